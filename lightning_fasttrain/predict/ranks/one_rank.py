"""The rank that a prediction is for: how its strategy changes the model, or what the strategy's formulas say."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.predict.allocation_trace import Allocation
from lightning_fasttrain.predict.ranks.rank_states import NOTE, KnowsRankStates, RankStates, with_states_of_rank
from lightning_fasttrain.predict.ranks.sharded_model import ShardsFakeModel, sharded
from lightning_fasttrain.technique.declarations import PredictedStep

STREAMS = "Gathers and computation are assumed to share memory, as on one CUDA stream."


class OneRank:
    """One of ``world`` ranks under a strategy; without a strategy, the only one.

    Args:
        strategy: an :class:`~lightning_fasttrain.FSDP2Strategy` or :class:`~lightning_fasttrain.ZeROStrategy`, or None.
        world: number of ranks.
        rank: the rank.

    Raises:
        TypeError: the strategy cannot be predicted.
        ValueError: ``rank`` is not below ``world``, or there are several ranks without a strategy.
    """

    def __init__(self, strategy: object, world: int, rank: int) -> None:
        if rank >= world:
            why = f"ranks are counted from 0, so the last one is {world - 1}"
            raise ValueError(explain(f"rank={rank} of world={world}", why, "Use a rank below world"))
        if strategy is None and world > 1:
            why = "the strategy decides what each rank holds"
            raise ValueError(explain(f"world={world} without strategy=", why, "Pass strategy=FSDP2Strategy()"))
        if strategy is not None and not isinstance(strategy, ShardsFakeModel | KnowsRankStates):
            why = "it cannot be predicted on a rank"
            way_out = "Pass an FSDP2Strategy or a ZeROStrategy; DDP's ranks need what one device needs, and its buckets"
            raise TypeError(explain(f"strategy={strategy!r}", why, way_out))
        self.strategy, self.world, self.rank = strategy, world, rank
        self._states: RankStates | None = None

    def plan(self, precision: str, on_cuda: bool) -> PredictedStep:
        """Return the step to predict, before techniques change it."""
        planned = PredictedStep(precision, on_cuda)
        if isinstance(self.strategy, KnowsRankStates):
            # DeepSpeed casts the model under "bf16-mixed" too, and frees gradients in its step.
            if precision != "32-true":
                planned.precision = "bf16-true"
            planned.releases = True
            planned.notes.append(NOTE)
        elif self.strategy is not None and on_cuda:
            planned.notes.append(STREAMS)
        return planned

    @contextmanager
    def shard(
        self, model: nn.Module, forward: Callable[[Any], object], planned: PredictedStep, mode: FakeTensorMode
    ) -> Iterator[Callable[[Any], Any]]:
        """Shard ``model`` in place, if the strategy does so; yield ``forward`` as the strategy runs it."""
        if not isinstance(self.strategy, ShardsFakeModel):
            yield forward
            return
        with sharded(model, self.strategy, self.world, self.rank, forward, planned, mode) as sharded_forward:
            yield sharded_forward

    def count_states(self, model: nn.Module, optimizer: Optimizer, precision: str) -> None:
        """Let the strategy count the states of a rank, if it has formulas for them."""
        if isinstance(self.strategy, KnowsRankStates):
            self._states = self.strategy.predict_rank_states(model, optimizer, self.world, precision)

    def allocations(self, traced: Sequence[Allocation], since: int) -> Sequence[Allocation]:
        """Return the traced allocations as they are on this rank."""
        if self._states is None:
            return traced
        return with_states_of_rank(traced, self._states, since)
