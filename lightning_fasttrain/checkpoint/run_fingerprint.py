"""Settings by which to check that a checkpoint belongs to this run, so that the run resumes unchanged."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import ConcatDataset, RandomSampler, SequentialSampler, Subset

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.select import class_name
from lightning_fasttrain.technique import Capability, Exactness, Technique
from lightning_fasttrain.technique.technique import settings_of, techniques_of

_OPTIMIZERS, _GROUPS, _SCHEDULES, _TECHNIQUES = "optimizers", "parameters per group", "schedules", "techniques"
_PROCESSES = "processes"
_RESTORED = "restored"  # settings that the saved state of optimizers and schedules replaces
# Of a parameter group: not settings, or of no effect but on rounding. Schedules start from lr, and keep it aside.
_LEFT_OUT = {"params", "name", "initial_lr", "base_lrs", "fused", "foreach", "capturable", "differentiable"}
_SAMPLES = 3  # entries of a dataset that are hashed: the first, the middle, the last


def read_settings(trainer: L.Trainer) -> dict[str, Any]:
    """Return the Trainer's settings, under names that an error can show; None where a setting cannot be compared."""
    # These callbacks change accumulate_grad_batches during the run, so its current value is not comparable.
    scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
    scheduled = scheduled or any_sums_batches(trainer)
    clip = "none" if trainer.gradient_clip_val is None else float(trainer.gradient_clip_val)
    optimizers = list(map(class_name, trainer.optimizers))
    processes = None if keeps_global_batch(trainer) else trainer.world_size
    return {
        _PROCESSES: processes,
        "accumulate_grad_batches": None if scheduled else trainer.accumulate_grad_batches,
        "precision": str(trainer.precision),
        "gradient_clip_val": clip,
        "gradient_clip_algorithm": str(getattr(trainer.gradient_clip_algorithm, "value", "norm")),
        _OPTIMIZERS: optimizers or None,
        _TECHNIQUES: _read_techniques(trainer),
    }


def read_step_settings(trainer: L.Trainer) -> dict[str, Any]:
    """Return the settings of new optimizers and schedules; call it before their saved state is restored."""
    restored: dict[str, Any] = {}
    for number, optimizer in enumerate(trainer.optimizers, 1):
        named = type(optimizer).__name__
        if len(trainer.optimizers) > 1:
            named += f" {number}"
        for i, group in enumerate(optimizer.param_groups):
            where = ""
            if len(optimizer.param_groups) > 1:
                where = f" of group {i}"
            for key, value in _plain_settings({**group, "lr": group.get("initial_lr", group.get("lr"))}):
                restored[f"{named}.{key}{where}"] = value
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    for schedule in schedules:
        for key, value in _plain_settings(schedule.state_dict()):
            restored[f"{type(schedule).__name__}.{key}"] = value
    counts: list[list[int]] = []
    for optimizer in trainer.optimizers:
        counts.append([len(group["params"]) for group in optimizer.param_groups])
    return {_RESTORED: restored, _SCHEDULES: list(map(class_name, schedules)), _GROUPS: counts}


def with_restored(now: dict[str, Any], then: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings ``now`` of :func:`read_step_settings` once the saved ones have replaced them."""
    kept = {name: value for name, value in then.get(_RESTORED, {}).items() if name in now[_RESTORED]}
    return {**now, _RESTORED: {**now[_RESTORED], **kept}}


def _plain_settings(settings: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        values = [value]
        if isinstance(value, list | tuple):
            value = values = list(value)
        is_plain = all(isinstance(one, bool | int | float | str) for one in values)
        if is_plain and key not in _LEFT_OUT and not key.startswith("_"):
            yield key, value


def _read_techniques(trainer: L.Trainer) -> dict[str, dict[str, Any]]:
    """Map each technique that changes the values of a step to its settings, and whether it changes training."""
    found: dict[str, dict[str, Any]] = {}
    for technique in techniques_of(trainer):
        if technique.bitwise:
            continue
        changes = _trains_differently(technique, trainer.lightning_module)
        found[type(technique).__name__] = {"settings": settings_of(technique), "changes training": changes}
    return found


def _trains_differently(technique: Technique, module: L.LightningModule) -> bool:
    # Accumulation is as exact as a larger batch, and another window gives another batch.
    return _sums_batches(technique) or technique.exactness_on(module) is Exactness.CHANGES_TRAINING


def _sums_batches(technique: Technique) -> bool:
    return technique.does(Capability.SUMS_BATCHES)


def any_sums_batches(trainer: L.Trainer) -> bool:
    """Whether a technique sums the gradients of several batches, and saves the sums with a checkpoint."""
    return any(map(_sums_batches, techniques_of(trainer)))


def keeps_global_batch(trainer: L.Trainer) -> bool:
    """Whether a technique reads the same global batches on any number of ranks."""
    return any(technique.does(Capability.KEEPS_GLOBAL_BATCH) for technique in techniques_of(trainer))


def describe_loader(loader: object) -> dict[str, Any]:
    """Return the same facts about one training loader, before it is read from."""
    dataset: Any = getattr(loader, "dataset", loader)
    try:
        samples = len(dataset)
    except (TypeError, NotImplementedError):
        samples = None
    sampler = getattr(loader, "batch_sampler", None)
    return {
        "samples in the training data": samples,
        # With a batch_sampler the loader's own batch_size is None.
        "batch size": getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None),
        "shuffle": _shuffles(getattr(loader, "sampler", None)),
        "drop_last": getattr(sampler, "drop_last", None),
        "training data": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        **_hash_data(dataset, "training data"),
    }


def _shuffles(sampler: object) -> bool | str | None:
    if sampler is None:
        return None
    shuffle = getattr(sampler, "shuffle", None)  # DistributedSampler's
    if isinstance(shuffle, bool):
        return shuffle
    if type(sampler) in (RandomSampler, SequentialSampler):
        return isinstance(sampler, RandomSampler)
    return type(sampler).__qualname__  # for other samplers the name is compared


def _hash_data(dataset: object, where: str) -> dict[str, str]:
    """Hash a few entries of each table, list or tensor of a dataset, by name. None of the dataset's code is run.

    Its ``__getitem__`` may draw random numbers or open files, so no samples are requested. Columns of strings are
    hashed by the last component of a path, since data may be moved.
    """
    if isinstance(dataset, Subset):
        # The same base with other indices is other data, so both are hashed.
        return {**_hash_values(dataset.indices, f"{where}.indices"), **_hash_data(dataset.dataset, where)}
    if type(dataset) in (list, tuple):
        return _hash_values(dataset, where)
    found: dict[str, str] = {}
    if isinstance(dataset, ConcatDataset):
        for i, part in enumerate(dataset.datasets):
            found |= _hash_data(part, f"{where}[{i}]")
        return found
    for key, part in getattr(dataset, "__dict__", {}).items():
        found |= _hash_values(part, f"{where}.{key}")
    return found


def _hash_values(values: Any, where: str) -> dict[str, str]:
    # TensorDataset holds its tensors like this.
    if type(values) in (list, tuple) and values and len(values) < 10 and all(map(_is_array, values)):
        found: dict[str, str] = {}
        for i, part in enumerate(values):
            found |= _hash_values(part, f"{where}[{i}]")
        return found
    if not (_is_array(values) or type(values) in (list, tuple, range)) or not len(values):
        return {}
    # Both ends and the middle: another split or order of the same data usually differs in one of them.
    ends = np.linspace(0, len(values) - 1, _SAMPLES).astype(int)
    data = _join([values[int(i)] for i in ends], b"|")
    if data is None:
        return {}
    return {where: hashlib.sha256(data).hexdigest()[:12]}


def _is_array(value: object) -> bool:
    return type(value) in (Tensor, np.ndarray) and value.ndim > 0


def _join(entries: Sequence[object], by: bytes) -> bytes | None:
    parts: list[bytes] = []
    for entry in entries:
        data = _bytes_of(entry)
        if data is None:
            return None
        parts.append(data)
    return by.join(parts)


def _bytes_of(entry: object) -> bytes | None:
    """Return the values and strings of one sample as bytes; None if it holds anything else."""
    if isinstance(entry, str):
        return os.path.basename(entry).encode(errors="surrogatepass")
    if isinstance(entry, bool | int | float | np.number):
        # One form for equal numbers of Python, NumPy and torch.
        return repr(float(entry)).encode()
    if type(entry) is np.ndarray and entry.dtype != object:
        return np.ascontiguousarray(entry).tobytes()
    if type(entry) is Tensor:
        plain = entry.detach().cpu().contiguous()
        if plain.ndim == 0:
            return repr(plain.item()).encode()
        # view(uint8): NumPy does not have bfloat16.
        return plain.view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(entry, Mapping):
        entry = [part for key in sorted(entry, key=str) for part in (str(key), entry[key])]
    if isinstance(entry, list | tuple):
        return _join(entry, b",")
    return None


def list_disagreements(then: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each setting whose value is known on both sides and differs."""
    # Loaders are compared one by one, when this run makes them.
    for name in sorted((then.keys() & now.keys()) - {"loaders", _TECHNIQUES, _RESTORED}):
        if then[name] is not None and now[name] is not None and then[name] != now[name]:
            way_out = _AS_IT_WAS
            if name == _PROCESSES:
                way_out = f"{_AS_IT_WAS}; {_ANY_NUMBER}"
            yield explain(_both(name, then, now), _consequence(name, then, now), way_out)
    before, after = then.get(_RESTORED, {}), now.get(_RESTORED, {})
    for name in before:
        if name in after and before[name] != after[name]:
            why = f"the saved state replaces it, so the resumed run would use {before[name]}"
            yield explain(_both(name, before, after), why, _AS_IT_WAS)
    other = list_other_techniques(then, now, changing_training=True)
    if other:
        what = f"the checkpoint was saved with different techniques: {'; '.join(other)}"
        yield explain(what, "so the resumed run would differ from the uninterrupted one", _AS_IT_WAS)


def _both(name: str, then: Mapping[str, object], now: Mapping[str, object]) -> str:
    return f"the checkpoint was saved with {name} = {then[name]}, this run has {name} = {now[name]}"


def _consequence(name: str, then: dict[str, Any], now: dict[str, Any]) -> str:
    """Return what would happen to a run that resumed nevertheless."""
    if name == _PROCESSES:
        return "positions in the data and random states do not fit, so the resumed run would read other batches"
    if name == _SCHEDULES and len(then[name]) < len(now[name]):
        return "the checkpoint has no state of the added schedule, which would begin at its first step"
    if name == _SCHEDULES:
        return "the state of the saved schedule would be lost, and the learning rate stays what it was last"
    return "so the resumed run would differ from the uninterrupted one"


_ANY_NUMBER = "a run with loaders.GlobalBatch resumes on any number of processes"
_AS_IT_WAS = "Use the saved settings, or accept a different run with ExactResume(strict=False)"


def list_doubts(
    checkpoint: Mapping[str, object], module: L.LightningModule, then: dict[str, Any], now: dict[str, Any]
) -> Iterator[str]:
    """Yield warnings about differences that are no reason to stop: hyper-parameters, and rounding."""
    hyper_parameters = _other_hyper_parameters(checkpoint, module)
    if hyper_parameters is not None:
        yield hyper_parameters
    other = list_other_techniques(then, now, changing_training=False)
    if not other:
        return
    what = f"the checkpoint was saved with different techniques: {'; '.join(other)}"
    why = "the training is the same up to the rounding of its sums, so it may not resume bit for bit"
    yield explain(what, why, "If it has to, use the saved techniques")


def list_other_techniques(then: dict[str, Any], now: dict[str, Any], changing_training: bool) -> list[str]:
    """List what differs in each technique, either of those that change training or of the others.

    Example:
        >>> clipping = {"AdaptiveClipping": {"settings": {"clipping": "0.01"}, "changes training": True}}
        >>> list_other_techniques({"techniques": clipping}, {"techniques": {}}, changing_training=True)
        ['AdaptiveClipping in the checkpoint only']
    """
    # A checkpoint of an older version has no list of techniques.
    if _TECHNIQUES not in then or _TECHNIQUES not in now:
        return []
    before, after = then[_TECHNIQUES], now[_TECHNIQUES]
    found: list[str] = []
    for name in {**before, **after}:
        sides = [side[name] for side in (before, after) if name in side]
        if any(side["changes training"] for side in sides) is not changing_training:
            continue
        if len(sides) < 2:
            where = "this run"
            if name in before:
                where = "the checkpoint"
            found.append(f"{name} in {where} only")
            continue
        was, is_now = before[name]["settings"], after[name]["settings"]
        # An argument that only one version of a technique has is left out.
        differ = [key for key in was if key in is_now and was[key] != is_now[key]]
        if differ:
            changes = ", ".join(f"{key} = {was[key]} in the checkpoint, {is_now[key]} in this run" for key in differ)
            found.append(f"{name} with {changes}")
    return found


def refuse_other_optimizers(then: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuse a checkpoint of other optimizers or parameter groups, even where other differences are accepted.

    Raises:
        ValueError: the optimizers differ; the message names both.
    """
    for name in (_OPTIMIZERS, _GROUPS):
        if not then.get(name) or not now.get(name) or then[name] == now[name]:
            continue
        what = _both(name, then, now)
        way_out = "Use the same, or load only the weights: model.load_state_dict(torch.load(path)['state_dict'])"
        raise ValueError(explain(what, "the optimizer state cannot be converted", way_out))


def _other_hyper_parameters(checkpoint: Mapping[str, Any], module: L.LightningModule) -> str | None:
    """Return a warning if the module has other hyper-parameters than the saved one; None if it does not.

    Only plain values are compared.
    """
    then, now = checkpoint.get("hyper_parameters") or {}, dict(module.hparams)
    plain = (bool, int, float, str, type(None))
    differ: list[str] = []
    for name in then:
        are_plain = name in now and isinstance(then[name], plain) and isinstance(now[name], plain)
        if are_plain and then[name] != now[name]:
            differ.append(f"{name} = {then[name]!r} in the checkpoint, {now[name]!r} in this run")
    if not differ:
        return None
    what = f"{type(module).__name__} has different hyper-parameters from the checkpoint"
    return explain(what, "; ".join(differ[:5]), "If they affect training, use the saved values")
