"""Choose the blocks to recompute so that a step's peak stays within a limit, at the least extra time."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import nn

from lightning_fasttrain.core.checks import PositiveFloat, check_arguments
from lightning_fasttrain.core.modules.parameters import device_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.core.peak_memory import refuse_uncounted
from lightning_fasttrain.model.activation_checkpointing import CheckpointPolicy
from lightning_fasttrain.model.memory_budget.block_profiler import StepWatch
from lightning_fasttrain.model.memory_budget.checkpoint_plan import CheckpointPlan


@check_arguments
class MemoryBudget(CheckpointPolicy):
    """Recompute just enough that a training step's peak stays within a limit, at the least extra time.

    Recomputation keeps training bitwise the same, so the first steps of the real training are measured. In the first
    step, with every block recomputed, each block's forward is run a few times to measure its saved bytes and its time,
    in total and for its expensive operations alone. In the second step, which includes optimizer state, the peak is
    measured between each two blocks. These give the bytes that every block may hold during its backward, so that the
    best choice among *kept*, *selective* and *recomputed* for each block is a knapsack, which is solved exactly. The
    third step checks the peak; if it is above the limit, or well below what was predicted, a new choice is made.

    A later batch that is larger in some dimension is measured as well, and the choice holds for it and for earlier
    ones; in distributed runs, where processes decide together, all blocks are recomputed for such a batch. Compiled
    blocks run uncompiled while they are measured; the step after the one that compiles them is checked. CUDA graphs
    return no memory, so with them the first choice recomputes every block, and later ones keep as much as fits.

    Args:
        budget_gib: the limit in GiB, for all tensors: parameters, optimizer, activations, temporaries. On CUDA the
            allocator's memory for other code in the process counts too. ``"fit"`` is 92% of the free memory.

    Attributes:
        plan: the :class:`~lightning_fasttrain.model.CheckpointPlan`; None until it is made, after two optimizer steps.

    Raises:
        ValueError: ``budget_gib`` is not above 0. At the second optimizer step, or the fourth with compiled blocks, if
            the peak is above the limit even with every block recomputed; the message says by how much, and how to
            reduce it.

    Example:
        >>> from lightning_fasttrain import ActivationCheckpointing
        >>> checkpointing = ActivationCheckpointing(MemoryBudget(budget_gib=20))
        >>> checkpointing.policy.plan  # a CheckpointPlan, after `Trainer(callbacks=[checkpointing]).fit(model)`

    Source:
        Ours. Related: Jain et al. 2020, "Checkmate", https://arxiv.org/abs/1910.02653, solves for single operations
        ahead of time; ``torch._functorch.config.activation_memory_budget`` takes a fraction, inside the compiler.
    """

    measures: ClassVar[bool] = True

    def __init__(self, budget_gib: PositiveFloat | Literal["fit"] = "fit") -> None:
        self.budget_gib = budget_gib
        self.plan: CheckpointPlan | None = None
        self._watch: StepWatch | None = None

    def __repr__(self) -> str:
        return f"MemoryBudget(budget_gib={self.budget_gib!r})"

    def wrap(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Undo]:
        self.plan = None
        device = device_of(model)
        if device.type != "meta":  # of which the weights are made later, on a device that is not known yet
            refuse_uncounted("MemoryBudget", device)

        def tell(plan: CheckpointPlan) -> None:
            self.plan = plan

        watch = self._watch = StepWatch(model, blocks, self.budget_gib, tell)
        undos = {name: forward.install() for name, forward in watch.forwards.items()}
        # All blocks share the watch, and one of the undos must end it.
        first = next(iter(undos))

        def undo(unwrap: Undo = undos[first]) -> None:
            watch.close()
            self._watch = None
            unwrap()

        return {**undos, first: undo}

    def see(self, batch: object) -> None:
        """Record a batch that the loader keeps, which existed before the step and counts towards its peak."""
        if self._watch is not None:
            self._watch.see(batch)
