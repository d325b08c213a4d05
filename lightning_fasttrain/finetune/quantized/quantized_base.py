"""The weights of a model's linear layers in 4 or 8 bits, frozen, while something else is trained."""

import copy
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from lightning_fasttrain.core.checks import one_of
from lightning_fasttrain.core.host.lightning import trainer_of
from lightning_fasttrain.core.messages import explain, list_some, note_once, number_of, say, warn
from lightning_fasttrain.core.modules.blocks import Blocks
from lightning_fasttrain.finetune.quantized._quantizable import IN_ADAPTER, Quantizable, sort_out
from lightning_fasttrain.finetune.quantized._quantized_layer import (
    FLOATS,
    KINDS,
    is_quantized,
    quantization_of,
    quantize_layer_,
    require_bitsandbytes,
    round_bias_,
)
from lightning_fasttrain.finetune.quantized._quantized_tensor import quantize_tensor_
from lightning_fasttrain.finetune.quantized.quantized_state import keep_quantized_
from lightning_fasttrain.finetune.selection.uncovered_weights import shares_of, warn_of_what_is_out_of_reach
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Surgery, Technique
from lightning_fasttrain.technique.facts import Facts
from lightning_fasttrain.technique.predicted_step import PredictedStep

NONE_LEFT = "bitsandbytes multiplies with what is quantised, so no layer but the head would be left"
ALL_OR_SKIP = "Leave LowPrecisionProducts out, or name with skip= what is to stay whole and multiply in 8 bits"


@dataclass(frozen=True)
class QuantizedReport:
    """What :func:`quantize_base_` has done; print it for one line.

    Args:
        kind: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        quantized: qualified names of the layers that it has quantised.
        stacks: of the tensors of several matrices, such as a layer's experts, that it has quantised.
        already: of all those that were quantised before.
        left: name of each other linear layer, and of all else that holds a matrix, such as a convolution → why it was
            left. Embeddings are not listed.
        bytes_before: what the quantised weights took.
        bytes_after: what they take, with all constants and tables.
        shares: name of what was left → its share of the bytes that all parameters take now.
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
        stacks = f" and {len(self.stacks)} stacks of matrices" if self.stacks else ""
        parts = [f"{len(self.quantized)} linear layers{stacks} in {self.kind}, {size}"]
        if self.already:
            parts.append(f"{len(self.already)} were quantised before")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            share = sum(self.shares.get(name, 0.0) for name in names)
            parts.append(f"left: {list_some(names)} ({reason}; {share:.0%} of all bytes)")
        return "; ".join(parts)


def quantize_base_(
    model: nn.Module,
    kind: str = "nf4",
    *,
    double_quant: bool = True,
    compute_dtype: torch.dtype | str = "auto",
    skip: Blocks = (),
) -> QuantizedReport:
    """Quantise the weights of a model's linear layers, in place, with bitsandbytes; freeze them and their biases.

    A weight in 4 bits takes about an eighth of its float32 memory, in int8 a quarter. It is dequantised where it is
    used, so activations and gradients are of the usual dtype, and gradients flow through to what lies before it. All
    other parameters are left as they are: embeddings, norms and the head still train, unless something freezes them
    (:class:`LoRA` does). An optimizer must be made afterwards, and other references to the old weights be gone, or
    their memory stays. One layer after another is quantised, with temporaries of three times its float32 size; of six
    times in fp4 on a CPU.

    A tensor that holds several matrices, as today's mixtures of experts have them [experts, out, in], is held in 4 bits
    too: the forward of its module gets it dequantised, and the backward dequantises it again. All experts of a layer
    are floats meanwhile.

    Weights that ``torchao.quantization.quantize_`` has put into int8 or float8 are left as they are: adapters beside
    them, their files and ``export_model`` work. They are no ``kind`` here, since they load no plain checkpoint, cannot
    be pickled, and in float8 do not follow the model into another precision; for int4 torchao has no kernel on CPUs.

    Left alone, with a reason in the report: heads (:func:`~lightning_fasttrain.finetune.find_heads`), what shares its
    weight with another module or Hugging Face keeps in float32, what ``skip`` names, subclasses of ``nn.Linear`` such
    as ``nn.MultiheadAttention`` uses, layers with adapters, and all other matrices that are in no ``nn.Linear``: if
    these are a tenth of all bytes, there is a warning. Code that reads ``layer.weight`` instead of calling the layer
    needs it in ``skip``. In int8 stacks are left, and inputs are quantised too, on a CPU only in eval.

    Args:
        model: any module whose weights are there, on the CPU or on CUDA; they are quantised where they are.
        kind: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        double_quant: quantise the constants of 4-bit blocks too, which saves 0.37 bits a weight.
        compute_dtype: of the products in 4-bit layers. ``"auto"``: half precision as the Trainer or the weights have
            it; for float32, bfloat16 on CUDA devices that can, and else float32. In int8 it is that of the input.
        skip: layers to leave: a class, a class name, or a pattern of qualified names as for
            :func:`~lightning_fasttrain.model.find_blocks`; or several of these. What lies inside of them is left too.

    Returns:
        What was quantised, what had been before, and what was left and why. Quantising cannot be undone; twice is
        the same as once, and a model that Hugging Face has loaded in 4 or 8 bits is recognised.

    Raises:
        ValueError: unknown kind or dtype; ``skip`` matches nothing; nothing to quantise; weights on the meta device.
        TypeError: ``skip`` holds something else than patterns and classes.
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
            why = "it has no weights yet"
            raise ValueError(explain(f"{name!r} is on the meta device", why, "Use load_quantized(...)"))
    before = sum(weight.nbytes for weight in weights.values())
    del weights  # or they would outlive what takes their place
    for layer in found.layers.values():
        dtype = choose_compute_dtype(compute_dtype, model, layer.weight)
        quantize_layer_(layer, layer.weight, kind, double_quant, dtype)
        round_bias_(layer)
    # Those that Hugging Face has quantised lose their state when loaded, too.
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
        why = "it computes in the dtype of its input"
        raise ValueError(explain(f"compute_dtype={compute_dtype} with int8", why, "Leave it out"))


def report(
    model: nn.Module, kind: str, found: Quantizable, holders: dict[str, nn.Module], before: int
) -> QuantizedReport:
    """Say what was done to ``model``, and warn where much of it was not reached."""
    made = (*found.layers.values(), *holders.values())
    after = sum(tensor.nbytes for layer in made for tensor in quantization_of(layer).values())
    shares = shares_of(model, found.left)
    warn_of_what_is_out_of_reach(model, found.left, shares)
    names = tuple(found.layers)
    return QuantizedReport(kind, names, tuple(holders), tuple(found.already), found.left, before, after, shares)


def choose_compute_dtype(wanted: torch.dtype | str, model: nn.Module, weight: torch.Tensor) -> torch.dtype:
    if isinstance(wanted, torch.dtype):
        return wanted
    trainer = trainer_of(model)
    precision = "" if trainer is None else str(trainer.precision)  # the weights may be cast to it only later
    device = weight.device if trainer is None else trainer.strategy.root_device
    if precision.startswith("bf16"):
        return torch.bfloat16
    if precision.startswith("16"):
        return torch.float16
    if weight.dtype is torch.float32 and device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return weight.dtype


class QuantizedBase(Technique):
    """Keep the weights of the linear layers in 4 or 8 bits, frozen.

    Acts right after ``configure_model``, before all other surgery, so before a checkpoint is restored: one of a
    quantised model and one of the plain model both load. Alone it freezes no more than what it quantises, so
    embeddings, norms and the head train; with :class:`~lightning_fasttrain.LoRA` beside it, the adapters do. It stays
    after the run, since what was rounded away cannot come back.

    Args:
        kind: as for :func:`~lightning_fasttrain.finetune.quantize_base_`.
        double_quant: as there.
        compute_dtype: as there.
        skip: as there.

    Attributes:
        report: what the last :meth:`apply` has done.

    Raises:
        ValueError: unknown kind or dtype.

    Example:
        >>> techniques = [QuantizedBase("nf4", skip=["**.router"])]

    Source:
        See :func:`~lightning_fasttrain.finetune.quantize_base_`.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    surgery: ClassVar[Surgery | None] = Surgery.QUANTIZE
    effect: ClassVar[str] = "frozen weights in 4 or 8 bits: an eighth or a quarter of their memory"
    when: ClassVar[str] = "frozen weights are most of the memory, and something else trains"
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
            return "all weights train, and what is quantised cannot: use QLoRA, or freeze most of them"
        return None

    def predict(self, step: PredictedStep) -> "QuantizedBase":
        """A Trainer tells it the precision. Here is none, so a copy is told what it would be."""
        if self.compute_dtype != "auto" or self.kind == "int8":
            return self
        told = copy.deepcopy(self)  # the run itself is to ask its Trainer
        told.compute_dtype = torch.bfloat16 if step.on_cuda or step.precision.startswith("bf16") else "auto"
        return told

    def took_hold(self, model: nn.Module) -> str:
        layers = sum(is_quantized(module) for module in model.modules())
        return f"{number_of(layers, 'linear layer')} in {self.kind}" if layers else ""

    def apply(self, model: nn.Module) -> None:
        settings = {"double_quant": self.double_quant, "compute_dtype": self.compute_dtype, "skip": self.skip}
        self.report = quantize_base_(model, self.kind, **settings)
        if self.report.quantized or self.report.stacks:
            say("QuantizedBase: %s", self.report)
        else:
            note_once(f"QuantizedBase: {len(self.report.already)} layers are quantised already, so nothing is done")
