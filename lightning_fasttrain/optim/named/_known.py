"""The optimizers that are known by name: where each comes from, what it is given, what it cannot."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.messages import explain


@dataclass(frozen=True)
class Known:
    """One optimizer that is known by name.

    Args:
        places: dotted paths of the class; the first whose package is installed is taken.
        extra: of this package, which brings the first place; "" if torch does, or we.
        lr: learning rate where none is given.
        weight_decay: likewise; 0 for those that add it to the gradient, where it is another thing.
        marks: ``"muon"`` or ``"galore"``: matrices of blocks are in groups of their own.
        fuses: whether it has ``fused=``, for CUDA.
        refuses: ``"offload"`` or ``"updates"`` → why it cannot.
    """

    places: tuple[str, ...]
    extra: str = ""
    lr: float = 1e-3
    weight_decay: float = 0.01
    marks: str = ""
    fuses: bool = False
    refuses: Mapping[str, str] = field(default_factory=dict)

    def find_class(self) -> Any:
        """The class itself.

        Raises:
            ModuleNotFoundError: no package that brings it is installed; names the extra.
        """
        missing = []
        for place in self.places:
            module, _, name = place.rpartition(".")
            try:
                return getattr(require(module, self.extra), name)
            except ModuleNotFoundError as error:
                missing.append(error)
        raise missing[0]  # of the first, whose extra this package has


_PAGED = {"offload": "its state moves to host memory by itself, when the device is full"}
_OWN_AVERAGE = {
    "offload": "it swaps the weights for their average, where they are",
    "updates": "it counts for a whole group of parameters",
}
_OURS = "lightning_fasttrain.optim"

KNOWN: dict[str, Known] = {
    "sgd": Known(("torch.optim.SGD",), weight_decay=0.0, fuses=True),
    "adagrad": Known(("torch.optim.Adagrad",), lr=1e-2, weight_decay=0.0),
    "rmsprop": Known(("torch.optim.RMSprop",), weight_decay=0.0),
    "adam": Known(("torch.optim.Adam",), weight_decay=0.0, fuses=True),
    "adamw": Known(("torch.optim.AdamW",), fuses=True),
    "adafactor": Known(("torch.optim.Adafactor",), lr=1e-2),
    "lion": Known((f"{_OURS}.named.lion.Lion",), lr=1e-4),
    "muon": Known((f"{_OURS}.named.muon.MuonAdamW",), marks="muon", fuses=True),
    "galore": Known((f"{_OURS}.galore.GaLoreAdamW",), marks="galore"),
    "adamw8bit": Known(("bitsandbytes.optim.AdamW8bit", "torchao.optim.AdamW8bit"), extra="finetune"),
    "adamw4bit": Known(("torchao.optim.AdamW4bit",), extra="ao"),
    "lion8bit": Known(("bitsandbytes.optim.Lion8bit",), extra="finetune", lr=1e-4),
    "paged-adamw": Known(("bitsandbytes.optim.PagedAdamW",), extra="finetune", refuses=_PAGED),
    "paged-adamw8bit": Known(("bitsandbytes.optim.PagedAdamW8bit",), extra="finetune", refuses=_PAGED),
    "paged-lion8bit": Known(("bitsandbytes.optim.PagedLion8bit",), extra="finetune", lr=1e-4, refuses=_PAGED),
    "schedule-free": Known(("schedulefree.AdamWScheduleFree",), extra="schedule-free", refuses=_OWN_AVERAGE),
}


def find_known(name: str) -> Known:
    """The one called ``name``, however its words are joined: ``"Paged_AdamW_8bit"`` is ``"paged-adamw8bit"``.

    Raises:
        ValueError: there is none; the message lists the names.

    Example:
        >>> find_known("AdamW_8bit").places[0]
        'bitsandbytes.optim.AdamW8bit'
    """
    for known, row in KNOWN.items():
        if _normalize(known) == _normalize(name):
            return row
    why = "no optimizer is known by this name"
    raise ValueError(explain(f"optimizer {name!r}", why, f"Use one of {', '.join(KNOWN)}"))


def is_known(name: str) -> bool:
    """Whether :func:`find_known` finds it."""
    return _normalize(name) in map(_normalize, KNOWN)


def _normalize(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def refuse_settings(name: str, kind: type[Optimizer], settings: Mapping[str, Any]) -> None:
    """Refuse settings that the class has not.

    Raises:
        TypeError: names them, and those that it has.
    """
    allowed = [key for key in inspect.signature(kind).parameters if key not in ("params", "lr", "weight_decay")]
    unknown = [key for key in settings if key not in allowed]
    if unknown:
        what = f"{', '.join(unknown)} for {name!r}"
        raise TypeError(explain(what, f"{kind.__name__} has no such setting", f"It has {', '.join(allowed)}"))
