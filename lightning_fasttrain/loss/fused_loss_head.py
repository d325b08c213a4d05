"""The head of a language model and its cross-entropy run as one, without the logits between them."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain._checks import one_of, positive_int
from lightning_fasttrain._facts import Facts
from lightning_fasttrain._messages import explain, list_some, note_once, warn
from lightning_fasttrain._surgery import Undo, WrappedForward, first_line, told_heads, wrapper_on
from lightning_fasttrain.loss._chunks import autocast_dtype
from lightning_fasttrain.loss.deferred_logits import DeferredLogits
from lightning_fasttrain.loss.linear_cross_entropy import BACKENDS, linear_cross_entropy
from lightning_fasttrain.technique import Setting, Surgery, Technique


def fuse_loss_head_(
    model: nn.Module, head: str | None = None, *, chunk: int | None = None, backend: str = "auto"
) -> dict[str, "FusedHead"]:
    """Let the model's ``cross_entropy`` be computed straight from its last hidden states, in place.

    While gradients are on, the head returns :class:`DeferredLogits`, which the model's own code reshapes, shifts,
    scales, adds a bias to and gives to ``torch.nn.functional.cross_entropy``, or to ``log_softmax`` and ``nll_loss``.
    There :func:`~lightning_fasttrain.linear_cross_entropy` takes over. So the loss is the model's own, whatever it
    ignores, shifts or divides by. For N tokens and V classes this saves the N·V logits, their float32 copy and their
    gradient.
    Where gradients are off, as in validation and generation, logits are made as usual. DDP looks for tensors in what a
    model returns if ``find_unused_parameters`` is set; then the model must return the loss itself, as in a Trainer.

    Args:
        model: any module whose head is an ``nn.Linear``, and whose loss is ``cross_entropy`` of the head's output.
        head: qualified name of the head. By default what the models inside return from ``get_output_embeddings()``,
            by which Hugging Face's tell it.
        chunk: as for :func:`~lightning_fasttrain.linear_cross_entropy`.
        backend: as for :func:`~lightning_fasttrain.linear_cross_entropy`.

    Returns:
        Qualified name of each head → what now replaces its ``forward``, with a method ``undo``. Heads
        that were fused before are left as they are, and left out.

    Raises:
        ValueError: no head found, or none of that name.
        TypeError: a head is something else than ``nn.Linear``.
        RuntimeError: in training, if logits are used for anything else than a cross-entropy.

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
    options = {"chunk": None if chunk is None else positive_int("chunk", chunk), "backend": backend}
    fused: dict[str, FusedHead] = {}
    for name, found in _heads(model, head).items():
        if type(found) is not nn.Linear:
            why = "only a plain nn.Linear is known to be the product that the fused loss computes"
            way_out = "Leave the head out of quantisation and adapters, or train without FusedLossHead"
            raise TypeError(explain(f"head '{name}' is a {type(found).__name__}", why, way_out))
        if not wrapper_on(found, FusedHead):
            fused[name] = FusedHead(found, options)
            fused[name].install()
    return fused


def _heads(model: nn.Module, head: str | None) -> dict[str, nn.Module]:
    modules: dict[str, Any] = dict(model.named_modules())
    if head is not None:
        heads = {head: modules[head]} if head in modules else {}
    else:
        told = told_heads(model)
        heads = {name: module for name, module in modules.items() if module in told}
    if not heads:
        widths = {name: m.out_features for name, m in modules.items() if isinstance(m, nn.Linear)}
        widest = sorted(widths, key=lambda name: -widths[name])[:4]
        why = "there is no such layer" if head is not None else "no model in it has get_output_embeddings()"
        way_out = f"Name the head; the widest linear layers are {', '.join(map(repr, widest)) or 'none'}"
        raise ValueError(explain(f"{head=} in {type(model).__name__}", why, way_out))
    return heads


class FusedHead(WrappedForward):
    """A head that gives out deferred logits while gradients are on."""

    module: nn.Linear
    can_compile: ClassVar[bool] = True

    def __init__(self, module: nn.Linear, options: dict[str, Any]) -> None:
        super().__init__(module)
        self.options = options
        self.used = False

    def __call__(self, input: Tensor, then: Callable[[Tensor], Tensor] | None = None) -> Tensor | DeferredLogits:
        if then is not None:
            return then(input)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # the compiler knows no deferred logits
            return self.inner(input)
        if is_traceable_wrapper_subclass(self.module.weight):
            note_once("FusedLossHead: a head whose weight is quantised or tensor-parallel makes its logits")
            return self.inner(input)
        autocast = autocast_dtype(input.device)
        # Under Fabric, cross_entropy is called outside of the autocast in which the model runs.
        loss_of = functools.partial(self.loss_of, autocast)
        return DeferredLogits(input, self.module.out_features, autocast or input.dtype, loss_of)

    def loss_of(
        self,
        autocast: torch.dtype | None,
        hidden: Tensor,
        targets: Tensor,
        factor: float,
        cap: float | None,
        bias: Tensor | None = None,
        **how: Any,
    ) -> Tensor:
        added = bias

        def loss(hidden: Tensor) -> Tensor:
            weight, bias = self.module.weight, self.module.bias
            if factor != 1:
                hidden, bias = hidden * factor, None if bias is None else bias * factor
            if added is not None:
                bias = added.to(weight.dtype) if bias is None else bias + added
            loss_of = self._compiled_loss if self.compiled else linear_cross_entropy
            return loss_of(hidden, weight, targets, bias=bias, softcap=cap, **how, **self.options)

        self.used = True
        with torch.autocast(hidden.device.type, dtype=autocast, enabled=autocast is not None):  # as the head was called
            return self.module(hidden, then=loss)  # through its hooks, by which sharded weights are gathered

    def _compiled_loss(self, *tensors: Tensor, **options: Any) -> Tensor:
        """The loss with compiled code between its products; without it for good once that has failed."""
        if self.failure is not None or options["backend"] not in ("auto", "chunked"):
            return linear_cross_entropy(*tensors, **options)
        try:
            return linear_cross_entropy(*tensors, **{**options, "backend": "compiled"})
        except torch._dynamo.exc.TorchDynamoException as error:
            self.failure = first_line(error)
        what = f"the loss of a head ({type(self.module).__name__}) could not be compiled and runs as it is"
        warn(explain(what, self.failure, "Mend the cause, or use CompileBlocks without head=True"))
        return linear_cross_entropy(*tensors, **options)


class FusedLossHead(Technique):
    """The model's loss without its logits: for Hugging Face's language models as they are, and for others by name.

    Acts right after ``configure_model``, after adapters and before checkpointing; undone at teardown. In training,
    the ``logits`` that the model returns have a shape but no numbers. Inside a model that is compiled as a whole the
    logits are made as usual; :class:`~lightning_fasttrain.CompileBlocks` leaves the head out, and goes with it; with
    ``head=True`` it compiles what this computes between its matrix products.

    Args:
        head: as for :func:`~lightning_fasttrain.fuse_loss_head_`.
        chunk: as for :func:`~lightning_fasttrain.linear_cross_entropy`.
        backend: as for :func:`~lightning_fasttrain.linear_cross_entropy`.

    Example:
        >>> fused = FusedLossHead()

    Source:
        See :func:`~lightning_fasttrain.fuse_loss_head_`.
    """

    surgery: ClassVar[Surgery | None] = Surgery.ARCHITECTURE
    effect: ClassVar[str] = "the loss without the logits, a few tokens at a time"
    when: ClassVar[str] = "a large vocabulary makes logits most of the memory; not for a few classes"
    in_a_loop: ClassVar[str] = "fuse_loss_head_(model)"
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("head", "fused", cost=1.05),)
    predicted: ClassVar[bool] = True

    def __init__(self, head: str | None = None, *, chunk: int | None = None, backend: str = "auto") -> None:
        self.head = head
        self.chunk = None if chunk is None else positive_int("chunk", chunk)
        self.backend = one_of("backend", backend, BACKENDS)
        self._fused: dict[str, FusedHead] = {}

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.heads == 0:
            return "no head was found that gives logits: name it in head="
        return None

    def apply(self, model: nn.Module) -> Undo:
        fused = self._fused = fuse_loss_head_(model, self.head, chunk=self.chunk, backend=self.backend)

        def undo() -> None:
            self._fused = {}
            for head in fused.values():
                head.undo()

        return undo

    def took_hold(self, model: nn.Module) -> str:
        heads = [name for name, module in model.named_modules() if wrapper_on(module, FusedHead)]
        return f"the loss of {list_some(heads)} without its logits" if heads else ""

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        if not self._fused or any(head.used for head in self._fused.values()):
            return None
        why = "the output of the head did not reach cross_entropy, or the head is compiled with its model"
        return why, "Compile the blocks alone, with CompileBlocks, or leave FusedLossHead out"
