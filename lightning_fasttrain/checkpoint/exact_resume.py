"""Resume a killed run from its last checkpoint, bit for bit as if it had not been interrupted."""

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar, Literal, NamedTuple

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fasttrain.checkpoint.loader_state.attributes import watch_attributes
from lightning_fasttrain.checkpoint.loader_state.resumable_loader import ResumableLoader
from lightning_fasttrain.checkpoint.newest_checkpoint import explain_missing_last, guard_loading
from lightning_fasttrain.checkpoint.resume_state import (
    ResumeState,
    SavePoint,
    add_logged,
    complete_batch_,
    count_as_ended,
    find_save_point,
    hold_loader,
    keeps_its_state,
    list_left_out,
    read_forgotten,
    read_metrics,
    resume_after_batch,
    resume_after_epoch,
    step_takes_batches,
)
from lightning_fasttrain.checkpoint.run_fingerprint import (
    any_sums_batches,
    describe_loader,
    list_disagreements,
    list_doubts,
    read_settings,
    read_step_settings,
    refuse_other_optimizers,
    with_restored,
)
from lightning_fasttrain.core.distributed import gather, gather_gradients, is_sharded, pack
from lightning_fasttrain.core.host.lightning import (
    DataFetcher,
    accumulation_continues,
    asked_checkpoint,
    is_last_batch_taken,
    validation_loaders,
)
from lightning_fasttrain.core.host.loader_wrapper import iterate_again
from lightning_fasttrain.core.messages import explain, list_some, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.core.state.rng import random_state
from lightning_fasttrain.technique import Technique

KEY = "ExactResume"


class _TrainingLoader(NamedTuple):
    held: ResumableLoader | None  # None if its position is not ours to save
    about: dict[str, Any] | None  # facts before anything was read; {} if Lightning saves its state


class ExactResume(Technique):
    """Resume a run exactly: the same batches, the same random numbers, the same weights, whenever it was killed.

    Each checkpoint holds, for every process: the states of the random generators of torch, CUDA, Python and NumPy, the
    position in the training loaders and the attributes of their datasets and samplers that have changed (see
    :func:`~lightning_fasttrain.checkpoint.resumable`), running metrics, and, inside an accumulation window of
    ``accumulate_grad_batches``, the accumulated gradients. On resuming, the iteration in which the checkpoint was saved
    is finished first, including pending validation. The batches of an uninterrupted run are those of a run without it.

    Checkpoints taken by callbacks after a batch, after validation and after an epoch are exact; after an exception,
    the batch is run again. The module's own ``on_train_batch_end`` is not repeated, since callbacks save before it.
    Gradients that manual optimization carries over several batches, and those of a window under strategies that shard
    them, are not saved (with a warning). A loader with its own ``state_dict`` is left to Lightning, except torchdata's
    ``StatefulDataLoader``, whose position is the batch that was trained on instead of the one that was prefetched.

    Acts where the strategy wraps its loaders, when checkpoints are saved, and in the first iteration of a resumed run.
    Combine it with :class:`~lightning_fasttrain.AtomicCheckpoints`, so that a kill does not damage a checkpoint.

    Args:
        strict: whether it is an error if the checkpoint has another number of processes (without
            :class:`~lightning_fasttrain.loaders.GlobalBatch`, which resumes on any number), precision, clipping,
            accumulation, training data, batch size, order, ``drop_last``, other settings of a technique that changes
            training, or other settings of optimizers and schedules, which the saved state replaces; or if
            ``ckpt_path="last"`` finds none. Otherwise a warning, and all that still fits is restored. Data are
            identified by class, length and a few entries of the dataset's tensors and lists, without calling the
            dataset. Other hyper-parameters, and techniques that change only rounding, always give a warning.
        seed_samples: as for :func:`~lightning_fasttrain.checkpoint.resumable`: resuming a run with workers reads no
            batches again.
        on_change: as for :func:`~lightning_fasttrain.checkpoint.resumable`: whether other contents of the last batch
            before the saved position, or of the first one after it, are an error or a warning; a warning if not
            ``strict``.

    Raises:
        ValueError: in ``fit`` with ``ckpt_path``, for such a checkpoint if ``strict``; the message has both values.
            Always for a checkpoint of another model, or of other optimizers or parameter groups. With the first batch,
            if the data have changed.
        FileNotFoundError: in ``fit`` with ``ckpt_path="last"`` without a last checkpoint, if ``strict``.

    Example:
        >>> callbacks = [ExactResume(), L.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=100)]
        >>> trainer = L.Trainer(accelerator="cpu", callbacks=callbacks, logger=False, enable_progress_bar=False)

    Source:
        As in Composer's resumption tests, the complete checkpoint equals the uninterrupted run's, bit for bit.
        Lightning alone saves neither random states nor positions (its issues 17543 and 18780).
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "a killed run resumes bit for bit: data order, random states, metrics, gradients"
    when: ClassVar[str] = "a run may be killed, and must end as if it had not been killed"
    in_a_loop: ClassVar[str] = "checkpoint.resumable(loader), and save checkpoint.random_state() with its state_dict()"
    predicted: ClassVar[bool] = True

    def __init__(
        self, strict: bool = True, seed_samples: bool = False, on_change: Literal["error", "warn"] = "error"
    ) -> None:
        self.strict, self.seed_samples, self.on_change = strict, seed_samples, on_change if strict else "warn"
        self._begin()

    def _begin(self) -> None:
        self._patches = ExitStack()
        self._loaders: list[_TrainingLoader] = []
        self._being_made: list[_TrainingLoader] | None = None  # while Lightning makes the training loaders
        self._resume: ResumeState | None = None  # until training continues
        self._begins_epoch = False
        self._step_settings: dict[str, Any] = {}  # until the optimizers exist
        self._unlogged: list[dict[str, Any]] = []
        self._validation: list[dict[str, Any]] = []  # states of validation loaders that are not made yet

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        self._begin()
        self._patches.callback(guard_loading(trainer.strategy))
        if trainer.state.fn == TrainerFn.FITTING:
            self._explain_other_models(trainer)
            self._take_places(trainer, pl_module)
        return self._patches.close

    def _refuse_missing_last(self, trainer: L.Trainer) -> None:
        """Refuse ``ckpt_path="last"`` without a last checkpoint; Lightning then trains from the beginning."""
        if trainer.ckpt_path is not None or asked_checkpoint(trainer) != "last":
            return
        message = explain_missing_last([getattr(keeper, "dirpath", None) for keeper in trainer.checkpoint_callbacks])
        if self.strict:
            raise FileNotFoundError(message)
        warn(message)

    def _explain_other_models(self, trainer: L.Trainer) -> None:
        """Compare the techniques before the weights are loaded, whose names and shapes depend on them."""
        load = trainer.strategy.load_model_state_dict

        def load_model_state_dict(checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
            then = checkpoint.get(KEY, {}).get("settings", {})
            message = next(list_disagreements(then, read_settings(trainer)), None)
            if self.strict and message is not None:
                raise ValueError(message)
            if trainer.precision == "64-true":
                trainer.lightning_module.double()  # Lightning does it after loading, which rounds to float32
            try:
                load(checkpoint, *args, **kwargs)
            except RuntimeError as error:
                lines = [line.strip(" \t.") for line in str(error).splitlines()]
                if "in loading state_dict" not in lines[0]:
                    raise
                why = f"its weights do not fit this one ({list_some(lines[1:])})"
                way_out = "Build the model and its techniques as in the saved run"
                raise ValueError(explain("the checkpoint was saved with another model", why, way_out)) from error

        self._patches.callback(patch(trainer.strategy, "load_model_state_dict", load_model_state_dict))

    def _take_places(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        fit_loop, strategy = trainer.fit_loop, trainer.strategy
        # Lightning has no hook between making the loaders and reading from them, so methods of Lightning are patched.
        setup_data, process = fit_loop.setup_data, strategy.process_dataloader
        run_start = fit_loop.epoch_loop.on_run_start

        def restoring_setup_data() -> None:
            if self._begins_epoch:  # after on_train_start, before on_train_epoch_start
                self._begins_epoch = False
                self._restore(trainer, pl_module)
            self._hold_loaders_of(setup_data)

        def counting_run_start(data_fetcher: DataFetcher) -> None:
            # Lightning's own condition for iterating again.
            if trainer.current_epoch > 0 and not fit_loop.is_resuming and not fit_loop.epoch_loop.restarting:
                for loader in self._loaders:  # Lightning iterates again
                    if loader.held is not None:
                        loader.held.count_from(0)
            run_start(data_fetcher)

        self._patches.callback(patch(fit_loop, "setup_data", restoring_setup_data))
        self._patches.callback(patch(strategy, "process_dataloader", lambda loader: process(self._hold(loader))))
        self._patches.callback(patch(fit_loop.epoch_loop, "on_run_start", counting_run_start))

    def _hold_loaders_of(self, setup_data: Callable[[], None]) -> None:
        """Run Lightning's ``setup_data``, and store the training loaders that it makes, if any."""
        self._being_made, self._waiting = [], []
        try:
            setup_data()
        finally:
            made, self._being_made = self._being_made, None
        if made:
            self._loaders = made
            if self._resume is not None and self._resume.mine is not None:
                self._resume.positioned = True

    def _hold(self, loader: Any) -> Any:
        """Wrap a training loader of this run so that its position is known; return other loaders unchanged."""
        # Outside of setup_data only validation loaders arrive here, one after the other, in the order of the saved
        # states.
        if self._being_made is None:
            attributes = watch_attributes(loader)
            if self._validation:
                attributes.restore(self._validation.pop(0), strict=False)
            return loader
        i, held, resume = len(self._being_made), hold_loader(loader, self.seed_samples, self.on_change), self._resume
        about = {} if held is None and keeps_its_state(loader) else None
        if held is not None:
            held.waiting = self._waiting
        self._being_made.append(_TrainingLoader(held, about if held is None else describe_loader(loader)))
        # Here, not later: setup_data iterates as soon as it has wrapped the loaders, and may fetch ahead.
        if resume is not None and not resume.positioned:
            resume.check_loader(loader, i)
            resume.set_position(held, i)
        return loader if held is None else held

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: called on all processes, whichever of them writes the file."""
        loops = checkpoint["loops"]["fit_loop"]["state_dict"]
        theirs = list(filter(None, loops.pop("combined_loader", [])))
        if theirs:
            # Lightning's state, without our own, which is empty here.
            loops["combined_loader"] = theirs
        if trainer.interrupted and trainer.world_size > 1:
            # Waiting for processes that may have failed would hide the error.
            return
        point, device = find_save_point(trainer), trainer.strategy.root_device
        random, positions = random_state(), self._positions(trainer, point)
        validation = [watch_attributes(loader).changes() for loader in validation_loaders(trainer)]
        metrics = read_metrics(trainer, pl_module, point)
        mine = {"random": random, "loaders": positions, "validation": validation, **metrics}
        checkpoint[KEY] = {
            "point": str(point),
            "ranks": gather(pack(mine), device, everywhere=isinstance(trainer.strategy, DeepSpeedStrategy)),
            "settings": {**self._read_settings(trainer), "loaders": [loader.about for loader in self._loaders]},
            "forgotten": read_forgotten(trainer),
        }
        if not _in_window(trainer, point):
            return
        if not (isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy) or is_sharded(pl_module)):
            checkpoint[KEY]["gradients"] = gather_gradients(pl_module.named_parameters(), device)
        elif not hasattr(trainer.strategy, "scale_gradients_"):
            # The suite's own strategies warn themselves.
            what = f"a checkpoint inside an accumulation window under {type(trainer.strategy).__name__}"
            why = "gradients are sharded there and are not saved, so a resumed run lacks them for one step"
            warn(explain(what, why, "Save at optimizer steps"))

    def _positions(self, trainer: L.Trainer, point: SavePoint) -> list[dict[str, Any] | None]:
        # Lightning may have prefetched batches, so the position is the number of batches trained on.
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        ended = point is SavePoint.EPOCH or (point is not SavePoint.WITHIN and is_last_batch_taken(trainer))
        follows_user = step_takes_batches(trainer)
        positions: list[dict[str, Any] | None] = []
        for held, about in self._loaders:
            if held is None:
                positions.append({} if about is None else None)  # nothing is saved for an iterator
            elif ended:
                positions.append(held.between_passes())
            else:
                positions.append(held.position(held.handed_out if follows_user else batches))
        return positions

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: before Lightning restores its loops, and with most strategies before an optimizer exists."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        state = checkpoint.get(KEY)
        if state is None:
            what = "ExactResume: this checkpoint was saved without ExactResume, or after a failure of several processes"
            why = "it has no random states and no positions in the data, so the run resumes as Lightning does"
            warn(explain(what, why, "Save with ExactResume next time"))
            return
        fit_loop = checkpoint["loops"]["fit_loop"]
        self._resume = resume = ResumeState(state, fit_loop, trainer, self.strict)
        if resume.point in (SavePoint.BATCH, SavePoint.VALIDATION):
            complete_batch_(checkpoint)
        now = self._read_settings(trainer)
        self._compare(resume, now)
        doubts = list_doubts(checkpoint, pl_module, resume.settings, now)
        for doubt in (*doubts, *list_left_out(trainer, checkpoint)):
            warn(f"ExactResume: {doubt}")
        if resume.mine is None:
            return
        self._validation = list(resume.mine["validation"])
        theirs = iter(fit_loop["state_dict"].get("combined_loader", []))
        # One per loader with a state_dict, including ours, since Lightning counts them; none for iterators.
        states = []
        for position in resume.mine["loaders"]:
            if position is None:
                states.append(next(theirs, {}))
            elif position:
                states.append({})
        if any(states):
            fit_loop["state_dict"]["combined_loader"] = states

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the optimizers exist, and their state is not restored yet."""
        self._step_settings = read_step_settings(trainer)
        if self._resume is not None:
            self._compare(self._resume, self._read_settings(trainer))

    def _read_settings(self, trainer: L.Trainer) -> dict[str, Any]:
        return {**read_settings(trainer), **self._step_settings, "seed_samples": self.seed_samples}

    def _compare(self, resume: ResumeState, now: dict[str, Any]) -> None:
        """Compare with the saved settings; some strategies load a checkpoint before optimizers exist, others after."""
        refuse_other_optimizers(resume.settings, now)
        resume.check(now)
        if self._step_settings:
            self._step_settings = with_restored(self._step_settings, resume.settings)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: Lightning has restored its own state, and has not begun an epoch."""
        self._refuse_missing_last(trainer)
        resume = self._resume
        if resume is None:
            return
        # Some strategies restore only after making the loaders.
        if not resume.positioned and resume.mine is not None:
            for i, loader in enumerate(self._loaders):
                resume.set_position(loader.held, i)
            iterate_again(trainer)
            resume.positioned = True
        count_as_ended(trainer, [held is not None and held.repeats > 0 for held, _ in self._loaders])
        if resume.point is SavePoint.EPOCH:
            self._begins_epoch = True
            resume_after_epoch(trainer)
        else:
            restore = functools.partial(self._restore, trainer, pl_module)
            self._patches.callback(resume_after_batch(trainer, resume.point, restore))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the checkpoint was that of a finished run, which trains nothing more and calls no other hook."""
        if self._resume is not None:
            self._restore(trainer, pl_module)

    def _restore(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore this process's state right before training continues."""
        # Cleared first, so that this happens once: setup_data and the hooks read it.
        resume, self._resume = self._resume, None
        assert resume is not None
        self._validation = resume.restore(trainer, pl_module)
        self._unlogged = resume.unlogged

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: object) -> None:
        """Hook: add restored sums to the metrics that the module has logged by now, on another number of ranks."""
        self._unlogged = list(filter(None, (add_logged(trainer, logged) for logged in self._unlogged)))


def _in_window(trainer: L.Trainer, point: SavePoint) -> bool:
    """Whether gradients are carried to the next batch without being saved by anything else."""
    between = point not in (SavePoint.EPOCH, SavePoint.WITHIN)
    return between and accumulation_continues(trainer) and not any_sums_batches(trainer)
