"""Let cuDNN time its convolution kernels on the shapes of a run, and restore the setting afterwards."""

from typing import ClassVar

import lightning as L
import torch
from torch import nn

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.technique import Exactness, Technique
from lightning_fasttrain.technique.declarations import Facts

_NOT_HERE = "there is no CUDA device here, and cuDNN runs on no other"


@check_arguments
def cudnn_benchmark_() -> Undo:
    """Let cuDNN choose the kernel of each convolution by timing them all, once for each new shape.

    Worthwhile where shapes stay the same: each new one costs the time of all kernels. Kernels round differently and
    the choice may differ from run to run, so deterministic algorithms are refused beside it.

    Returns:
        How to restore the previous setting.

    Raises:
        ValueError: ``torch.use_deterministic_algorithms(True)`` or ``torch.backends.cudnn.deterministic`` is set.

    Example:
        >>> import torch
        >>> before = torch.backends.cudnn.benchmark
        >>> undo = cudnn_benchmark_()
        >>> torch.backends.cudnn.benchmark, undo(), torch.backends.cudnn.benchmark == before
        (True, None, True)

    Source:
        https://docs.pytorch.org/docs/stable/backends.html#torch.backends.cudnn.benchmark
    """
    if torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic:
        why = "kernels that are chosen by time may differ from run to run, and deterministic algorithms are on"
        raise ValueError(explain("cudnn_benchmark_", why, "Remove one of the two"))
    if not torch.cuda.is_available():
        note_once(f"CudnnBenchmark has no effect: {_NOT_HERE}.")
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True

    def undo() -> None:
        torch.backends.cudnn.benchmark = before

    return undo


class CudnnBenchmark(Technique):
    """Let cuDNN time its convolution kernels; see :func:`cudnn_benchmark_`.

    Acts in ``setup``, before the model is configured, in every entry point of the Trainer, and restores the setting at
    teardown. ``Trainer(benchmark=True)`` sets it too, and leaves it set.

    Raises:
        ValueError: in ``fit``: deterministic algorithms are on.

    Example:
        >>> import lightning_fasttrain as ft
        >>> from torch import nn
        >>> with ft.apply(nn.Conv2d(3, 8, 3), [ft.model.CudnnBenchmark()]):
        ...     torch.backends.cudnn.benchmark
        True

    Source:
        See :func:`cudnn_benchmark_`.
    """

    exactness: ClassVar[Exactness] = Exactness.TOLERANCE
    bound: ClassVar[float] = 1e-3
    effect: ClassVar[str] = "cuDNN times its convolution kernels on the shapes of the run, and takes the fastest"
    when: ClassVar[str] = "a ConvNet trains on a GPU with images of one size; not where shapes change all the time"
    in_a_loop: ClassVar[str] = "apply(model, [...]), or model.cudnn_benchmark_()"
    predicted: ClassVar[bool] = True

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        return _NOT_HERE if facts.device == "cpu" else None

    def outcome(self, model: nn.Module) -> str:
        return "" if torch.cuda.is_available() else f"had no effect: {_NOT_HERE}"

    def apply(self, model: nn.Module) -> Undo:
        return cudnn_benchmark_()

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo:
        return cudnn_benchmark_()
