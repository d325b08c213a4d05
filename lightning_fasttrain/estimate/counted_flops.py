"""Count the FLOPs of a training step, and explain by part how they differ from 6 N."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.seed import isolate_rng
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lightning_fasttrain.core.batch import count_batch, loss_in
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.host.lightning import attached_trainer
from lightning_fasttrain.core.messages import Report, titled_table
from lightning_fasttrain.core.modules.parameters import count_elements
from lightning_fasttrain.memory.fake_step import Factory, fake_batch, fake_model
from lightning_fasttrain.memory.operators.data_dependent_values import AssumedNumbers
from lightning_fasttrain.memory.predict_memory import Loss, explaining_errors, forward_of
from lightning_fasttrain.technique import Surgery, Technique
from lightning_fasttrain.technique.declarations import PredictedStep
from lightning_fasttrain.technique.technique import find_surgeons

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

    def as_table(self) -> Table:
        """Build a ``rich`` table from 6 N to the count."""
        table = titled_table(f"FLOPs of a step of {self.tokens:,} {self.unit}s, {self.counted:.4g}")
        for name in ("", "FLOPs", f"per {self.unit}", "of the count"):
            table.add_column(name, justify="left" if not name else "right")
        rows = {f"6 N, N = {self.parameters:,}": self.six_n, **self.parts(), "counted by torch": self.counted}
        if self.recomputed:
            rows["recomputed by techniques, besides"] = self.recomputed
        for name, flops in rows.items():
            if flops:
                share = f"{flops / self.counted:+.1%}"
                table.add_row(name, f"{flops:.4g}", f"{flops / self.tokens:.4g}", share)
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
        Chowdhery et al. 2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311; counted by torch's
        ``FlopCounterMode``.
    """
    samples, tokens = count_batch(batch)
    if not samples:
        raise ValueError("batch: it holds no tensor with samples, so nothing can be counted. Pass a batch of a loader.")
    surgeons = find_surgeons(techniques, PredictedStep())
    others = without_recomputation(surgeons)
    plain = _trace(module, batch, loss, others)
    whole = _trace(module, batch, loss, surgeons).total if len(surgeons) > len(others) else plain.total
    unit, count = ("token", tokens) if tokens else ("sample", samples)
    return plain.split_up(count, unit, samples, max(0, whole - plain.total))


def without_recomputation(techniques: Sequence[Technique]) -> list[Technique]:
    """Return the techniques that operate on a model, without those that recompute parts of it."""
    kinds = (None, Surgery.CHECKPOINT)
    return [technique for technique in techniques if technique.surgery not in kinds]


def _trace(module: nn.Module | Factory, batch: object, loss: Loss | None, techniques: Sequence[Technique]) -> "_Trace":
    mode, counter = FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False)
    # Nothing is drawn on CUDA, and asking for its state would initialize it.
    with isolate_rng(include_cuda=False), explaining_errors(), fake_model(module, techniques, None, mode) as net:
        trace = _Trace(net)
        forward = forward_of(net, loss, Precision())
        # Torch does not count the CPU kernel of attention, but does count its matrix products.
        with attached_trainer(net), mode, AssumedNumbers(truth=False), sdpa_kernel(SDPBackend.MATH), counter, trace:
            found = loss_in(forward(fake_batch(batch, mode)), "its FLOPs are counted")
            with trace.in_backward():
                found.backward()
    trace.total = counter.get_total_flops()
    return trace


class _Trace(TorchDispatchMode):
    """Notes in a forward which products use which parameter, and which use none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        for parameter in model.parameters():
            key = _storage(parameter)
            self.sizes[key] = self.sizes.get(key, 0) + count_elements(parameter)
            self.shapes[key] = tuple(parameter.shape)
        self.total = self.forward = 0
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

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", func)
        if self._forward and packet in flop_registry:
            self._note(flop_registry[packet](*args, **kwargs, out_val=out), args)
        elif self._forward and packet is _aten.embedding:
            self.looked_up.add(_storage(args[0]))
        return out

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
