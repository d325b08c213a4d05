"""Floor: what a technique is told of a model and its machine, to say whether it has anything to do there."""

from dataclasses import dataclass

NO_BLOCKS = "no repeated blocks were found: name them in blocks="


@dataclass(frozen=True)
class Facts:
    """What is known before a run; None: not known.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        devices: that train together.
        compiler: whether ``torch.compile`` can work.
        blocks: repeated blocks in the model.
        heads: layers that turn features into predictions.
        trains: share of the parameters that require a gradient.
    """

    device: str
    devices: int = 1
    compiler: bool | None = None
    blocks: int | None = None
    heads: int | None = None
    trains: float | None = None
