"""Fuse the head of a language model with its cross-entropy, without storing the logits."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodWrapperType
from typing import Any, ClassVar, Protocol

import lightning as L
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from lightning_fasttrain.core.checks import NonNegativeFloat, PositiveInt, check_arguments, one_of
from lightning_fasttrain.core.messages import describe_error, explain, list_some, note_once, warn
from lightning_fasttrain.core.modules.heads import SplitHead, find_heads, on_all_ranks, outside_blocks
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    WrappedForward,
    output_embeddings_of,
    wrapper_on,
    wrappers_on,
)
from lightning_fasttrain.loss.chunked import autocast_dtype
from lightning_fasttrain.loss.deferred_logits import DeferredLogits, NeedsValuesError, scale_bias
from lightning_fasttrain.loss.linear_cross_entropy import BACKENDS, linear_cross_entropy
from lightning_fasttrain.loss.logit_losses import MiscompiledError
from lightning_fasttrain.technique import Exactness, Setting, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep

_Tensor: Any = Tensor  # to type checkers its properties are values
# Strategies and precision plugins query these on each tensor of an output. Deferred logits, which are not tensors, are
# skipped.
_ASKED_OF_TENSORS = {
    _Tensor.requires_grad.__get__,
    _Tensor.grad_fn.__get__,
    _Tensor.is_leaf.__get__,
    _Tensor.is_nested.__get__,
    _Tensor.layout.__get__,
    Tensor.is_floating_point,
    Tensor.register_hook,
}


@dataclass
class HeadEvidence:
    """Evidence from the training steps so far about one linear layer.

    Attributes:
        ended: whether a gradient reached its output, from any source.
        reached: whether the output reached a cross-entropy.
        refused: the first operation on the output that deferred logits do not support; "" if there was none.
    """

    ended: bool = False
    reached: bool = False
    refused: str = ""

    @property
    def is_head(self) -> bool:
        return self.reached and not self.refused

    def add(self, other: "HeadEvidence") -> None:
        self.ended |= other.ended
        self.reached |= other.reached
        self.refused = self.refused or other.refused


class ObservedHead(Protocol):
    """The part of a fused head that :class:`HeadSearch` needs."""

    evidence: HeadEvidence


class HeadSearch:
    """The layers of one model among which the first training loss identifies the heads.

    Attributes:
        candidates: qualified name → object that replaces the layer's forward.
        is_reported: whether it was reported that no candidate is a head, or a Trainer will report it.
    """

    def __init__(self) -> None:
        self.candidates: dict[str, ObservedHead] = {}
        self.is_reported = False

    @property
    def has_seen_a_step(self) -> bool:
        """Whether a backward has reached a candidate."""
        return any(head.evidence.ended for head in self.candidates.values())

    def found(self) -> list[str]:
        return [name for name, head in self.candidates.items() if head.evidence.is_head]

    def why_none(self) -> tuple[str, str] | None:
        """Return why no candidate is the head, and what to do; None if one is."""
        if self.found():
            return None
        uses: list[str] = []
        for name, head in self.candidates.items():
            if head.evidence.reached:
                uses.append(f"the logits of '{name}' are also used for {head.evidence.refused}")
        if uses:
            return "; ".join(uses), "Use the logits for cross_entropy alone, or leave FusedLossHead out"
        for name, head in self.candidates.items():
            used = f", used for {head.evidence.refused}" if head.evidence.refused else ""
            uses.append(f"'{name}'{used}")
        why = f"no output of a linear layer outside of the repeated blocks ({list_some(uses)}) reached cross_entropy"
        way_out = "Compute the loss with torch's cross_entropy, compile the blocks alone, with CompileBlocks"
        return why, f"{way_out}, name the head in head=, or leave FusedLossHead out"

    def tell(self) -> None:
        """Warn once if there is no head when a second forward begins, unless a Trainer reports it."""
        if self.is_reported or not self.has_seen_a_step:
            return
        reason = self.why_none()
        if reason is not None:
            self.is_reported = True
            warn(explain("FusedLossHead did nothing in the first batch", *reason))


def _watch_function(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    # Records made while tracing would be missing at run time.
    if torch.compiler.is_compiling():
        return result
    watched = [one for one in tree_leaves((args, kwargs)) if _is_watched(one)]
    if not watched or func in _ASKED_OF_TENSORS:
        return result
    try:
        deferred = _do_likewise(func, tree_map(_deferred_of, tuple(args)), tree_map(_deferred_of, kwargs))
    except Exception as error:
        # Training with deferred logits would raise the error, too.
        for one in watched:
            use = error.use if isinstance(error, NeedsValuesError) else func.__name__
            one.evidence.refused = one.evidence.refused or use
        return result
    return _mark(result, deferred, watched[0].evidence)


class _Watched:
    """A tensor of logits that applies each operation to deferred logits, too.

    The values are those of the plain tensor. Operations that deferred logits do not support are recorded as evidence,
    and their results are plain tensors.
    """

    deferred: DeferredLogits
    evidence: HeadEvidence

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _watch_function(func, args, kwargs or {})


class WatchedLogits(_Watched, Tensor):
    """Watched logits with values."""


class WatchedFakeLogits(_Watched, FakeTensor):
    """Watched logits without values, as in a predicted step."""


def watch_logits(output: Tensor, hidden: Tensor, total: HeadEvidence) -> Tensor:
    """Return a linear layer's ``output`` as watched logits; the evidence is added when its gradient arrives."""
    if not output.requires_grad:
        return output
    evidence = HeadEvidence(ended=True)

    def loss_of(hidden: Tensor, targets: Tensor, *_: object, **__: object) -> Tensor:
        evidence.reached = True
        return torch.zeros_like(targets)

    # By then the step has finished using the output, including an accuracy computed after the loss.
    output.register_hook(lambda gradient: total.add(evidence))
    return _mark(output, DeferredLogits(hidden.detach(), output.shape[-1], output.dtype, loss_of), evidence)


def _is_watched(value: object) -> bool:
    return isinstance(value, WatchedLogits | WatchedFakeLogits) and "deferred" in vars(value)


def _deferred_of(value: object) -> Any:
    return value.deferred if _is_watched(value) else value


def _mark(result: object, deferred: object, evidence: HeadEvidence) -> Any:
    if isinstance(result, Tensor) and isinstance(deferred, DeferredLogits):
        marked: Any = result
        if isinstance(result, FakeTensor):
            marked.__class__ = WatchedFakeLogits  # a tensor can be given one Python object, which it has
        else:
            with torch._C.DisableTorchFunctionSubclass():
                marked = result.as_subclass(WatchedLogits)
        marked.deferred, marked.evidence = deferred, evidence
        return marked
    if isinstance(result, tuple) and isinstance(deferred, tuple) and len(result) == len(deferred):
        return tuple(_mark(one, other, evidence) for one, other in zip(result, deferred, strict=True))
    return result


def _do_likewise(func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
    """Call ``func`` on deferred logits, whose methods have the names of torch's."""
    if isinstance(args[0], DeferredLogits):
        if isinstance(func, MethodWrapperType):  # the getter of a property's descriptor
            return getattr(args[0], func.__self__.__name__)  # type: ignore[attr-defined]
        if getattr(Tensor, func.__name__, None) is func:
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
    return func(*args, **kwargs)


@check_arguments
def fuse_loss_head_(
    model: nn.Module,
    head: str | None = None,
    *,
    chunk: PositiveInt | None = None,
    backend: str = "auto",
    z_loss: NonNegativeFloat = 0.0,
) -> dict[str, "FusedHead"]:
    """Compute the model's ``cross_entropy`` directly from its last hidden states, in place.

    While gradients are on, the head returns :class:`DeferredLogits`, which the model's own code reshapes, shifts,
    scales, adds a bias to and passes to ``torch.nn.functional.cross_entropy``, or to ``log_softmax`` and ``nll_loss``.
    There :func:`~lightning_fasttrain.linear_cross_entropy` takes over. So the loss is the model's own, including
    ignored labels, class weights, label smoothing, soft-capped logits, shifts and normalizers. For N tokens and V
    classes this saves the N·V logits, their float32 copy and their gradient. Where gradients are off, as in validation
    and generation, logits are computed as usual. DDP searches a model's output for tensors if
    ``find_unused_parameters`` is set; then the model must return the loss itself, as in a Trainer. In a tensor group of
    :class:`~lightning_fasttrain.FSDP2Strategy`, the classes of a head that is named are split over the ranks.

    Without ``head``, models with ``get_output_embeddings()``, such as Hugging Face's, define their own. In all others
    the first training loss identifies it: in the first forward and backward the linear layers outside of the repeated
    blocks compute their outputs as usual, and each layer whose output is used for a cross-entropy and nothing else is
    fused from its next call on. So a wrong layer is never fused, but the first micro-batch needs the memory of its
    logits.

    Args:
        model: any module whose head is an ``nn.Linear``, and whose loss is ``cross_entropy`` of the head's output.
        head: qualified name of the head. By default the first training loss identifies it.
        chunk: as for :func:`~lightning_fasttrain.linear_cross_entropy`.
        backend: as for :func:`~lightning_fasttrain.linear_cross_entropy`.
        z_loss: weight of the squared log-partition, which is added to the training loss; PaLM's is 1e-4. Where
            gradients are off, as in validation, the loss stays the model's own, and so it does in the forward that
            identifies the head, if it is not named.

    Returns:
        A mapping from the qualified name of each head, or each candidate, to the object that replaces its ``forward``,
        with a method ``undo``. Heads that were already fused stay unchanged, and are not listed.

    Raises:
        ValueError: no layer has that name, or no linear layer can be the head.
        TypeError: a head is not an ``nn.Linear``.
        RuntimeError: in training, if a custom ``torch.autograd.Function`` uses the logits.

    Example:
        >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
        >>> list(fuse_loss_head_(net, head="1"))
        ['1']
        >>> logits = net(torch.tensor([[1, 2, 3]]))
        >>> logits
        DeferredLogits(shape=(1, 3, 9))
        >>> nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor([2, 3, 4])).backward()

    Source:
        See :func:`~lightning_fasttrain.linear_cross_entropy`. Checked against Hugging Face's models with their logits.
    """
    one_of("backend", backend, BACKENDS)
    if z_loss and backend == "torch":
        why = "torch's fused loss has no z-loss"
        raise ValueError(explain(f"{z_loss=} with {backend=}", why, "Use backend='chunked'"))
    options = {"chunk": chunk, "backend": backend, "z_loss": z_loss}
    named = _named_heads(model, head)
    search = None if named else HeadSearch()
    fused: dict[str, FusedHead] = {}
    for name, found in (named or _candidates(model)).items():
        if type(found) is not nn.Linear:
            why = "expected a plain nn.Linear, whose product the fused loss computes"
            way_out = "Exclude the head from quantization and adapters, or train without FusedLossHead"
            raise TypeError(explain(f"head '{name}' is a {type(found).__name__}", why, way_out))
        if not wrapper_on(found, FusedHead):
            fused[name] = FusedHead(found, options, search)
            fused[name].install()
    if search is not None:
        search.candidates.update(fused)
    return fused


def _named_heads(model: nn.Module, head: str | None) -> dict[str, nn.Module]:
    """Return the heads that the user or the contained models name; empty if there are none."""
    modules = dict(model.named_modules())
    if head is None:
        named = output_embeddings_of(model)
        return {name: module for name, module in modules.items() if module in named}
    if head not in modules:
        what = f"{head=} in {type(model).__name__}"
        raise ValueError(explain(what, "no such layer", f"Name the head; {_list_widest(model)}"))
    return {head: modules[head]}


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return the plain linear layers outside of the repeated blocks."""
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    found: dict[str, nn.Module] = {name: linear[name] for name in outside_blocks(model, linear)}
    if not found:
        what = f"head=None in {type(model).__name__}"
        why = "no submodule has get_output_embeddings(), and no plain nn.Linear is outside of the repeated blocks"
        raise ValueError(explain(what, why, f"Name the head; {_list_widest(model)}"))
    return found


def _list_widest(model: nn.Module) -> str:
    widths = {name: layer.out_features for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    widest = sorted(widths, key=lambda name: -widths[name])[:4]
    return f"the widest linear layers are {', '.join(map(repr, widest)) or 'none'}"


class FusedHead(WrappedForward):
    """A head that returns deferred logits while gradients are on."""

    module: nn.Linear
    can_compile: ClassVar[bool] = True

    def __init__(self, module: nn.Linear, options: dict[str, Any], search: HeadSearch | None = None) -> None:
        super().__init__(module)
        self.options, self.search = options, search
        self.evidence = HeadEvidence()
        self.used = False
        self.is_guessed = False  # in a prediction, where logits used for more than the loss would show that it is none

    @property
    def is_fused(self) -> bool:
        """Whether it returns deferred logits, or will from its next call on."""
        return self.search is None or self.evidence.is_head

    @property
    def is_undecided(self) -> bool:
        return self.search is not None and not self.search.has_seen_a_step

    @property
    def is_split(self) -> bool:
        """Whether the vocabulary is split over a group of ranks."""
        return wrapper_on(self.module, SplitHead)

    def __call__(self, input: Tensor, then: Callable[[Tensor], Tensor] | None = None) -> Tensor | DeferredLogits:
        if then is not None:
            return then(input)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # unsupported by the compiler
            return self.inner(input)
        if is_traceable_wrapper_subclass(self.module.weight) and not self.is_split:
            note_once("FusedLossHead: a head with a quantized or tensor-parallel weight computes its logits")
            return self.inner(input)
        if self.search is not None and not self.evidence.is_head:
            return self._look_for_loss(input, self.search)
        autocast = autocast_dtype(input.device)
        # Under Fabric, cross_entropy is called outside of the autocast in which the model runs.
        return DeferredLogits(
            input,
            self.module.out_features,
            autocast or input.dtype,
            functools.partial(self.loss_of, autocast),
            values_of=None if self.is_guessed else functools.partial(self._values_of, autocast),
            adds_to_loss=self.options["z_loss"] > 0,
        )

    def _values_of(self, autocast: torch.dtype | None, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, dtype=autocast, enabled=autocast is not None):
            return self.module(hidden, then=self.inner)

    def _look_for_loss(self, input: Tensor, search: HeadSearch) -> Tensor:
        """Return the plain output, watched as long as this layer may be the head."""
        # A gradient came from elsewhere than a cross-entropy.
        if self.evidence.ended:
            search.tell()
            self.undo()
            return self.inner(input)
        return watch_logits(self.inner(input), input, self.evidence)

    def loss_of(
        self,
        autocast: torch.dtype | None,
        hidden: Tensor,
        targets: Tensor,
        factor: float,
        cap: float | None,
        bias: Tensor | None = None,
        **how: object,
    ) -> Tensor:
        bias_of_model = bias

        def loss(hidden: Tensor) -> Tensor:
            weight, bias, added = self.module.weight, self.module.bias, bias_of_model
            if isinstance(weight, DTensor):
                hidden = on_all_ranks(hidden, weight.device_mesh)
                added = None if added is None else on_all_ranks(added, weight.device_mesh)
            if factor != 1:
                hidden, bias = hidden * factor, scale_bias(bias, factor)
            if added is not None:
                bias = added.to(weight.dtype) if bias is None else bias + added
            loss_of = self._compiled_loss if self.compiled else linear_cross_entropy
            return loss_of(hidden, weight, targets, bias=bias, softcap=cap, **how, **self.options)

        self.used = True
        with torch.autocast(hidden.device.type, dtype=autocast, enabled=autocast is not None):  # as in the head's call
            return self.module(hidden, then=loss)  # through its hooks, which gather sharded weights

    def _compiled_loss(self, *tensors: Tensor, **options: object) -> Tensor:
        """Compute the loss with compiled code between its products; if that fails once, without it from then on."""
        if self.failure is not None or self.is_split or options["backend"] not in ("auto", "chunked"):
            return linear_cross_entropy(*tensors, **options)
        try:
            return linear_cross_entropy(*tensors, **{**options, "backend": "compiled"})
        except (torch._dynamo.exc.TorchDynamoException, MiscompiledError) as error:
            self.failure = describe_error(error)
        what = f"the loss of a head ({type(self.module).__name__}) could not be compiled and runs uncompiled"
        warn(explain(what, self.failure, "Fix the cause, or use CompileBlocks(head=False)"))
        return linear_cross_entropy(*tensors, **options)


class FusedLossHead(Technique):
    """Compute the model's loss without its logits, for any model whose head is an ``nn.Linear``.

    Hugging Face's language models define their head. In other models, unless ``head`` names it, the first training loss
    identifies it, and it is fused from the second forward on; see :func:`~lightning_fasttrain.fuse_loss_head_`.

    Acts right after ``configure_model``, after adapters and before checkpointing; undone at teardown. In training, the
    returned ``logits`` have a shape but no values. Inside a model that is compiled completely the logits are computed
    as usual; :class:`~lightning_fasttrain.CompileBlocks` excludes the head, and composes with this; with ``head=True``
    it compiles the code between the matrix products of this loss.

    Args:
        head: as for :func:`~lightning_fasttrain.fuse_loss_head_`.
        chunk: as for :func:`~lightning_fasttrain.linear_cross_entropy`.
        backend: as for :func:`~lightning_fasttrain.linear_cross_entropy`.
        z_loss: as for :func:`~lightning_fasttrain.fuse_loss_head_`; it changes training, and everything else here does
            not.

    Example:
        >>> fused = FusedLossHead(z_loss=1e-4)
        >>> fused.exactness.value
        'changes_training'

    Source:
        See :func:`~lightning_fasttrain.fuse_loss_head_`.
    """

    surgery: ClassVar[Surgery | None] = Surgery.ARCHITECTURE
    effect: ClassVar[str] = "the loss is computed a few tokens at a time, without storing the logits"
    when: ClassVar[str] = "logits of a large vocabulary take most of the memory; not for a few classes"
    in_a_loop: ClassVar[str] = "fuse_loss_head_(model)"
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("head", "fused", cost=1.05),)
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        head: str | None = None,
        *,
        chunk: PositiveInt | None = None,
        backend: str = "auto",
        z_loss: NonNegativeFloat = 0.0,
    ) -> None:
        self.head, self.chunk, self.z_loss = head, chunk, z_loss
        self.backend = one_of("backend", backend, BACKENDS)
        if z_loss:
            self.exactness = Exactness.CHANGES_TRAINING
        self._fused: dict[str, FusedHead] = {}
        self._is_predicted = False
        self._is_asked = False

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.heads == 0:
            return "no linear layer was found that computes logits"
        return None

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo:
        self._is_asked = True  # why_idle is called after the first batch
        return functools.partial(setattr, self, "_is_asked", False)

    def predict(self, step: PredictedStep) -> Technique | None:
        steady = copy.copy(self)  # for steps after the first, when the head is known
        steady._is_predicted = True
        return steady

    def apply(self, model: nn.Module) -> Undo:
        head, is_guessed = self.head, False
        if head is None and self._is_predicted and not output_embeddings_of(model):
            likely = outside_blocks(model, find_heads(model))
            if len(likely) == 1:
                head, is_guessed = likely[0], True
        options = {"chunk": self.chunk, "backend": self.backend, "z_loss": self.z_loss}
        fused = self._fused = fuse_loss_head_(model, head, **options)
        for one in fused.values():
            one.is_guessed = is_guessed
        if self._search is not None:
            self._search.is_reported = self._is_asked

        def undo() -> None:
            self._fused = {}
            for head in fused.values():
                head.undo()

        return undo

    def describe_effect(self, model: nn.Module) -> str:
        fused: list[str] = []
        searched: list[str] = []
        for name, module in model.named_modules():
            for head in wrappers_on(module, FusedHead):
                (fused if head.is_fused else searched).append(name)
        if searched:
            return f"finds the head from the first loss, among {list_some(searched)}"
        if not fused:
            return ""
        return f"the loss of {list_some(fused)} without its logits"

    def outcome(self, model: nn.Module) -> str:
        if self._search is None or not (found := self._search.found()):
            return ""
        return f"found the head from the first loss: {list_some(found)}"

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        if self._search is not None:
            return self._search.why_none()
        if not self._fused or any(head.used for head in self._fused.values()):
            return None
        why = "the output of the head did not reach cross_entropy, or the head is compiled with its model"
        return why, "Compile the blocks alone, with CompileBlocks, or leave FusedLossHead out"

    @property
    def _search(self) -> HeadSearch | None:
        return next((head.search for head in self._fused.values()), None)
