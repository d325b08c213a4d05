"""The blocks to recompute are chosen so that a step's peak stays within a limit, at the least extra time."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.model.activation_checkpointing import CheckpointPolicy
from lightning_fasttrain.model.memory_budget.block_profiler import StepWatch
from lightning_fasttrain.model.memory_budget.checkpoint_plan import CheckpointPlan


class MemoryBudget(CheckpointPolicy):
    """Recompute just enough that a training step's peak stays within a limit, at the least extra time.

    Recomputed or not, the training is the same bit for bit, so the first steps of the real training are measured. In
    the first, with every block recomputed, each block's forward is run a few times beside it: what it saves, how long
    it takes, and both for its expensive operations alone. In the second, which has the optimizer's state, the peak is
    measured between each two blocks. From these follow, for every block, what may be held when its turn comes in the
    backward, so that the best choice among *kept*, *selective* and *recomputed* for each is a knapsack, which is
    solved exactly. The third step checks the peak; should it be above the limit, the choice is made again.

    A later batch that is larger in some dimension is measured as well, and the choice holds for it and for those
    before; in distributed runs, where processes decide together, such a batch has every block recomputed.
    Compiled blocks run uncompiled while they are measured, and need less than planned afterwards.

    Args:
        budget_gib: the limit in GiB, for all that tensors take: parameters, optimizer, activations, temporaries. On
            CUDA what the allocator holds for others in the process counts too. ``"fit"`` is 92% of what is free.

    Attributes:
        plan: the :class:`~lightning_fasttrain.model.CheckpointPlan`; None until it is made, after two optimizer steps.

    Raises:
        ValueError: ``budget_gib`` is not above 0. At the second optimizer step, if even with every block recomputed
            the peak is above the limit: by how much, and what helps.

    Example:
        >>> from lightning_fasttrain import ActivationCheckpointing
        >>> checkpointing = ActivationCheckpointing(MemoryBudget(budget_gib=20))
        >>> checkpointing.policy.plan  # a CheckpointPlan, after `Trainer(callbacks=[checkpointing]).fit(model)`

    Source:
        Ours. Related: Jain et al. 2020, "Checkmate", https://arxiv.org/abs/1910.02653, solves for single operations
        ahead of time; ``torch._functorch.config.activation_memory_budget`` takes a fraction, inside the compiler.
    """

    measures: ClassVar[bool] = True

    def __init__(self, budget_gib: float | str = "fit") -> None:
        number = isinstance(budget_gib, int | float) and not isinstance(budget_gib, bool) and budget_gib > 0
        if budget_gib != "fit" and not number:
            why = "it is the most that a step may take, in GiB"
            way_out = 'Give a number above 0, or "fit" for what the device has'
            raise ValueError(explain(f"budget_gib={budget_gib!r}", why, way_out))
        self.budget_gib = budget_gib
        self.plan: CheckpointPlan | None = None
        self._watch: StepWatch | None = None

    def __repr__(self) -> str:
        return f"MemoryBudget(budget_gib={self.budget_gib!r})"

    def wrap(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, Undo]:
        self.plan = None

        def tell(plan: CheckpointPlan) -> None:
            self.plan = plan

        watch = self._watch = StepWatch(model, blocks, self.budget_gib, tell)
        undos = {name: forward.install() for name, forward in watch.forwards.items()}
        first = next(iter(undos))  # the watch is everyone's, and one of the undos has to end it

        def undo(unwrap: Undo = undos[first]) -> None:
            watch.close()
            self._watch = None
            unwrap()

        return {**undos, first: undo}

    def see(self, batch: Any) -> None:
        """A batch that the loader keeps was there before the step, and counts towards its peak."""
        if self._watch is not None:
            self._watch.see(batch)
