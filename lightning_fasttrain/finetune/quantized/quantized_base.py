"""Quantisation of the frozen weights of linear layers to 4 or 8 bits, while other parameters train."""

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain.core.checks import check_arguments, one_of
from lightning_fasttrain.core.device import dtype_of, fast_mixed_precision
from lightning_fasttrain.core.host.lightning import trainer_of
from lightning_fasttrain.core.messages import explain, list_some, note_once, number_of, say, warn
from lightning_fasttrain.core.modules.heads import find_heads
from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.core.modules.select import (
    PROMPT_ENCODER,
    TUNER,
    WRAPPER,
    Blocks,
    Sharing,
    find_skipped,
    group_by_reason,
    is_a,
    is_part_of,
    walk_around,
)
from lightning_fasttrain.finetune.quantized.quantized_layer import (
    FLOATS,
    KINDS,
    is_quantized,
    is_transposed,
    quantization_of,
    quantize_layer_,
    require_bitsandbytes,
    round_bias_,
)
from lightning_fasttrain.finetune.quantized.quantized_tensor import keep_quantized_, quantize_tensor_
from lightning_fasttrain.finetune.selection.base_fingerprint import is_torchaos
from lightning_fasttrain.finetune.selection.targets import (
    is_matrix,
    out_of_reach,
    owner_of,
    read_besides,
    read_past,
    shares_of,
    warn_of_what_is_out_of_reach,
)
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep

_ADAPTERS = (TUNER, WRAPPER, PROMPT_ENCODER)
IN_ADAPTER = "it has an adapter already"


@dataclass(frozen=True)
class Quantizable:
    """Result of :func:`sort_out`, by qualified names.

    Args:
        layers: linear layers to quantise, including the ``Conv1D`` of GPT-2.
        stacks: tensors [n, rows, columns] to quantise → the module that holds the tensor, and its name there.
        already: layers that are quantised already.
        left: other layers and tensors → why they are not quantised.
    """

    layers: dict[str, Any]
    stacks: dict[str, tuple[nn.Module, str]]
    already: dict[str, nn.Module]
    left: dict[str, str]

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors to quantise."""
        weights: dict[str, Any] = {name: layer.weight for name, layer in self.layers.items()}
        for name, (owner, key) in self.stacks.items():
            weights[name] = owner._parameters[key]
        return weights


def sort_out(model: nn.Module, kind: str, skip: Blocks) -> Quantizable:
    """Find the layers of ``model`` to quantise, those quantised already, and the others with the reason.

    Raises:
        ValueError: there is nothing to quantise; ``skip`` matches nothing.
        TypeError: ``skip`` contains anything other than patterns and classes.
    """
    skipped, heads = find_skipped(model, skip), find_heads(model)
    shared = {**_kept_whole(model), **_shared_modules(model)}
    shared.update(dict.fromkeys(read_besides(model), "its module reads its weight, or the dtype of it"))
    shared.update(dict.fromkeys(read_past(model), "its weight is read without calling it"))
    layers: dict[str, Any] = {}
    already: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    # The outermost PEFT module that contains the current one; no name begins with "\0".
    adapter = "\0"
    for name, module in model.named_modules():
        if is_a(module, *_ADAPTERS) and not name.startswith(adapter):
            adapter = f"{name}."
        if is_quantized(module):
            already[name] = module
        elif isinstance(module, nn.Linear) or is_transposed(module):
            reason = _why_left(name, module, skipped, heads, shared)
            if name.startswith(adapter):
                # Other layers inside of the wrapper belong to the adapter.
                if name == f"{adapter}base_layer":
                    left[name] = reason or IN_ADAPTER
            elif reason:
                left[name] = reason
            else:
                layers[name] = module
    stacks = _stacks(model, skipped) if kind != "int8" else {}
    unreached = out_of_reach(model, skipped)
    reached = {*layers, *already, *left, *stacks}
    left.update({name: why for name, why in unreached.items() if not {name, f"{name}.weight"} & reached})
    if not layers and not already and not stacks:
        raise ValueError(_nothing_to_quantise(model, left))
    return Quantizable(layers, stacks, already, left)


def _stacks(model: nn.Module, skipped: set[str]) -> dict[str, tuple[nn.Module, str]]:
    """Find tensors of several matrices that modules multiply with in their own forward, such as experts."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in walk_around(model, lambda module: is_a(module, *_ADAPTERS)):
        # The weight of a Conv1d has three dimensions as well, also with weight normalization.
        if name in skipped or isinstance(module, _ConvNd | ParametrizationList):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and is_matrix(parameter) and parameter.dtype in FLOATS:
                found[f"{name}.{key}".lstrip(".")] = module, key
    return found


def _why_left(name: str, layer: nn.Module, skipped: set[str], heads: list[str], shared: dict[str, str]) -> str:
    """Return why a layer is not quantised; empty if it can be."""
    if name in skipped:
        return "skip"
    if name.removesuffix(".base_layer") in heads:
        return "a head"
    return shared.get(name) or _why_unfit(layer)


def _nothing_to_quantise(model: nn.Module, left: dict[str, str]) -> str:
    what = f"nothing to quantise in {type(model).__name__}"
    if not left:
        return explain(what, "it has no nn.Linear", "Remove the quantisation")
    reasons = ", ".join(f"{name} ({reason})" for name, reason in list(left.items())[:6])
    way_out = "Quantise before adapters are added, and skip fewer layers; only nn.Linear can be quantised"
    return explain(what, f"none of its matrices can be: {reasons}", way_out)


def _shared_modules(model: nn.Module) -> dict[str, str]:
    """Map each module that shares a parameter with another one to that reason."""
    sharing, reasons = Sharing(model), dict[str, str]()
    modules = dict(model.named_modules(remove_duplicate=False))
    for group in sharing.groups:
        for key in group:
            name, _, own = key.rpartition(".")
            places = sharing.names[modules[name]]
            others = [other for other in group if not is_part_of(other, places)]
            if others:
                reasons[name] = f"it shares its {own} with {owner_of(others[0])[0]}"
    return reasons


def _kept_whole(model: nn.Module) -> dict[str, str]:
    """Map modules that Hugging Face models keep in float32, such as ``wo`` in T5, to that reason."""
    reasons: dict[str, str] = {}
    for prefix, owner in model.named_modules():
        kept = {*(getattr(owner, "_keep_in_fp32_modules", None) or ())}
        kept |= {*(getattr(owner, "_keep_in_fp32_modules_strict", None) or ())}
        for name, _ in owner.named_modules():
            if any(f".{one}." in f".{name}." for one in kept):
                reasons[f"{prefix}.{name}".lstrip(".")] = f"{type(owner).__name__} keeps it in float32"
    return reasons


def _why_unfit(layer: nn.Module) -> str:
    # A subclass may compute something else in its forward, which would be replaced with the class.
    if type(layer) is not nn.Linear and not is_transposed(layer):
        return f"it is a {type(layer).__name__}, not a plain nn.Linear"
    weight = layer._parameters.get("weight")
    if weight is not None and is_torchaos(weight):
        return "torchao has quantised it"
    if weight is None or is_traceable_wrapper_subclass(weight):  # such as a DTensor
        return "its weight is not a plain parameter"
    if weight.dtype not in FLOATS:
        return f"its weight is in {weight.dtype}"
    return ""


NONE_LEFT = "bitsandbytes computes the products of quantised layers, so only the head would be left for it"
ALL_OR_SKIP = "Remove LowPrecisionProducts, or name with skip= the layers to leave unquantised, for its 8-bit products"


@dataclass(frozen=True)
class QuantizedReport:
    """Result of :func:`quantize_base_`; print it for a one-line summary.

    Args:
        kind: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        quantized: qualified names of the layers that were quantised.
        stacks: qualified names of the quantised tensors of several matrices, such as a layer's experts.
        already: qualified names of the layers that were quantised before.
        left: name of each other linear layer, and of each other module or tensor that holds a matrix, such as a
            convolution → why it was not quantised. Embeddings are not listed.
        bytes_before: bytes of the weights before they were quantised.
        bytes_after: bytes of the quantised weights, including all constants and tables.
        shares: name of each entry of ``left`` → its share of the bytes of all parameters after quantisation.
    """

    kind: str
    quantized: tuple[str, ...]
    stacks: tuple[str, ...]
    already: tuple[str, ...]
    left: dict[str, str]
    bytes_before: int
    bytes_after: int
    shares: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        size = f"{self.bytes_before / 2**20:.1f} → {self.bytes_after / 2**20:.1f} MiB"
        stacks = ""
        if self.stacks:
            stacks = f" and {len(self.stacks)} stacks of matrices"
        parts = [f"{len(self.quantized)} linear layers{stacks} in {self.kind}, {size}"]
        if self.already:
            parts.append(f"{len(self.already)} were quantised before")
        for reason, names in group_by_reason(self.left).items():
            share = sum(self.shares.get(name, 0.0) for name in names)
            parts.append(f"left: {list_some(names)} ({reason}; {share:.0%} of all bytes)")
        return "; ".join(parts)


@check_arguments
def quantize_base_(
    model: nn.Module,
    kind: str = "nf4",
    *,
    double_quant: bool = True,
    compute_dtype: torch.dtype | str = "auto",
    skip: Blocks = (),
) -> QuantizedReport:
    """Quantise the weights of a model's linear layers, in place, with bitsandbytes; freeze them and their biases.

    A weight in 4 bits takes about an eighth of its float32 memory, in int8 a quarter. It is dequantised when it is
    used, so activations and gradients have the usual dtype, and gradients flow through to earlier layers. All other
    parameters are unchanged: embeddings, norms and the head still train unless they are frozen, as by :class:`LoRA`.
    Create the optimizer afterwards, and delete other references to the old weights, or their memory is not freed.
    Layers are quantised one after another, each with temporaries of three times its float32 size (six times for fp4 on
    a CPU).

    A tensor that holds several matrices, as in current mixture-of-experts models [experts, out, in], is quantised to
    4 bits too: the forward of its module gets it dequantised, and the backward dequantises it again. All experts of the
    layer are in floating point during that time.

    Weights that ``torchao.quantization.quantize_`` has converted to int8 or float8 are unchanged: adapters on them,
    adapter files and ``export_model`` work. torchao is not offered as a ``kind``, since its weights cannot load a plain
    checkpoint, cannot be pickled, and in float8 are not converted with the model to another precision; for int4 it has
    no CPU kernel.

    Not quantised, with a reason in the report: heads (:func:`~lightning_fasttrain.finetune.find_heads`), modules that
    share their weight with another one or that Hugging Face keeps in float32, modules that ``skip`` names, subclasses
    of ``nn.Linear`` such as ``nn.MultiheadAttention`` uses, layers with adapters, and all other matrices outside of
    ``nn.Linear``, with a warning if these are at least 10% of all bytes. If code reads ``layer.weight`` instead of
    calling the layer, name the layer in ``skip``. With int8, stacks are not quantised, and inputs are quantised too, on
    a CPU only in eval mode.

    Args:
        model: any module whose weights are on the CPU or on CUDA; they are quantised on their device.
        kind: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        double_quant: quantise the constants of 4-bit blocks too, which saves 0.37 bits per weight.
        compute_dtype: dtype of the products in 4-bit layers, or its name. ``"auto"``: the half precision of the
            Trainer or the weights; for float32, bfloat16 on CUDA devices that support it, else float32. With int8 it
            is that of the input.
        skip: layers not to quantise: a class, a class name, or a pattern of qualified names as for
            :func:`~lightning_fasttrain.model.find_blocks`; or several of these. Layers inside of them are skipped too.

    Returns:
        The layers that were quantised, those that were quantised before, and the others with the reason. Quantisation
        cannot be undone; a second call changes nothing, and a model that Hugging Face has loaded in 4 or 8 bits is
        recognised.

    Raises:
        ValueError: unknown kind or dtype; ``skip`` matches nothing; nothing to quantise; weights on the meta device.
        TypeError: ``skip`` contains anything other than patterns and classes.
        ModuleNotFoundError: bitsandbytes is missing.

    Example:
        >>> net = nn.Sequential(nn.Embedding(64, 64), *[nn.Linear(64, 64) for _ in range(2)], nn.Linear(64, 9))
        >>> report = quantize_base_(net)
        >>> report.quantized, report.left
        (('1', '2'), {'3': 'a head'})
        >>> net[1].weight.dtype, net[0].weight.requires_grad
        (torch.uint8, True)

    Source:
        Dettmers et al. 2023, "QLoRA", https://arxiv.org/abs/2305.14314; int8: Dettmers et al. 2022, "LLM.int8()",
        https://arxiv.org/abs/2208.07339, without its outliers. The layers are bitsandbytes'.
    """
    check_settings(kind, compute_dtype)
    require_bitsandbytes()
    found = sort_out(model, kind, skip)
    if IN_ADAPTER in found.left.values():
        warn("quantize_base_: layers with adapters stay in full precision. Quantise first, then add adapters.")
    weights = found.weights()
    for name, weight in weights.items():
        if weight.is_meta:
            why = "it has no values yet"
            raise ValueError(explain(f"{name!r} is on the meta device", why, "Use load_quantized(...)"))
    before = bytes_of(weights.values())
    del weights  # otherwise the old weights would not be freed
    for layer in found.layers.values():
        dtype = choose_compute_dtype(compute_dtype, model, layer.weight)
        quantize_layer_(layer, layer.weight, kind, double_quant, dtype)
        round_bias_(layer)
    # Layers that Hugging Face has quantised need this as well.
    for layer in (*found.layers.values(), *found.already.values()):
        keep_quantized_(layer)
    holders = {}
    for name, (owner, key) in found.stacks.items():
        holders[name] = quantize_tensor_(owner, key, owner.get_parameter(key).detach(), kind, double_quant)
    return report(model, kind, found, holders, before)


def check_settings(kind: str, compute_dtype: torch.dtype | str) -> None:
    one_of("kind", kind, KINDS)
    if compute_dtype != "auto" and compute_dtype not in FLOATS:
        allowed = ", ".join(map(str, FLOATS))
        why = "bitsandbytes cannot compute in it"
        raise ValueError(explain(f"compute_dtype={compute_dtype!r}", why, f'Use "auto" or {allowed}'))
    if kind == "int8" and compute_dtype != "auto":
        why = "int8 layers compute in the dtype of their input"
        raise ValueError(explain(f"compute_dtype={compute_dtype} with int8", why, "Remove it"))


def report(
    model: nn.Module, kind: str, found: Quantizable, holders: dict[str, nn.Module], before: int
) -> QuantizedReport:
    """Create the report of a quantisation, and warn if a large part of ``model`` could not be quantised."""
    made = (*found.layers.values(), *holders.values())
    after = sum(bytes_of(quantization_of(layer).values()) for layer in made)
    shares = shares_of(model, found.left)
    warn_of_what_is_out_of_reach(model, found.left, shares)
    names = tuple(found.layers)
    return QuantizedReport(kind, names, tuple(holders), tuple(found.already), found.left, before, after, shares)


def choose_compute_dtype(wanted: torch.dtype | str, model: nn.Module, weight: torch.Tensor) -> torch.dtype:
    if isinstance(wanted, torch.dtype):
        return wanted
    precision, device = "", weight.device
    trainer = trainer_of(model)
    if trainer is not None:
        # The Trainer may convert the weights to its precision later.
        precision, device = str(trainer.precision), trainer.strategy.root_device
    if precision.startswith("bf16"):
        return torch.bfloat16
    if precision.startswith("16"):
        return torch.float16
    if weight.dtype is torch.float32 and device.type == "cuda":
        return dtype_of(fast_mixed_precision(device) or "32-true")
    return weight.dtype


class QuantizedBase(Technique):
    """Keep the weights of the linear layers in 4 or 8 bits, frozen.

    Acts right after ``configure_model``, before all other model surgery and before a checkpoint is restored, which may
    be one of a quantised or of the plain model. It freezes only the layers that it quantises, so embeddings, norms and
    the head train; together with :class:`~lightning_fasttrain.LoRA`, the adapters do. The model stays quantised after
    the run, since quantisation cannot be undone.

    Args:
        kind: as for :func:`~lightning_fasttrain.finetune.quantize_base_`.
        double_quant: as there.
        compute_dtype: as there.
        skip: as there.

    Attributes:
        report: result of the last :meth:`apply`.

    Raises:
        ValueError: unknown kind or dtype.

    Example:
        >>> techniques = [QuantizedBase("nf4", skip=["**.router"])]

    Source:
        See :func:`~lightning_fasttrain.finetune.quantize_base_`.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTS_LAYERS})
    surgery: ClassVar[Surgery | None] = Surgery.QUANTIZE
    effect: ClassVar[str] = "frozen weights in 4 or 8 bits: an eighth or a quarter of their memory"
    when: ClassVar[str] = "frozen weights take most of the memory, and other parameters train"
    in_a_loop: ClassVar[str] = "finetune.quantize_base_(model)"
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        kind: str = "nf4",
        *,
        double_quant: bool = True,
        compute_dtype: torch.dtype | str = "auto",
        skip: Blocks = (),
    ) -> None:
        check_settings(kind, compute_dtype)
        self.kind, self.double_quant, self.compute_dtype, self.skip = kind, double_quant, compute_dtype, skip
        self.report: QuantizedReport | None = None

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        return (Conflict(Capability.REPLACES_PRODUCTS, NONE_LEFT, ALL_OR_SKIP, lambda base, _: not base.skip),)

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.trains == 1:
            return "all weights train, and quantised weights cannot: use QLoRA, or freeze most of them"
        return None

    def predict(self, step: PredictedStep) -> "QuantizedBase":
        """Return a copy with the compute dtype that the Trainer's precision would give."""
        if self.compute_dtype != "auto" or self.kind == "int8":
            return self
        # In the run itself, the Trainer determines it.
        predicted = copy.deepcopy(self)
        if step.on_cuda or step.precision.startswith("bf16"):
            predicted.compute_dtype = torch.bfloat16
        return predicted

    def describe_effect(self, model: nn.Module) -> str:
        layers = sum(map(is_quantized, model.modules()))
        if not layers:
            return ""
        return f"{number_of(layers, 'linear layer')} in {self.kind}"

    def apply(self, model: nn.Module) -> None:
        settings = {"double_quant": self.double_quant, "compute_dtype": self.compute_dtype, "skip": self.skip}
        self.report = quantize_base_(model, self.kind, **settings)
        if self.report.quantized or self.report.stacks:
            say("QuantizedBase: %s", self.report)
        else:
            note_once(f"QuantizedBase: {len(self.report.already)} layers are quantised already, so nothing is changed")
