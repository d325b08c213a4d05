"""Rehearsal stage: a new process resumes from the checkpoint and must match the uninterrupted run."""

import torch

from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.dry_run.rehearsal.context import Rehearsed, explain_errors
from lightning_fasttrain.dry_run.rehearsal.nested_trainer import devices_again
from lightning_fasttrain.dry_run.rehearsal.small_run import Course, Follower, Saving
from lightning_fasttrain.dry_run.rehearsal.state_record import (
    describe,
    describe_change,
    measure_distance,
    measure_size,
    persistent_only,
)
from lightning_fasttrain.dry_run.verification.digest import find_differences, take_digest
from lightning_fasttrain.run.checkpoint.exact_resume import ExactResume

_TIMES = 8.0  # multiple of the step's own rounding that is allowed, if it is not deterministic
_ROUNDING = 32 * torch.finfo(torch.float32).eps


def resume_from_checkpoint(on: Rehearsed, saving: Saving, whole: Course) -> None:
    """Load the checkpoint into a new model, and compare its next step with the uninterrupted one.

    Args:
        on: the run, with ExactResume, so that both steps see the same batch and random state.
        saving: how it saved.
        whole: the uninterrupted run.

    Raises:
        RehearsalError: on all ranks: other content was loaded, or the step differs.
    """
    if saving.weights_only:
        on.raise_on_all(_compare_weights(whole))
        on.report.tell("resume", "weights were loaded unchanged; a run cannot resume from weights only")
        return
    resumed = _resume(on, saving)
    on.raise_on_all(_find_other_content(on, whole, resumed))
    # Losses as text, in which NaN equals NaN.
    differ = find_differences({**whole.end, "loss": str(whole.losses)}, {**resumed.end, "loss": str(resumed.losses)})
    how = "the next step is the uninterrupted run's, bit for bit"
    if any(on.ask_all(bool(differ))):  # one more run needs all ranks
        again = _resume(on, saving)
        problem = None
        if differ:
            problem = _explain_difference(whole, resumed, again, differ)
        on.raise_on_all(problem)
        how = "the next step is the uninterrupted run's, up to the difference of two equal steps on this device"
    on.report.resumed_exactly = not differ
    if not any(isinstance(callback, ExactResume) for callback in on.trainer.callbacks):
        how += ", with ft.ExactResume(); without it data order and random states start over"
    on.report.tell("resume", f"a new model loaded the checkpoint; {how}")


def _resume(on: Rehearsed, saving: Saving) -> Course:
    follower = Follower(None)
    with explain_errors(follower.course, "resuming from a checkpoint: "):
        on.run.fit(on.batches, on.validation, follower, devices_again(on.trainer), ckpt_path=saving.path)
    return follower.course


def _find_other_content(on: Rehearsed, whole: Course, resumed: Course) -> str | None:
    module = on.trainer.lightning_module
    saved, loaded = persistent_only(whole.saved, module), persistent_only(resumed.saved, module)
    wrong = find_differences(saved, loaded)
    if not wrong:
        return None
    what = f"a checkpoint was saved and loaded, but differs in {list_some(wrong)}"
    why = f"{wrong[0]} {describe_change(saved.get(wrong[0]), loaded.get(wrong[0]))}"
    way_out = "Check the checkpoint plugin, on_save_checkpoint, load_state_dict"
    return explain(what, why, f"{way_out}; instead of a plugin, ft.AtomicCheckpoints() verifies what it reads")


def _explain_difference(whole: Course, resumed: Course, again: Course, differ: list[str]) -> str | None:
    """Explain a different result; None if two steps are never equal here, and these are as close as any two."""
    if find_differences(resumed.end, again.end) and _are_near(whole, resumed, again, differ):
        return None
    lost: list[str] = []
    for path in find_differences(whole.saved, resumed.saved):
        if path.startswith("buffer "):
            lost.append(f"{path}, which is not persistent")
    for name in find_differences(whole.saved_attributes, resumed.saved_attributes):
        was, now = whole.saved_attributes.get(name), resumed.saved_attributes.get(name)
        if was is not None:
            lost.append(f"{name} ({describe(was)} before, {describe(now)} after the load)")
    what = f"the step after a load differs from the uninterrupted run's in {list_some(differ)}"
    why = "a value that it depends on is not in the checkpoint"
    if lost:
        why += f", perhaps {list_some(lost)}"
    return explain(what, why, "Add it to state_dict and load_state_dict, or make it a persistent buffer")


def _are_near(whole: Course, resumed: Course, again: Course, differ: list[str]) -> bool:
    for path in differ:
        if path == "loss":  # the weights show more than the loss
            continue
        one, other, third = whole.end.get(path), resumed.end.get(path), again.end.get(path)
        allowed = _TIMES * measure_distance(other, third) + _ROUNDING * measure_size(one)
        if not measure_distance(one, other) <= allowed:  # NaN is not close
            return False
    return True


def _compare_weights(whole: Course) -> str | None:
    read, wrong = whole.loaded["state_dict"], []
    for path, value in whole.saved.items():
        name = path.partition(" ")[2]
        if path.startswith(("weight ", "buffer ")) and name in read and not take_digest(read[name]).is_same(value):
            wrong.append(path)
    if not wrong:
        return None
    what = f"weights were saved and loaded, but differ in {list_some(wrong)}"
    return explain(what, "the file differs from the saved weights", "Check the checkpoint plugin")
