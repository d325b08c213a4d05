"""Parameters and FLOPs of transformers: by published formulas, and counted in a step."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_fasttrain.core.batch import count_batch, loss_in
from lightning_fasttrain.core.checks import NonNegativeInt, PositiveFloat, PositiveInt, check_arguments
from lightning_fasttrain.core.host.lightning import attached_trainer
from lightning_fasttrain.core.messages import Report, ReportTable
from lightning_fasttrain.core.modules.blocks import find_blocks
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.core.modules.parameters import count_elements
from lightning_fasttrain.core.modules.select import is_inside
from lightning_fasttrain.memory.fake_step import Factory, fake_batch, fake_model
from lightning_fasttrain.memory.kernel_flops import FlopCounter
from lightning_fasttrain.memory.predict_memory import Loss, explaining_errors, forward_of
from lightning_fasttrain.technique import Surgery, Technique
from lightning_fasttrain.technique.declarations import PredictedStep
from lightning_fasttrain.technique.technique import find_with_surgery

_FEW = 0.002  # of all parameters: such parts are one row


@check_arguments
def count_parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each part: children of the repeated blocks, added up over blocks, and others.

    Tied parameters count once, in the part that comes first. Parts with less than 0.2% of all parameters are one row,
    "others".

    Args:
        model: any module; nothing but its shapes is used.

    Returns:
        Name of a part, with ``*`` for the index of a block → number of parameters, in the order of the model.

    Example:
        >>> block = lambda: nn.TransformerEncoderLayer(16, 2, 64)
        >>> net = nn.Sequential(nn.Embedding(100, 16), *[block() for _ in range(3)])
        >>> parts = count_parameters_by_part(net)
        >>> parts["0"], parts["*.self_attn"], sum(parts.values())
        (1600, 3264, 11440)

    Source:
        Ours.
    """
    try:
        blocks = list(find_blocks(model))
    except ValueError:
        blocks = []
    found: dict[str, int] = {}
    # Without duplicates, so that tied parameters count once.
    for name, parameter in model.named_parameters():
        part = _part_of(name, blocks)
        found[part] = found.get(part, 0) + count_elements(parameter)
    total = sum(found.values())
    small = [part for part, count in found.items() if count < _FEW * total]
    if len(small) > 1:
        found["others"] = sum(found.pop(part) for part in small)
    return found


def _part_of(name: str, blocks: list[str]) -> str:
    owner, _, _ = name.rpartition(".")
    for block in blocks:
        if is_inside(name, [block]):
            child = name.removeprefix(f"{block}.").split(".")[0]
            return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", f"{block}.{child}")
    return owner or name


Recomputation = Literal["none", "selective", "full"]


@check_arguments
def six_n_flops(parameters: PositiveFloat, tokens: PositiveFloat) -> float:
    """Return the FLOPs of a training, C = 6 N D: for each parameter and token 2 in the forward, 4 in the backward.

    Args:
        parameters: N. Kaplan et al. leave out embeddings, Hoffmann et al. and GPT-3 include them.
        tokens: D.

    Example:
        >>> f"{six_n_flops(174.6e9, 300e9):.3g}"  # GPT-3
        '3.14e+23'

    Source:
        Kaplan et al. 2020, section 2.1, https://arxiv.org/abs/2001.08361. Checked against table D.1 of GPT-3, Brown et
        al. 2020, https://arxiv.org/abs/2005.14165.
    """
    return 6 * parameters * tokens


@check_arguments
def kaplan_parameters(
    layers: PositiveInt,
    width: PositiveInt,
    attention_width: PositiveInt | None = None,
    mlp_width: PositiveInt | None = None,
) -> int:
    """Return the parameters of a transformer without embeddings, N = 2 d L (2 d_attn + d_ff), and without vectors.

    Args:
        layers: L.
        width: d, of the hidden state.
        attention_width: d_attn, of all heads together; by default d.
        mlp_width: d_ff; by default 4 d, with which N = 12 L d².

    Example:
        >>> kaplan_parameters(layers=96, width=12288)  # GPT-3
        173946175488

    Source:
        Kaplan et al. 2020, equation 2.1, https://arxiv.org/abs/2001.08361.
    """
    return 2 * width * layers * (2 * (attention_width or width) + (mlp_width or 4 * width))


@check_arguments
def kaplan_forward_flops(
    parameters: PositiveFloat, layers: PositiveInt, context: PositiveInt, attention_width: PositiveInt
) -> float:
    """Return the FLOPs of the forward for one token, 2 N + 2 L n_ctx d_attn; a training takes three times as many.

    Its second term, attention, is half of that of :func:`palm_flops_per_token`, as if attention were causal.

    Args:
        parameters: N, without embeddings.
        layers: L.
        context: n_ctx, tokens of a sequence.
        attention_width: d_attn, of all heads together.

    Example:
        >>> kaplan_forward_flops(1.5e9, layers=48, context=1024, attention_width=1600)
        3157286400.0

    Source:
        Kaplan et al. 2020, equation 2.2, https://arxiv.org/abs/2001.08361.
    """
    return 2 * parameters + 2 * layers * context * attention_width


@check_arguments
def palm_flops_per_token(
    parameters: PositiveFloat,
    layers: NonNegativeInt,
    heads: PositiveInt,
    head_width: PositiveInt,
    context: PositiveInt,
) -> float:
    """Return the model FLOPs of a training for one token, 6 N + 12 L H Q T, without recomputation.

    Args:
        parameters: N.
        layers: L; 0 to leave attention out.
        heads: H.
        head_width: Q, elements of a head.
        context: T, tokens of a sequence; attention is counted for all of them, as if it were not causal.

    Example:
        >>> f"{palm_flops_per_token(540.35e9, layers=118, heads=48, head_width=256, context=2048):.5g}"  # PaLM
        '3.2777e+12'

    Source:
        Chowdhery et al. 2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311.
    """
    return 6 * parameters + 12 * layers * heads * head_width * context


@check_arguments
def megatron_parameters(
    layers: PositiveInt, width: PositiveInt, vocabulary: PositiveInt, context: PositiveInt
) -> float:
    """Return the parameters of a GPT with a tied head, 12 l h² (1 + 13 / 12h + (V + s) / 12lh).

    Args:
        layers: l.
        width: h.
        vocabulary: V.
        context: s, the number of learned positions.

    Example:
        >>> f"{megatron_parameters(layers=96, width=12288, vocabulary=51200, context=2048):.4g}"
        '1.746e+11'

    Source:
        Narayanan et al. 2021, section 5.1, https://arxiv.org/abs/2104.04473.
    """
    return 12 * layers * width**2 * (1 + 13 / (12 * width) + (vocabulary + context) / (12 * layers * width))


@check_arguments
def megatron_flops(
    batch: PositiveInt,
    layers: PositiveInt,
    width: PositiveInt,
    vocabulary: PositiveInt,
    context: PositiveInt,
    recomputation: Recomputation = "none",
) -> float:
    """Return the FLOPs of one training step of a GPT, 72 B L s h² (1 + s / 6h + v / 12hL).

    With recomputation it is the number that the hardware computes: selective recomputation repeats the products of
    attention, which makes the second term s / 3h; full recomputation repeats the forward of all layers.

    Args:
        batch: B, sequences of a step.
        layers: L.
        width: h.
        vocabulary: v.
        context: s, tokens of a sequence.
        recomputation: ``"none"``, ``"selective"`` or ``"full"``.

    Example:
        >>> selective = megatron_flops(64, 96, 12288, 51200, 2048, recomputation="selective")  # GPT-3
        >>> f"{selective / megatron_flops(64, 96, 12288, 51200, 2048) - 1:.1%}"
        '2.7%'

    Source:
        Korthikanti et al. 2022, equations 7 and 8, https://arxiv.org/abs/2205.05198; full recomputation as in
        Narayanan et al. 2021, https://arxiv.org/abs/2104.04473. Checked against their table 5.
    """
    base = 72 * batch * layers * context * width**2
    attention, head = context / (6 * width), vocabulary / (12 * width * layers)
    if recomputation == "selective":
        return base * (1 + 2 * attention + head)
    if recomputation == "full":
        return base * (4 / 3 * (1 + attention) + head)
    return base * (1 + attention + head)


_aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionShape:
    """The shape of the attention of a model whose layers are all the same, as seen in its products.

    Attributes:
        layers: number of attentions in a forward.
        heads: of each; 0 if the samples of the batch do not divide the products.
        head_width: elements of a head.
        context: tokens that are attended to.
    """

    layers: int
    heads: int
    head_width: int
    context: int


@dataclass(frozen=True)
class StepFlops(Report):
    """The FLOPs of a training step; print it for a table.

    Attributes:
        counted: model FLOPs of forward and backward, without recomputation.
        recomputed: what techniques recompute besides.
        tokens: token ids of the batch; its samples, if it holds none.
        unit: ``"token"`` or ``"sample"``.
        parameters: N, all of them.
        multiplied: parameters that matrix products use as a weight.
        lookups, others, reused, attention, not_needed: what is added to 6 N for each token to get ``counted``.
        shape: of attention; None if there is none, or its layers differ.
        hidden_width: elements of the hidden state; 0 if unknown.
        vocabulary: rows of the largest embedding; 0 without one.
    """

    counted: int
    recomputed: int
    tokens: int
    unit: str
    parameters: int
    multiplied: int
    lookups: int
    others: int
    reused: int
    attention: int
    not_needed: int
    shape: AttentionShape | None
    hidden_width: int
    vocabulary: int

    @property
    def six_n(self) -> int:
        """6 N for each token."""
        return 6 * self.parameters * self.tokens

    @property
    def flops_per_token(self) -> float:
        """Counted FLOPs for each token, or for each sample of a batch without token ids."""
        return self.counted / self.tokens

    def parts(self) -> dict[str, int]:
        """Return what is added to 6 N for each token; the sum of all is ``counted``."""
        return {
            "embeddings are looked up, not multiplied": self.lookups,
            "norms, biases and other vectors are not multiplied": self.others,
            f"weights used more or less than once a {self.unit}": self.reused,
            "products without a weight, as in attention": self.attention,
            "gradients that are not needed (frozen weights, the batch)": self.not_needed,
        }

    def as_table(self) -> ReportTable:
        """Build the table from 6 N to the count."""
        numbers = dict.fromkeys(("FLOPs", f"per {self.unit}", "of the count"), "number")
        table = ReportTable(
            f"FLOPs of a step of {self.tokens:,} {self.unit}s, {self.counted:.4g}", {"": "name", **numbers}
        )
        rows = {f"6 N, N = {self.parameters:,}": self.six_n, **self.parts(), "counted by torch": self.counted}
        if self.recomputed:
            rows["recomputed by techniques, besides"] = self.recomputed
        for name, flops in rows.items():
            if flops:
                share = f"{flops / self.counted:+.1%}"
                table.add(name, f"{flops:.4g}", f"{flops / self.tokens:.4g}", share)
        return table


@check_arguments
def count_step_flops(
    module: nn.Module | Factory, batch: object, *, loss: Loss | None = None, techniques: Sequence[Technique] = ()
) -> StepFlops:
    """Count the FLOPs of a training step without computing anything, and split up how they differ from 6 N a token.

    Causal attention is counted in full, as in the formula of PaLM. FLOPs are those of matrix products and convolutions.

    Args:
        module: a function that builds the model, or the model, which is not changed.
        batch: one batch of the loader.
        loss: (module, batch) → loss, instead of ``training_step``.
        techniques: techniques of the run. What they recompute is counted separately; adapters and frozen weights
            change the count itself.

    Raises:
        TypeError: no model, no loss, or a model that cannot be copied.
        ValueError: a batch without samples, or code with shapes that depend on tensor values.

    Example:
        >>> flops = count_step_flops(nn.Linear(10, 20), torch.zeros(5, 10), loss=lambda net, batch: net(batch).sum())
        >>> flops.counted, flops.six_n, flops.others, flops.not_needed
        (4000, 6600, -600, -2000)

    Source:
        Chowdhery et al. 2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311; formulas of torch's
        ``FlopCounterMode``.
    """
    samples, tokens = count_batch(batch)
    if not samples:
        raise ValueError("batch: it holds no tensor with samples, so nothing can be counted. Pass a batch of a loader.")
    with_surgery = find_with_surgery(techniques, PredictedStep())
    others = without_recomputation(with_surgery)
    plain = _trace(module, batch, loss, others)
    whole = _trace(module, batch, loss, with_surgery).total if len(with_surgery) > len(others) else plain.total
    unit, count = ("token", tokens) if tokens else ("sample", samples)
    return plain.split_up(count, unit, samples, max(0, whole - plain.total))


def without_recomputation(techniques: Sequence[Technique]) -> list[Technique]:
    """Return the techniques that operate on a model, without those that recompute parts of it."""
    kinds = (None, Surgery.CHECKPOINT)
    return [technique for technique in techniques if technique.surgery not in kinds]


def _trace(module: nn.Module | Factory, batch: object, loss: Loss | None, techniques: Sequence[Technique]) -> "_Trace":
    mode = FakeMode()
    # Nothing is drawn on CUDA, and asking for its state would initialize it.
    with isolate_rng(include_cuda=False), explaining_errors(), fake_model(module, techniques, None, mode) as net:
        trace = _Trace(net)
        forward = forward_of(net, loss, Precision())
        # As matrix products, attention has no recomputation in its backward.
        with attached_trainer(net), mode, sdpa_kernel(SDPBackend.MATH), trace:
            found = loss_in(forward(fake_batch(batch, mode)), "its FLOPs are counted")
            with trace.in_backward():
                found.backward()
    return trace


class _Trace(FlopCounter):
    """Notes in a forward which products use which parameter, and which use none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        for parameter in model.parameters():
            key = _storage(parameter)
            self.sizes[key] = self.sizes.get(key, 0) + count_elements(parameter)
            self.shapes[key] = tuple(parameter.shape)
        self.forward = 0
        self.used: dict[int, int] = {}  # storage of a parameter → FLOPs of the products that use it
        self.looked_up: set[int] = set()
        self.between: list[tuple[int, ...]] = []  # (count, rows, inner, columns) of products without a parameter
        self._forward = True

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        self._forward = False
        try:
            yield
        finally:
            self._forward = True

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = self.total
        result = super().run(func, args, kwargs)
        if self._forward and self.total > before:
            self._note(self.total - before, args)
        elif self._forward and func.overloadpacket is _aten.embedding:
            self.looked_up.add(_storage(args[0]))
        return result

    def _note(self, flops: int, args: Any) -> None:
        self.forward += flops
        factors = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim > 1]
        for factor in factors:
            if _storage(factor) in self.sizes:
                self.used[_storage(factor)] = self.used.get(_storage(factor), 0) + flops
                return
        if len(factors) >= 2 and factors[-1].ndim == 3:
            count, rows, inner = factors[-2].shape
            self.between.append((count, rows, inner, factors[-1].shape[2]))

    def split_up(self, tokens: int, unit: str, samples: int, recomputed: int) -> StepFlops:
        with_weight = sum(self.used.values())
        multiplied = sum(self.sizes[key] for key in self.used)
        lookups = sum(self.sizes.get(key, 0) for key in self.looked_up - self.used.keys())
        parameters = sum(self.sizes.values())
        tables = [self.shapes[key] for key in self.looked_up & self.shapes.keys()]
        vocabulary, width = max(tables, default=(0, 0))
        return StepFlops(
            counted=self.total,
            recomputed=recomputed,
            tokens=tokens,
            unit=unit,
            parameters=parameters,
            multiplied=multiplied,
            lookups=-6 * lookups * tokens,
            others=-6 * (parameters - multiplied - lookups) * tokens,
            reused=3 * with_weight - 6 * multiplied * tokens,
            attention=3 * (self.forward - with_weight),
            # Two products of a backward for each of the forward, where both gradients are needed.
            not_needed=self.total - 3 * self.forward,
            shape=self._attention_shape(samples),
            hidden_width=width,
            vocabulary=vocabulary,
        )

    def _attention_shape(self, samples: int) -> AttentionShape | None:
        scores, values = self.between[::2], self.between[1::2]
        # Each layer multiplies queries by keys, and weights by values.
        if not scores or len(set(scores)) > 1 or len(set(values)) > 1 or len(scores) != len(values):
            return None
        (count, rows, inner, columns), value = scores[0], values[0]
        if value != (count, rows, columns, inner):
            return None
        heads = count // samples if count % samples == 0 else 0
        return AttentionShape(len(scores), heads, inner, columns)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
