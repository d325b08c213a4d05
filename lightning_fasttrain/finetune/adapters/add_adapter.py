"""Small trainable layers beside a frozen model: put in, found again, and chosen among."""

import copy
import warnings
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import Any

import lightning as L
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from lightning_fasttrain.core.host.late_parameters import notices_late_parameters
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.heads import find_heads, is_a, is_inside
from lightning_fasttrain.core.modules.parameters import count_parameters
from lightning_fasttrain.core.modules.wrapped_forward import patch
from lightning_fasttrain.finetune.adapters._adapter_checks import (
    check_config,
    check_layers,
    check_name,
    check_parameters,
    is_there,
    refuse_namesake,
    without_namesakes,
)
from lightning_fasttrain.finetune.adapters.fast_path_weights import see_adapters_
from lightning_fasttrain.finetune.adapters.initializations import Batches, check_start, finish_start_, prepare_start
from lightning_fasttrain.finetune.quantized._quantized_tensor import shown_as_parameters
from lightning_fasttrain.finetune.quantized.expert_adapters import use_held_tensors_
from lightning_fasttrain.finetune.selection._adapter_switches import has_prompt, switches
from lightning_fasttrain.finetune.selection._float32_adapters import keep_adapter_in_float32_
from lightning_fasttrain.finetune.selection.base_fingerprint import adapters_on, base_names, held_child
from lightning_fasttrain.finetune.selection.freezing import freeze_
from lightning_fasttrain.finetune.selection.targets import (
    Targets,
    find_target_parameters,
    find_targets,
    list_layer_kinds,
    refuse_tied,
    require_peft,
    shortest_ends,
    shortest_names,
)
from lightning_fasttrain.finetune.selection.uncovered_weights import told_without_adapter


@notices_late_parameters
def add_adapter_(
    model: nn.Module,
    config: Any,
    targets: Targets | None = None,
    *,
    train: Iterable[str] = (),
    name: str = "default",
    batches: Batches | None = None,
) -> list[str]:
    """Put an adapter into ``model``, in place, and freeze everything else.

    The layers themselves are PEFT's; which of them, and that nothing else trains, is decided here, so that any module
    will do: a Hugging Face model, a ``LightningModule`` that holds one, or a network of your own. What is adapted is
    the Hugging Face model inside, else the one child of a ``LightningModule`` that holds all targets, else ``model``
    itself; adapter files name layers as seen from there. Frozen BatchNorm keeps its statistics; the adapter's dropout
    is on, in whatever mode the model is.

    Args:
        model: any module. What it returns is bitwise unchanged by an adapter that starts at zero, as LoRA does.
        config: one of PEFT's, such as ``peft.LoraConfig(r=16)``. A copy of it is used, with the targets filled in.
        targets: which layers, as for :func:`~lightning_fasttrain.finetune.find_targets`; by default
            ``config.target_modules``, and "all-linear" where that is None. ``config.target_parameters`` names tensors,
            such as a layer's experts ("experts.gate_up_proj"), in floats or in 4 bits; where it is given, layers get
            adapters only if they are named.
        train: names of further modules that train whole, such as a new head; they are saved with the adapter.
        name: of this adapter, among several.
        batches: for ``init_lora_weights="eva"`` and ``"corda"``, which begin with what data does in the layers: some to
            call ``model`` with; a dict is passed by keywords, a tuple by position.

    Returns:
        Qualified names of the adapted layers and tensors. If an adapter of this name and kind is there, its own, and
        nothing is done.

    Raises:
        ValueError: nothing matches; a target is tied to another layer, or lies in a module of ``train``; a rank above a
            layer's size; a start that needs data is given none; another adapter of this name, or of another kind, is
            there.
        TypeError: ``config`` is none of PEFT's, or PEFT has no such adapter for a target's class.
        ModuleNotFoundError: PEFT is not installed.

    Example:
        >>> import peft
        >>> net = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2, bias=False)})
        >>> add_adapter_(net, peft.LoraConfig(r=2), "body", train=["head"])
        ['body']
        >>> for name, parameter in net.named_parameters():
        ...     if parameter.requires_grad:
        ...         print(name)
        body.lora_A.default.weight
        body.lora_B.default.weight
        head.modules_to_save.default.weight

    Source:
        ``peft.inject_adapter_in_model``.
    """
    peft = require_peft()
    check_config(peft, config)
    check_name(name)
    config = copy.deepcopy(config)
    tensors = find_target_parameters(model, getattr(config, "target_parameters", None) or ())
    default: Targets = [] if tensors else "all-linear"
    wanted = targets if targets is not None else (config.target_modules or default)
    found = {} if tensors and wanted == [] else find_targets(model, wanted)
    whole = find_targets(model, list(train)) if train else {}
    _refuse_both(found, whole)
    refuse_tied(model, found)
    refuse_tied(model, whole)
    check_layers(found, config)
    check_parameters(tensors, config)
    root = _fill_in_(config, model, found, tensors, whole)
    for prompted in filter(has_prompt, model.modules()):
        is_there(adapters_on(prompted), name, config)  # which refuses two kinds
    refuse_merged(root, f"adding adapter '{name}'")
    if is_there(adapters_on(root), name, config):
        train_mode(root)
        return [*found, *tensors]
    refuse_namesake(name, (one for one, _ in root.named_modules()))
    check_start(config, found, batches)
    heads = [head for head in find_heads(model) if head not in found and head not in whole]
    replaced = (*found, *dict.fromkeys(tensors.values()), *whole)
    _put_in(model, root, config, name, replaced, batches)
    train_mode(root)
    besides = f", {len(tensors)} tensors ({', '.join(config.target_parameters)})" if tensors else ""
    besides += f", and {', '.join(whole)} whole" if whole else ""
    if targets in (None, "all-linear"):
        besides += f"; heads left as they are: {', '.join(heads)}" if heads else ""
        besides += told_without_adapter(model, [*found, *tensors])
    trained, total = count_parameters(model)
    say(
        "%s '%s': %d layers (%s)%s; trains %s of %s parameters (%.2f%%)",
        config.peft_type.value, name, len(found), list_layer_kinds(found), besides,
        f"{trained:,}", f"{total:,}", 100 * trained / total,
    )  # fmt: skip
    return [*found, *tensors]


def _refuse_both(found: Iterable[str], whole: Collection[str]) -> None:
    for target in found:
        if target in whole or is_inside(target, whole):
            raise ValueError(explain(f"'{target}'", "it is in train= and a target as well", "Leave it out of one"))


def _put_in(
    model: nn.Module, root: nn.Module, config: Any, name: str, replaced: Iterable[str], batches: Batches | None
) -> None:
    """Freeze ``model`` and add the adapter; what goes wrong on the way leaves all as it was."""
    with ExitStack() as on_error:
        # PEFT freezes only the module that it is given, and lets running statistics go on.
        on_error.callback(freeze_(model))
        # PEFT replaces layers one by one, so a failure in the middle would leave some adapted.
        for one in replaced:
            parent, _, last = one.rpartition(".")
            holder = model.get_submodule(parent)
            on_error.callback(setattr, holder, last, getattr(holder, last))
        prepare_start(model, root, config, batches)
        _inject(config, root, name)
        finish_start_(model, root, config, name, batches)
        keep_adapter_in_float32_(switches(root), name)  # after EVA, which makes matrices of other ranks
        see_adapters_(model, on_error)
        on_error.pop_all()


def _fill_in_(
    config: Any, model: nn.Module, found: Collection[str], tensors: Collection[str], whole: Collection[str]
) -> nn.Module:
    """Name in ``config`` what is adapted, as seen from the module that the adapter is put into; return that."""
    prefix, root = _root(model, [*found, *tensors, *whole])
    inside = [target.removeprefix(prefix) for target in found]
    # Not None where only tensors are meant: PEFT would add the layers that it lists for this kind of model.
    config.target_modules = _as_peft_keeps(shortest_names(inside, root)) if inside else set()
    if tensors:
        within = [tensor.removeprefix(prefix) for tensor in tensors]
        config.target_parameters = shortest_ends(within, list(base_names(root).values()))
    if getattr(config, "feedforward_modules", None):  # (IA)³ scales the input of these, the output of the others
        feedforward = [one.removeprefix(prefix) for one in find_targets(model, config.feedforward_modules)]
        config.feedforward_modules = _as_peft_keeps(shortest_names([one for one in feedforward if one in inside], root))
    if whole:
        config.modules_to_save = without_namesakes([one.removeprefix(prefix) for one in whole], root)
    return root


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Qualified name → module, for the modules in ``model`` that PEFT's adapters were put into.

    In a ``PeftModel`` that is the model inside; what PEFT has around it holds the same configuration. With virtual
    tokens it is the ``PeftModel`` itself.

    Raises:
        ValueError: there is none.
    """
    found = {name: module for name, module in model.named_modules() if adapters_on(module)}
    if not found:
        way_out = "Add one: apply(model, [LoRA(rank=16)])"
        raise ValueError(explain(f"{type(model).__name__} has no adapter", "none was added", way_out))
    return found


def adapter_names(model: nn.Module) -> list[str]:
    """Names of all adapters in ``model``, in the order in which they were added."""
    return list(dict.fromkeys(name for root in adapted_modules(model).values() for name in adapters_on(root)))


def use_adapter_(model: nn.Module, name: str | list[str]) -> None:
    """Let the forward use the adapter of this ``name``, or several at once, and only that train.

    Call it before the optimizer is made, or between runs: an optimizer holds the parameters that it was given.

    Raises:
        ValueError: no such adapter; the message lists those there are.

    Example:
        >>> import peft
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> for task in ("summaries", "titles"):
        ...     _ = add_adapter_(net, peft.LoraConfig(r=2), "0", name=task)
        >>> use_adapter_(net, "summaries")
        >>> [n for n, p in net.named_parameters() if p.requires_grad]
        ['0.lora_A.summaries.weight', '0.lora_B.summaries.weight']
    """
    from peft.tuners.tuners_utils import set_adapter

    names = [name] if isinstance(name, str) else list(name)
    there = adapter_names(model)
    refuse_merged(model, f"using {', '.join(names)}")
    refuse_unknown(names, there)
    roots = adapted_modules(model).values()
    if len(names) > 1 and any(has_prompt(root) for root in roots):
        raise ValueError(explain(f"adapters {names}", "virtual tokens of one name at a time are put in", "Name one"))
    for root in roots:
        if has_prompt(root):
            use_prompt_(root, names[0])
        else:
            set_adapter(root, names)


def use_prompt_(root: Any, name: str, trainable: bool = True) -> None:
    """Let the forward put in the virtual tokens of this name, and only them train, or none."""
    root.set_adapter(name, inference_mode=not trainable)
    for other, encoder in root.prompt_encoder.items():
        encoder.requires_grad_(trainable and other == name)  # PEFT leaves those of the others as they are


def refuse_unknown(names: Iterable[str], there: list[str]) -> None:
    for name in names:
        if name not in there:
            listed = f"There are: {', '.join(there)}"
            raise ValueError(explain(f"adapter '{name}'", "there is none of that name", listed))


def adapter_parameters(model: nn.Module) -> set[str]:
    """Qualified names of what the adapters brought: their parameters and buffers, and their copies of whole modules."""
    brought: set[str] = set()
    for name, module in model.named_modules():
        if is_a(module, "BaseTunerLayer") or is_a(module, "AuxiliaryTrainingWrapper"):
            base = f"{held_child(module)}."
            brought |= {f"{name}.{key}" for key in module.state_dict() if not key.startswith(base)}
        if has_prompt(module):
            start = f"{name}.prompt_encoder.".removeprefix(".")
            brought |= {f"{start}{key}" for key in module.get_submodule("prompt_encoder").state_dict()}
    return brought


def refuse_merged(model: nn.Module, what: str) -> None:
    """Refuse what goes wrong unseen while an adapter is in the weights, where PEFT takes it out without being asked.

    Raises:
        ValueError: one is merged.
    """
    # Virtual tokens, which are no modules, cannot be merged.
    layers: list[Any] = [layer for layer in switches(model) if isinstance(layer, nn.Module)]
    merged = dict.fromkeys(name for layer in layers for name in layer.merged_adapters)
    if merged:
        why = f"{', '.join(merged)} is merged into the weights already"
        raise ValueError(explain(what, why, "Call unmerge_adapters_(model) first"))


def _inject(config: Any, root: nn.Module, name: str) -> None:
    peft = require_peft()
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")  # several are meant
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # and put right, for GPT-2's layers
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")  # said when merging
        for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"):  # PEFT looks at a quantised layer's class only if set
            if not getattr(root, flag, False):
                stack.callback(patch(root, flag, True))
        if any(isinstance(parameter, FakeTensor) for parameter in root.parameters()):
            stack.enter_context(unset_fake_temporarily())  # PEFT moves what it makes, which modules of fakes cannot
        try:
            with shown_as_parameters(root):
                peft.inject_adapter_in_model(config, root, adapter_name=name)
        except ValueError as error:
            if not any(words in str(error) for words in ("is not supported", "is incompatible with")):
                raise
            what = f"{config.peft_type.value} on {config.target_modules}"
            raise TypeError(explain(what, f"PEFT says: {error}", "Leave those out")) from error
    use_held_tensors_(root)  # only now, as PEFT has made its wrappers for plain parameters


def _as_peft_keeps(names: list[str] | str) -> set[str] | str:
    return names if isinstance(names, str) else set(names)  # as its configurations do when they are made


def _root(model: nn.Module, names: Collection[str]) -> tuple[str, nn.Module]:
    """The module that adapters are put into, and what its name adds to those of its layers."""
    from transformers import PreTrainedModel

    def holds(name: str) -> bool:
        return all(one.startswith(f"{name}.") for one in names)

    if not isinstance(model, PreTrainedModel):
        for name, module in model.named_modules():
            if name and holds(name) and isinstance(module, PreTrainedModel):
                return f"{name}.", module
        if isinstance(model, L.LightningModule):
            for name, child in model.named_children():
                if holds(name) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                    return f"{name}.", child
    return "", model


def train_mode(root: nn.Module) -> None:
    """Lightning leaves pretrained parts in eval, as they come; the adapter's own dropout is meant."""
    for layer in switches(root):
        for name, child in layer.named_children():
            if name not in ("base_layer", "original_module"):
                child.train()
