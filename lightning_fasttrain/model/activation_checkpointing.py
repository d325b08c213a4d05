"""Activations of a block are recomputed in the backward pass instead of being kept."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, ClassVar

import lightning as L
import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy as Keep
from torch.utils.checkpoint import SelectiveCheckpointContext

from lightning_fasttrain.core.checks import positive_int
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    count_wrapped,
    patch,
    why_none_ran,
    wrapper_on,
    wrappers_on,
)
from lightning_fasttrain.model.checkpoint_savings import CheckpointSavings
from lightning_fasttrain.model.checkpointed_forward import CheckpointedForward
from lightning_fasttrain.technique import Setting, Surgery, Technique
from lightning_fasttrain.technique.facts import NO_BLOCKS, Facts
from lightning_fasttrain.technique.predicted_step import PredictedStep


class CheckpointPolicy(ABC):
    """Which blocks are recomputed, and what of them is kept.

    One of :class:`EveryBlock`, :class:`SelectiveOps` and :class:`~lightning_fasttrain.MemoryBudget`.

    Attributes:
        measures: whether it decides by measuring the first steps.
    """

    measures: ClassVar[bool] = False

    @abstractmethod
    def wrap(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Undo]:
        """Replace the blocks' ``forward`` by what recomputes; none of them has that yet.

        Args:
            model: the whole model.
            blocks: qualified name → block, in the model's order.

        Returns:
            Qualified name of each block that was changed → how to undo it.
        """

    def see(self, batch: Any) -> None:  # noqa: B027 (most have nothing to do)
        """Told by the Trainer before each batch; a policy that measures memory counts it."""


class EveryBlock(CheckpointPolicy):
    """Recompute every k-th block as a whole.

    Args:
        k: 1 is all of them.

    Raises:
        TypeError, ValueError: ``k`` is no whole number of at least 1.

    Example:
        >>> EveryBlock(2)
        EveryBlock(k=2)
    """

    def __init__(self, k: int = 1) -> None:
        self.k = positive_int("k", k)

    def __repr__(self) -> str:
        return f"EveryBlock(k={self.k})"

    def wrap(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Undo]:
        savings, chosen = CheckpointSavings(repr(self)), list(blocks)[:: self.k]
        return {name: CheckpointedForward(blocks[name], savings=savings).install() for name in chosen}


class SelectiveOps(CheckpointPolicy):
    """In every block keep what is expensive to recompute; the rest is recomputed: norms, activations, dropout, casts.

    Expensive are the products with weights (matrix products, convolutions), hundreds of operations for each number that
    they give, and fused attention. ``bmm`` is not: an attention that is written out would keep its [T, T] tables.
    Nothing random is kept, so neither is attention with dropout: what is left out of the recomputation would shift
    the random numbers of all that follows. Unless the block is compiled, each of its operations passes through Python
    for this, twice, which blocks with little to compute feel.

    Args:
        also: further operations to keep, as overloads such as ``torch.ops.aten.bmm.default``. If a result is changed
            in place afterwards, the backward raises a RuntimeError.

    Raises:
        TypeError: an entry of ``also`` is no operation overload.
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
            if not isinstance(op, OpOverload):
                way_out = f"Use torch.ops.{op}.default" if isinstance(op, OpOverloadPacket) else "Use one"
                raise TypeError(explain(f"also={op!r}", "this is no operation overload", way_out))
            if torch.Tag.nondeterministic_seeded in op.tags:
                why = "it draws random numbers; left out of the recomputation it would shift all later ones"
                raise ValueError(explain(f"also={op}", why, "Leave it out: it is cheap to recompute"))

    def __repr__(self) -> str:
        also = [str(op) for op in self.also]
        return f"SelectiveOps(also={also})" if also else "SelectiveOps()"

    def wrap(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Undo]:
        savings = CheckpointSavings(repr(self))  # one for all blocks: what counts is their sum
        return {name: CheckpointedForward(block, self.keeps, savings).install() for name, block in blocks.items()}

    def keeps(self, context: SelectiveCheckpointContext | None, op: OpOverload, *args: Any, **kwargs: Any) -> Keep:
        """What ``create_selective_checkpoint_contexts`` asks about each operation."""
        kept = op in self.also or (op in _dear_ops() and not _drops_out(op, args, kwargs))
        return Keep.MUST_SAVE if kept else Keep.PREFER_RECOMPUTE


# Names of aten's operations; those that this torch does not have are passed over.
_EXPENSIVE = (
    *("mm", "addmm", "linear", "mkldnn_linear", "convolution", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    "_int_mm",  # of LowPrecisionProducts
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


def _drops_out(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    for position, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            # By position or by name, as the caller of the operation has it.
            return bool(args[position] if position < len(args) else kwargs.get("dropout_p"))
    return False


def checkpoint_activations_(
    model: nn.Module, policy: CheckpointPolicy | None = None, blocks: Blocks | None = None
) -> dict[str, Undo]:
    """Keep only the inputs of the model's blocks, in place, and recompute the rest in the backward pass.

    With L equal blocks that save A bytes each, the peak falls from L·A to about A plus L inputs, for one more
    forward of each block. The recomputation is the same computation: the random state of torch, Python and NumPy is
    put back for it (dropout draws the same masks), and buffers that the forward changes (BatchNorm statistics) are
    changed once. Non-reentrant always, so frozen inputs, keyword arguments and DDP work. The first pass counts what is
    kept, and warns if plain blocks would keep no more.

    Args:
        model: any module. Hugging Face models have their key-value cache switched off, which cannot be recomputed; on
            some CPUs that alone changes the last bit, as attention reads keys and values from elsewhere.
        policy: which blocks are recomputed and what of them is kept: ``EveryBlock(k)``, all of them by default,
            ``SelectiveOps()``, or ``MemoryBudget(gib)``.
        blocks: which modules are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.

    Returns:
        Qualified name of each block that is now checkpointed → how to undo it. If some were before, these names, and
        nothing is done. Where a model's cache was switched off, that setting's name too.

    Raises:
        TypeError: ``policy`` is no policy.
        ValueError: no blocks found.

    Example:
        >>> net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        >>> list(checkpoint_activations_(net, EveryBlock(2)))
        ['0', '2']

    Source:
        Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174; on
        ``torch.utils.checkpoint``, which keeps torch's random state but neither Python's, NumPy's nor buffers.
    """
    policy = _check_policy(policy)
    found = find_blocks(model, blocks)
    undos: dict[str, Undo] = {
        name: _do_nothing for name, block in found.items() if wrapper_on(block, CheckpointedForward)
    }
    if not undos:
        undos.update(policy.wrap(model, found))
    _without_cache(model, undos)
    return undos


def _check_policy(policy: CheckpointPolicy | None) -> CheckpointPolicy:
    if policy is not None and not isinstance(policy, CheckpointPolicy):
        way_out = (
            f"Use EveryBlock({policy})" if isinstance(policy, int) else "Use EveryBlock, SelectiveOps or MemoryBudget"
        )
        raise TypeError(explain(f"policy={policy!r}", "this is no policy of activation checkpointing", way_out))
    return policy or EveryBlock()


def _do_nothing() -> None:
    pass


def _without_cache(model: nn.Module, undos: dict[str, Undo]) -> None:
    """A key-value cache filled in the forward would be filled again by the recomputation."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            # Modules share configs: the next one with this config finds False, so it is restored just once.
            undos[f"{name}.config.use_cache"] = patch(config, "use_cache", False)
            note_once("checkpoint_activations_: use_cache=False in the model's config while its blocks are recomputed")


class ActivationCheckpointing(Technique):
    """Recompute the activations of the model's blocks in the backward pass.

    Acts right after ``configure_model``, before adapters' optimizer and compilation; undone at teardown.

    Args:
        policy: which blocks are recomputed and what of them is kept; see
            :func:`~lightning_fasttrain.checkpoint_activations_`.
        blocks: which modules are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.

    Raises:
        TypeError: ``policy`` is no policy.

    Example:
        >>> everything, half, lean = ActivationCheckpointing(), ActivationCheckpointing(EveryBlock(2)), SelectiveOps()

    Source:
        See :func:`~lightning_fasttrain.checkpoint_activations_`.
    """

    surgery: ClassVar[Surgery | None] = Surgery.CHECKPOINT
    effect: ClassVar[str] = "recomputes all blocks, every k-th, what is cheap, or just what a limit in GiB asks"
    when: ClassVar[str] = "activations do not fit, and a step may take a third longer; try MicroBatching first"
    in_a_loop: ClassVar[str] = "checkpoint_activations_(model)"
    worth_trying: ClassVar[tuple[Setting, ...]] = (
        Setting("recompute", "selective", {"policy": SelectiveOps()}, cost=1.08),
        Setting("recompute", "half", {"policy": EveryBlock(2)}, cost=1.16),
        Setting("recompute", "all", cost=1.32),
    )
    predicted: ClassVar[bool] = True

    def __init__(self, policy: CheckpointPolicy | None = None, blocks: Blocks | None = None) -> None:
        self.policy = _check_policy(policy)
        self.blocks = blocks

    def apply(self, model: nn.Module) -> Undo:
        undos = checkpoint_activations_(model, self.policy, self.blocks)

        def undo() -> None:
            for take_out in undos.values():
                take_out()

        return undo

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.blocks == 0:
            return NO_BLOCKS
        return None

    def predict(self, step: PredictedStep) -> "ActivationCheckpointing":
        if self.policy.measures:
            why = "it measures the first steps to choose what to recompute, and keeps to its budget in any case"
            way_out = "Predict with EveryBlock() or SelectiveOps()"
            raise ValueError(explain(f"ActivationCheckpointing({self.policy})", why, way_out))
        return self

    def took_hold(self, model: nn.Module) -> str:
        blocks = count_wrapped(model, CheckpointedForward)
        how = "recomputed" if isinstance(self.policy, EveryBlock) else f"recomputed as {self.policy} says"
        return f"{blocks} {how}" if blocks else ""

    def outcome(self, model: nn.Module) -> str:
        wrappers = [wrapper for module in model.modules() for wrapper in wrappers_on(module, CheckpointedForward)]
        idle = any(wrapper.savings is not None and wrapper.savings.saves is False for wrapper in wrappers)
        return "saved no memory in this model" if idle else ""

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        return why_none_ran(model, CheckpointedForward)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Hook: the batch is there, and nothing has been computed with it."""
        self.policy.see(batch)
