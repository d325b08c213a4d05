"""Run the blocks of a model without the padding of their batches."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import lightning as L
from torch import nn

from lightning_fasttrain.core.batch.leaves import batch_size, can_be_cut, pick_rows
from lightning_fasttrain.core.batch.padded_axes import propose_padding
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import explain, say, warn
from lightning_fasttrain.core.modules.blocks import Blocks
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    count_wrapped,
    undo_all,
    wrappers_in,
)
from lightning_fasttrain.micro_batching.normalizer.find_split import trial_step_of, trial_step_of_trainer
from lightning_fasttrain.micro_batching.padding.packed_forward import PackedForward, remove_padding_
from lightning_fasttrain.micro_batching.padding.try_trimming import Outcome
from lightning_fasttrain.technique import Capability, Conflict, Surgery, Technique
from lightning_fasttrain.technique.declarations import NO_BLOCKS, Facts
from lightning_fasttrain.trial.runs import Run, Trial
from lightning_fasttrain.trial.sample_rows import Sample, rank_rows
from lightning_fasttrain.trial.try_split import TrialSchedule, TrialStep, distinguish_rounding, try_split, try_whole

_LOGGED = 1e-3  # relative, of logged values: products of other shapes round differently
_LEAST = 0.05  # a share of padding that is worth a word
_MASK = "a mask of shape (rows, 1, length, length), or a key_padding_mask, that shows padding"
_WAY_OUT = "Leave PaddingFree out: MicroBatching(n) cuts padding off where that is exact"


@check_arguments
def check_padding_free(step: Callable[[Any], object], batch: object) -> float:
    """Raise if the gradient differs from that of the padded batch where blocks run without padding.

    The step runs twice on a few rows of the batch, without dropout, and is undone.

    Args:
        step: maps a batch to its loss, as for :func:`~lightning_fasttrain.accumulate_gradients`.
        batch: a padded batch.

    Returns:
        The relative difference that was found, which is rounding.

    Raises:
        ValueError: the gradient or a logged value differs, or no block ran without padding.
    """
    trial_step = trial_step_of(step)
    outcome = _try(trial_step, batch)
    if not outcome.is_known:
        raise ValueError(explain("a step without padding cannot be checked", outcome.why_not, "Give a padded batch"))
    if outcome.why_not:
        raise ValueError(explain("a step without padding changes the training", outcome.why_not, _WAY_OUT))
    return outcome.error


def _try(trial_step: TrialStep, batch: object) -> Outcome:
    """Run a few rows of a batch with and without padding, and return the worst outcome of all ranks."""
    wrappers = [wrapper for model in trial_step.models for wrapper in wrappers_in(model, PackedForward)]
    acted = [wrapper.acts for wrapper in wrappers]
    try:
        mine = _try_rows(trial_step, batch, wrappers)
    finally:
        for wrapper, acts in zip(wrappers, acted, strict=True):
            wrapper.acts = acts
    return mine.of_all_ranks()


def _try_rows(trial_step: TrialStep, batch: object, wrappers: Sequence[PackedForward]) -> Outcome:
    def step(rows: object) -> Any:
        # It stays so until the next run, since a recomputation in the backward asks again.
        for wrapper in wrappers:
            wrapper.acts = rows is not sample.whole
        return trial_step.step(rows)

    for wrapper in wrappers:
        wrapper.ran = False
    ranked = rank_rows(batch, batch_size(batch))
    trying = replace(trial_step, step=step, in_turn=False)
    for count in (4, 2):  # two where four do not fit in memory
        rows = ranked[:count]
        sample = Sample(pick_rows(batch, rows), len(rows), [[(pick_rows(batch, rows), None)]])
        trial = try_split(trying, iter([sample]), "float32")
        if trial.failed or not trial.why_not:
            break
    if trial.failed and trial_step.gradients:
        for wrapper in wrappers:
            wrapper.acts = False
        try_whole(replace(trial_step, in_turn=False), batch)
    if trial.why_not:
        return Outcome(trial.why_not, is_known=trial.failed)
    if not any(wrapper.ran for wrapper in wrappers):
        why = f"none of its blocks got {_MASK} in this batch"
        return Outcome(why, is_known=False)
    return _judge(trying, trial)


def _judge(trial_step: TrialStep, trial: Trial) -> Outcome:
    """Compare the run with padding and the one without."""
    trial = distinguish_rounding(trial_step, trial, lambda trial: trial.error(_weight_of_all))
    error = trial.error(_weight_of_all)
    if error > trial.limit:
        why = f"the gradient then differs by {error:.1g}: padded entries take part in it, or blocks connect tokens"
        return Outcome(f"{why} outside of their attention", error=error)
    packed = trial.splits[0][0].logged
    for name, logged in trial.whole.logged.items():
        other = packed.get(name)
        if other is None or not math.isclose(logged.value, other.value, rel_tol=_LOGGED, abs_tol=1e-6):
            return Outcome(f"the logged value {name!r} depends on padding", error=error)
    return Outcome(error=error)


def _weight_of_all(runs: list[Run]) -> list[float]:
    """Return the weight of a run on all rows."""
    return [1.0]


class PaddingFree(Technique):
    """Run the blocks of a model without the padding of their batches, as one row of all tokens.

    The first batch with padding is tried on a few rows, and refused where the gradient or a logged value would change;
    until then, blocks run with padding. Batches 2, 4, 8, ... are tried, too, within 1% of the time, and if one differs,
    blocks run with padding from then on. It joins
    ``MicroBatching``, whose micro-batches then run no padding at all, and :class:`~lightning_fasttrain.FusedLossHead`,
    which on a CPU leaves out the head's work at labels that are ignored.

    Acts on blocks outside of recomputation, so that what is kept for it is without padding, too; the trial is before
    the batch's forward.

    Args:
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.

    Raises:
        ValueError: no blocks were found; in ``fit``: the gradient would change in this batch, or a block computes with
            its mask.

    Example:
        >>> trainer = L.Trainer(accelerator="cpu", callbacks=[PaddingFree()], logger=False,
        ...                     enable_checkpointing=False, enable_progress_bar=False)

    Source:
        See :func:`~lightning_fasttrain.micro_batching.remove_padding_`.
    """

    keeps_draws: ClassVar[bool] = False
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.TRIMS_PADDING})
    surgery: ClassVar[Surgery | None] = Surgery.UNPAD
    effect: ClassVar[str] = "blocks compute the tokens of a padded batch alone, as one row"
    when: ClassVar[str] = "much of a batch is padding, and its attention gets a mask; on a GPU, or with MicroBatching"
    in_a_loop: ClassVar[str] = "micro_batching.remove_padding_(model)"

    def __init__(self, blocks: Blocks | None = None) -> None:
        self.blocks = blocks
        self.acts = True  # in a bare loop check_padding_free tries it
        self._has_padding = self._has_ended = False
        self._trial_schedule = TrialSchedule(from_first=True)

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "each batch has another number of tokens, and compiled code does not see which document a token is of"
        way_out = "Use CompileBlocks with MicroBatching(n), which cuts padding off to a few lengths"
        return (Conflict(Capability.COMPILES_BLOCKS, why, way_out),)

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.blocks == 0:
            return NO_BLOCKS
        return "images have no padding at the end of rows" if facts.batch == "images" else None

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn == "fit" and not pl_module.automatic_optimization:
            why = "it tries the training step on a batch, and this one steps its optimizers itself"
            way_out = "Call remove_padding_(model), and check_padding_free for a step that returns the loss"
            raise ValueError(explain("PaddingFree with automatic_optimization=False", why, way_out))
        self.acts, self._trial_schedule, self._has_ended = False, TrialSchedule(from_first=True), False
        return None

    def apply(self, model: nn.Module) -> Undo:
        undo = undo_all(remove_padding_(model, self.blocks).values())
        for wrapper in wrappers_in(model, PackedForward):
            wrapper.acts = self.acts
        return undo

    def describe_effect(self, model: nn.Module) -> str:
        blocks = count_wrapped(model, PackedForward)
        if not blocks:
            return ""
        return f"{blocks} run without padding once that is found exact"

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        if not self._has_padding or any(wrapper.ran for wrapper in wrappers_in(model, PackedForward)):
            return None
        why = f"no block got {_MASK} in the first batch"
        return why, "Load the model with attn_implementation='sdpa', or use MicroBatching(n), which trims padding"

    def outcome(self, model: nn.Module) -> str:
        for wrapper in wrappers_in(model, PackedForward):
            seen = wrapper.seen  # the same one for all blocks
            if seen.tokens:
                return f"{1 - seen.tokens / seen.padded:.0%} of the tokens were padding that did not run"
        return ""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: the batch is on its device, and nothing has been computed from it."""
        if self._has_ended or not self._trial_schedule.is_due(lambda: can_be_cut(batch)):
            return
        self._has_padding = any(axis[0].share >= _LEAST for axis in propose_padding(batch))
        with self._trial_schedule.timed() if self.acts else nullcontext():  # what decides is worth any time
            outcome = _try(trial_step_of_trainer(trainer, pl_module, batch_idx), batch)
        if outcome.why_not and outcome.is_known:
            message = explain("PaddingFree() would change the training", outcome.why_not, _WAY_OUT)
            if not self.acts:
                raise ValueError(message)
            self._act(pl_module, False)  # batches before this one were right, so the run may continue
            warn(f"{message} Blocks run with padding from here on.")
        elif outcome.is_known and not self.acts:
            self._act(pl_module, True)
            what = "loss" if is_sharded(pl_module) else "gradient"
            text = "PaddingFree: blocks run without padding. Checked on a few rows: the %s matches to %.0e"
            say(text, what, max(outcome.error, 1e-9))

    def _act(self, model: nn.Module, acts: bool) -> None:
        self.acts = acts
        self._has_ended = not acts
        for wrapper in wrappers_in(model, PackedForward):
            wrapper.acts = acts
