"""Matrix products of linear layers in 8 bits during training; weights, gradients and optimizer are unchanged."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lightning_fasttrain.core.checks import PositiveInt, check_arguments, one_of
from lightning_fasttrain.core.host.lightning import trainer_of
from lightning_fasttrain.core.messages import explain, list_some, note_once, say
from lightning_fasttrain.core.modules.heads import find_heads
from lightning_fasttrain.core.modules.recomputation import refuse_second_derivative
from lightning_fasttrain.core.modules.select import Blocks, as_list, find_skipped, group_by_reason, is_linear, layers_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, count_wrapped, undo_all, wrapper_on
from lightning_fasttrain.technique import Capability, Exactness, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep
from lightning_fasttrain.technique.technique import techniques_of


@dataclass(frozen=True)
class Format:
    """An 8-bit format, and the requirements of the tensor cores that multiply it.

    Args:
        dtype: dtype of the rounded values.
        top: maximum to which a row is scaled.
        multiple: both sizes of a layer must be multiples of it.
        capability: minimum CUDA compute capability with such tensor cores.
        min_features: inputs and outputs from which on the product is known to save more than rounding costs.
    """

    dtype: torch.dtype
    top: float
    multiple: int
    capability: tuple[int, int]
    min_features: int


# float8: a compiled step took 1.13 times as long as in bf16 at 1,600 features, and 0.85 times at 4,096
# (examples/results/h100 and h200).
FORMATS = {
    "float8": Format(torch.float8_e4m3fn, 448.0, 16, (8, 9), 4096),
    "int8": Format(torch.int8, 127.0, 8, (7, 5), 1024),
}
_FEWEST_ROWS = 17  # minimum rows of the first factor in CUDA's int8 product
# Values in a row: 127² times as many stay below 2³¹, the limit of an int32 sum.
_LONGEST = 2**17


def round_rows(matrix: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Scale each row so that its maximum is the format's maximum, and round: ``matrix ≈ rounded · scale``.

    Non-finite values make their row's scale non-finite, and so the products: a loss scaler still sees them.

    Args:
        matrix: [m, n], of any floating-point dtype.
        kind: ``"float8"`` or ``"int8"``.

    Returns:
        The rounded values [m, n], row-major, and scales [m, 1] in float32.

    Example:
        >>> rounded, scale = round_rows(torch.tensor([[1.27, -0.5], [0.0, 0.0]]), "int8")
        >>> rounded.tolist(), round(scale[0].item(), 4)
        ([[127, -50], [0, 0]], 0.01)
    """
    form = FORMATS[kind]
    largest = matrix.abs().amax(1, keepdim=True).float()
    # A row of zeros gets a nonzero scale, to avoid a division by zero.
    scale = (largest / form.top).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = matrix / scale
    if not form.dtype.is_floating_point:
        scaled = scaled.round()
    return scaled.to(form.dtype).contiguous(), scale


def multiply_rows(first: Tensor, second: Tensor, kind: str) -> Tensor:
    """Compute first · secondᵀ with both factors rounded row by row to 8 bits, accumulating in int32 or float32.

    Args:
        first: [m, n].
        second: [k, n]; k a multiple of the format's ``multiple``.
        kind: ``"float8"`` or ``"int8"``.

    Returns:
        [m, k] in float32.
    """
    length = first.shape[1]
    if length > _LONGEST:
        start = multiply_rows(first[:, :_LONGEST], second[:, :_LONGEST], kind)
        return start + multiply_rows(first[:, _LONGEST:], second[:, _LONGEST:], kind)
    if length % 16:  # tokens, in the product for the weight's gradient; zeros add nothing
        first, second = F.pad(first, (0, -length % 16)), F.pad(second, (0, -length % 16))
    left, left_scale = round_rows(first, kind)
    right, right_scale = round_rows(second, kind)
    if kind == "int8":
        missing = max(0, _FEWEST_ROWS - len(left))
        if missing:
            left = F.pad(left, (0, 0, 0, missing))
        # ``right`` is row-major, so ``right.t()`` is column-major, as tensor cores require for the second factor.
        product = torch._int_mm(left, right.t())[: len(first)]
    else:
        # With one scale for all, sums are accumulated and kept in float32 on all supported devices; torch's product
        # with a scale per row is slow with exact sums, and returns bfloat16 on some of them.
        one = torch.ones((), dtype=torch.float32, device=first.device)
        # Autocast would change the CPU's emulation.
        with torch.autocast(first.device.type, enabled=False):
            product = torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32)
    return product * left_scale * right_scale.t()


class _Products(torch.autograd.Function):
    """input · weightᵀ and both gradients of it, each a product of rows rounded along the summed dimension."""

    @staticmethod
    def forward(ctx: FunctionCtx, input: Tensor, weight: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.kind = kind
        return multiply_rows(input, weight, kind).to(input.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        way_out = "Remove LowPrecisionProducts for this"
        refuse_second_derivative("a product in 8 bits", way_out)  # rounding has no derivative
        input, weight = ctx.saved_tensors
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            # [m, k] · [k, n]; transposed, as the second factor has rows along the summed dimension.
            of_input = multiply_rows(gradient, weight.t(), ctx.kind).to(input.dtype)
        if ctx.needs_input_grad[1]:
            # [k, m] · [m, n]: summed over tokens.
            of_weight = multiply_rows(gradient.t(), input.t(), ctx.kind).to(weight.dtype)
        return of_input, of_weight, None


def linear_in_8_bits(input: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Compute ``F.linear`` with its products, also those of its backward, in 8 bits.

    Under autocast the input is cast as for ``F.linear``, so that no more memory is kept for the backward; the weight is
    rounded directly, and its gradient has its dtype.

    Args:
        input: [..., n].
        weight: [k, n]; both sizes multiples of the format's ``multiple``.
        bias: [k] or None.
        kind: ``"float8"`` or ``"int8"``.

    Returns:
        [..., k] in the dtype of ``F.linear``.

    Example:
        >>> input, weight = torch.randn(3, 32), torch.randn(16, 32)
        >>> difference = linear_in_8_bits(input, weight, None, "int8") - F.linear(input, weight)
        >>> bool(difference.norm() < 0.02 * F.linear(input, weight).norm())
        True

    Source:
        Rows scaled for each product as in torchao's float8 recipe "rowwise" and its int8 mixed-precision training,
        https://github.com/pytorch/ao; gradients are e4m3 too, with 3 bits of mantissa, since rows have scales.
    """
    device = input.device.type
    if torch.is_autocast_enabled(device):
        input = input.to(torch.get_autocast_dtype(device))
    rows = input.reshape(-1, input.shape[-1])
    product = _Products.apply(rows, weight, kind).view(*input.shape[:-1], len(weight))
    return product if bias is None else product + bias.to(product.dtype)


KINDS = tuple(FORMATS)
_HOPPER = (9, 0)  # compute capability
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class EightBitForward(WrappedForward):
    """A linear layer's forward in 8 bits; in eval mode without gradients it stays in full precision."""

    rounds: ClassVar[bool] = True

    def __init__(self, module: nn.Linear, kind: str) -> None:
        super().__init__(module)
        self.kind = kind

    def __call__(self, input: Tensor) -> Tensor:
        evaluates = not self.module.training and not torch.is_grad_enabled()
        # An expert without tokens has no maximum to scale by.
        if self.paused or evaluates or input.numel() == 0:
            return self.inner(input)
        layer: Any = self.module
        return linear_in_8_bits(input, layer.weight, layer.bias, self.kind)


@dataclass(frozen=True)
class LowPrecisionReport:
    """Result of :func:`multiply_in_low_precision_`; print it for one line.

    Args:
        kind: ``"float8"`` or ``"int8"``.
        layers: qualified names of the layers that now multiply in 8 bits.
        already: qualified names of layers that did before.
        left: name of each other linear layer → why it was skipped.
        undo: restores the layers' own forward.
    """

    kind: str
    layers: tuple[str, ...]
    already: tuple[str, ...]
    left: dict[str, str]
    undo: Undo = field(repr=False)

    def __str__(self) -> str:
        parts = [f"{len(self.layers)} linear layers multiply in {self.kind}"]
        if self.already:
            parts.append(f"{len(self.already)} did already")
        for reason, names in group_by_reason(self.left).items():
            parts.append(f"skipped: {list_some(names)} ({reason})")
        return "; ".join(parts)


@check_arguments
def multiply_in_low_precision_(
    model: nn.Module, kind: str, *, skip: Blocks = (), min_features: PositiveInt | None = None
) -> LowPrecisionReport:
    """Compute the products of a model's linear layers in 8 bits during training: forward, and both gradients.

    In each product both factors are rounded row by row along the summed dimension, with a scale per row: to int8,
    ``scale = max|row| / 127``, or to float8 (e4m3), ``scale = max|row| / 448``. Products are accumulated in int32 or
    float32 and scaled back. Weights, their gradients and the optimizer keep their precision, ``state_dict`` its keys,
    and every module its class. The error of each element Σ aₖ·bₖ, compared with float64, is at most

        int8:    (max|b| · Σ|aₖ| + max|a| · Σ|bₖ|) / 254 + n · max|a| · max|b| / 254²
        float8:  (1/8 + 1/256) · Σ|aₖ·bₖ|, and slightly more for values below 1/28,000 of their row's maximum

    in addition to float32's own rounding. For normally distributed values these are 1% and 4% of the result's norm.

    Skipped, with a reason in the report, are heads, layers matched by ``skip``, subclasses of ``nn.Linear`` such as
    quantized layers and those inside ``nn.MultiheadAttention``, layers with a replaced forward, sizes that tensor cores
    do not support (multiples of 8 for int8, of 16 for float8), and layers too small to gain: rounding takes time in
    proportion to rows and columns, the product to both. Under an adapter, the frozen layer multiplies in 8 bits and the
    adapter in its own precision. Attention's products of activations do not belong to a layer, and are not changed.

    Args:
        model: any module, with weights on any device, including the meta device.
        kind: ``"float8"`` for GPUs of compute capability 8.9 (Ada, Hopper) and later, ``"int8"`` from 7.5 (Turing) on.
            Both also run on a CPU: int8 with hardware support, if available, float8 by emulation, without gain.
        skip: layers to skip: a class, a class name, or a pattern of qualified names as for
            :func:`~lightning_fasttrain.model.find_blocks`; or several of these. Layers inside of them are skipped too.
        min_features: layers with fewer inputs or outputs are skipped; None for 4,096 in float8 and 1,024 in int8. In
            float8 with compiled blocks, a step of a GPT with 4,096 features took 0.85 times as long as in bf16 on an
            H200, in 0.86 of the memory; with 1,600 features, on an H100, 1.13 times as long in 0.76 of it.

    Returns:
        The changed layers, the skipped ones with reasons, and how to undo it. Applying it twice has no further effect.

    Raises:
        ValueError: unknown kind; ``skip`` matches nothing; no layer to change; a device without such tensor cores, or
            one on which int8 is slower than bf16 (Hopper and later), unless ``min_features`` is given.
        TypeError: ``skip`` contains something other than patterns and classes; ``min_features`` is not an integer.

    Example:
        >>> net = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 5))
        >>> report = multiply_in_low_precision_(net, "int8")
        >>> report.layers, report.left
        (('0',), {'2': 'a head'})
        >>> report.undo()

    Source:
        torchao's float8 recipe "rowwise" and its int8 mixed-precision training, https://github.com/pytorch/ao; Wortsman
        et al. 2023, "Stable and low-precision training", https://arxiv.org/abs/2304.13013, compute the weight's
        gradient in 16 bits for int8; here, as in torchao, it is in 8 bits too.
    """
    one_of("kind", kind, KINDS)
    smallest = FORMATS[kind].min_features if min_features is None else min_features
    layers, already, left = _sort_out(model, kind, skip, smallest)
    if not layers and not already:
        raise ValueError(_nothing_to_change(model, left))
    _refuse_device(model, kind, by_default=min_features is None)
    undo = undo_all([EightBitForward(layer, kind).install() for layer in layers.values()])
    return LowPrecisionReport(kind, tuple(layers), tuple(already), left, undo)


def _sort_out(
    model: nn.Module, kind: str, skip: Blocks, min_features: int
) -> tuple[dict[str, nn.Linear], list[str], dict[str, str]]:
    """Return the linear layers of ``model``: to be changed, changed already, and skipped, with the reason."""
    skipped, heads = find_skipped(model, skip), find_heads(model)
    layers: dict[str, nn.Linear] = {}
    already: list[str] = []
    left: dict[str, str] = {}
    for name, layer in layers_of(model).items():
        if not (isinstance(layer, nn.Linear) or is_linear(layer)):
            continue
        if wrapper_on(layer, EightBitForward):
            already.append(name)
        elif name in skipped:
            left[name] = "skip"
        elif name in heads:
            left[name] = "a head"
        elif reason := _why_unfit(layer, kind, min_features):
            left[name] = reason
        elif isinstance(layer, nn.Linear):
            layers[name] = layer
    return layers, already, left


def _why_unfit(layer: nn.Module, kind: str, min_features: int) -> str:
    """Return why the layer itself is unsuitable; empty if it is suitable."""
    weight = layer._parameters.get("weight")
    if type(layer) is not nn.Linear or weight is None:
        return f"it is a {type(layer).__name__}, not a plain nn.Linear"  # such as a quantized one, with its own product
    if "forward" in vars(layer):  # ours would bypass it
        return "its forward was replaced"
    if weight.dtype not in _TYPES:
        return f"its weight is in {weight.dtype}"
    multiple = FORMATS[kind].multiple
    if layer.in_features % multiple or layer.out_features % multiple:
        return f"{kind} needs sizes that are multiples of {multiple}"
    if min(layer.in_features, layer.out_features) < min_features:
        return f"fewer than {min_features} inputs or outputs"
    return ""


def _nothing_to_change(model: nn.Module, left: dict[str, str]) -> str:
    what = f"no layer of {type(model).__name__} can multiply in 8 bits"
    if not left:
        return explain(what, "it has no nn.Linear", "Remove LowPrecisionProducts")
    reasons = [f"{list_some(names)} ({reason})" for reason, names in group_by_reason(left).items()]
    way_out = "Remove LowPrecisionProducts; min_features= sets another limit"
    return explain(what, f"all are skipped: {', '.join(reasons)}", way_out)


def usual_kind() -> str:
    """Return the kind that gains time on this machine's GPU, if any does: float8 from Hopper on, int8 before."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= _HOPPER:
        return "float8"
    return "int8"


def _refuse_device(model: nn.Module, kind: str, by_default: bool) -> None:
    """Refuse a GPU without tensor cores for this kind or without gain, if the device is already known."""
    trainer = trainer_of(model)
    device = trainer.strategy.root_device if trainer is not None else next(model.parameters()).device
    if device.type not in ("cuda", "cpu", "meta"):
        why = "torch supports 8-bit products on CUDA devices and CPUs"
        raise ValueError(explain(f"products in {kind} on {device}", why, "Remove LowPrecisionProducts"))
    if kind == "float8" and not torch.cuda.is_available():
        note_once("float8 products: without a GPU they are emulated on the CPU, slower than float32.")
    if device.type == "cuda":
        _refuse_gpu(device, kind, by_default)


def _refuse_gpu(device: torch.device, kind: str, by_default: bool) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < FORMATS[kind].capability:
        needed = ".".join(map(str, FORMATS[kind].capability))
        why = f"{torch.cuda.get_device_name(device)} has no tensor cores for it, which need compute capability {needed}"
        raise ValueError(explain(f"products in {kind}", why, "Train in bf16 or float16 without them"))
    if kind == "int8" and by_default and capability >= _HOPPER:
        why = "a compiled step of a GPT with 4,096 features took 1.7 times as long as in bf16 on an H200"
        way_out = 'Use "float8", or give min_features= to use int8 all the same'
        raise ValueError(explain(f"products in int8 on {torch.cuda.get_device_name(device)}", why, way_out))


def _note_uncompiled(trainer: L.Trainer | None, kind: str) -> None:
    """Note that rounding is slow on a GPU unless it is compiled, if no technique of the run compiles."""
    if trainer is None or trainer.strategy.root_device.type != "cuda":
        return
    if not any(technique.does(Capability.COMPILES_BLOCKS) for technique in techniques_of(trainer)):
        times = {"float8": "1.6", "int8": "2.1"}[kind]
        note_once(f"Products in {kind} took {times} times as long as in bf16 on an H200. Add CompileBlocks.")


class LowPrecisionProducts(Technique):
    """Compute the products of linear layers in 8 bits during training; see :func:`multiply_in_low_precision_`.

    Acts right after ``configure_model``, after adapters are added and before blocks are recomputed or compiled, which
    must include it; undone at teardown, so that the trained model is evaluated and saved as any other. Rounding a
    factor takes a few separate passes over memory unless :class:`~lightning_fasttrain.CompileBlocks` fuses it: without
    it a step of a GPT with 4,096 features took 1.6 times (float8) and 2.1 times (int8) as long as in bf16 on an H200,
    and with 1,600 features 2.8 and 3.5 times on an H100, which is said at the start.

    The tolerance is that of each product; its effect on training has no bound. Over 100 steps of a small GPT on text
    the loss stays within 1% of that in full precision (means of the last ten steps). In int8, weights drift from full
    precision about as far as in bf16-mixed, in float8 several times as far.

    Args:
        kind: ``"float8"`` or ``"int8"``.
        skip: layers to skip, as for the function.
        min_features: as for the function.

    Attributes:
        report: a :class:`LowPrecisionReport`, once the technique has acted.

    Raises:
        ValueError: unknown kind.
        TypeError: ``min_features`` is not an integer.

    Example:
        >>> import lightning_fasttrain as ft
        >>> techniques = [ft.model.LowPrecisionProducts("int8"), ft.CompileBlocks()]

    Source:
        See :func:`multiply_in_low_precision_`.
    """

    exactness: ClassVar[Exactness] = Exactness.TOLERANCE
    bound: ClassVar[float] = 0.1
    surgery: ClassVar[Surgery | None] = Surgery.ARCHITECTURE
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.REPLACES_PRODUCTS})
    effect: ClassVar[str] = "linear layers multiply in float8 or int8; weights and gradients keep their precision"
    when: ClassVar[str] = (
        "most time is spent in linear layers with thousands of features, and blocks are compiled; not on a CPU "
        "with bf16 support"
    )
    in_a_loop: ClassVar[str] = 'apply(model, [model.LowPrecisionProducts("int8")])'
    predicted: ClassVar[bool] = True

    def __init__(self, kind: str, *, skip: Blocks = (), min_features: PositiveInt | None = None) -> None:
        self.kind = one_of("kind", kind, KINDS)
        self.skip: Blocks = tuple(as_list(skip))
        self.min_features = min_features
        self.report: LowPrecisionReport | None = None

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.device == "cpu":
            return "a CPU emulates float8, slower than float32; int8 is faster than float32 with avx512_vnni"
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < FORMATS["int8"].capability:
            return "this GPU has no tensor cores for 8-bit products"
        return None

    def predict(self, step: PredictedStep) -> "LowPrecisionProducts":
        if self.kind == "float8" and not step.on_cuda:
            step.notes.append("Copies that a CPU makes to multiply float8 values are not counted.")
        return self

    def apply(self, model: nn.Module) -> Undo:
        self.report = multiply_in_low_precision_(model, self.kind, skip=self.skip, min_features=self.min_features)
        if self.report.layers:
            say("LowPrecisionProducts: %s", self.report)
            _note_uncompiled(trainer_of(model), self.kind)
        return self.report.undo

    def describe_effect(self, model: nn.Module) -> str:
        layers = count_wrapped(model, EightBitForward, "layer")
        return layers and f"{layers} multiply in {self.kind}"
