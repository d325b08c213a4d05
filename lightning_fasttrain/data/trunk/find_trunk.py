"""Find the trunk of a model: the submodules in which the samples of a batch do not depend on one another."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain._blocks import is_wanted, keep_outermost, list_kinds
from lightning_fasttrain._messages import explain, list_some
from lightning_fasttrain._surgery import Undo
from lightning_fasttrain.data.normalizer.classify_terms import gradient_floor
from lightning_fasttrain.data.normalizer.find_split import CannotSplitError, error_limit
from lightning_fasttrain.data.normalizer.trial.runs import Split
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, Trial, run_again, try_split
from lightning_fasttrain.data.trunk.micro_batch_forward import (
    MicroBatchedForward,
    find_batch_size,
    list_batch_statistics,
    refuse_batch_statistics,
)

Through = str | type[nn.Module] | Sequence[str | type[nn.Module]]
# Layers that save no more than their input, which has to be kept anyway.
_SINGLE_LAYERS = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
)


_LEAST_SHARE = 0.5  # of the trained parameters: layers beside BatchNorm, say, are no trunk


@dataclass
class Trunk:
    """Submodules that run in micro-batches while the rest of a step sees the whole batch.

    Attributes:
        modules: qualified name → module.
        shared: for each name, the arguments and outputs whose first axis is not the batch.
    """

    modules: dict[str, nn.Module]
    shared: dict[str, frozenset[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return list_some([repr(name or "the module itself") for name in self.modules])

    def install(self, n: int) -> tuple[list[MicroBatchedForward], Undo]:
        """Run these submodules in ``n`` micro-batches until the returned function is called."""
        with ExitStack() as stack:
            wrappers: list[MicroBatchedForward] = []
            for name, module in self.modules.items():
                wrapper = MicroBatchedForward(module, n)
                wrapper.shared = self.shared.get(name, frozenset())
                stack.callback(wrapper.install())
                wrappers.append(wrapper)
            return wrappers, stack.pop_all().close


def name_trunk(models: Sequence[nn.Module], through: Through) -> Trunk:
    """The trunk that a user named.

    Raises:
        ValueError: nothing has that name or class; the message lists the candidates. Or BatchNorm is in it.
    """
    wanted = [through] if isinstance(through, str | type) else list(through)
    found: dict[str, nn.Module] = {}
    for model in models:
        for name, module in model.named_modules():
            if any(is_wanted(name, module, one) for one in wanted):
                found.setdefault(name, module)
    outermost = keep_outermost(found)
    if not outermost:
        kinds = list_kinds(models[0]) if models else "none, since the step reaches no module"
        way_out = "Give the qualified name of a submodule, a pattern or a class"
        raise ValueError(explain(f"through={through!r} matches nothing", f"candidates are {kinds}", way_out))
    for module in outermost.values():
        refuse_batch_statistics(module)
    return Trunk(outermost)


def find_trunk(stage: Stage, trial: Trial) -> Trunk | str:
    """The largest submodules in which samples do not depend on one another; or why there are none.

    Modules that were called with the batch as the first axis of what goes in and of what comes out are taken from the
    outside to the inside, and kept if the step with them in micro-batches has the loss and gradient of the unsplit one.
    """
    unsplit = _record_calls(stage, trial, None)
    piece = _record_calls(stage, trial, 1)
    rows = trial.sample.size, _rows_of_piece(trial)
    trunk = Trunk({})
    waiting = _name_models(stage.models)
    statistics: list[str] = []
    while waiting:
        name, module = waiting.pop(0)
        shared = _read_shared(unsplit.get(module, []), piece.get(module, []), rows)
        if shared is not None and _is_worth_it(module):
            statistics += [f"{name}.{layer}".strip(".") for layer in list_batch_statistics(module)]
            added = Trunk({**trunk.modules, name: module}, {**trunk.shared, name: shared})
            if not any(list_batch_statistics(module)) and is_exact(stage, trial, added):
                trunk = added
                continue
        waiting += [(f"{name}.{child}".strip("."), inner) for child, inner in module.named_children()]
    if trunk.modules and _share(trunk, stage.models) >= (_LEAST_SHARE if statistics else 0):
        return trunk
    if statistics:
        layers = list_some([repr(layer) for layer in statistics])
        return f"BatchNorm in training mode takes the statistics of the batch ({layers}): freeze it with .eval()"
    return "no submodule with batch-first inputs and outputs was found in which samples do not depend on one another"


def _is_worth_it(module: nn.Module) -> bool:
    trained = any(parameter.requires_grad for parameter in module.parameters())
    return trained and not isinstance(module, _SINGLE_LAYERS)


def _share(trunk: Trunk, models: Sequence[nn.Module]) -> float:
    """How many of the trained parameters are in the trunk."""
    inside = {p for module in trunk.modules.values() for p in module.parameters() if p.requires_grad}
    every = {p for model in models for p in model.parameters() if p.requires_grad}
    return _count_elements(inside) / max(1, _count_elements(every))


def _count_elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _name_models(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    if len(models) == 1:
        return [("", models[0])]
    return [(f"{type(model).__name__}{place}", model) for place, model in enumerate(models)]


def refuse_dependent_samples(stage: Stage, samples: Iterator[Sample], trunk: Trunk) -> None:
    """Try a trunk that was named on a few samples, and note which of its tensors are not split.

    Raises:
        CannotSplitError: the gradient is not that of the unsplit samples.
    """
    trial = try_split(stage, samples) if stage.gradients else None
    if trial is None or trial.why_not or not trial.splits[0].parameters:
        return
    unsplit, piece = _record_calls(stage, trial, None), _record_calls(stage, trial, 1)
    rows = trial.sample.size, _rows_of_piece(trial)
    for name, module in trunk.modules.items():
        trunk.shared[name] = _read_shared(unsplit.get(module, []), piece.get(module, []), rows) or frozenset()
    if not is_exact(stage, trial, trunk):
        why = "its gradient is not that of the unsplit samples, so they depend on one another inside of it"
        raise CannotSplitError(f"through= names {trunk}, but {why}", trial)


def is_exact(stage: Stage, trial: Trial, trunk: Trunk) -> bool:
    """Whether the step has the loss and gradient of the unsplit one with this trunk in two micro-batches."""
    _, undo = trunk.install(2)
    try:
        run = run_again(stage, trial)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):  # whatever a user's model may raise
        return False
    finally:
        undo()
    whole = trial.splits[0].whole
    if not set(run.changed) <= set(whole.changed) or any(_holds(trunk, name) for name in whole.changed):
        return False
    split = Split([trial.sample.whole], whole, [run], trial.splits[0].parameters)
    return split.error([1.0], gradient_floor(trial)) <= error_limit(trial)


def _holds(trunk: Trunk, buffer: str) -> bool:
    """Whether a buffer that the step changes is in the trunk, where each micro-batch would change it."""
    return any(not name or buffer.startswith(f"{name}.") for name in trunk.modules)


def _rows_of_piece(trial: Trial) -> int:
    where = trial.sample.cuttings[0][1][1]
    return 0 if where is None else where.stop - where.start


@dataclass
class _Call:
    """The shapes of what went into a module and came out of it."""

    inputs: dict[str, torch.Size]
    outputs: dict[str, torch.Size]
    size: int


def _record_calls(stage: Stage, trial: Trial, piece: int | None) -> dict[nn.Module, list[_Call]]:
    """All calls of all modules in one run of the step."""
    calls: dict[nn.Module, list[_Call]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs, outputs = dict(_shapes_in((args, kwargs), "input")), dict(_shapes_in(output, "output"))
        calls.setdefault(module, []).append(_Call(inputs, outputs, find_batch_size((args, kwargs))))

    with _hooked(stage.models, note):
        run_again(stage, trial, piece)
    return calls


@contextmanager
def _hooked(models: Sequence[nn.Module], hook: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for module in {module: None for model in models for module in model.modules()}:
            handle = module.register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield


def _shapes_in(value: Any, path: str) -> Iterator[tuple[str, torch.Size]]:
    """The tensors in a value, by the paths that :class:`MicroBatchedForward` uses."""
    if isinstance(value, Tensor):
        yield path, value.shape
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _shapes_in(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _shapes_in(item, f"{path}[{place}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield from _shapes_in(getattr(value, one.name), f"{path}.{one.name}")


def _read_shared(unsplit: list[_Call], piece: list[_Call], rows: tuple[int, int]) -> frozenset[str] | None:
    """The tensors that are the same for all micro-batches; None where a call is not batch-first."""
    if not unsplit or len(unsplit) != len(piece) or not rows[1]:
        return None
    shared: set[str] = set()
    for one, other in zip(unsplit, piece, strict=True):
        if one.inputs.keys() != other.inputs.keys() or one.outputs.keys() != other.outputs.keys():
            return None
        grown = {path for path in one.inputs if _has_grown(one.inputs[path], other.inputs[path], rows)}
        if not grown or any(len(shape) == 0 for shape in one.outputs.values()):
            return None
        if not any(_has_grown(one.outputs[path], other.outputs[path], rows) for path in one.outputs):
            return None
        fixed = [path for path in one.inputs if path not in grown]
        fixed += [path for path in one.outputs if one.outputs[path] == other.outputs[path]]
        shared.update(fixed)
    return frozenset(shared)


def _has_grown(unsplit: torch.Size, piece: torch.Size, rows: tuple[int, int]) -> bool:
    """Whether the first axis follows the number of samples."""
    if not len(unsplit) or len(unsplit) != len(piece):
        return False
    return unsplit[0] * rows[1] == piece[0] * rows[0] and unsplit[0] != piece[0]
