"""Checkpoints of runs with adapters: they hold what trains, and a model without the adapter refuses them."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.host.lightning import replicates, trainer_of
from lightning_fasttrain.core.messages import explain, warn
from lightning_fasttrain.core.modules.select import is_part_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch_all
from lightning_fasttrain.core.package import PACKAGE, public_path
from lightning_fasttrain.core.safe_load import CorruptCheckpoint, read_archive
from lightning_fasttrain.finetune.adapters.adapter_checks import meaning_of
from lightning_fasttrain.finetune.adapters.add_adapter import adapter_parameters
from lightning_fasttrain.finetune.selection.base_fingerprint import (
    adapters_on,
    base_fingerprint,
    base_names,
    is_fingerprint,
    names_not_in,
    refuse_other_base,
)
from lightning_fasttrain.technique import Surgery, Technique

# Keys of a checkpoint: hashes of the base that is not in it, and the settings of the adapters that are.
FINGERPRINT, ADAPTERS = "lightning_fasttrain.base", "lightning_fasttrain.adapters"
_LONGEST_CALL = 300  # characters


@check_arguments
def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the part of ``model.state_dict()`` that training changes: kilobytes rather than gigabytes.

    It excludes frozen parameters and the buffers of layers whose parameters are frozen (BatchNorm's statistics, the
    tables of quantised weights); it includes all adapters, also inactive ones.

    Example:
        >>> import peft, lightning_fasttrain as ft
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> _ = ft.finetune.add_adapter_(net, peft.LoraConfig(r=2), "0")
        >>> list(ft.finetune.trained_state(net))
        ['0.lora_A.default.weight', '0.lora_B.default.weight']
    """
    return _trained_part(model.state_dict(), model)


@check_arguments
def trained_names(model: nn.Module) -> list[str]:
    """Return the keys of :func:`trained_state`, in the order of ``model.state_dict()``.

    Fabric saves only these with ``fabric.save(path, {"model": model}, filter={"model": lambda key, _: key in names})``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> _ = net[0].requires_grad_(False)
        >>> trained_names(net)
        ['1.weight', '1.bias', '1.running_mean', '1.running_var', '1.num_batches_tracked']
    """
    adapters = adapter_parameters(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trains = {name for name, parameter in parameters.items() if parameter.requires_grad}
    # Quantised weights have nested keys, such as "weight.absmax", also beside a bias that trains.
    frozen = parameters.keys() - trains
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(prefix=prefix, recurse=False, remove_duplicate=False))
        if own and not own.keys() & trains:
            frozen.add(prefix)
    names = []
    for name in model.state_dict():
        changes = name in trains or (name not in parameters and not is_part_of(name, frozen))
        if name in adapters or changes:
            names.append(name)
    return names


@check_arguments
def load_trained_state_(model: nn.Module, checkpoint: str | os.PathLike[str] | Mapping[str, Any]) -> list[str]:
    """Load a run's checkpoint into a model with the run's adapter, in place, without a Trainer.

    A module with :class:`~lightning_fasttrain.FastTrainMixin` and the run's techniques needs only Lightning's
    ``load_from_checkpoint``, which adds the adapter and calls this. A checkpoint of the trained state alone does not
    change the base, which must be the one that it was trained with.

    Args:
        model: the run's module, with the adapter: ``apply(model, [LoRA(rank=16)])``.
        checkpoint: a file that a Trainer saved, or its content.

    Returns:
        Names of the loaded parameters and buffers.

    Raises:
        ValueError: the model has no adapter, another one, or another base; the message names the first difference.
            Or the file is damaged, or is not a Trainer's.
        FileNotFoundError: there is no such file.

    Example:
        >>> import copy, lightning as L, torch, lightning_fasttrain as ft
        >>> class Net(L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = nn.Linear(4, 4)
        ...     def training_step(self, batch, _):
        ...         return self.body(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=1.0)
        >>> net, path = Net(), getfixture("tmp_path") / "run.ckpt"
        >>> again, quiet = copy.deepcopy(net), {"enable_progress_bar": False, "enable_model_summary": False}
        >>> quiet |= {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        >>> trainer = L.Trainer(max_steps=1, callbacks=[ft.LoRA(rank=2)], **quiet)
        >>> trainer.fit(net, torch.ones(1, 3, 4))
        >>> trainer.save_checkpoint(path)
        >>> undo = ft.apply(again, [ft.LoRA(rank=2)])
        >>> ft.finetune.load_trained_state_(again, path)
        ['body.lora_A.default.weight', 'body.lora_B.default.weight']
        >>> torch.equal(again.body(torch.ones(4)), net.body(torch.ones(4)))
        True
    """
    content: Any = checkpoint
    if not isinstance(checkpoint, Mapping):
        content = read_archive(checkpoint)
    state = complete_state(model, content)
    model.load_state_dict(state)
    return [name for name in state if name in content["state_dict"]]


def complete_state(model: nn.Module, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a complete ``state_dict`` of ``model``: the values of a checkpoint, then the model's own for the rest.

    Raises:
        ValueError: see :func:`load_trained_state_`.
    """
    if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
        why = "expected a checkpoint of a Trainer, which has a state_dict"
        raise ValueError(explain("the checkpoint", why, "Load it with model.load_state_dict"))
    if not adapter_parameters(model):
        way_out = "Add the one of the run first: apply(model, [LoRA(...)])"
        raise ValueError(explain(f"{type(model).__name__} has no adapter", "the checkpoint holds one", way_out))
    saved = _without_refusal(checkpoint["state_dict"], model)
    _names_in_part(checkpoint, set(saved), model, strict=True)
    _compare_settings(checkpoint, model, refuse=True)
    if FINGERPRINT not in checkpoint:
        return saved
    # The saved values first: Lightning moves a module to the device of the first of them.
    return {**saved, **{name: own for name, own in model.state_dict().items() if name not in saved}}


def checkpoint_adapters_(trainer: L.Trainer, module: L.LightningModule, what_trains: bool) -> Undo:
    """Describe the adapters in a run's checkpoints, also in those after it; compare adapters and base when loading.

    A checkpoint of the complete model is loaded completely. A strategy that loads the model by itself, as FSDP2Strategy
    and ZeROStrategy do, calls its own ``names_to_load`` for the expected names.

    Args:
        trainer: the Trainer of the run.
        module: its module, to which the adapter will be added.
        what_trains: save :func:`trained_state` alone, with a fingerprint of the base.
    """
    strategy = trainer.strategy
    save, load = strategy.save_checkpoint, strategy.load_model_state_dict

    def save_checkpoint(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # Lightning calls this on all ranks, and the fingerprint of sharded weights needs all of them.
        calls = list(map(_call_of, adding_techniques(trainer.callbacks)))
        save(_described(checkpoint, trainer, module, what_trains, calls), *args, **kwargs)

    def load_model_state_dict(checkpoint: dict[str, Any], strict: bool = True) -> None:
        # In place, for the callbacks that read the checkpoint afterwards.
        checkpoint["state_dict"] = _without_refusal(checkpoint["state_dict"], module)
        part = _names_in_part(checkpoint, set(checkpoint["state_dict"]), module, strict)
        _compare_settings(checkpoint, module, refuse=not _fits(checkpoint["state_dict"], module))
        load(checkpoint, strict=strict and part is None)

    def names_to_load(checkpoint: Mapping[str, object], saved: set[str], strict: bool) -> set[str]:
        refusal = saved & _renamed(module).keys()  # one process wrote the file
        part = _names_in_part(checkpoint, saved - refusal, module, strict)
        _compare_settings(checkpoint, module, refuse=False)  # the strategy compares the shapes
        return refusal | (set(module.state_dict()) if part is None else part)

    changed: dict[str, Any] = {"save_checkpoint": save_checkpoint}
    if what_trains:
        changed["lightning_module_state_dict"] = lambda: trained_state(module)
    # Such a strategy has already loaded the model when Lightning calls ``load_model_state_dict``.
    if hasattr(strategy, "names_to_load"):
        changed["names_to_load"] = names_to_load
    else:
        changed["load_model_state_dict"] = load_model_state_dict
    undo = patch_all(strategy, changed)

    def end() -> None:
        undo()
        module.on_save_checkpoint = AdapterCheckpoints(module, trainer.callbacks, what_trains)

    return end


class AdapterCheckpoints:
    """Replacement of a module's ``on_save_checkpoint``, for checkpoints that are saved after a run with an adapter.

    The adapter stays in the module after the run, and so does this: of all hooks of a Trainer, a checkpoint of weights
    only calls this one alone. It does what :func:`checkpoint_adapters_` does during the run.
    """

    def __init__(self, module: L.LightningModule, techniques: Sequence[Technique], what_trains: bool) -> None:
        self.module, self.what_trains = module, what_trains
        self.calls = list(map(_call_of, adding_techniques(techniques)))
        self.inner = module.on_save_checkpoint
        if isinstance(self.inner, AdapterCheckpoints):  # of an earlier run
            self.inner = self.inner.inner

    def __call__(self, checkpoint: dict[str, Any]) -> None:
        self.inner(checkpoint)
        trainer = trainer_of(self.module)
        if trainer is None or not replicates(trainer.strategy) or not adapter_parameters(self.module):
            return  # others write files of their own; without parameters, the plain model is saved
        if "save_checkpoint" in vars(trainer.strategy) or _runs_without_techniques(trainer):
            return
        state = checkpoint["state_dict"]
        trained = _trained_part(state, self.module)
        smaller = self.what_trains and len(trained) < len(state)
        if smaller:
            checkpoint["state_dict"] = trained
        checkpoint.update(_described(checkpoint, trainer, self.module, smaller, self.calls))


def _runs_without_techniques(trainer: L.Trainer) -> bool:
    """Check for a run that would not know how to resume from such a checkpoint."""
    return trainer.state.status == TrainerStatus.RUNNING and not adding_techniques(trainer.callbacks)


def _described(
    checkpoint: dict[str, Any], trainer: L.Trainer, module: L.LightningModule, of_part: bool, calls: Sequence[str]
) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if settings := _settings_of_adapters(module):
        more[ADAPTERS] = settings
    if of_part:
        more[FINGERPRINT] = base_fingerprint(module)
    if replicates(trainer.strategy):  # others write files that load_from_checkpoint cannot read
        more["state_dict"] = {**checkpoint["state_dict"], **_refusal(module, calls)}
    return {**checkpoint, **more}


def adding_techniques(techniques: Iterable[object]) -> list[Technique]:
    """Return the techniques that give a model other names in its ``state_dict``."""
    adds = (Surgery.QUANTIZE, Surgery.ADAPT)
    return [one for one in techniques if isinstance(one, Technique) and one.surgery in adds]


def _refusal(module: L.LightningModule, calls: Sequence[str]) -> dict[str, Any]:
    """Return an entry of a ``state_dict`` that no model without the adapter can load, and that says what to do.

    Without it, ``load_from_checkpoint`` of a class that does not add the adapter returns the base model if
    ``strict=False``, and otherwise fails with a list of all names. The entry is called as a weight of the base is that
    has another name beside the adapter. It is not a tensor, so torch refuses it, strict or not, in a process without
    this package too; and since it has a ``__torch_function__``, torch prints its ``shape``, which is the message.
    """
    renamed = next(iter(_renamed(module)), None)
    if renamed is None:
        return {}
    name = type(module).__name__
    lines = ["(none).", f"This checkpoint of {name} holds an adapter, and the model has none. Add it, then load:"]
    lines.append(f"    model = {name}(...)")
    lines.append(f"    ft.apply(model, [{', '.join(calls)}])")
    lines.append("    ft.finetune.load_trained_state_(model, path)")
    lines.append(f"Where {name} is a FastTrainMixin that names its techniques, load_from_checkpoint does so.\n")
    entry: Any = OrderedDict()  # the only container that torch.load(weights_only=True) returns with its attributes
    entry.__torch_function__ = None
    entry.shape = "\n".join(lines)
    return {renamed: entry}


def _call_of(technique: Technique) -> str:
    """Return the call that makes a technique; without arguments where one of them is an object with many settings."""
    call, kind = repr(technique), type(technique)
    if kind.__module__.partition(".")[0] == PACKAGE:
        call = f"ft.{public_path(kind)}{call.removeprefix(kind.__name__)}"
    return call if len(call) < _LONGEST_CALL else f"{call.partition('(')[0]}(...)"


def _without_refusal(state: object, model: nn.Module) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise CorruptCheckpoint(explain("the checkpoint", "its state_dict is damaged", "Use an older checkpoint"))
    renamed = _renamed(model)
    return {name: value for name, value in state.items() if name not in renamed}


def _renamed(model: nn.Module) -> dict[str, str]:
    """Map each name of a base weight that has another name beside an adapter to that other name."""
    return {plain: name for name, plain in base_names(model).items() if plain != name}


def _settings_of_adapters(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Map the adapters in ``model``, by module and name, to the settings that give their values a meaning."""
    found: dict[str, dict[str, Any]] = {}
    for place, module in model.named_modules():
        for name, config in adapters_on(module).items():
            settings = found[f"{place}.{name}".lstrip(".")] = {}
            for key, value in meaning_of(config).items():
                # Which modules were meant is known from the names of the values.
                describes_values = "dropout" not in key and not key.endswith("_modules")
                if describes_values and type(value) in (bool, int, float, str):
                    settings[key] = value
    return found


def _trained_part(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    return {name: state[name] for name in trained_names(model) if name in state}


def _names_in_part(checkpoint: Mapping[str, Any], saved: set[str], module: nn.Module, strict: bool) -> set[str] | None:
    """Return the names to load from a checkpoint of the trained state; None for a checkpoint of the complete model."""
    if FINGERPRINT not in checkpoint:
        _refuse_plain(saved, module)
        return None
    if not is_fingerprint(checkpoint[FINGERPRINT]):
        raise CorruptCheckpoint(explain("the checkpoint", "its fingerprint is damaged", "Use an older checkpoint"))
    refuse_other_base(checkpoint[FINGERPRINT], module, "the checkpoint")
    known = set(module.state_dict())
    missing = names_not_in(trained_names(module), saved)
    # Modules that are unfrozen later need not train yet.
    more = sorted(saved - known)
    if strict and (missing or more):
        why = f"this run has no {more[:3]}"
        if missing:
            why = f"it lacks {missing[:3]}"
        way_out = "Resume with the same adapter (targets, rank, train=)"
        raise ValueError(explain("the checkpoint has other trained parameters than this run", why, way_out))
    return saved & known


def _refuse_plain(saved: set[str], module: nn.Module) -> None:
    adapters = adapter_parameters(module)
    if adapters and not adapters & saved:
        why = "it was saved before the adapter was added, so this run can start from it but not resume it"
        way_out = "Load it into the model before the run, with load_state_dict, and omit ckpt_path"
        raise ValueError(explain("the checkpoint holds no adapter", why, way_out))


def _fits(state: Mapping[str, Any], module: nn.Module) -> bool:
    """Return whether the saved values of adapters have the shapes of this run's."""
    own = module.state_dict()
    common = [name for name in adapter_parameters(module) if name in state and name in own]
    return all(state[name].shape == own[name].shape for name in common)


def _compare_settings(checkpoint: Mapping[str, Any], module: nn.Module, refuse: bool) -> None:
    """Refuse an adapter of another rank, alpha or other setting, or warn of it, with both values.

    A run may resume with another alpha, so a warning is enough where the values fit, and a Trainer shows it.
    """
    saved = checkpoint.get(ADAPTERS, {})
    if not isinstance(saved, dict) or not all(isinstance(settings, dict) for settings in saved.values()):
        why = "its settings of adapters are damaged"
        raise CorruptCheckpoint(explain("the checkpoint", why, "Use an older checkpoint"))
    for name, ours in _settings_of_adapters(module).items():
        theirs = saved.get(name, {})
        differ = [key for key, value in ours.items() if theirs.get(key, value) != value]
        if not differ:
            continue
        before = ", ".join(f"{key}={theirs[key]!r}" for key in differ)
        now = ", ".join(f"{key}={ours[key]!r}" for key in differ)
        what = f"the checkpoint's adapter '{name}' has {before}, and this run's has {now}"
        message = explain(what, "its values were trained with those settings", "Use the same settings")
        if refuse:
            raise ValueError(message)
        warn(message)
