"""Float32 matrix products in TF32 or in full float32, set in one place and put back afterwards."""

from contextlib import suppress
from typing import ClassVar

import lightning as L
import torch
from torch import nn

from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.core.messages import note_once
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.technique import Exactness, Technique
from lightning_fasttrain.technique.facts import Facts

# What torch accepts for fp32_precision on CUDA; the word set_float32_matmul_precision has for the same.
_OLD_WORD = {"tf32": "high", "ieee": "highest"}


def matmul_precision_(precision: str) -> Undo:
    """Set how CUDA multiplies float32 numbers: in linear layers, convolutions and recurrent layers alike.

    TF32 rounds the factors to 10 bits of mantissa (float32 has 23) and sums in float32. The tensors stay float32;
    tensor cores of compute capability 8.0 and later do the product several times faster. Plain torch uses TF32 for
    convolutions and recurrent layers and full float32 for matrix products.

    torch keeps two views of this switch, and reading the old one raises once the new one alone was written.
    Inductor's autotuning, flex attention and Lightning's CUDA accelerator read the old one, so both are kept in
    step, unless somebody has already left the old one unreadable: then it is not touched.

    Args:
        precision: ``"tf32"``, or ``"ieee"`` for full float32 everywhere.

    Returns:
        How to put back what was there.

    Raises:
        ValueError: any other word.

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

    if old_word is not None and (old_word == "highest") != (precision == "ieee"):  # "medium" is TF32 on CUDA too
        torch.set_float32_matmul_precision(_OLD_WORD[precision])
        if before[1] != "bf16":  # the old view cannot say "full float32 on CUDA, bfloat16 on the CPU"
            cpu_matmul.fp32_precision = before[1]
    if old_cudnn is not None:
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
    for operation in (matmul, conv, rnn):  # not cpu_matmul: only what CUDA does is to change
        operation.fp32_precision = precision

    def undo() -> None:
        # The old switches first: they set the new ones of CUDA and of the CPU too.
        if old_word is not None:
            torch.set_float32_matmul_precision(old_word)
        if old_cudnn is not None:
            torch.backends.cudnn.allow_tf32 = old_cudnn
        for operation, value in zip(operations, before, strict=True):  # exactly: "none" inherits, "ieee" does not
            operation.fp32_precision = value

    return undo


def _old_view() -> tuple[str | None, bool | None]:
    """Both switches by their old names; None where reading raises, because only the new ones were written."""
    word: str | None = None
    cudnn: bool | None = None
    with suppress(RuntimeError):
        allowed = torch.backends.cuda.matmul.allow_tf32  # raises in cases where the word can still be read
        word = torch.get_float32_matmul_precision()
        assert allowed == (word != "highest")
    with suppress(RuntimeError):
        cudnn = torch.backends.cudnn.allow_tf32
    return word, cudnn


class MatmulPrecision(Technique):
    """Multiply float32 numbers in TF32 on CUDA, or in full float32; see :func:`matmul_precision_`.

    Acts in ``setup``, before the model is configured, in every entry point of the Trainer, and puts the old setting
    back at teardown. "ieee" is nearer to the mathematics than plain torch, which has TF32 on for convolutions, so
    neither word gives a plain run's numbers to the last bit.

    Args:
        precision: ``"tf32"`` or ``"ieee"``.

    Raises:
        ValueError: any other word.

    Example:
        >>> import lightning_fasttrain as ft
        >>> from lightning_fasttrain.model import MatmulPrecision
        >>> from torch import nn
        >>> with ft.apply(nn.Linear(2, 2), [MatmulPrecision("ieee")]):
        ...     torch.backends.cudnn.conv.fp32_precision
        'ieee'

    Source:
        See :func:`matmul_precision_`. Lightning only advises to set it, and reads it by its old name (its issue 21256).
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
            return f"in {facts.precision} products are not of float32 numbers"
        return None

    def outcome(self, model: nn.Module) -> str:
        on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        return f"gained nothing, since {self.why_not(Facts('cpu'))}" if on_cpu else ""

    def apply(self, model: nn.Module) -> Undo:
        return matmul_precision_(self.precision)

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo:
        return matmul_precision_(self.precision)
