"""Knowledge distillation: a student learns from a teacher's predictions, not only from the labels."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, Protocol

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain.core.batch import loss_in, with_loss
from lightning_fasttrain.core.checks import NonNegativeFloat, PositiveFloat, Share, check_arguments
from lightning_fasttrain.core.host.lightning import trainer_of
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.modules.select import find_module
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    WrappedForward,
    patch,
    wrapper_on,
    wrappers_in,
    wrappers_on,
)
from lightning_fasttrain.loss.chunked import autocast_dtype
from lightning_fasttrain.loss.fused_loss_head import FusedHead
from lightning_fasttrain.loss.linear_kl_divergence import LogitsOf, divergence, refuse_other_classes
from lightning_fasttrain.loss.loss_inputs import (
    HEAD,
    PROJECTIONS,
    Seen,
    Tap,
    feature_in,
    head_of,
    logits_of,
    masks_in,
    of_feature,
    of_logits,
    student_of,
)
from lightning_fasttrain.loss.teacher import AnyTeacher, Teacher, load_teacher
from lightning_fasttrain.technique import Conflict, Exactness, Surgery, Technique
from lightning_fasttrain.technique.declarations import PredictedStep

Features = Mapping[str, str | tuple[str, nn.Module]]
Pairs = dict[str, tuple[str, nn.Module | None]]  # name in the student → name in the teacher, and the projection
Mask = Callable[[Any], Tensor]


class Settings(Protocol):
    """Settings of a distillation; see :func:`~lightning_fasttrain.loss.distil_into`."""

    temperature: float
    alpha: float
    head: str | None
    teacher_head: str | None
    features: Pairs
    feature_weight: float
    mask: Mask | None


class Distiller:
    """Wraps steps: ``step = distil(step)``.

    Attributes:
        parts: the last step's ``own`` loss, ``kl`` (with T²) and ``features``, detached, as far as they were computed.
    """

    def __init__(self, model: nn.Module, student: nn.Module, teacher: nn.Module, settings: Settings) -> None:
        _refuse_a_trained_teacher(model, teacher)
        head, teacher_head = settings.head, settings.teacher_head
        self.model, self.student, self.mask, self.alpha = model, student, settings.mask, settings.alpha
        self.temperature, self.feature_weight = settings.temperature, settings.feature_weight
        # name in the student → name in the teacher, and whether the model has a projection, its own copy
        self.pairs = {name: (to, module is not None) for name, (to, module) in settings.features.items()}
        self.head = head_of(student, head, "head")
        if teacher_head is None and head in dict(teacher.named_modules()):
            teacher_head = head
        modules = {name: find_module(student, name, "features") for name in self.pairs}
        # From the class, since a wrapper on the instance has no argument names.
        self.names = list(inspect.signature(type(student).forward).parameters)[1:]
        self.listening, self.seen = False, Seen()
        self.calls: list[_Call] = []
        self.parts: dict[str, Tensor] = {}
        with ExitStack() as undo:
            self.teacher = Teacher(teacher, teacher_head, [name for name, _ in self.pairs.values()])
            undo.callback(self.teacher.undo)
            heads = self.head, self.teacher.head
            if self.alpha > 0 and isinstance(heads[0], nn.Linear) and isinstance(heads[1], nn.Linear):
                refuse_other_classes(heads[0].out_features, heads[1].out_features)
            for name, module in modules.items():
                undo.callback(Tap(module, name, self.seen).install())
            # Last, so outside of a tap on the student itself, which only records while this wrapper runs it.
            undo.callback(Student(student, self).install())
            self.undo_all = undo.pop_all()

    def undo(self) -> None:
        self.undo_all.close()

    def __getstate__(self) -> dict[str, Any]:  # undoing a copy must not change the original
        return {**self.__dict__, "undo_all": ExitStack(), "calls": [], "listening": False, "parts": {}}

    def __call__(self, step: Callable[..., object]) -> "DistilledStep":
        return DistilledStep(self, step)

    def run_student(
        self, forward: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> Any:
        """Run the student's forward inside a step, after the teacher's, while no activations are in memory."""
        device = next((p.device for p in self.student.parameters()), torch.device("cpu"))
        call = _Call({**dict(zip(self.names, args, strict=False)), **kwargs}, autocast_dtype(device))
        call.logits, call.features = self.teacher.run(args, kwargs, device)
        with self.seen.watch(), self.seen.hook(self.head, HEAD):
            call.output = forward(*args, **kwargs)
        self.calls.append(call)
        return call.output

    def mix(self, own: Tensor, batch: object) -> Tensor:
        """Return the mixed loss of a step in which the student was called."""
        if len(self.calls) != 1:
            what = f"the step called {type(self.student).__name__} {len(self.calls)} times with gradients"
            way_out = "Use student= to name the module whose output is compared, and call it once"
            raise RuntimeError(explain(what, "the teacher is compared with one call a step", way_out))
        call = self.calls[0]
        # A list, since the logits and each feature start at its first element.
        masks = list(masks_in(batch, call.arguments, self.student)) if self.mask is None else [self.mask(batch)]
        loss = (1 - self.alpha) * own
        self.parts = {"own": own.detach()}
        if self.alpha > 0:
            kl = self._divergence(call, masks)
            loss, self.parts["kl"] = loss + self.alpha * kl, kl.detach()
        elif not self.pairs:  # nothing is learned, but the divergence is reported
            with torch.no_grad():
                self.parts["kl"] = self._divergence(call, masks)
        if self.pairs:
            total = torch.stack([self._distance(name, call, masks) for name in self.pairs]).sum()
            loss, self.parts["features"] = loss + self.feature_weight * total, total.detach()
        return loss

    def _divergence(self, call: "_Call", masks: list[Tensor]) -> Tensor:
        student = logits_of(call.output, self._linear_head(), self.seen.at.get(HEAD), call.autocast)
        teacher = call.logits
        if student is None or teacher is None:
            whose, module = ("student", self.student) if student is None else ("teacher", self.teacher.module)
            why = "they must be its output: itself, its 'logits', or the first of a tuple"
            way_out = "Use head= to name the layer that computes them, or use alpha=0 and features="
            raise TypeError(explain(f"{type(module).__name__}, the {whose}, returned no logits", why, way_out))
        shape = torch.Size((*student.hidden.shape[:-1], student.classes))
        mask, classes_second = of_logits(masks, shape)
        if self.mask is not None and mask is None:
            what = f"mask= returned {tuple(masks[0].shape)} for logits {tuple(shape)}"
            raise ValueError(explain(what, "expected one boolean per position", "Return a mask of that shape"))
        if classes_second and student.weight is teacher.weight is None:
            student, teacher = (one._replace(hidden=one.hidden.movedim(1, -1)) for one in (student, teacher))
        return divergence(student, teacher, temperature=self.temperature, mask=mask)

    def _linear_head(self) -> nn.Module | None:
        head = self.head
        if head is None:  # possibly one that was fused by name
            fused = [module for module in self.student.modules() if wrapper_on(module, FusedHead)]
            if len(fused) == 1:
                head = fused[0]
        # bitsandbytes' layers are subclasses of nn.Linear, torchao's and sharded weights are subclasses of Tensor.
        if type(head) is nn.Linear and not is_traceable_wrapper_subclass(head.weight):
            return head
        return None

    def _distance(self, name: str, call: "_Call", masks: list[Tensor]) -> Tensor:
        to, is_projected = self.pairs[name]
        ours, theirs = feature_in(self.seen.at.get(name, (None, None))[1]), call.features.get(to)
        if ours is None or theirs is None:
            why = "it was not called by its model, or its first output is not a tensor"
            way_out = "Name a layer that returns its hidden states"
            raise TypeError(explain(f"features: '{name if ours is None else to}' gave no tensor", why, way_out))
        mask = of_feature(masks, ours.shape)
        if is_projected:
            # The model's copy, which its optimizer trains; the module in `features` stays unchanged.
            projection = self.model.get_submodule(f"{PROJECTIONS}.{projection_key(name)}")
            dtype = next((p.dtype for p in projection.parameters()), ours.dtype)
            # Outside autocast, layers accept only their own dtype.
            ours = projection(ours.to(dtype))
        if ours.shape != theirs.shape:
            wide = f"nn.Linear({ours.shape[-1]}, {theirs.shape[-1]})"
            what = f"features: '{name}' {tuple(ours.shape)} and the teacher's '{to}' {tuple(theirs.shape)}"
            way_out = f"Give a module that maps one onto the other, which is trained: {{'{name}': ('{to}', {wide})}}"
            raise ValueError(explain(what, "hidden states are compared element by element", way_out))
        # The square of 256 exceeds float16, and bfloat16 keeps three digits of a difference.
        wide_enough = torch.promote_types(ours.dtype, torch.float32)
        distance = (ours.to(wide_enough) - theirs.to(wide_enough)).square()
        if mask is None:
            return distance.mean()
        distance = distance.flatten(mask.ndim).mean(dim=-1)
        # Not a product with the mask: NaN · 0 is NaN.
        return torch.where(mask, distance, 0).sum() / mask.sum().clamp(min=1)  # a micro-batch may have none


class _Call:
    """One call of the student, and the teacher's output for it."""

    output: Any
    logits: LogitsOf | None
    features: dict[str, Tensor | None]

    def __init__(self, arguments: Mapping[str, object], autocast: torch.dtype | None) -> None:
        self.arguments, self.autocast = arguments, autocast


class Student(WrappedForward):
    """The student's forward: inside a step, with gradients, it also runs the teacher."""

    def __init__(self, module: nn.Module, distiller: Distiller) -> None:
        super().__init__(module)
        self.distiller = distiller

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.distiller.listening and torch.is_grad_enabled():
            return self.distiller.run_student(self.inner, args, kwargs)
        return self.inner(*args, **kwargs)


class DistilledStep:
    """A step whose loss is mixed with the divergence from the teacher.

    An object rather than a closure, so that a copy of a model with this step trains the copy and not the original.
    """

    def __init__(self, distiller: Distiller, step: Callable[..., object]) -> None:
        # inspect reads the signature from this name.
        self.distiller, self.__wrapped__ = distiller, step

    def __call__(self, *args: object, **kwargs: object) -> Any:
        distiller = self.distiller
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        distiller.listening = True
        try:
            output = self.__wrapped__(*args, **kwargs)
            # A call of the student by mask= does not count.
            distiller.listening = False
            if output is None:  # the step is skipped
                return None
            own = loss_in(output, "its loss is mixed with the teacher's, but it holds no loss tensor")
            loss = distiller.mix(own, next(iter((*args, *kwargs.values())), None))
        finally:
            distiller.listening = False
            distiller.calls.clear()
            distiller.seen.clear()  # releases the graph
        return with_loss(output, loss)


def projection_key(name: str) -> str:
    """Return the name of a feature's projection among the model's modules, without dots."""
    return name.replace(".", "/") or "output"


def _refuse_a_trained_teacher(model: nn.Module, teacher: nn.Module) -> None:
    trained = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    shared = [trained[parameter] for parameter in teacher.parameters() if parameter in trained]
    if shared or teacher in model.modules():
        what = f"the teacher, a {type(teacher).__name__}, is part of the model"
        if shared:
            what += f": they share '{shared[0]}'"
        why = "it would change during training, and be part of checkpoints, the optimizer and DDP"
        way_out = "Pass it to Distillation only, not to the module; for self-distillation, use copy.deepcopy(model)"
        raise ValueError(explain(what, why, way_out))


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
    2. the batch's ``labels`` or ``targets``, as :func:`~lightning_fasttrain.micro_batching.count_targets` finds them;
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

    def describe_effect(self, model: nn.Module) -> str:
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
