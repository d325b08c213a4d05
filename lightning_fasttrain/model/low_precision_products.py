"""The matrix products of linear layers in 8 bits during training; weights, gradients and optimizer as they are."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.checks import one_of, positive_int
from lightning_fasttrain.core.host.lightning import trainer_of
from lightning_fasttrain.core.messages import explain, list_some, note_once, say
from lightning_fasttrain.core.modules.blocks import Blocks
from lightning_fasttrain.core.modules.heads import find_heads, find_skipped, is_linear, layers_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, count_wrapped, wrapper_on
from lightning_fasttrain.model.eight_bit_products import FORMATS, linear_in_8_bits
from lightning_fasttrain.technique import Capability, Exactness, Surgery, Technique
from lightning_fasttrain.technique.facts import Facts
from lightning_fasttrain.technique.predicted_step import PredictedStep

KINDS = tuple(FORMATS)
MIN_FEATURES = 1024
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class EightBitForward(WrappedForward):
    """A linear layer's forward in 8 bits; an evaluation, in eval mode without gradients, stays in full precision."""

    rounds: ClassVar[bool] = True

    def __init__(self, module: nn.Linear, kind: str) -> None:
        super().__init__(module)
        self.kind = kind

    def __call__(self, input: Tensor) -> Tensor:
        evaluates = not self.module.training and not torch.is_grad_enabled()
        if self.paused or evaluates or input.numel() == 0:  # experts without tokens get none, which have no largest
            return self.inner(input)
        layer: Any = self.module
        return linear_in_8_bits(input, layer.weight, layer.bias, self.kind)


@dataclass(frozen=True)
class LowPrecisionReport:
    """What :func:`multiply_in_low_precision_` has done; print it for one line.

    Args:
        kind: ``"float8"`` or ``"int8"``.
        layers: qualified names of the layers that now multiply in 8 bits.
        already: of those that did before.
        left: name of each other linear layer → why it was left.
        undo: puts the layers' own forward back.
    """

    kind: str
    layers: tuple[str, ...]
    already: tuple[str, ...]
    left: dict[str, str]
    undo: Undo = field(repr=False)

    def __str__(self) -> str:
        parts = [f"{len(self.layers)} linear layers multiply in {self.kind}"]
        if self.already:
            parts.append(f"{len(self.already)} did before")
        for reason, names in _by_reason(self.left).items():
            parts.append(f"left: {list_some(names)} ({reason})")
        return "; ".join(parts)


def multiply_in_low_precision_(
    model: nn.Module, kind: str, *, skip: Blocks = (), min_features: int = MIN_FEATURES
) -> LowPrecisionReport:
    """Compute the products of a model's linear layers in 8 bits while it trains: forward, and both gradients.

    Of each product both factors are rounded just before, row by row along what is summed, with a scale for each row:
    to int8, ``scale = max|row| / 127``, or to float8 (e4m3), ``scale = max|row| / 448``. Products are summed in int32
    or float32 and scaled back. Weights, their gradients and the optimizer keep their precision, ``state_dict`` its
    keys, and every module its type. Against products in float64, each number of the result Σ aₖ·bₖ is off by at most

        int8:    (max|b| · Σ|aₖ| + max|a| · Σ|bₖ|) / 254 + n · max|a| · max|b| / 254²
        float8:  (1/8 + 1/256) · Σ|aₖ·bₖ|, and a little more where numbers are below 1/28,000 of their row's largest

    beside float32's own rounding. For normally distributed numbers these are 1% and 4% of the result's norm.

    Left alone, with a reason in the report: heads, what ``skip`` names, subclasses of ``nn.Linear`` such as quantised
    layers and those inside ``nn.MultiheadAttention``, layers whose forward somebody has replaced, sizes that the
    units do not take (multiples of 8 for int8, of 16 for float8), and layers too small to gain: rounding takes time
    in proportion to rows and columns, the product to both. Under an adapter, the frozen layer multiplies in 8 bits and
    the adapter in its own precision. Attention's products of activations are in no layer, so not reached either.

    Args:
        model: any module, wherever its weights are, on the meta device too.
        kind: ``"float8"`` for GPUs of compute capability 8.9 (Ada, Hopper) and later, ``"int8"`` from 7.5 (Turing) on.
            Both also run on a CPU: int8 on its own units, where it has them, float8 by emulation, without gain.
        skip: layers to leave: a class, a class name, or a pattern of qualified names as for
            :func:`~lightning_fasttrain.model.find_blocks`; or several of these. What lies inside of them is left too.
        min_features: layers with fewer inputs or outputs are left. torchao's filter for this recipe, made on an H100
            with compiled code, asks for more than 1,024 inputs and 2,048 outputs.

    Returns:
        What was changed, what was left and why, and how to undo it. Twice is the same as once.

    Raises:
        ValueError: unknown kind; ``skip`` matches nothing; no layer to change; a device that has no such units.
        TypeError: ``skip`` holds something else than patterns and classes; ``min_features`` is no whole number.

    Example:
        >>> net = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 5))
        >>> report = multiply_in_low_precision_(net, "int8")
        >>> report.layers, report.left
        (('0',), {'2': 'a head'})
        >>> report.undo()

    Source:
        torchao's float8 recipe "rowwise" and its int8 mixed-precision training, https://github.com/pytorch/ao; Wortsman
        et al. 2023, "Stable and low-precision training", https://arxiv.org/abs/2304.13013, keep the weight's gradient
        in 16 bits for int8; here as in torchao it is in 8 bits too.
    """
    one_of("kind", kind, KINDS)
    positive_int("min_features", min_features)
    layers, already, left = _sort_out(model, kind, skip, min_features)
    if not layers and not already:
        raise ValueError(_nothing_to_change(model, left))
    _refuse_device(model, kind)
    undos = [EightBitForward(layer, kind).install() for layer in layers.values()]

    def undo() -> None:
        for put_back in undos:
            put_back()

    return LowPrecisionReport(kind, tuple(layers), tuple(already), left, undo)


def _sort_out(
    model: nn.Module, kind: str, skip: Blocks, min_features: int
) -> tuple[dict[str, nn.Linear], list[str], dict[str, str]]:
    """The linear layers of ``model``: to be changed, changed already, and left, with the reason."""
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
    """Empty where nothing speaks against the layer itself."""
    weight = layer._parameters.get("weight")
    if type(layer) is not nn.Linear or weight is None:
        return f"it is a {type(layer).__name__}, not a plain nn.Linear"  # a quantised one, say, has its own product
    if "forward" in vars(layer):  # ours would pass it by
        return "its forward was replaced"
    if weight.dtype not in _TYPES:
        return f"its weight is in {weight.dtype}"
    multiple, sizes = FORMATS[kind].multiple, (layer.in_features, layer.out_features)
    if any(size % multiple for size in sizes):
        return f"{kind} takes sizes that are multiples of {multiple}"
    return f"fewer than {min_features} inputs or outputs" if min(sizes) < min_features else ""


def _by_reason(left: dict[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name)
    return reasons


def _nothing_to_change(model: nn.Module, left: dict[str, str]) -> str:
    what = f"no layer of {type(model).__name__} can multiply in 8 bits"
    if not left:
        return explain(what, "it has no nn.Linear", "Leave LowPrecisionProducts out")
    reasons = [f"{list_some(names)} ({reason})" for reason, names in _by_reason(left).items()]
    return explain(what, f"all are left: {', '.join(reasons)}", "Leave LowPrecisionProducts out")


def _refuse_device(model: nn.Module, kind: str) -> None:
    """Refuse a GPU without units for this kind, where it is known already which one it will be."""
    trainer = trainer_of(model)
    device = trainer.strategy.root_device if trainer is not None else next(model.parameters()).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FORMATS[kind].capability:
        needed = ".".join(map(str, FORMATS[kind].capability))
        why = f"{torch.cuda.get_device_name(device)} has no units for it, which came with compute capability {needed}"
        raise ValueError(explain(f"products in {kind}", why, "Train in bf16 or float16 without them"))
    if device.type not in ("cuda", "cpu", "meta"):
        why = "torch multiplies numbers in 8 bits on CUDA devices and CPUs"
        raise ValueError(explain(f"products in {kind} on {device}", why, "Leave LowPrecisionProducts out"))
    if kind == "float8" and not torch.cuda.is_available():
        note_once("float8 products: there is no GPU here, and a CPU only emulates them, slower than float32.")


class LowPrecisionProducts(Technique):
    """Compute the products of linear layers in 8 bits while training; see :func:`multiply_in_low_precision_`.

    Acts right after ``configure_model``, after adapters have come and before blocks are recomputed or compiled, which
    must see it; undone at teardown, so that what was trained is evaluated and saved as any other model. The rounding
    of each factor is a few passes over memory of its own unless :class:`~lightning_fasttrain.CompileBlocks` fuses it.

    The tolerance is that of each product; what training makes of it has no bound. Over 100 steps of a small GPT on text
    the loss stays within 1% of that in full precision (means of the last ten steps). In int8 weights drift from it
    about as far as in bf16-mixed, in float8 several times as far.

    Args:
        kind: ``"float8"`` or ``"int8"``.
        skip: layers to leave, as for the function.
        min_features: as for the function.

    Attributes:
        report: a :class:`LowPrecisionReport`, once it has acted.

    Raises:
        ValueError: unknown kind.
        TypeError: ``min_features`` is no whole number.

    Example:
        >>> import lightning_fasttrain as ft
        >>> techniques = [ft.LowPrecisionProducts("int8"), ft.CompileBlocks()]

    Source:
        See :func:`multiply_in_low_precision_`.
    """

    exactness: ClassVar[Exactness] = Exactness.TOLERANCE
    bound: ClassVar[float] = 0.1
    surgery: ClassVar[Surgery | None] = Surgery.ARCHITECTURE
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.REPLACES_PRODUCTS})
    effect: ClassVar[str] = "linear layers multiply in float8 or int8; weights and gradients keep their precision"
    when: ClassVar[str] = (
        "most time goes into linear layers with thousands of inputs and outputs, and blocks are compiled; not on a CPU "
        "with units for bf16"
    )
    in_a_loop: ClassVar[str] = 'apply(model, [LowPrecisionProducts("int8")])'
    predicted: ClassVar[bool] = True

    def __init__(self, kind: str, *, skip: Blocks = (), min_features: int = MIN_FEATURES) -> None:
        self.kind = one_of("kind", kind, KINDS)
        self.skip: Blocks = skip if isinstance(skip, str | type) else tuple(skip)  # YAML gives a list
        self.min_features = positive_int("min_features", min_features)
        self.report: LowPrecisionReport | None = None

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.device == "cpu":
            return "a CPU emulates float8, slower than float32; int8 gains on float32 where it has avx512_vnni"
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < FORMATS["int8"].capability:
            return "this GPU has no units for products in 8 bits"
        return None

    def predict(self, step: PredictedStep) -> "LowPrecisionProducts":
        if self.kind == "float8" and not step.on_cuda:
            step.notes.append("The copies in which a CPU multiplies float8 numbers are not counted.")
        return self

    def apply(self, model: nn.Module) -> Undo:
        self.report = multiply_in_low_precision_(model, self.kind, skip=self.skip, min_features=self.min_features)
        if self.report.layers:
            say("LowPrecisionProducts: %s", self.report)
        return self.report.undo

    def took_hold(self, model: nn.Module) -> str:
        layers = count_wrapped(model, EightBitForward, "layer")
        return f"{layers} multiply in {self.kind}" if layers else ""
