"""Set float32 matrix products to TF32 or full float32 in one place, and restore the setting afterwards."""

from contextlib import suppress
from typing import ClassVar

import lightning as L
import torch
from torch import nn

from lightning_fasttrain.core.checks import check_arguments, one_of
from lightning_fasttrain.core.messages import note_once
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.technique import Exactness, Technique
from lightning_fasttrain.technique.declarations import Facts

# The values of fp32_precision on CUDA, and the corresponding value of set_float32_matmul_precision.
_OLD_WORD = {"tf32": "high", "ieee": "highest"}


@check_arguments
def matmul_precision_(precision: str) -> Undo:
    """Set how CUDA multiplies float32 values in linear, convolutional and recurrent layers.

    TF32 rounds the factors to 10 bits of mantissa (float32 has 23) and accumulates in float32. The tensors stay
    float32; tensor cores of compute capability 8.0 and later are several times faster with it. Plain torch uses TF32
    for convolutions and recurrent layers and full float32 for matrix products.

    torch has an old and a new API for this setting, and reading the old one raises once only the new one was written.
    Inductor's autotuning, flex attention and Lightning's CUDA accelerator read the old one, so both are kept
    consistent, unless the old one is already unreadable: then it is not changed.

    Args:
        precision: ``"tf32"``, or ``"ieee"`` for full float32 everywhere.

    Returns:
        How to restore the previous setting.

    Raises:
        ValueError: any other value.

    Example:
        >>> import torch
        >>> before = torch.backends.cuda.matmul.fp32_precision
        >>> undo = matmul_precision_("tf32")
        >>> torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
        ('tf32', 'tf32')
        >>> undo()
        >>> torch.backends.cuda.matmul.fp32_precision == before
        True

    Source:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """
    one_of("precision", precision, tuple(_OLD_WORD))
    if not torch.cuda.is_available():
        note_once(f"matmul_precision={precision!r}: this machine has no CUDA device, so it has no effect here.")
    matmul, conv, rnn = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    cpu_matmul = torch.backends.mkldnn.matmul
    operations = (matmul, cpu_matmul, conv, rnn)
    before = [operation.fp32_precision for operation in operations]
    old_word, old_cudnn = _old_view()

    # "medium" also means TF32 on CUDA.
    if old_word is not None and (old_word == "highest") != (precision == "ieee"):
        torch.set_float32_matmul_precision(_OLD_WORD[precision])
        # The old API cannot express "full float32 on CUDA, bfloat16 on the CPU".
        if before[1] != "bf16":
            cpu_matmul.fp32_precision = before[1]
    if old_cudnn is not None:
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
    for operation in (matmul, conv, rnn):  # not cpu_matmul: only CUDA is changed
        operation.fp32_precision = precision

    def undo() -> None:
        # The old settings first: they also set the new ones of CUDA and of the CPU.
        if old_word is not None:
            torch.set_float32_matmul_precision(old_word)
        if old_cudnn is not None:
            torch.backends.cudnn.allow_tf32 = old_cudnn
        # Exactly: "none" inherits, "ieee" does not.
        for operation, value in zip(operations, before, strict=True):
            operation.fp32_precision = value

    return undo


def _old_view() -> tuple[str | None, bool | None]:
    """Return both settings of the old API; None where reading raises, because only the new ones were written."""
    word: str | None = None
    cudnn: bool | None = None
    with suppress(RuntimeError):
        # This may raise even if the other setting can still be read.
        allowed = torch.backends.cuda.matmul.allow_tf32
        word = torch.get_float32_matmul_precision()
        assert allowed == (word != "highest")
    with suppress(RuntimeError):
        cudnn = torch.backends.cudnn.allow_tf32
    return word, cudnn


class MatmulPrecision(Technique):
    """Multiply float32 values in TF32 on CUDA, or in full float32; see :func:`matmul_precision_`.

    Acts in ``setup``, before the model is configured, in every entry point of the Trainer, and restores the old setting
    at teardown. "ieee" is more precise than plain torch, which uses TF32 for convolutions, so neither value is bitwise
    equal to a plain run.

    Args:
        precision: ``"tf32"`` or ``"ieee"``.

    Raises:
        ValueError: any other value.

    Example:
        >>> import lightning_fasttrain as ft
        >>> from lightning_fasttrain.model import MatmulPrecision
        >>> from torch import nn
        >>> with ft.apply(nn.Linear(2, 2), [MatmulPrecision("ieee")]):
        ...     torch.backends.cudnn.conv.fp32_precision
        'ieee'

    Source:
        See :func:`matmul_precision_`. Lightning only advises to set it, and reads the old API (its issue 21256).
    """

    exactness: ClassVar[Exactness] = Exactness.TOLERANCE
    bound: ClassVar[float] = 1e-2
    effect: ClassVar[str] = "float32 matrix products on tensor cores"
    when: ClassVar[str] = "you train in float32 on a GPU with tensor cores; not in bf16, and not on a CPU"
    predicted: ClassVar[bool] = True

    def __init__(self, precision: str = "tf32") -> None:
        self.precision = one_of("precision", precision, tuple(_OLD_WORD))

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.device == "cpu":
            return "TF32 is a format of GPUs"
        if facts.precision is not None and facts.precision.startswith(("bf16", "16")):
            return f"in {facts.precision} products are not of float32 values"
        return None

    def outcome(self, model: nn.Module) -> str:
        on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        return f"had no effect: {self.why_not(Facts('cpu'))}" if on_cpu else ""

    def apply(self, model: nn.Module) -> Undo:
        return matmul_precision_(self.precision)

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo:
        return matmul_precision_(self.precision)
