"""A run that was killed goes on, from its last checkpoint, bit for bit as if nothing had happened."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.tensor import DTensor

from lightning_fasttrain.core.files.guarded_loading import guard_loading
from lightning_fasttrain.core.host.lightning import is_last_batch_taken, step_goes_on, validation_loaders
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.run.checkpoint._gathered_states import gather, gather_gradients, pack, unpack
from lightning_fasttrain.run.checkpoint._loop_progress import (
    SavePoint,
    complete_batch_,
    count_as_ended,
    end_epoch_of_plateau_schedules,
    go_on_after_batch,
    go_on_after_epoch,
    iterate_again,
    save_point,
    step_takes_batches,
)
from lightning_fasttrain.run.checkpoint._running_metrics import metrics_state, restore_metrics
from lightning_fasttrain.run.checkpoint.extra_state import forgotten_state, restore_forgotten
from lightning_fasttrain.run.checkpoint.loader_rng import generator_state, generators_of, set_generator_state
from lightning_fasttrain.run.checkpoint.resumable_loader import ResumableLoader
from lightning_fasttrain.run.checkpoint.run_fingerprint import (
    about_loader,
    disagreements,
    doubts,
    read_settings,
    refuse_other_optimizers,
)
from lightning_fasttrain.technique import Capability, Technique
from lightning_fasttrain.technique.technique import techniques_of

KEY = "ExactResume"


class ExactResume(Technique):
    """Resume a run exactly: the same batches, the same random numbers, the same weights, whenever it was killed.

    Into each checkpoint go, for every process: the states of torch's, CUDA's, Python's and NumPy's generators and of
    those that loaders own, the position in the training loaders (see :func:`~lightning_fasttrain.resumable`), running
    metrics, and, within an accumulation window of ``accumulate_grad_batches``, the gradients so far. On resuming, the
    iteration that was cut off by the checkpoint is finished first, with the validation that may have been due.

    Exact are checkpoints taken by callbacks after a batch, after validation and after an epoch; after an exception,
    the batch is begun again. Not repeated is what the module itself does in ``on_train_batch_end``, since callbacks
    save before it. Not saved are gradients that manual optimisation carries over several batches, and those of a
    window under strategies that shard them, which is said. A loader with a ``state_dict`` of its own is Lightning's.

    Acts where the strategy takes its loaders, when checkpoints are made, and in the first iteration of a resumed run.
    With :class:`~lightning_fasttrain.AtomicCheckpoints` a kill costs no checkpoint either.

    Args:
        strict: whether a checkpoint of another number of processes, precision, clipping, accumulation, of a technique
            that changes the training and is set differently, or of other training data, batch size, order or
            ``drop_last`` is an error; else it is a warning, and what still fits is restored. Data are told by their
            class, length, and a few entries of the tensors and lists that a dataset holds; its own code is not run for
            it. Other hyper-parameters are a warning in any case, and so are techniques that change only rounding.

    Raises:
        ValueError: in ``fit`` with ``ckpt_path``, if ``strict``: such a checkpoint; the message has both values.
            Strict or not: a checkpoint of another optimizer.

    Example:
        >>> callbacks = [ExactResume(), L.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=100)]
        >>> trainer = L.Trainer(accelerator="cpu", callbacks=callbacks, logger=False, enable_progress_bar=False)

    Source:
        The oracle of Composer's resumption tests: the whole checkpoint equals that of the uninterrupted run, bit for
        bit. Lightning alone keeps neither random states nor positions (its issues 17543 and 18780).
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "a killed run goes on bit for bit: data order, random states, metrics, open windows"
    when: ClassVar[str] = "a run may be killed, and must end as if it had not been"
    in_a_loop: ClassVar[str] = "resumable(loader), and save run.random_state() with its state_dict()"
    predicted: ClassVar[bool] = True

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self._begin()

    def _begin(self) -> None:
        self._patches = ExitStack()
        self._loaders: list[ResumableLoader | None] = []
        self._about: list[dict[str, Any] | None] = []  # of the loaders, before anything was read
        self._restored: dict[str, Any] | None = None  # of all processes
        self._mine: dict[str, Any] | None = None  # of this one
        self._used = 0
        self._wrapping: list[ResumableLoader | None] | None = None  # those made right now
        self._positioned = self._begins_epoch = False
        self._between: list[tuple[ResumableLoader, dict[str, Any]]] = []  # for the next pass, if none was going on
        self._validation: list[list[Any]] = []
        self._said: set[str] = set()

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        self._begin()
        self._patches.callback(guard_loading(trainer.strategy))
        if trainer.state.fn == TrainerFn.FITTING:
            self._take_places(trainer, pl_module)
        return self._patches.close

    def _take_places(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        fit_loop, strategy = trainer.fit_loop, trainer.strategy
        # Lightning has no hook between making the loaders and reading from them, so its methods are patched.
        setup_data, process = fit_loop.setup_data, strategy.process_dataloader
        run_start = fit_loop.epoch_loop.on_run_start

        def restoring_setup_data() -> None:
            if self._begins_epoch:  # after on_train_start, before on_train_epoch_start
                self._begins_epoch = False
                self._restore(trainer, pl_module)
            self._hold_loaders_of(setup_data)

        def counting_run_start(data_fetcher: Any) -> None:
            # Lightning's own condition for iterating again.
            if trainer.current_epoch > 0 and not fit_loop.is_resuming and not fit_loop.epoch_loop.restarting:
                for held in self._loaders:  # Lightning iterates again
                    if held is not None:
                        held.count_from(0)
            run_start(data_fetcher)

        self._patches.callback(patch(fit_loop, "setup_data", restoring_setup_data))
        self._patches.callback(patch(strategy, "process_dataloader", lambda loader: process(self._hold(loader))))
        self._patches.callback(patch(fit_loop.epoch_loop, "on_run_start", counting_run_start))

    def _hold_loaders_of(self, setup_data: Callable[[], None]) -> None:
        """Run Lightning's ``setup_data``, and keep the training loaders that it makes, if it makes any."""
        before, self._wrapping, self._about = (self._loaders, self._about), [], []
        try:
            setup_data()
        finally:
            made, self._wrapping = self._wrapping, None
        if made:
            self._loaders = made
            self._positioned = self._positioned or self._mine is not None
        else:
            self._loaders, self._about = before

    def _hold(self, loader: Any) -> Any:
        """What takes the place of a loader of this run: of a training loader one that knows where it is."""
        # Outside of setup_data only the loaders of validation come by, one after the other, in the order of the saved
        # states.
        if self._wrapping is None:
            if self._validation:
                _set_generators(loader, self._validation.pop(0))
            return loader
        held = _resumable_loader(loader)
        self._wrapping.append(held)
        about = None if held is None else about_loader(loader)
        self._about.append({} if _keeps_its_state(loader) else about)
        # Here and not later: setup_data iterates as soon as it has wrapped the loaders, and may fetch ahead.
        if self._restored is not None and not self._positioned:
            self._check(about_loader(loader), len(self._wrapping) - 1)
            self._set_position(held, len(self._wrapping) - 1)
        return loader if held is None else held

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: called on all processes, whoever writes the file."""
        loops = checkpoint["loops"]["fit_loop"]["state_dict"]
        theirs = [state for state in loops.pop("combined_loader", []) if state]
        if theirs:
            loops["combined_loader"] = theirs  # without our own, which are empty
        if trainer.interrupted and trainer.world_size > 1:
            return  # the other processes may not come, and waiting for them would hide the error
        point, device = save_point(trainer), trainer.strategy.root_device
        random, positions = random_state(), self._positions(trainer, point)
        validation = []
        for loader in validation_loaders(trainer):
            validation.append([generator_state(generator) for generator in generators_of(loader)])
        metrics = metrics_state(trainer, pl_module, point)
        mine = {"random": random, "loaders": positions, "validation": validation, **metrics}
        checkpoint[KEY] = {
            "point": str(point),
            "ranks": gather(pack(mine), device),
            "settings": {**read_settings(trainer), "loaders": self._about},
            "forgotten": forgotten_state(trainer),
        }
        if not _in_window(trainer, point):
            return
        if not _is_sharded(trainer, pl_module):
            checkpoint[KEY]["gradients"] = gather_gradients(pl_module.named_parameters(), device)
        elif not hasattr(trainer.strategy, "scale_gradients_"):  # the suite's own say it themselves
            what = f"a checkpoint inside an accumulation window under {type(trainer.strategy).__name__}"
            why = "gradients are in pieces there and are not saved, so a resumed run lacks them for one step"
            warn(explain(what, why, "Save at optimizer steps"))

    def _positions(self, trainer: L.Trainer, point: SavePoint) -> list[dict[str, Any] | None]:
        # Lightning may have fetched ahead, so what counts is how many batches were trained on.
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        ended = point is SavePoint.EPOCH or (point is not SavePoint.WITHIN and is_last_batch_taken(trainer))
        follows_user = step_takes_batches(trainer)
        positions: list[dict[str, Any] | None] = []
        for held, about in zip(self._loaders, self._about, strict=True):
            if held is None:
                positions.append({} if about is None else None)  # of an iterator nothing is kept
            elif ended:
                positions.append(held.between_passes())
            else:
                positions.append(held.position(held.handed_out if follows_user else batches))
        return positions

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: before Lightning restores its loops, and on most strategies before there is an optimizer."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        state = checkpoint.get(KEY)
        if state is None:
            what = "ExactResume: this checkpoint was saved without it, or when several processes failed"
            why = "neither random states nor positions in the data are in it, so the run goes on as Lightning does"
            warn(explain(what, why, "Save with ExactResume next time"))
            return
        point, fit_loop = SavePoint(state["point"]), checkpoint["loops"]["fit_loop"]
        epochs = fit_loop["epoch_progress"]["current"]
        # Until `completed` is counted Lightning has not stepped the plateau schedules of the epoch.
        self._restored = {**state, "point": point, "plateaus": epochs["completed"] < epochs["processed"]}
        self._used = fit_loop["epoch_loop.batch_progress"]["current"]["processed"]
        if point in (SavePoint.BATCH, SavePoint.VALIDATION):
            complete_batch_(checkpoint)
        then, now = state["settings"], read_settings(trainer)
        self._check(now)
        for doubt in doubts(checkpoint, pl_module, then, now):
            warn(f"ExactResume: {doubt}")
        # Positions and random states are one process's own: with another number of them they fit nowhere.
        if len(state["ranks"]) != trainer.world_size:
            return
        self._mine = mine = unpack(state["ranks"][trainer.global_rank])
        self._validation = list(mine["validation"])
        theirs = iter(fit_loop["state_dict"].get("combined_loader", []))
        states = []  # one for each loader that has a state_dict, ours too, which Lightning counts; not for iterators
        for position in mine["loaders"]:
            if position is None:
                states.append(next(theirs, {}))
            elif position:
                states.append({})
        if any(states):
            fit_loop["state_dict"]["combined_loader"] = states

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: optimizers are there, and their state is not restored yet."""
        if self._restored is not None:
            refuse_other_optimizers(self._restored["settings"], read_settings(trainer))
            self._check(read_settings(trainer))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: Lightning has restored all it does, and not begun an epoch."""
        if self._restored is None:
            return
        if not self._positioned and self._mine is not None:  # this strategy restores after it made the loaders
            for i, held in enumerate(self._loaders):
                self._set_position(held, i)
            iterate_again(trainer)
            self._positioned = True
        count_as_ended(trainer, [held is not None and held.repeats > 0 for held in self._loaders])
        point = self._restored["point"]
        if point is SavePoint.EPOCH:
            self._begins_epoch = True
            go_on_after_epoch(trainer)
        else:
            self._patches.callback(go_on_after_batch(trainer, point, lambda: self._restore(trainer, pl_module)))

    def _restore(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last thing before training goes on; the random state is the last of it."""
        state, mine = self._restored, self._mine
        assert state is not None
        # Gone before anything else is done, so that it happens once: setup_data and the hooks ask for them.
        self._restored = self._mine = None
        restore_forgotten(trainer, state["forgotten"])
        if mine is None:
            return
        parameters = dict(pl_module.named_parameters())
        for name, grad in state["gradients"][trainer.global_rank].items() if "gradients" in state else ():
            parameters[name].grad = grad.to(parameters[name])
        restore_metrics(trainer, pl_module, mine)
        if state["point"] is SavePoint.EPOCH and state["plateaus"]:
            end_epoch_of_plateau_schedules(trainer)
        for held, between in self._between:
            _load(held, between)  # again: Lightning may have fetched a batch ahead
        self._between.clear()
        loaders = validation_loaders(trainer)
        for loader, states in zip(loaders, mine["validation"], strict=False):
            _set_generators(loader, states)
        # Or they are made later, and get their states then.
        self._validation = [] if loaders else list(mine["validation"])
        set_random_state(mine["random"])  # last, since all above may draw

    def _set_position(self, held: ResumableLoader | None, i: int) -> None:
        # None if this checkpoint is one of another number of processes.
        states = [] if self._mine is None else self._mine["loaders"]
        state = states[i] if i < len(states) else None
        if held is None or not state:
            return
        _load(held, state)
        if state["start"] is None:
            self._between.append((held, state))
        else:
            held.count_from(self._used)

    def _check(self, now: dict[str, Any], loader: int | None = None) -> None:
        assert self._restored is not None
        then = self._restored["settings"]
        if loader is not None:
            then = dict(enumerate(then["loaders"])).get(loader) or {}
        for message in disagreements(then, now):
            if message in self._said:
                continue
            self._said.add(message)
            if self.strict:
                raise ValueError(message)
            warn(message)


class _Held(ResumableLoader):
    """A loader whose position is kept by the callback, for every process, rather than by Lightning for rank zero."""

    # Lightning takes what has a state_dict for resumable, and does not warn of it.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state


# Of the class above, since _Held leaves it to Lightning as empty.
_load = ResumableLoader.load_state_dict


def _keeps_its_state(loader: Any) -> bool:
    """Whether Lightning saves and restores it; its own test is the same."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _resumable_loader(loader: Any) -> ResumableLoader | None:
    if _keeps_its_state(loader):
        return None
    if isinstance(loader, Iterator):
        what = f"ExactResume with a {type(loader).__name__} as training loader"
        why = "an iterator cannot be read again up to where it was, so its position is not in checkpoints"
        warn(explain(what, why, "Use a DataLoader, or an object whose __iter__ starts over"))
        return None
    return _Held(loader)


def _set_generators(loader: object, states: list[Any]) -> None:
    for generator, state in zip(generators_of(loader), states, strict=False):
        set_generator_state(generator, state)


def _in_window(trainer: L.Trainer, point: SavePoint) -> bool:
    """Whether gradients are carried to the next batch, and nobody else saves them."""
    saved = any(technique.does(Capability.SUMS_BATCHES) for technique in techniques_of(trainer))
    return not saved and point not in (SavePoint.EPOCH, SavePoint.WITHIN) and step_goes_on(trainer)


def _is_sharded(trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
    if isinstance(trainer.strategy, DeepSpeedStrategy | FSDPStrategy):
        return True
    return any(isinstance(parameter, DTensor) for parameter in pl_module.parameters())
