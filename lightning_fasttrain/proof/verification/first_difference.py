"""Find where two runs of the same steps first differ: in a module's output or gradient, or in a weight's."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, resolve_name
from torch.utils._pytree import tree_leaves

from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.core.state.values import to_float64
from lightning_fasttrain.proof.verification.digest import draw_signs, take_digest
from lightning_fasttrain.proof.verification.short_run import Steps, run_steps, seed_step
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.trial.deterministic_step import DeterministicStep

_SHOWN = 16  # entries of a row that are kept, besides a random sum over all of them
_TIMES, _ROUNDINGS = 16.0, 32 * torch.finfo(torch.float32).eps  # as in the comparison that failed
_WEIGHT_TIMES = 64.0  # Adam flips the sign of values that are zero up to rounding, in some runs and not in others
# The first two describe modules, the others weights; in the order of a step.
_OUTPUT, _GRADIENT, _SUM, _WEIGHT = "returns", "receives the gradient", "has the gradient", "has the value"
_PHASES = (_OUTPUT, _GRADIENT, _SUM, _WEIGHT)


@dataclass(frozen=True)
class FirstDifference:
    """The first value that differs by more than the model's own rounding.

    Attributes:
        step: the optimizer step, counted from 1.
        name: name of the module or the weight; or of an operator, and of the module that called it.
        what: the quantity that differs.
        value, plain: an entry with the techniques and without them.
        rounding: how far rounding moves such an entry.
        row: row of the batch; None for a weight.
        summed: whether the values are sums of many entries under random signs, since no sampled entry differs.
    """

    step: int
    name: str
    what: str
    value: float
    plain: float
    rounding: float
    row: int | None
    summed: bool = False

    def __str__(self) -> str:
        values = f"{self.value:.8g}"
        if self.summed:
            values = f"summed under random signs, {values}"
        if self.row is not None:
            values += f" in row {self.row} of the batch"
        values += f" instead of {self.plain:.8g}"
        rounding = f"rounding moves such values by {self.rounding:.0e}"
        return f"First difference in step {self.step}: {self.name} {self.what} {values}; {rounding}."


# Key of a recorded value: the step, the quantity, the module or weight, and its width, since an operator may be called
# on several tensors.
_Key = tuple[int, str, str, int]


@dataclass
class _Values:
    """Recorded values, in the order of recording.

    Attributes:
        calls: rows of each call; for each row some entries and then random sums of all its entries.
        shown: how many of the columns are entries.
    """

    calls: dict[_Key, list[Tensor]] = field(default_factory=dict)
    shown: dict[_Key, int] = field(default_factory=dict)

    def note(self, step: int, what: str, name: str, entries: Tensor, sums: Tensor) -> None:
        key = (step, what, name, entries.shape[1])
        self.calls.setdefault(key, []).append(torch.cat([to_float64(entries), to_float64(sums)], dim=1).cpu())
        self.shown[key] = entries.shape[1]


_Side = tuple[Steps, Sequence[Technique]]


def find_first_difference(
    usual: _Side, other: _Side, window: int, nudge: Callable[[nn.Module], object], operators: bool = False
) -> FirstDifference | None:
    """Run both sides with hooks on each module, and the reference with rounding noise too, and compare call by call.

    Args:
        usual: the steps, and the techniques that act in them.
        other: the same for the other side, where each step may consist of several micro-batches.
        window: number of these micro-batches.
        nudge: moves weights by one rounding.
        operators: whether to compare each call of a torch function too, not only modules.

    Returns:
        The first difference; None if all values that both sides have are the same up to rounding.
    """
    plain = _run(*usual, _Watcher(1, None, operators))
    rounded = _run(*usual, _Watcher(1, nudge, operators))
    others = _run(*other, _Watcher(window, None, operators))
    for key, calls in plain.calls.items():
        theirs = _concatenate(others.calls.get(key, []), calls)
        noisy = _concatenate(rounded.calls.get(key, []), calls)
        if theirs is None or noisy is None:
            continue
        found = _compare(key, plain.shown[key], torch.cat(calls), theirs, noisy)
        if found is not None:
            return found
    return None


def _concatenate(parts: list[Tensor], calls: list[Tensor]) -> Tensor | None:
    """Concatenate the rows of each call, which may be split over micro-batches; None if the calls do not match."""
    times = len(parts) // max(len(calls), 1)
    if times * len(calls) != len(parts) or times == 0:
        return None
    joined = torch.cat([part for place in range(len(calls)) for part in parts[place :: len(calls)]])
    return joined if joined.shape == torch.cat(calls).shape else None


def _compare(key: _Key, shown: int, usual: Tensor, theirs: Tensor, noisy: Tensor) -> FirstDifference | None:
    step, what, name, _ = key
    apart, noise, size = float((theirs - usual).norm()), float((noisy - usual).norm()), float(usual.norm())
    times = _WEIGHT_TIMES if what == _WEIGHT else _TIMES
    if apart <= times * noise + _ROUNDINGS * size:  # NaN is not close
        return None
    summed = bool((theirs == usual)[:, :shown].all())  # no sampled entry differs
    columns = slice(shown, None) if summed else slice(shown)
    usual, theirs, noisy = usual[:, columns], theirs[:, columns], noisy[:, columns]
    row, column = divmod(int((theirs - usual).abs().nan_to_num(torch.inf).argmax()), usual.shape[1])
    values = float(theirs[row, column]), float(usual[row, column]), float((noisy - usual).abs().max())
    return FirstDifference(step, name, what, *values, row if what in (_OUTPUT, _GRADIENT) else None, summed)


def _run(of: Steps, techniques: Sequence[Technique], watcher: "_Watcher") -> _Values:
    run_steps(replace(of, validation=None), techniques, watcher)
    return watcher.in_order()


class _Watcher(L.Callback):
    """Hooks on the output and the gradient of each module; and on those of each operator, if requested."""

    def __init__(self, window: int, change: Callable[[nn.Module], object] | None, operators: bool) -> None:
        self.window, self.change, self.step = window, change, 1
        self.operators = _Operators(self._note) if operators else None
        self.values = _Values()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.change is not None:
            self.change(pl_module)
        for name, module in pl_module.named_modules():
            if module is not pl_module:
                self._watch(module, f"{name} ({type(module).__name__})")
        if self.operators is not None:
            patch(pl_module, "training_step", self.operators.watch_step(pl_module.training_step))

    def _watch(self, module: nn.Module, name: str) -> None:
        def leave(module: nn.Module, args: object, output: object) -> None:
            if self.operators is not None:
                self.operators.callers.pop()
            self._note(name, output)

        if self.operators is not None:
            callers = self.operators.callers
            module.register_forward_pre_hook(lambda *_: callers.append(name))
        module.register_forward_hook(leave)

    def _note(self, name: str, output: object) -> None:
        if not _is_part_of_the_step():
            return
        # Operations that only read a value are not part of the step.
        with torch._C.DisableTorchFunction():
            for tensor in _floats(output):
                self.values.note(self.step, _OUTPUT, name, *self._describe_rows(tensor))
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._note_gradient, self.step, name))
                # The first is enough to locate a difference.
                break

    def _note_gradient(self, step: int, name: str, gradient: Tensor) -> None:
        if _is_part_of_the_step(in_backward=True):
            self.values.note(step, _GRADIENT, name, *self._describe_rows(gradient))

    def _describe_rows(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return some entries of each row, [rows, entries], and a random sum of all its entries, [rows, 1]."""
        tensor = torch.atleast_1d(tensor.detach())
        rows = tensor.reshape(len(tensor), -1)
        width, shown = rows.shape[1], min(_SHOWN, rows.shape[1])
        places = torch.arange(shown, device=rows.device) * (width - 1) // max(shown - 1, 1)
        wide = rows if rows.element_size() >= 4 else rows.float()
        return rows[:, places], (wide @ draw_signs((width,), width).to(wide))[:, None]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self.step = batch_idx // self.window + 1
        if batch_idx % self.window == 0:
            seed_step(self.step - 1)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        for name, parameter in pl_module.named_parameters():
            if parameter.grad is not None:
                self._note_weight(_SUM, name, parameter.grad)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.window == 0:
            for name, parameter in pl_module.named_parameters():
                if parameter.requires_grad:
                    self._note_weight(_WEIGHT, name, parameter)

    def _note_weight(self, what: str, name: str, tensor: Tensor) -> None:
        digest = take_digest(tensor)
        self.values.note(self.step, what, name, digest.entries[None], digest.sums[None])

    def in_order(self) -> _Values:
        """Return the values step by step: outputs first, then gradients, then weights."""
        ordered = sorted(self.values.calls.items(), key=lambda item: (item[0][0], _PHASES.index(item[0][1])))
        return _Values(dict(ordered), self.values.shown)


class _Operators(TorchFunctionMode):
    """Reports each call of a torch function in a training step, and the module in which it was called."""

    def __init__(self, note: Callable[[str, Any], None]) -> None:
        super().__init__()
        self.note = note
        self.callers: list[str] = []

    def watch_step(self, training_step: Callable[..., object]) -> Callable[..., Any]:
        @wraps(training_step)
        def watched(*args: object, **kwargs: object) -> Any:
            # A step that an error has ended leaves its callers behind.
            self.callers[:] = ["training_step"]
            with self:
                return training_step(*args, **kwargs)

        return watched

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = resolve_name(func) or str(func)
        # Functions named __get__ read an attribute, such as a gradient or a shape.
        if "__get__" not in name:
            self.note(f"{name} in {self.callers[-1]}", output)
        return output


def _is_part_of_the_step(in_backward: bool = False) -> bool:
    """Whether the current call belongs to the step, rather than to a trial run or a recomputation in the backward."""
    if not in_backward and torch._C._current_graph_task_id() != -1:
        return False
    return not any(isinstance(mode, DeterministicStep) for mode in _get_current_function_mode_stack())


def _floats(output: object) -> Iterator[Tensor]:
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield leaf
