"""The teacher of a distillation, which runs beside the student and is not part of it."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.device import is_out_of_memory
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.select import find_module
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, patch
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.loss.chunked import autocast_dtype
from lightning_fasttrain.loss.deferred_logits import DeferredLogits
from lightning_fasttrain.loss.linear_kl_divergence import LogitsOf
from lightning_fasttrain.loss.loss_inputs import HEAD, Seen, Tap, feature_in, head_of, logits_of

AnyTeacher = nn.Module | str | os.PathLike[str] | Callable[[], nn.Module]


def load_teacher(teacher: AnyTeacher, student: nn.Module) -> nn.Module:
    """Load the teacher from a module, a path or a function, without drawing from the run's random state."""
    if isinstance(teacher, nn.Module):
        return teacher
    # Sharded strategies build the student on the meta device, where a teacher would never be materialized.
    with keep_random_state(), torch.device("cpu"):
        made = teacher() if callable(teacher) else _from_directory(Path(teacher), student)
    if not isinstance(made, nn.Module):
        why = "it is run"
        raise TypeError(explain(f"the function for the teacher returned {type(made).__name__}", why, "Return a module"))
    return made


def _from_directory(path: Path, student: nn.Module) -> nn.Module:
    if not path.is_dir():
        why = "no such directory"
        raise ValueError(explain(f"teacher={str(path)!r}", why, "Give a directory that save_pretrained wrote"))
    if not any(path.glob("*.safetensors")):
        why = "it contains no safetensors file, and pickles are not opened"
        raise ValueError(explain(f"teacher={str(path)!r}", why, "Save it with model.save_pretrained(directory)"))
    transformers = require("transformers", extra="finetune")
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # A model of the same task as the student's, for any architecture.
    for name in dir(transformers):
        if not name.startswith("AutoModel"):
            continue
        auto = getattr(transformers, name)
        models = getattr(auto, "_model_mapping", None)
        if models is None or type(config) not in models or not _lists(models, student):
            continue
        # Only tensors and settings are read from a directory: no pickle, no code, and nothing from the network.
        options = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False, "dtype": "auto"}
        return auto.from_pretrained(path, config=config, **options)
    why = f"no Hugging Face task supports both that class and a {type(config).__name__}"
    way_out = "Give the teacher as a module, or a function that creates it"
    raise ValueError(explain(f"teacher={str(path)!r} for {type(student).__name__}", why, way_out))


def _lists(models: Any, student: nn.Module) -> bool:
    kind: Any = type(getattr(student, "config", None))
    if kind not in models:
        return False
    listed = models[kind]
    if isinstance(listed, list):
        listed = tuple(listed)
    return isinstance(student, listed)


class _Deferring(WrappedForward):
    """The teacher's head, which need not compute its logits during a step."""

    module: nn.Linear

    def __init__(self, module: nn.Linear, seen: Seen) -> None:
        super().__init__(module)
        self.seen, self.on = seen, True

    def __call__(self, input: Tensor) -> Tensor | DeferredLogits:
        # Outside of run() it is an ordinary model. The compiler does not support deferred logits, and a loss of them
        # multiplies by the weight itself, so that must be a plain tensor.
        if (
            not (self.on and self.seen.open)
            or torch.compiler.is_compiling()
            or is_traceable_wrapper_subclass(self.module.weight)
        ):
            return self.inner(input)
        dtype = autocast_dtype(input.device) or input.dtype
        # A loss of the teacher's own, which Hugging Face's models compute from labels, is not used.
        return DeferredLogits(input, self.module.out_features, dtype, lambda *_, **__: input.new_zeros(()))


class Teacher:
    """A module that runs in eval mode, without a graph, on the student's device.

    Changes to it are undone: its device and its modes are restored.
    """

    def __init__(self, module: nn.Module, head: str | None, features: Iterable[str]) -> None:
        self.module, self.seen, self.undo_all = module, Seen(), ExitStack()
        self.head = head_of(module, head, "teacher_head")
        taps = [Tap(find_module(module, name, "features"), name, self.seen) for name in features]
        wants_logits = any(tap.module in (self.head, module) for tap in taps)  # a feature must be a tensor
        self.deferring: _Deferring | None = None
        if type(self.head) is nn.Linear and not wants_logits:
            self.deferring = _Deferring(self.head, self.seen)
        if self.deferring is not None:
            self.undo_all.callback(self.deferring.install())
            # Created after the line above, so that it is outermost and records the deferred logits.
            taps.append(Tap(self.deferring.module, HEAD, self.seen))
        for tap in taps:
            self.undo_all.callback(tap.install())
        for one in module.modules():
            # One by one, since train() would also switch modules that were in eval mode before.
            self.undo_all.callback(setattr, one, "training", one.training)
            config = getattr(one, "config", None)
            # The teacher's cached keys and values of every layer would be unused.
            if getattr(config, "use_cache", False) is True:
                self.undo_all.callback(patch(config, "use_cache", False))
        module.eval()
        tensors = [*module.parameters(), *module.buffers()]
        self.home = tensors[0].device if tensors else None
        self.dtype = next((x.dtype for x in tensors if x.is_floating_point()), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Teacher":
        return self  # it does not change, so copies of the student share it

    def undo(self) -> None:
        self.undo_all.close()
        if self.home is not None:
            self._move_to(self.home)

    def _move_to(self, device: torch.device) -> None:
        first = next(self.module.parameters(), None)
        if first is not None and first.device != device:
            self.module.to(device)

    def run(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], device: torch.device
    ) -> tuple[LogitsOf | None, dict[str, Tensor | None]]:
        """Return logits and features for these arguments of the student."""
        self._move_to(device)

        # The student may run in another precision, and without autocast layers accept only their own dtype.
        def fit(value: object) -> Any:
            if self.dtype is not None and isinstance(value, Tensor) and value.is_floating_point():
                return value.to(self.dtype)
            return value

        args, kwargs = tree_map(fit, (args, kwargs))
        with torch.no_grad(), self.seen.watch():
            output = self._output(args, kwargs)
            head = self.deferring and self.deferring.module
            # Remove the logits, so that only features remain.
            logits = logits_of(output, head, self.seen.at.pop(HEAD, None), autocast_dtype(device))
        features = {name: feature_in(out) for name, (_, out) in self.seen.at.items()}
        self.seen.clear()
        return None if logits is None else logits.detach(), features

    def _output(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        try:
            return self.module(*args, **kwargs)
        # Deferred logits raise the first two; code that expects a Tensor and gets something else raises the third.
        except (RuntimeError, AttributeError, TypeError) as error:
            if self.deferring is None or not self.deferring.on or is_out_of_memory(error):
                raise
            self.deferring.on = False
            # Raises again, unless missing values were the cause.
            output = self.module(*args, **kwargs)
            note_once(f"distillation: {type(self.module).__name__} uses its logits, so the teacher computes them")
            return output
