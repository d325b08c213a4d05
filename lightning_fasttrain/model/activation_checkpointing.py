"""Recompute activations of blocks in the backward instead of keeping them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy as Keep
from torch.utils.checkpoint import SelectiveCheckpointContext, checkpoint, create_selective_checkpoint_contexts

from lightning_fasttrain.core.checks import NotACallback, PositiveInt, check_arguments
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.blocks import Blocks, disable_cache_, find_blocks
from lightning_fasttrain.core.modules.recomputation import (
    Again,
    Contexts,
    RecomputedForward,
    recompute_in_backward,
    recomputed_outside,
)
from lightning_fasttrain.core.modules.select import class_name
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    count_wrapped,
    undo_all,
    why_none_ran,
    wrapper_on,
)
from lightning_fasttrain.technique import Setting, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep, why_no_blocks


class CheckpointPolicy(NotACallback, ABC):
    """Selects the blocks that are recomputed, and the results in them that are kept.

    One of :class:`EveryBlock`, :class:`SelectiveOps` and :class:`~lightning_fasttrain.MemoryBudget`.

    Attributes:
        measures: whether the policy decides by measuring the first steps.
    """

    measures: ClassVar[bool] = False
    where_to_use: ClassVar[str] = "It is a policy of a callback: use ActivationCheckpointing(policy)"

    @abstractmethod
    def wrap(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Undo]:
        """Replace the blocks' ``forward`` by one that recomputes; none of them is checkpointed yet.

        Args:
            model: the complete model.
            blocks: qualified name → block, in the model's order.

        Returns:
            Qualified name of each changed block → how to undo the change.
        """

    def see(self, batch: object) -> None:
        """Called by the Trainer before each batch; a policy that measures memory counts the batch."""


@check_arguments
class EveryBlock(CheckpointPolicy):
    """Recompute every k-th block completely.

    Args:
        k: interval between recomputed blocks; 1 recomputes all.

    Raises:
        TypeError, ValueError: ``k`` is not an integer of at least 1.

    Example:
        >>> EveryBlock(2)
        EveryBlock(k=2)
    """

    def __init__(self, k: PositiveInt = 1) -> None:
        self.k = k

    def __repr__(self) -> str:
        return f"EveryBlock(k={self.k})"

    def wrap(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Undo]:
        return {name: CheckpointedForward(blocks[name]).install() for name in list(blocks)[:: self.k]}


@check_arguments(also="Use operator overloads, such as torch.ops.aten.bmm.default")
class SelectiveOps(CheckpointPolicy):
    """Keep the expensive results of every block; recompute the rest: norms, activations, dropout, casts.

    Expensive are products with weights (matrix products, convolutions), with hundreds of operations per result element,
    and fused attention. ``bmm`` is not: unfused attention would keep its [T, T] matrices. Random results are never
    kept, including attention with dropout: skipping them in the recomputation would shift the random state of all later
    operations. In uncompiled blocks each operation passes through Python for this, twice, which costs time in blocks
    with little computation.

    Args:
        also: further operations to keep, as overloads such as ``torch.ops.aten.bmm.default``. If a kept result is
            changed in place afterwards, the backward raises a RuntimeError.

    Raises:
        TypeError: an entry of ``also`` is not an operator overload.
        ValueError: an entry of ``also`` draws random numbers.

    Example:
        >>> SelectiveOps(also=[torch.ops.aten.bmm.default])
        SelectiveOps(also=['aten.bmm.default'])

    Source:
        A policy for ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
    """

    def __init__(self, also: Iterable[OpOverload] = ()) -> None:
        self.also = tuple(also)
        for op in self.also:
            if torch.Tag.nondeterministic_seeded in op.tags:
                why = "it draws random numbers; if it is not recomputed, all later draws shift"
                raise ValueError(explain(f"also={op}", why, "Remove it: it is cheap to recompute"))

    def __repr__(self) -> str:
        if not self.also:
            return "SelectiveOps()"
        return f"SelectiveOps(also={list(map(str, self.also))})"

    def wrap(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Undo]:
        return {name: CheckpointedForward(block, self.keeps).install() for name, block in blocks.items()}

    def keeps(
        self, context: SelectiveCheckpointContext | None, op: OpOverload, *args: object, **kwargs: object
    ) -> Keep:
        """Answer ``create_selective_checkpoint_contexts`` for each operation."""
        kept = op in self.also or (op in _dear_ops() and not _drops_out(op, args, kwargs))
        if kept:
            return Keep.MUST_SAVE
        return Keep.PREFER_RECOMPUTE


# Names of aten operators; those that are missing in this torch are skipped.
_EXPENSIVE = (
    *("mm", "addmm", "linear", "mkldnn_linear", "convolution", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    "_int_mm",  # used by LowPrecisionProducts
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


@cache
def _dear_ops() -> frozenset[OpOverload]:
    return frozenset(getattr(torch.ops.aten, name).default for name in _EXPENSIVE if hasattr(torch.ops.aten, name))


def _drops_out(op: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            # By position or by name, depending on the caller.
            return bool(args[position] if position < len(args) else kwargs.get("dropout_p"))
    return False


_POLICIES = "Use EveryBlock(k), SelectiveOps() or MemoryBudget(budget_gib)"


@check_arguments(policy=_POLICIES)
def checkpoint_activations_(
    model: nn.Module, policy: CheckpointPolicy | None = None, blocks: Blocks | None = None
) -> dict[str, Undo]:
    """Keep only the inputs of the model's blocks, in place, and recompute the rest in the backward.

    With L equal blocks that save A bytes each, the peak falls from L·A to about A plus L inputs, for one additional
    forward of each block. The recomputation is identical: random states of torch, Python and NumPy are restored for it
    (dropout draws the same masks), and buffers that the forward changes (BatchNorm statistics) are changed once. It is
    always non-reentrant, so frozen inputs, keyword arguments and DDP work. Small blocks, such as the single layers
    of an MLP, save no memory, since their inputs are kept: select larger ones with ``blocks``.

    Args:
        model: any module. The key-value cache of Hugging Face models is disabled, since it cannot be recomputed; on
            some CPUs that alone changes the last bit, as attention reads keys and values from other memory.
        policy: the blocks that are recomputed and the results that are kept: ``EveryBlock(k)``, all blocks by
            default, ``SelectiveOps()``, or ``MemoryBudget(gib)``.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.

    Returns:
        Qualified name of each block that is now checkpointed → how to undo it. If some were checkpointed before,
        their names, and nothing is done. If a model's cache was disabled, the name of that setting too.

    Raises:
        TypeError: ``policy`` is not a checkpoint policy.
        ValueError: no blocks were found.

    Example:
        >>> net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        >>> list(checkpoint_activations_(net, EveryBlock(2)))
        ['0', '2']

    Source:
        Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174. The hooks
        on saved tensors follow ``torch.utils.checkpoint``, which restores torch's random state but neither Python's,
        NumPy's nor buffers, and adds 1.5 times as much time on the host.
    """
    policy = policy or EveryBlock()
    found = find_blocks(model, blocks)
    undos: dict[str, Undo] = {
        name: _do_nothing for name, block in found.items() if wrapper_on(block, CheckpointedForward)
    }
    if not undos:
        undos.update(policy.wrap(model, found))
    without_cache = disable_cache_(model)  # the recomputation would fill it again
    if without_cache:
        note_once("checkpoint_activations_: use_cache=False in the model's config while blocks are checkpointed")
    return {**undos, **without_cache}


def _do_nothing() -> None:
    pass


class ActivationCheckpointing(Technique):
    """Recompute the activations of the model's blocks in the backward.

    Acts right after ``configure_model``, before compilation and before adapters' optimizer; undone at teardown.

    Args:
        policy: the blocks that are recomputed and the results that are kept; see
            :func:`~lightning_fasttrain.checkpoint_activations_`.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.

    Raises:
        TypeError: ``policy`` is not a checkpoint policy.

    Example:
        >>> everything, half, lean = ActivationCheckpointing(), ActivationCheckpointing(EveryBlock(2)), SelectiveOps()

    Source:
        See :func:`~lightning_fasttrain.checkpoint_activations_`.
    """

    surgery: ClassVar[Surgery | None] = Surgery.CHECKPOINT
    ways_out: ClassVar[Mapping[str, str]] = {"policy": _POLICIES}
    effect: ClassVar[str] = "recomputes all blocks, every k-th, cheap operations, or as much as a limit in GiB requires"
    when: ClassVar[str] = "activations do not fit, and a step may take a third more time; try MicroBatching first"
    in_a_loop: ClassVar[str] = "checkpoint_activations_(model)"
    worth_trying: ClassVar[tuple[Setting, ...]] = (
        Setting("recompute", "selective", {"policy": SelectiveOps()}, cost=1.08),
        Setting("recompute", "half", {"policy": EveryBlock(2)}, cost=1.16),
        Setting("recompute", "all", cost=1.32),
    )
    predicted: ClassVar[bool] = True
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        "use_reentrant": "no use_reentrant=: recomputation is never reentrant",
        "preserve_rng_state": "no preserve_rng_state=: random states are always preserved",
    }

    def __init__(self, policy: CheckpointPolicy | None = None, blocks: Blocks | None = None) -> None:
        self.policy = policy or EveryBlock()
        self.blocks = blocks

    def apply(self, model: nn.Module) -> Undo:
        return undo_all(checkpoint_activations_(model, self.policy, self.blocks).values())

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        return why_no_blocks(facts)

    def predict(self, step: PredictedStep) -> "ActivationCheckpointing":
        if self.policy.measures:
            why = "it measures the first steps to choose what to recompute, and stays within its budget"
            way_out = "Predict with EveryBlock() or SelectiveOps()"
            raise ValueError(explain(f"ActivationCheckpointing({self.policy})", why, way_out))
        return self

    def describe_effect(self, model: nn.Module) -> str:
        blocks = count_wrapped(model, CheckpointedForward)
        if not blocks:
            return ""
        if isinstance(self.policy, EveryBlock):
            return f"{blocks} recomputed"
        return f"{blocks} recomputed by {self.policy}"

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        return why_none_ran(model, CheckpointedForward)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: the batch exists, and nothing has been computed from it."""
        self.policy.see(batch)


class CheckpointedForward(RecomputedForward):
    """A forward whose activations are recomputed in the backward.

    Args:
        module: the block.
        keeps: decides for each operation whether its result is kept; None keeps nothing.
    """

    def __init__(self, module: nn.Module, keeps: Callable[..., Keep] | None = None) -> None:
        super().__init__(module)
        self.keeps = keeps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        self.ran = True
        # The compiler traces the recomputation, and functionalizes buffers itself.
        if torch.compiler.is_compiling():
            if self.keeps is None:
                return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
            contexts = partial(create_selective_checkpoint_contexts, self.keeps)
            return checkpoint(self.inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if recomputed_outside.get():
            return self.inner(*args, **kwargs)
        run, leaves = self._by_position(args, kwargs)
        versions = self.versions_of(leaves)
        output = recompute_in_backward(run, leaves, self._contexts())
        self.examine(output, leaves, versions)
        return output

    def _by_position(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Callable[..., Any], Sequence[object]]:
        """Return the forward, and the tensors to call it with by position.

        Of tensors inside others neither the device is found, whose random state must be restored, nor do hooks on saved
        tensors see them.
        """
        if not kwargs and all(isinstance(one, Tensor) for one in args):
            return self.inner, args
        leaves, structure = tree_flatten((args, kwargs))

        def run(*leaves: object) -> Any:
            args, kwargs = tree_unflatten(leaves, structure)
            return self.inner(*args, **kwargs)

        return run, leaves

    def _contexts(self) -> Contexts:
        if self.keeps is None:
            return self.contexts(nullcontext(), nullcontext())
        forward, again = self.contexts(*create_selective_checkpoint_contexts(self.keeps))
        return forward, Again(partial(self._refuse_changed_results, again))

    @contextmanager
    def _refuse_changed_results(self, again: AbstractContextManager[Any]) -> Iterator[None]:
        """Raises: RuntimeError: the block has changed a result in place that was kept for the recomputation."""
        try:
            with again:
                yield
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            what = f"selective recomputation of {class_name(self.module)}"
            why = "it changes the result of an expensive operation in place, as ReLU(inplace=True) may"
            way_out = "Set inplace=False, leave the block out, or recompute it as a whole, with EveryBlock()"
            raise RuntimeError(explain(what, why, way_out)) from None
