"""Plan at the start of a fit, and train with the planned techniques."""

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning as L
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from lightning_fasttrain.core.atomic_write import why_unwritable, write_atomic
from lightning_fasttrain.core.checks import PositiveFloat, check_arguments, one_of
from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.core.host.lightning import refuse_second_stateful, training_loader
from lightning_fasttrain.core.messages import explain, say, warn
from lightning_fasttrain.core.peak_memory import refuse_uncounted
from lightning_fasttrain.core.safe_load import read_json
from lightning_fasttrain.planner.candidates import Choice
from lightning_fasttrain.planner.make_plan import make_plan
from lightning_fasttrain.planner.plan import Plan
from lightning_fasttrain.proof.rehearsal.context import combine, length_of, reading_ahead
from lightning_fasttrain.technique import Capability, Exactness, Technique
from lightning_fasttrain.technique.technique import needs_an_object, techniques_of

_FILE = "fasttrain_plan.json"
_ENDLESS = 10**9
_FORMAT = 4  # of the choice in it: a plan in another one is made again


class AddsTechniques(L.Callback):
    """Base class of callbacks that add techniques to the Trainer in ``setup``, for the length of a fit."""

    where_to_use: ClassVar[str] = (
        "It adds techniques to a Trainer: use Trainer(callbacks=[Auto()]); elsewhere, those of make_plan(model, batch)"
    )
    _added: Sequence[Technique] = ()

    @property
    def state_key(self) -> str:
        """Its name among the states in a checkpoint, which is that of its class."""
        refuse_second_stateful(self)
        return super().state_key

    def _refuse_earlier(self, trainer: L.Trainer, what_comes: str) -> None:
        place = trainer.callbacks.index(self)
        for technique in techniques_of(trainer):
            if trainer.callbacks.index(technique) < place:
                name, why = type(self).__name__, f"it has taken its place already when the {what_comes}"
                raise ValueError(explain(f"{technique} is listed before {name}", why, f"List {name} first"))

    def _add(self, trainer: L.Trainer, techniques: Sequence[Technique]) -> None:
        self._added = techniques
        # Changed in place: Lightning is going through this list, and calls their setup too.
        trainer.callbacks += techniques

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hook: the last of a run that ended well. A later fit adds fresh techniques."""
        self._remove_added(trainer)

    @needs_an_object
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Hook: the only one that is called when a run fails."""
        self._remove_added(trainer)

    def _remove_added(self, trainer: L.Trainer) -> None:
        # A new list: Lightning is going through the old one, and what was added must still hear of the end.
        trainer.callbacks = [callback for callback in trainer.callbacks if callback not in self._added]
        self._added = ()


@check_arguments
class Auto(AddsTechniques):
    """Plan with :func:`~lightning_fasttrain.make_plan` at the start of ``fit``, and add the techniques to the Trainer.

    Precision and strategy of the Trainer are kept. Rank zero plans, and all ranks use its plan. Measuring takes 2% of
    the run's expected time, and 30 s at most; of a short run nothing is measured, and the plan is a prediction. The
    plan is stored in ``fasttrain_plan.json`` in the Trainer's ``default_root_dir``, where the next run of the same
    model on the same machine reads it, so that a resumed run continues with the same techniques; checkpoints name them
    too. List it before other techniques.

    Args:
        memory_gib: as for :func:`~lightning_fasttrain.make_plan`.
        keep: as for :func:`~lightning_fasttrain.make_plan`, here ``"exact"`` by default.
        seconds: time limit for measurements; None: 2% of the time that the Trainer's steps take at least, 30 s at most.
        batch: the batch to plan with; by default the loader's first, from a separate iterator.

    Attributes:
        plan: the plan, on rank zero of a run that made one.
        choice: the techniques in use.

    Raises:
        ValueError: an unknown ``keep``; in ``fit``: another technique is listed before it, splits batches or is in the
            plan too, or there is no batch.

    Example:
        >>> import lightning_fasttrain as ft
        >>> trainer = L.Trainer(accelerator="cpu", callbacks=[ft.Auto(memory_gib=2)], logger=False,
        ...                     enable_checkpointing=False, enable_progress_bar=False)

    Source:
        Ours.
    """

    def __init__(
        self,
        memory_gib: PositiveFloat | Literal["fit"] = "fit",
        keep: str = "exact",
        seconds: PositiveFloat | None = None,
        batch: object = None,
    ) -> None:
        self.memory_gib: float | Literal["fit"] = memory_gib
        self.seconds, self.batch = seconds, batch
        self.keep = one_of("keep", keep, tuple(each.value for each in Exactness))
        self.plan: Plan | None = None
        self.choice: Choice | None = None

    @needs_an_object
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Hook: Lightning's earliest; callbacks that are added here are called right after this one."""
        if stage != "fit":
            return
        if self.choice is None:
            refuse_uncounted("Auto", trainer.strategy.root_device)
            self._refuse_earlier(trainer, "plan comes")
            self._refuse_other_splits(trainer)
            self.choice = self._choose_on_rank_zero(trainer, pl_module)
        chosen = self.choice.techniques()
        for first, second in itertools.product(chosen, techniques_of(trainer)):
            if type(first) is type(second):
                why, way_out = f"the plan has chosen {first}", f"Remove {second}, which the plan does without"
                raise ValueError(explain(f"Auto + {second}", why, way_out))
        self._add(trainer, chosen)

    def _refuse_other_splits(self, trainer: L.Trainer) -> None:
        for technique in techniques_of(trainer):
            if technique.does(Capability.SPLITS_BATCHES):
                why = "Auto chooses the number of micro-batches, and measures steps without this one"
                way_out = f"Remove {type(technique).__name__}, or replace Auto by the callbacks of make_plan"
                raise ValueError(explain(f"Auto + {technique}", why, way_out))

    def state_dict(self) -> dict[str, Any]:
        """Save the choice in the checkpoint."""
        return {} if self.choice is None else {"choice": asdict(self.choice)}

    def _choose_on_rank_zero(self, trainer: L.Trainer, module: L.LightningModule) -> Choice:
        known: dict[str, Any] | None = None
        try:
            if trainer.is_global_zero:
                known = self._choose(trainer, module)
        finally:  # the others wait for it
            known = trainer.strategy.broadcast(known)
        if known is None:
            raise RuntimeError("rank zero could not make a plan: see its error")
        return Choice.read(known)

    def _choose(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        loader = training_loader(trainer)
        batch = first_batch(loader) if self.batch is None else self.batch
        path, key = Path(trainer.default_root_dir, _FILE), self._key_of(trainer, module, batch)
        kept = _read(path)
        # A plan for a longer run is good for a shorter one; a prediction is replaced where there is time to measure.
        batches = count_batches(trainer, loader)
        if kept.get("key") == key and (kept["measured"] or kept["batches"] >= batches):
            say("Auto: continues with the plan in %s: %s", path, kept.get("words"))
            return kept["choice"]
        unwritable = why_unwritable(path.parent)
        if unwritable:  # no reason to end a run, which can train without
            way_out = "Use a Trainer whose default_root_dir is writable"
            warn(explain(f"Auto: the plan cannot be kept in {path}, so the next run plans again", unwritable, way_out))
        device = "cuda" if trainer.strategy.root_device.type == "cuda" else "cpu"
        self.plan = make_plan(
            module,
            batch,
            self.memory_gib,
            keep=self.keep,
            precision=trainer.precision,
            device=device,
            steps=batches,
            seconds=self.seconds,
            loader=loader,
            **_clipping_of(trainer),
        )
        chosen = self.plan.chosen.choice
        said = {
            "key": key,
            "choice": asdict(chosen),
            "words": str(chosen),
            "batches": batches,
            "plan": self.plan.as_dict(),
        }
        if not unwritable:
            write_atomic(path, json.dumps(said, indent=2))
        say("Auto: %s", chosen)
        for reason in (*self.plan.reasons, *self.plan.notes):
            say("Auto: %s", reason)
        return asdict(chosen)

    def _key_of(self, trainer: L.Trainer, module: L.LightningModule, batch: object) -> str:
        """Return a key that changes with everything that would change the plan."""
        shapes = [(name, str(p.dtype), tuple(p.shape), p.requires_grad) for name, p in module.named_parameters()]
        sizes: list[Any] = []
        apply_to_collection(batch, Tensor, lambda tensor: sizes.append((str(tensor.dtype), tuple(tensor.shape))))
        asked = self.memory_gib, self.keep, trainer.precision, trainer.world_size
        text = json.dumps([_FORMAT, shapes, sizes, asked, hardware(), versions()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def count_batches(trainer: L.Trainer, loader: Any) -> int:
    """Return the number of batches of the coming run, before Lightning has made its loaders.

    Where neither ``max_steps`` nor the length of the epochs limits it, it is a large number.
    """
    limits: list[float] = [_ENDLESS]
    if trainer.max_steps >= 0:
        limits.append(trainer.max_steps * trainer.accumulate_grad_batches)
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        share, batches = trainer.limit_train_batches, length_of(loader)
        if isinstance(share, int):
            batches = min(share, batches)
        elif batches < math.inf:
            batches = int(share * batches)
        if batches < math.inf:
            limits.append(trainer.max_epochs * batches)
    return max(1, int(min(limits)))


def first_batch(loader: object) -> Any:
    """Return the first batch of a loader, which the run then receives as its first batch."""
    try:
        if loader is None or isinstance(loader, Iterator):
            raise TypeError("the loader can be gone through once only")
        with reading_ahead(combine(loader)) as batches:
            for batch in batches:
                return batch
        raise TypeError("the loader gives none")
    except Exception as error:
        why = f"no batch could be taken at the start: {type(error).__name__}: {error}"
        raise ValueError(explain("Auto()", why, "Give one: Auto(batch=...)")) from error


def _clipping_of(trainer: L.Trainer) -> dict[str, Any]:
    if not trainer.gradient_clip_val:
        return {}
    return {"gradient_clip_val": trainer.gradient_clip_val, "gradient_clip_algorithm": trainer.gradient_clip_algorithm}


def _read(path: Path) -> Mapping[str, Any]:
    try:
        kept = read_json(path)
        Choice.read(kept["choice"]).techniques()
        return {**kept, "batches": int(kept["batches"]), "measured": bool(kept["plan"]["measured"])}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}  # none yet, or a damaged one, which is planned again
