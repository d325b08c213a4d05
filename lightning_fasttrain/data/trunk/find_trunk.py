"""Find the trunk of a model: the submodules in which the samples of a batch do not depend on one another."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from lightning_fasttrain.core.distributed import from_all_ranks
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import as_list, is_wanted, keep_outermost, list_kinds
from lightning_fasttrain.data.normalizer.find_split import CannotSplitError
from lightning_fasttrain.data.normalizer.trial.deterministic_step import list_batch_statistics
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, Trial, try_split
from lightning_fasttrain.data.trunk.micro_batch_forward import Trunk, refuse_batch_statistics
from lightning_fasttrain.data.trunk.try_trunk import FAILURES, TrunkTrial

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


def name_trunk(stage: Stage, samples: Iterator[Sample], batch: object, n: int, through: Through) -> Trunk:
    """Return the trunk that a user named, after trying it where that is possible.

    Args:
        stage: where the step runs.
        samples: a few samples of the batch.
        batch: the batch, which is tried as a whole where the step fails on a few samples.
        n: its number of micro-batches.
        through: a name, a class, or several of these.

    Raises:
        ValueError: no module has that name or class; the message lists the candidates. Or BatchNorm is in it.
        CannotSplitError: the gradient differs from that of the unsplit samples.
    """
    trunk = _select_trunk(stage.models, through)
    try:
        trial = try_split(stage, samples)
    except FAILURES:
        if stage.gradients:
            raise
        return trunk  # with sharded parameters, the whole batch is not tried
    tried = _try_modules(stage, trial, batch, n)
    if tried is None or (stage.gradients and trial.why_not and not trial.failed):
        return trunk  # the samples show nothing, as without targets
    for name, module in trunk.modules.items():
        shared = tried.find_shared(module)
        if shared is not None:
            trunk.shared[name] = shared
    if not tried.is_exact(trunk):
        why = "its gradient differs from that of the unsplit samples, so they depend on one another inside it"
        raise CannotSplitError(f"through= names {trunk}, but {why}")
    return trunk


def _select_trunk(models: Sequence[nn.Module], through: Through) -> Trunk:
    wanted = as_list(through)
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


def find_trunk(stage: Stage, trial: Trial | None, batch: object, n: int) -> Trunk | str:
    """Return the largest submodules in which samples do not depend on one another, or why there are none.

    Modules whose inputs and outputs have the batch as their first axis are tried from the outermost to the innermost,
    and kept if the step with them in micro-batches has the loss and gradient of the unsplit one.

    Args:
        stage: where the step runs.
        trial: a trial of the step on a few samples of the batch, if there is one.
        batch: the batch, which is tried as a whole where the step fails on a few samples.
        n: its number of micro-batches.
    """
    try:
        tried = _try_modules(stage, trial, batch, n)
    except FAILURES as error:
        return f"the step also fails on the whole batch: {type(error).__name__} {error}"
    if tried is None:
        return "no samples could be tried"
    trunk, has_statistics = _find_independent(stage.models, tried)
    is_large = _count_trained(trunk.modules.values()) >= _LEAST_SHARE * _count_trained(stage.models)
    if trunk.modules and (is_large or not has_statistics):
        return trunk
    if has_statistics:
        return "each submodule that could run in micro-batches contains BatchNorm: freeze it with .eval()"
    return "no submodule with batch-first inputs and outputs was found in which samples do not depend on one another"


def _try_modules(stage: Stage, trial: Trial | None, batch: object, n: int) -> TrunkTrial | None:
    """Prepare trials on a few samples, or on the whole batch where the step fails on these; None if neither works."""
    shows = trial is not None and bool(trial.splits)
    if not stage.gradients:
        shows = all(from_all_ranks([shows and trial is not None and not trial.why_not]))
    if trial is not None and shows and (trial.parameters or not stage.gradients):
        return TrunkTrial.on_samples(stage, trial)
    is_failed = stage.gradients and trial is not None and trial.failed
    if is_failed:
        return TrunkTrial.on_batch(stage, batch, n)
    return None


def _find_independent(models: Sequence[nn.Module], tried: TrunkTrial) -> tuple[Trunk, bool]:
    """Return the outermost modules without dependent samples, and whether others contain BatchNorm."""
    trunk = Trunk({})
    waiting: list[tuple[str, nn.Module]] = []
    for place, model in enumerate(models):
        name = f"{type(model).__name__}{place}"
        waiting.append((name if len(models) > 1 else "", model))
    has_statistics = False
    while waiting:
        name, module = waiting.pop(0)
        shared = tried.find_shared(module)
        if shared is not None and _count_trained([module]) and not isinstance(module, _SINGLE_LAYERS):
            mixes = any(list_batch_statistics(module))
            added = Trunk({**trunk.modules, name: module}, {**trunk.shared, name: shared})
            if not mixes and tried.is_exact(added):
                trunk = added
                continue
            has_statistics |= mixes
        waiting += [(f"{name}.{child}".strip("."), inner) for child, inner in module.named_children()]
    return trunk, has_statistics


def _count_trained(modules: Iterable[nn.Module]) -> int:
    """Return the number of elements of the trained parameters."""
    trained = {p for module in modules for p in module.parameters() if p.requires_grad}
    return sum(map(Tensor.numel, trained))
