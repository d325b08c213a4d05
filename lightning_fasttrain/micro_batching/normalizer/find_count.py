"""Find how the loss of a step function is split, from some samples of a batch."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import lightning as L
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_fasttrain.core.batch.leaves import batch_size
from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.micro_batching.normalizer.count_targets import Count, CountRule, CountTargets, named_count
from lightning_fasttrain.micro_batching.normalizer.find_split import CannotSplitError, find_split
from lightning_fasttrain.trial.runs import models_of
from lightning_fasttrain.trial.sample_rows import sample_rows
from lightning_fasttrain.trial.try_split import Stage, try_whole


@check_arguments
def find_count(
    step: Callable[[Any], object],
    batch: object,
    n: PositiveInt = 2,
    *,
    count: Count = "auto",
    check: bool = True,
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> CountTargets:
    """Find a function that counts what a loss is divided by, without running the model.

    A few samples are run, unsplit and in micro-batches. The normalizer of each loss is read from its graph (see
    :func:`~lightning_fasttrain.micro_batching.read_normalizers`), the gradient of the unsplit samples is compared with
    the weighted sum of the micro-batches' gradients, and the counting rules that reproduce the normalizers are
    determined: targets other than -100, the same after the shift of next-token models, other ignored labels, samples,
    and a plain sum. The step runs without dropout and with autocast off, and everything it changes is restored: random
    states, and buffers, metrics and plain attributes of the models that it uses.

    :func:`~lightning_fasttrain.accumulate_gradients` and ``MicroBatching`` do this themselves, and need no rule.

    Args:
        step: maps a micro-batch to its loss, or to a mapping with a ``"loss"``.
        batch: anything :func:`~lightning_fasttrain.micro_batching.split_batch` takes.
        n: the number of micro-batches that batches will be split into; one of them is known to fit in memory.
        count: a rule to check instead of finding one.
        check: False uses the nearest rule and reports its error.
        no_sync: as for :func:`~lightning_fasttrain.accumulate_gradients`.

    Returns:
        A function that maps a batch to its weight. Pass it as ``count=``.

    Raises:
        ValueError: the loss cannot be split, or no rule counts what it is divided by.

    Example:
        >>> import torch
        >>> net, data = torch.nn.Linear(3, 1), torch.randn(6, 3)
        >>> find_count(lambda x: net(x).pow(2).sum(), data)
        CountRule(name='sum', ignore_index=-100)
    """
    named = named_count(count)
    stage = stage_of(step, no_sync)
    try:
        split = find_split(stage, sample_rows(batch, -(-batch_size(batch) // n)), named, check=check)
    except CannotSplitError as error:
        if error.trial is None or not error.trial.failed:
            raise
        refused = error
    else:
        refused = None
    if refused is not None:  # outside of the handler, so that an error of the user's step is shown alone
        try_whole(stage, batch)
        raise refused
    assert split is not None  # this stage rejects a step that returns None
    if split.is_sum:
        return CountRule("sum")
    if split.count is None:
        why = f"it is divided by {split.read}, which is not a number of samples or labels"
        raise CannotSplitError(f"{why}, so no rule can count it beforehand; micro-batches can still read it")
    return split.count


def stage_of(
    step: Callable[[Any], object], no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Stage:
    """Return the stage on which a step function of a bare loop is tried."""
    models = models_of(step)
    replicas = [m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)]

    @contextmanager
    def skip_syncs() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(no_sync())
            for replica in replicas:
                stack.enter_context(replica.no_sync())
            yield

    sharded = any(map(is_sharded, models))
    return Stage(
        step, models, skip_syncs, gradients=not sharded, may_scale=not (sharded or any(map(_is_engine, models)))
    )


def stage_of_trainer(trainer: L.Trainer, pl_module: L.LightningModule, batch_idx: int) -> Stage:
    """Return the stage on which the training step of a Trainer's run is tried."""
    strategy, sharded = trainer.strategy, is_sharded(pl_module)
    # Bypass the strategy where possible, so that nothing is synchronized.
    training_step = strategy.training_step if sharded else pl_module.training_step
    # Of the class, since FSDP2 replaces the method of the module by one that takes any arguments.
    takes_index = len(inspect.signature(type(pl_module).training_step).parameters) > 2
    rest = [batch_idx] if takes_index else []
    context = strategy.precision_plugin.train_step_context
    return Stage(lambda rows: training_step(rows, *rest), [pl_module], context, gradients=not sharded, may_skip=True)


def _is_engine(model: nn.Module) -> bool:
    """Whether DeepSpeed holds the gradients of the model."""
    deepspeed = sys.modules.get("deepspeed")  # importing it takes seconds
    return deepspeed is not None and any(isinstance(module, deepspeed.DeepSpeedEngine) for module in model.modules())
