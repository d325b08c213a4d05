"""A student and its teacher, and training steps that learn from both."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_fasttrain.core.batch import loss_in, with_loss
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import find_module
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, wrapper_on
from lightning_fasttrain.loss._teacher import Teacher
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
)

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
