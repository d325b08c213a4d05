"""The other stages of a rehearsal: each checks one thing, and reports one line or raises an error."""

import copy
import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping

from lightning_fasttrain.checkpoint.atomic_checkpoints import AtomicCheckpointIO
from lightning_fasttrain.checkpoint.exact_resume import ExactResume
from lightning_fasttrain.core.device import is_out_of_memory
from lightning_fasttrain.core.messages import explain, first_line, list_some
from lightning_fasttrain.profiling.memory_record import format_bytes
from lightning_fasttrain.proof.rehearsal.context import (
    RehearsalError,
    Rehearsed,
    describe_batch,
    explain_errors,
    fill_up,
)
from lightning_fasttrain.proof.rehearsal.disk_space import (
    bytes_on_disk,
    describe_free_space,
    saves_within_epochs,
    writers_of,
)
from lightning_fasttrain.proof.rehearsal.run_copy import RunCopy, devices_again, one_device_again
from lightning_fasttrain.proof.rehearsal.small_run import (
    Course,
    Follower,
    Saving,
    describe,
    describe_change,
    measure_distance,
    measure_size,
    persistent_only,
)
from lightning_fasttrain.proof.verification.digest import find_differences, take_digest
from lightning_fasttrain.proof.verification.report import Verification
from lightning_fasttrain.proof.verification.short_run import StopAfter, as_loader
from lightning_fasttrain.proof.verification.verify import verify
from lightning_fasttrain.technique import Technique

_VERIFIED_IN = ("32-true", "bf16-mixed", "bf16-true", "64-true")


def describe_saving(trainer: L.Trainer, folder: Path) -> Saving:
    """Return how the run saves: as its ModelCheckpoints do, or complete checkpoints if it has none."""
    writers = writers_of(trainer)
    weights_only = bool(writers) and all(writer.save_weights_only for writer in writers)
    is_known = type(trainer.strategy.checkpoint_io) in (TorchCheckpointIO, AtomicCheckpointIO)
    return Saving(folder / "rehearsal.ckpt", saves_within_epochs(writers), weights_only, twice=not is_known)


def with_exact_resume(run: RunCopy) -> RunCopy:
    """Add ExactResume to the run, so that a resumed copy sees the same batches and random states."""
    if any(isinstance(callback, ExactResume) for callback in run.callbacks):
        return run
    changed = copy.copy(run)
    changed.callbacks = [*run.callbacks, ExactResume()]
    return changed


def verify_techniques(on: Rehearsed, precision: str) -> None:
    """Stage: check that training with the techniques is the same, on the first two batches."""
    techniques = on.run.techniques
    if not techniques:
        on.report.tell("verify", "there are no techniques to verify")
        return
    if precision_to_verify(on.trainer) != precision:
        on.report.notes.append(f"verify: checked in float32, not in {precision}.")
    names = ", ".join(type(technique).__name__ for technique in techniques)
    problem, line = None, "not checked: a step without the techniques does not fit into memory"
    try:
        verified = verify_run(on.trainer, on.run, on.sample.first, on.validation, techniques)
        on.report.verified = verified.ok
        line = f"{names}: {verified.rows[0].verdict}"
        if not verified.ok:
            problem = _explain_different_training(verified, names)
    except Exception as error:  # the next stage runs the module as the run does, and finds its errors
        if not is_out_of_memory(error):
            line = f"not checked: {type(error).__name__}: {first_line(error)}"
    on.raise_on_all(problem)
    on.report.tell("verify", line)


def verify_run(
    trainer: L.Trainer,
    run: RunCopy,
    first: list[Any],
    validation: list[list[Any]],
    techniques: list[Technique],
    steps: int = 2,
) -> Verification:
    """Verify techniques on the first batches of a run, on the device of this rank.

    Args:
        trainer: the Trainer of the run.
        run: a copy of the run.
        first: its first batches; one is enough.
        validation: the first batches of each of its validation loaders.
        techniques: the techniques to verify.
        steps: as in :func:`~lightning_fasttrain.verify`.
    """
    settings: dict[str, Any] = one_device_again(trainer)
    settings["precision"] = precision_to_verify(trainer)
    settings |= {name: value for name, value in run.settings.items() if name.startswith("gradient_clip")}
    batch = as_loader(first[:steps]) if len(first) >= steps else first[0]
    validated = validation[0][0] if validation and validation[0] else None
    with run.module_with_transfer_hooks() as module:
        return verify(module, batch, techniques, steps=steps, validation=validated, **settings)


def precision_to_verify(trainer: L.Trainer) -> str:
    """Return the run's own precision; float32 if its first steps may overflow by design, as with fp16."""
    precision = str(trainer.precision)
    return precision if precision in _VERIFIED_IN else "32-true"


def _explain_different_training(verified: Verification, names: str) -> str:
    whom = ", ".join(verified.guilty) or names
    wrong = [row.verdict for row in verified.rows if not row.ok]
    why = [*verified.problems, *wrong][0].rstrip(".")
    way_out = f"Remove {whom}, or see the details: print(ft.verify(module, batch, [...]))"
    return explain(f"verify with {whom} on the first batch", why, way_out)


def run_small(on: Rehearsed, saving: Saving) -> Course:
    """Stage: a window, a short one, validation, the end of an epoch, a save, the first step of the next epoch."""
    follower = Follower(saving)
    with explain_errors(follower.course):
        on.run.fit(on.batches, on.validation, follower, devices_again(on.trainer))
    course = follower.course
    on.raise_on_all(_find_early_end(course) or _find_bad_loss(course))
    _refuse_unlogged_monitors(on.trainer, course)
    on.report.step_s, on.report.save_s = course.step_s, course.save_s
    parts = ["the end of an epoch"]
    if on.validation:
        parts.insert(0, "a batch of validation")
    window = ""
    if on.window > 1:
        parts.insert(0, "a short window")
        window = f", a window of {on.window} batches,"
    first = describe_batch(on.sample.first[0])
    size = _predict_size(on)
    on.report.tell("step", f"one{window} takes {course.step_s:.3g} s{size} ({first}); {', '.join(parts)} succeeded")
    return course


def _predict_size(on: Rehearsed) -> str:
    """Return the predicted memory, if it can be predicted. Ranks do not communicate here, so each may fail alone."""
    try:
        nbytes = on.run.predict_peak(on.trainer, on.sample.first[0])
    except Exception as error:  # the module's own code runs without values
        on.report.notes.append(f"step: its memory could not be predicted: {first_line(error).rstrip('.')}.")
        return ""
    on.report.predicted_bytes = nbytes
    return f" and {format_bytes(nbytes)} (predicted)"


def _find_early_end(course: Course) -> str | None:
    if course.end:
        return None
    why = "a callback, or the module, has set trainer.should_stop"
    way_out = "Find the code that sets it, or exclude that callback: Rehearsal(without=(MyCallback,))"
    return explain(f"the rehearsed run ended after {course.reached}, before its second epoch", why, way_out)


def _find_bad_loss(course: Course) -> str | None:
    if all(map(math.isfinite, course.losses)):
        return None
    steps = course.end["global step"]
    way_out = "Check the batch and the learning rate; in 16 bits try bf16-mixed"
    return explain(f"the loss is {course.losses[0]} in step {steps}", "from then on training has no effect", way_out)


def _refuse_unlogged_monitors(trainer: L.Trainer, course: Course) -> None:
    stoppers = [callback for callback in trainer.callbacks if isinstance(callback, EarlyStopping)]
    for callback in (*writers_of(trainer), *stoppers):
        if callback.monitor is not None and callback.monitor not in course.metrics:
            known = ", ".join(sorted(set(course.metrics))) or "nothing"
            what = f"{type(callback).__name__}(monitor={callback.monitor!r})"
            way_out = f"Log it, self.log({callback.monitor!r}, ...), or monitor a logged value"
            raise RehearsalError(explain(what, f"no value of that name is logged, only {known}", way_out))


def measure_checkpoint(on: Rehearsed, saving: Saving) -> None:
    """Stage: check size and time of a save, and disk space for all checkpoints that the run will keep."""
    report, problem, room = on.report, None, ""
    report.checkpoint_bytes = nbytes = bytes_on_disk(saving.path)
    kept = sum(place.kept for place in on.places)
    report.kept = None if math.isinf(kept) else int(kept)
    if on.trainer.is_global_zero:  # the rank that writes
        try:
            room = describe_free_space(on.places, nbytes) or "the free disk space is unknown"
        except OSError as error:
            problem = str(error)
    on.raise_on_all(problem)
    if not on.places:
        room = "but no ModelCheckpoint keeps checkpoints"
    report.tell("checkpoint", f"{format_bytes(nbytes)} in {report.save_s:.2g} s; {room}")


def run_largest(on: Rehearsed) -> None:
    """Stage: run the largest batch of the sample, after a step, so that optimizer state exists."""
    sample = on.sample
    on.report.batches_seen = sample.seen
    first = describe_batch(sample.first[0])
    if not any(on.ask_all(sample.largest is not None)):
        on.report.tell("largest batch", f"none of {sample.seen} was larger than the first ones ({first})")
        return
    largest = sample.largest
    if largest is None:  # only another rank found a larger one
        largest = sample.first[0]
    size = f"{describe_batch(largest)}, the largest of {sample.seen} (the first: {first})"
    batches = [*fill_up(sample.first, on.window), largest]
    with explain_errors(Course(reached=f"the largest batch ({size})")):
        # One more than is run, so that the end of an epoch is not reached.
        on.run.fit([*batches, largest], [], StopAfter(len(batches)), devices_again(on.trainer))
    on.report.tell("largest batch", f"{size}, succeeded")


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
