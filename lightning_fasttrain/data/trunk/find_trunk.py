"""Find the trunk of a model: the submodules in which the samples of a batch do not depend on one another."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from lightning_fasttrain.core.distributed import from_all_ranks
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.modules.select import is_wanted, keep_outermost, list_kinds
from lightning_fasttrain.data.normalizer.find_split import CannotSplitError
from lightning_fasttrain.data.normalizer.trial.deterministic_step import list_batch_statistics
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, Trial, try_split
from lightning_fasttrain.data.trunk.micro_batch_forward import Trunk, refuse_batch_statistics
from lightning_fasttrain.data.trunk.try_trunk import FAILURES, TrialOnBatch, TrialOnOutputs, TrialOnSamples, TrunkTrial

Through = str | type[nn.Module] | Sequence[str | type[nn.Module]]
# Layers that save only their input, which has to be kept anyway.
_SINGLE_LAYERS = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
)
_LEAST_SHARE = 0.5  # of the trained parameters; a few layers beside BatchNorm, for example, are not enough


def name_trunk(models: Sequence[nn.Module], through: Through) -> Trunk:
    """Return the trunk that a user named.

    Raises:
        ValueError: no module has that name or class; the message lists the candidates. Or BatchNorm is in it.
    """
    wanted = [through] if isinstance(through, str | type) else list(through)
    found: dict[str, nn.Module] = {}
    for model in models:
        for name, module in model.named_modules():
            if any(is_wanted(name, module, one) for one in wanted):
                found.setdefault(name, module)
    outermost = keep_outermost(found)
    if not outermost:
        kinds = list_kinds(models[0]) if models else "none, since the step uses no module"
        way_out = "Give the qualified name of a submodule, a pattern or a class"
        raise ValueError(explain(f"through={through!r} matches nothing", f"candidates are {kinds}", way_out))
    for module in outermost.values():
        refuse_batch_statistics(module)
    return Trunk(outermost)


def find_trunk_of(stage: Stage, trial: Trial | None, batch: Any, n: int) -> Trunk | str:
    """Return the trunk found from trials of the step, or the reason why there is none."""
    try:
        tried = _try_modules(stage, trial, batch, n)
    except FAILURES as error:
        return f"the step also fails on the whole batch: {type(error).__name__} {error}"
    return "no samples could be tried" if tried is None else find_trunk(tried)


def _try_modules(stage: Stage, trial: Trial | None, batch: Any, n: int) -> TrunkTrial | None:
    """Prepare trials on a few samples, or on the whole batch where the step fails on these; None if neither works."""
    if not stage.gradients:
        shows = trial is not None and bool(trial.splits) and not trial.why_not
        return TrialOnOutputs(stage, trial) if all(from_all_ranks([shows])) and trial is not None else None
    if trial is not None and trial.splits and trial.parameters:
        return TrialOnSamples(stage, trial)
    return TrialOnBatch(stage, batch, n) if trial is not None and trial.failed else None


def find_trunk(tried: TrunkTrial) -> Trunk | str:
    """Return the largest submodules in which samples do not depend on one another, or why there are none.

    Modules whose inputs and outputs have the batch as their first axis are tried from the outermost to the innermost,
    and kept if the step with them in micro-batches has the loss and gradient of the unsplit one.
    """
    models = tried.stage.models
    trunk = Trunk({})
    waiting = _name_models(models)
    statistics: list[str] = []
    while waiting:
        name, module = waiting.pop(0)
        shared = tried.find_shared(module)
        if shared is not None and _is_worth_it(module):
            statistics += [f"{name}.{layer}".strip(".") for layer in list_batch_statistics(module)]
            added = Trunk({**trunk.modules, name: module}, {**trunk.shared, name: shared})
            if not any(list_batch_statistics(module)) and tried.is_exact(added):
                trunk = added
                continue
        waiting += [(f"{name}.{child}".strip("."), inner) for child, inner in module.named_children()]
    if trunk.modules and _share(trunk, models) >= (_LEAST_SHARE if statistics else 0):
        return trunk
    if statistics:
        layers = list_some([repr(layer) for layer in statistics])
        return f"BatchNorm in training mode uses the statistics of the batch ({layers}): freeze it with .eval()"
    return "no submodule with batch-first inputs and outputs was found in which samples do not depend on one another"


def _is_worth_it(module: nn.Module) -> bool:
    trained = any(parameter.requires_grad for parameter in module.parameters())
    return trained and not isinstance(module, _SINGLE_LAYERS)


def _share(trunk: Trunk, models: Sequence[nn.Module]) -> float:
    """Return the share of the trained parameters that the trunk holds."""
    inside = {p for module in trunk.modules.values() for p in module.parameters() if p.requires_grad}
    every = {p for model in models for p in model.parameters() if p.requires_grad}
    return _count_elements(inside) / max(1, _count_elements(every))


def _count_elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _name_models(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    if len(models) == 1:
        return [("", models[0])]
    return [(f"{type(model).__name__}{place}", model) for place, model in enumerate(models)]


def refuse_dependent_samples(stage: Stage, samples: Iterator[Sample], batch: Any, n: int, trunk: Trunk) -> None:
    """Try a named trunk, where possible, and note which of its tensors are not split.

    Raises:
        CannotSplitError: the gradient differs from that of the unsplit samples.
    """
    try:
        trial = try_split(stage, samples)
    except FAILURES:
        if stage.gradients:
            raise
        return  # with sharded parameters, the whole batch is not tried
    tried = _try_modules(stage, trial, batch, n)
    if tried is None or (stage.gradients and trial.why_not and not trial.failed):
        return  # the samples show nothing, as without targets
    for name, module in trunk.modules.items():
        shared = tried.find_shared(module)
        if shared is not None:
            trunk.shared[name] = shared
    if not tried.is_exact(trunk):
        why = "its gradient differs from that of the unsplit samples, so they depend on one another inside it"
        raise CannotSplitError(f"through= names {trunk}, but {why}")
