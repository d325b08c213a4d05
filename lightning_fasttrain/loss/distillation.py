"""Knowledge distillation: a student learns from a teacher's predictions, not only from the labels."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lightning_fasttrain.core.checks import NonNegativeFloat, PositiveFloat, Share, check_arguments
from lightning_fasttrain.core.host.lightning import trainer_of
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch, wrappers_in, wrappers_on
from lightning_fasttrain.loss._distiller import (
    DistilledStep,
    Distiller,
    Features,
    Mask,
    Pairs,
    Student,
    projection_key,
)
from lightning_fasttrain.loss._teacher import AnyTeacher, load_teacher
from lightning_fasttrain.loss.loss_inputs import PROJECTIONS, student_of
from lightning_fasttrain.technique import Conflict, Exactness, Surgery, Technique
from lightning_fasttrain.technique.predicted_step import PredictedStep


@check_arguments
@contextmanager
def distil_into(
    model: nn.Module,
    teacher: AnyTeacher,
    *,
    student: str | None = None,
    temperature: PositiveFloat = 2.0,
    alpha: Share = 0.5,
    head: str | None = None,
    teacher_head: str | None = None,
    features: Features | None = None,
    feature_weight: NonNegativeFloat = 1.0,
    mask: Mask | None = None,
) -> Iterator[Distiller]:
    r"""Enter a context in which steps learn from ``teacher``, too.

    Yields a function of steps, ``step = distil(step)``. The new step takes the same batch, calls the old one, and
    returns the same output with its loss mixed:

    .. math:: (1 - α) \, \mathrm{own} + α T^2 \, \mathrm{KL}(\mathrm{teacher} \Vert \mathrm{student})
              + w \sum_{\mathrm{features}} \mathrm{MSE}

    The teacher runs on the student's arguments, once a step, in eval mode and without a graph, on the student's device
    and in its autocast, in its own dtype. It draws no random numbers. It is in neither the model's ``state_dict`` nor
    its parameters, and DDP does not see it. It does not run where gradients are off, as in validation.

    Logits are compared a few tokens at a time, see :func:`~lightning_fasttrain.loss.linear_kl_divergence`: the
    teacher's are never computed in full if its head is a known plain ``nn.Linear``; nor are the student's with
    :func:`~lightning_fasttrain.fuse_loss_head_`.

    Averages are taken over the counted positions. These are given by the first of the following with a fitting shape:

    1. ``labels`` other than -100 among the student's arguments (or ``targets``, ``shift_labels``), shifted by one for
       causal models of Hugging Face, whose own loss does so;
    2. the batch's ``labels`` or ``targets``, as :func:`~lightning_fasttrain.data.count_targets` finds them;
    3. the ``attention_mask`` (``decoder_attention_mask`` with encoder and decoder) of the student's arguments or of
       the batch;
    4. otherwise, all positions count.

    So with ``count_targets``, or ``count_next_tokens`` where labels are shifted, micro-batches add up exactly. With a
    mask alone, weight them by ``count=lambda batch: batch["attention_mask"].sum()``. A feature without the labels'
    axes, (B, D) beside labels (B, T), is averaged over samples; micro-batches then add up if their sizes are equal.

    Args:
        model: the model that is trained, such as a ``LightningModule``. Enter this before its optimizer is created.
        teacher: a module; a directory that ``save_pretrained`` wrote (safetensors only, nothing is downloaded), opened
            for the same task as the student's; or a function that creates the module. From a ``LightningModule``, the
            same submodule is used as of the student.
        student: qualified name of the module whose output is compared. By default the Hugging Face model in ``model``,
            or the only child with parameters of a ``LightningModule``, or ``model`` itself. A step must call it once.
        temperature: T; the higher it is, the larger the influence of the teacher's small probabilities.
        alpha: α, from 0, the own loss alone, to 1, the teacher's alone. With 0 and ``features``, no logits are needed.
        head: qualified name of the student's layer that computes the logits. Hugging Face's models define it.
        teacher_head: the same in the teacher; by default ``head``, if it exists there.
        features: hidden states to match: name in the student → name in the teacher. Where their shapes differ,
            name → (name, module): the module, such as ``nn.Linear(384, 768)``, maps the student's onto the teacher's
            and is trained. It must be given, since widths are only known once the model has run, after the optimizer
            was created. A copy of it becomes part of ``model.distillation_projections``: the optimizer, DDP and
            checkpoints include it, and it stays after the ``with`` block.
        feature_weight: w.
        mask: maps a batch to the counted positions, (...) booleans, instead of the rules above.

    Yields:
        The function of steps. Its ``parts`` are the last step's ``own``, ``kl`` (with T²) and ``features``, detached.

    Raises:
        TypeError, ValueError: invalid settings; unknown names, with similar ones listed; vocabularies that differ; a
            teacher that is trained with the student.
        TypeError, ValueError, RuntimeError: in a step: its output has no loss, there are no logits, features differ in
            shape, or the student was not called exactly once.

    Example:
        >>> import torch
        >>> net, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
        >>> with distil_into(net, teacher, alpha=1.0) as distil:
        ...     step = distil(lambda batch: net(batch).square().mean())
        ...     loss = step(torch.ones(2, 4))
        >>> torch.equal(loss, distil.parts["kl"])
        True

    Source:
        Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", https://arxiv.org/abs/1503.02531; features:
        Romero et al. 2015, "FitNets", https://arxiv.org/abs/1412.6550. Checked against loops that compute both logits.
    """
    settings = Distillation(
        teacher,
        student=student,
        temperature=temperature,
        alpha=alpha,
        head=head,
        teacher_head=teacher_head,
        features=features,
        feature_weight=feature_weight,
        mask=mask,
    )
    distiller = settings.distil_(model)
    try:
        yield distiller
    finally:
        distiller.undo()


class Distillation(Technique):
    """Mix the loss of ``training_step`` with the divergence from a teacher; see :func:`distil_into`.

    The teacher is loaded, and projections are created, right after ``configure_model``; all is undone at teardown,
    except for projections. ``training_step`` returns its loss, or a dict with one, as always, and the parts of the
    mixed loss are logged at each step: ``distillation/own``, ``distillation/kl`` (with T²), ``distillation/features``.

    In a Fabric or bare loop, after ``apply(model, [distillation])``, wrap the step with
    ``step = distillation.distil(step)``, or use :func:`distil_into`.

    Args:
        teacher: as for :func:`distil_into`, like the other arguments. A path or a function, unlike a module, is loaded
            again in each run and each process, and released at its end.
        student: qualified name in the ``LightningModule``.
        temperature: T.
        alpha: α.
        head: the student's head.
        teacher_head: the teacher's head.
        features: hidden states to match.
        feature_weight: w.
        mask: maps a batch to the counted positions.

    Raises:
        TypeError, ValueError: settings out of range; in ``fit``: names or vocabularies that do not fit, manual
            optimization, or a teacher that is part of the model.

    Example:
        >>> teacher = nn.Linear(4, 3)
        >>> distillation = Distillation(teacher, temperature=4.0, alpha=0.9)

    Source:
        See :func:`distil_into`.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    surgery: ClassVar[Surgery | None] = Surgery.ARCHITECTURE
    ways_out: ClassVar[Mapping[str, str]] = {
        "features": "Use {'name in the student': 'name in the teacher'}, or a pair of that name and a module as value"
    }
    effect: ClassVar[str] = "a smaller model learns from a larger one, whose logits are never stored in full"
    when: ClassVar[str] = "there is a larger model with the same vocabulary to learn from"
    in_a_loop: ClassVar[str] = "with loss.distil_into(model, teacher) as distil: step = distil(step)"
    predicted: ClassVar[bool] = True

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "it reads the weight of the student's head outside of the head, where each rank holds one shard"
        return (Conflict(DeepSpeedStrategy, why, "Use stage=2 or less", lambda _, zero: zero.zero_stage_3),)

    def __init__(
        self,
        teacher: AnyTeacher,
        *,
        student: str | None = None,
        temperature: PositiveFloat = 2.0,
        alpha: Share = 0.5,
        head: str | None = None,
        teacher_head: str | None = None,
        features: Features | None = None,
        feature_weight: NonNegativeFloat = 1.0,
        mask: Mask | None = None,
    ) -> None:
        self.teacher, self.student, self.temperature, self.alpha = teacher, student, temperature, alpha
        self.head, self.teacher_head, self.feature_weight, self.mask = head, teacher_head, feature_weight, mask
        self.features = _as_pairs(features or {})
        self._stage: str | None = None
        self._distiller: Distiller | None = None

    def distil_(self, model: nn.Module) -> Distiller:
        """Connect ``model`` and the teacher; the result wraps steps, and has a method ``undo``."""
        student = student_of(model, self.student)
        if distiller_on(student) is not None:
            why = "a step has one teacher"
            raise ValueError(explain(f"{type(student).__name__} has a teacher already", why, "Undo the first one"))
        _add_projections_(model, self.features)
        teacher = load_teacher(self.teacher, student)
        if isinstance(teacher, L.LightningModule):
            same = self.student if self.student in dict(teacher.named_modules()) else None
            teacher = student_of(teacher, same)
        return Distiller(model, student, teacher, self)

    def distil(self, step: Callable[..., object]) -> DistilledStep:
        """Wrap a step so that its loss is mixed, after ``apply`` has connected model and teacher."""
        if self._distiller is None:
            why = "no model has been given yet"
            raise RuntimeError(explain("distil(step)", why, "Call ft.apply(model, [distillation]) first"))
        return self._distiller(step)

    def predict(self, step: PredictedStep) -> None:
        step.leave_out(self, "the teacher and its loss are not included, so this is a lower bound")

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo:
        stage = self._stage = getattr(trainer.state.fn, "value", None)
        if stage == "fit" and not pl_module.automatic_optimization:
            self._stage = None  # an attach that raises is not undone
            why = "the loss that training_step returns is not the one that is trained on"
            way_out = "Use `with distil_into(self, teacher) as distil` and distil(step) inside your training_step"
            raise ValueError(explain("Distillation with automatic_optimization=False", why, way_out))
        return functools.partial(setattr, self, "_stage", None)

    def apply(self, model: nn.Module) -> Undo | None:
        # Create only what the training run's checkpoint contains.
        if self._stage not in (None, "fit"):
            _add_projections_(model, self.features)
            return None
        there = distiller_on(student_of(model, self.student))
        if there is not None:  # applying twice has no further effect
            self._distiller = there
            return self._forget
        with ExitStack() as stack:
            self._distiller = distiller = self.distil_(model)
            stack.callback(self._forget)
            stack.callback(distiller.undo)
            if self._stage == "fit":
                assert isinstance(model, L.LightningModule)
                stack.callback(patch(model, "training_step", _LoggedStep(distiller, model.training_step)))
            return stack.pop_all().close

    def took_hold(self, model: nn.Module) -> str:
        teachers = [type(held.distiller.teacher.module).__name__ for held in wrappers_in(model, Student)]
        if not teachers:
            return ""
        return f"learns from a {list_some(teachers)}"

    def _forget(self) -> None:
        self._distiller = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_distiller": None, "_stage": None}


class _LoggedStep(DistilledStep):
    """``training_step`` that also logs the parts of its loss, per step only, so that the batch size is not needed."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        output = super().__call__(*args, **kwargs)
        module: Any = self.distiller.model
        if output is not None and trainer_of(module) is not None:
            for name, value in self.distiller.parts.items():
                module.log(f"distillation/{name}", value, on_step=True, on_epoch=False)
        return output


def _as_pairs(features: Features) -> Pairs:
    pairs: Pairs = {}
    for name, to in features.items():
        pairs[name] = (to, None) if isinstance(to, str) else (to[0], to[1])
    return pairs


def distiller_on(student: nn.Module) -> Distiller | None:
    """Return the distiller of this student, if there is one."""
    for held in wrappers_on(student, Student):
        return held.distiller
    return None


def _add_projections_(model: nn.Module, features: Pairs) -> None:
    given = {projection_key(name): module for name, (_, module) in features.items() if module is not None}
    if not given:
        return
    if isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        why = "the projection would become one of its layers"
        way_out = "Wrap the model in a module of your own"
        raise ValueError(explain(f"features with a projection in a {type(model).__name__}", why, way_out))
    held = model._modules.get(PROJECTIONS)
    if not isinstance(held, nn.ModuleDict):
        held = nn.ModuleDict()
        model.add_module(PROJECTIONS, held)
    first = next(model.parameters(), None)
    for key, module in given.items():
        if key not in held:  # a projection of an earlier run is already trained
            # A copy, so that the given module starts untrained with the next model.
            held[key] = copy.deepcopy(module).to(None if first is None else first.device)
