"""Add adapters to a frozen model, list them, select the active ones, and remove them."""

import copy
import re
import warnings
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

import lightning as L
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.host.late_parameters import notices_late_parameters
from lightning_fasttrain.core.messages import explain, first_line, list_some, say
from lightning_fasttrain.core.modules.heads import find_heads
from lightning_fasttrain.core.modules.parameters import count_parameters
from lightning_fasttrain.core.modules.select import (
    HUGGING_FACE_MODEL,
    TUNER,
    WRAPPER,
    Sharing,
    as_list,
    find_tuners,
    is_a,
    is_inside,
    is_part_of,
    list_names_above,
    list_places,
    replace_modules_,
    spread_replacements_,
)
from lightning_fasttrain.core.modules.wrapped_forward import WrappedForward, patch, patched, wrapper_on, wrappers_in
from lightning_fasttrain.finetune.adapters.adapter_checks import (
    check_config,
    check_layers,
    check_name,
    check_parameters,
    is_there,
    largest_rank,
    make_settings_plain_,
    refuse_merged,
    refuse_namesake,
    refuse_parted,
    refuse_unknown,
    without_namesakes,
)
from lightning_fasttrain.finetune.adapters.initializations import Batches, check_start, finish_start_, prepare_start
from lightning_fasttrain.finetune.quantized.quantized_tensor import shown_as_parameters, use_held_tensors_
from lightning_fasttrain.finetune.selection.base_fingerprint import (
    adapters_on,
    base_names,
    has_fake_parameters,
    held_child,
    names_in,
    names_not_in,
    strip_prefix,
)
from lightning_fasttrain.finetune.selection.float32_adapters import (
    has_prompt,
    keep_adapter_in_float32_,
    switches,
    trained_copies,
)
from lightning_fasttrain.finetune.selection.freezing import freeze_, update_statistics_
from lightning_fasttrain.finetune.selection.targets import (
    ALL_LINEAR,
    Targets,
    describe_uncovered,
    find_layers,
    find_target_parameters,
    find_targets,
    list_layer_kinds,
    method_of,
    refuse_tied,
    require_peft,
    shortest_ends,
    shortest_names,
)

if TYPE_CHECKING:
    from peft import PeftConfig


@check_arguments
@notices_late_parameters
def add_adapter_(
    model: nn.Module,
    config: "PeftConfig",
    targets: Targets | None = None,
    *,
    train: Iterable[str | re.Pattern[str]] = (),
    name: str = "default",
    batches: Batches | None = None,
) -> list[str]:
    """Add an adapter to ``model``, in place, and freeze everything else.

    The adapter layers are PEFT's. This function chooses the layers and freezes the rest, so that it accepts any module:
    a Hugging Face model, a ``LightningModule`` that holds one, or a network of your own. The adapted module is the
    Hugging Face model inside, else the one child of a ``LightningModule`` that holds all targets, else ``model``
    itself; adapter files name layers relative to it. A module in several places, such as BART's embedding after
    ``resize_token_embeddings``, has one adapter in all of them; files call it by its first name. Frozen BatchNorm keeps
    its statistics; the adapter's dropout is on, whether the model is in train or in eval mode.

    Args:
        model: any module. Its output is bitwise unchanged by an adapter that starts at zero, as LoRA does.
        config: a PEFT configuration, such as ``peft.LoraConfig(r=16)``. A copy of it is used, with the targets filled
            in.
        targets: the layers to adapt, as for :func:`~lightning_fasttrain.finetune.find_targets`; by default
            ``config.target_modules``, and "all-linear" where that is None. ``config.target_parameters`` names tensors,
            such as a layer's experts ("experts.gate_up_proj"), in floats or in 4 bits; where it is given, layers get
            adapters only if they are named.
        train: names of further modules that are trained in full, such as a new head; they are saved with the adapter.
            Of tied modules name all, which stay tied. In a model in 16 bits their weights are kept in float32 for the
            optimizer, and are rounded in the forward.
        name: name of this adapter, among several.
        batches: batches to call ``model`` with, for ``init_lora_weights="eva"`` and ``"corda"``, whose initialization
            depends on the layers' inputs; a dict is passed by keywords, a tuple by position.

    Returns:
        Qualified names of the adapted layers and tensors. If an adapter of this name and kind exists, its names are
        returned and the model is not changed.

    Raises:
        ValueError: nothing matches; a target, or a module whose rows train, is tied to a module that would not train
            with it; a target lies in a module of ``train``; the rank exceeds a layer's size; an initialization that
            needs data gets none; an adapter of this name with other settings, or an adapter of another kind, exists.
        TypeError: ``config`` is not a PEFT configuration, or PEFT has no such adapter for a target's class.
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
    check_config(config)
    check_name(name)
    config = copy.deepcopy(config)
    make_settings_plain_(config)
    tensors = find_target_parameters(model, getattr(config, "target_parameters", None) or ())
    default: Targets = [] if tensors else ALL_LINEAR
    wanted = targets if targets is not None else (config.target_modules or default)
    found = {} if tensors and wanted == [] else find_targets(model, wanted)
    thin = _remove_thin(found, config) if wanted == ALL_LINEAR else []
    whole = find_layers(model, train, "train")
    _refuse_both(found, whole)
    refuse_tied(model, found)
    refuse_tied(model, whole, together=True)
    refuse_tied(model, set(tensors.values()))
    check_layers(found, config)
    check_parameters(tensors, config)
    root = _fill_in_(config, model, found, tensors, whole)
    for prompted in filter(has_prompt, model.modules()):
        is_there(adapters_on(prompted), name, config)  # refuses adapters of two kinds
    refuse_merged(root, f"adding adapter '{name}'")
    if is_there(adapters_on(root), name, config):
        train_mode(root)
        return [*found, *tensors]
    refuse_namesake(name, dict(root.named_modules()))
    check_start(config, found, batches)
    heads = names_not_in(find_heads(model), {**found, **whole})
    _put_in(model, root, config, name, batches)
    train_mode(root)
    besides = f", {len(tensors)} tensors ({', '.join(config.target_parameters)})" if tensors else ""
    besides += f", and {', '.join(whole)} in full" if whole else ""
    if targets in (None, ALL_LINEAR):
        besides += f"; heads without adapter: {', '.join(heads)}" if heads else ""
        besides += f"; without adapter, since its rank would exceed their size: {list_some(thin)}" if thin else ""
        besides += describe_uncovered(model, [*found, *tensors])
    report_added(model, config, name, f"{len(found)} layers ({list_layer_kinds(found)}){besides}")
    return [*found, *tensors]


def report_added(model: nn.Module, config: "PeftConfig", name: str, what: str) -> None:
    """Log what an adapter of this name was added to, and how many parameters of ``model`` train now."""
    trained, total = count_parameters(model)
    share = f"{trained:,} of {total:,} parameters ({trained / total:.2%})"
    say("Adapter '%s' (%s): %s; trains %s", name, method_of(config), what, share)


def _remove_thin(found: dict[str, nn.Module], config: "PeftConfig") -> list[str]:
    """Remove the layers with fewer features than the rank, such as the gate of a shared expert."""
    rank = getattr(config, "r", None) or 0
    thin = [name for name, layer in found.items() if rank > largest_rank(layer)]
    if len(thin) == len(found):
        return []
    for name in thin:
        del found[name]
    return thin


def _refuse_both(found: Iterable[str], whole: Collection[str]) -> None:
    for target in found:
        if is_part_of(target, whole):
            raise ValueError(explain(f"'{target}'", "it is both a target and in train=", "Remove it from one of them"))


def _put_in(
    model: nn.Module,
    root: nn.Module,
    config: "PeftConfig",
    name: str,
    batches: Batches | None,
) -> None:
    """Freeze ``model`` and add the adapter; if that fails, leave the model unchanged."""
    places = list_places(model)
    with ExitStack() as on_error:
        # PEFT freezes only the module that it is given, and keeps updating running statistics.
        on_error.callback(freeze_(model))
        # PEFT replaces layers one by one, so a failure in the middle would leave some of them adapted.
        on_error.callback(replace_modules_, places, {child: child for _, _, child in places})
        prepare_start(model, root, config, batches)
        _inject(config, root, name)
        spread_replacements_(places)
        _share_rows_(root, name)
        refuse_parted(model, f"adapter '{name}'")
        places = list_places(model)
        finish_start_(model, root, config, name, batches)
        spread_replacements_(places)  # EVA removes adapters of rank 0
        finish_copies_(root, name)
        # After EVA, which creates matrices of other ranks.
        keep_adapter_in_float32_(switches(root), name)
        see_adapters_(model, on_error)
        on_error.pop_all()


def _fill_in_(
    config: "PeftConfig", model: nn.Module, found: Collection[str], tensors: Collection[str], whole: Collection[str]
) -> nn.Module:
    """Fill the targets into ``config``, relative to the module that gets the adapter, and return that module."""
    prefix, root = _root(model, [*found, *tensors, *whole])
    inside = strip_prefix(found, prefix)
    # Not None if only tensors are adapted: PEFT would add the layers that it lists for this kind of model.
    config.target_modules = _as_peft_keeps(shortest_names(inside, root)) if inside else set()
    if tensors:
        config.target_parameters = shortest_ends(strip_prefix(tensors, prefix), list(base_names(root).values()))
    # (IA)³ scales the inputs of these layers, and the outputs of the others.
    if getattr(config, "feedforward_modules", None):
        feedforward = names_in(
            strip_prefix(find_layers(model, as_list(config.feedforward_modules), "feedforward_modules"), prefix), inside
        )
        config.feedforward_modules = _as_peft_keeps(shortest_names(feedforward, root))
    if whole:
        config.modules_to_save = without_namesakes(strip_prefix(whole, prefix), root)
    rows = getattr(config, "trainable_token_indices", None)
    if isinstance(rows, dict):
        config.trainable_token_indices = {_as_first_name(end, root): indices for end, indices in rows.items()}
    return root


def _as_first_name(end: str, root: nn.Module) -> str:
    """Return the ending of a module's name, or its first name if only other names of it end so."""
    firsts = {name: names[0] for names in Sharing(root).names.values() for name in names}
    ending = [name for name in firsts if name.endswith(end)]
    if not ending or any(firsts[name] == name for name in ending):
        return end
    return firsts[ending[0]]


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Map qualified names to the modules in ``model`` that PEFT's adapters were added to.

    In a ``PeftModel`` that is the model inside; PEFT's wrappers around it hold the same configuration. With virtual
    tokens it is the ``PeftModel`` itself.

    Raises:
        ValueError: ``model`` has no adapter.
    """
    found = {name: module for name, module in model.named_modules() if adapters_on(module)}
    if not found:
        way_out = "Add one: apply(model, [LoRA(rank=16)])"
        raise ValueError(explain(f"{type(model).__name__} has no adapter", "none was added", way_out))
    return found


@check_arguments
def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of all adapters in ``model``, in the order in which they were added."""
    return list(dict.fromkeys(chain(*map(adapters_on, adapted_modules(model).values()))))


@check_arguments
def use_adapter_(model: nn.Module, name: str | list[str]) -> None:
    """Activate the adapter ``name``, or several at once, in the forward pass; only active adapters train.

    Call it before the optimizer is created, or between runs: an optimizer keeps the parameters that it was given.

    Raises:
        ValueError: there is no such adapter; the message lists the existing ones.

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

    names = as_list(name)
    there = adapter_names(model)
    refuse_merged(model, f"using {', '.join(names)}")
    refuse_unknown(names, there)
    roots = adapted_modules(model).values()
    if len(names) > 1 and any(map(has_prompt, roots)):
        why = "only one set of virtual tokens can be active at a time"
        raise ValueError(explain(f"adapters {names}", why, "Pass one name"))
    for root in roots:
        if has_prompt(root):
            use_prompt_(root, names[0])
        else:
            set_adapter(root, names)


def use_prompt_(root: object, name: str, trainable: bool = True) -> None:
    """Activate the virtual tokens ``name`` in the forward pass; only they train, or none if not ``trainable``."""
    root.set_adapter(name)  # older versions of PEFT have no inference_mode here
    if not trainable:
        root.requires_grad_(False)
    for other, encoder in root.prompt_encoder.items():
        # PEFT does not change ``requires_grad`` of the others.
        encoder.requires_grad_(trainable and other == name)


@check_arguments
def remove_adapter_(model: nn.Module, name: str) -> None:
    """Remove one of several adapters from the model, in place; if it was active, activate the first remaining one.

    Raises:
        ValueError: there is no adapter of that name, it is the only one, or an adapter is merged.

    Example:
        >>> import peft
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> for task in ("summaries", "titles"):
        ...     _ = add_adapter_(net, peft.LoraConfig(r=1), "0", name=task)
        >>> remove_adapter_(net, "titles")
        >>> adapter_names(net)
        ['summaries']

    Source:
        PEFT's ``delete_adapter``.
    """
    refuse_merged(model, f"remove_adapter_(model, '{name}')")
    there = adapter_names(model)
    refuse_unknown([name], there)
    if there == [name]:
        why = "it is the only adapter"
        raise ValueError(explain(f"remove_adapter_(model, '{name}')", why, "Use unload_adapters_(model, merge=False)"))
    # Before the deletion: PEFT would choose for each layer separately, in alphabetical order.
    if any(name in layer.active_adapters for layer in switches(model)):
        use_adapter_(model, names_not_in(there, [name])[0])
    for layer in switches(model):
        layer.delete_adapter(name)
    for module in model.modules():
        (vars(module).get("peft_config") or {}).pop(name, None)


def adapter_parameters(model: nn.Module) -> set[str]:
    """Return all names of the adapters' parameters and buffers, copies of fully trained modules included."""
    brought: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if is_a(module, TUNER, WRAPPER):
            base = f"{held_child(module)}."
            brought |= {f"{name}.{key}" for key in module.state_dict() if not key.startswith(base)}
        # Not all but the base model: a PeftModel also lists the embeddings of its base model under a second name.
        if has_prompt(module):
            start = f"{name}.prompt_encoder.".removeprefix(".")
            brought.update(module.get_submodule("prompt_encoder").state_dict(prefix=start))
    return brought


def adapter_state(root: nn.Module, name: str) -> dict[str, Tensor]:
    """Return the tensors of an adapter as PEFT names them in files; those of a module in several places only once."""
    from peft.utils.save_and_load import get_peft_model_state_dict

    # False: "auto" would query the Hugging Face Hub about the base.
    state = get_peft_model_state_dict(root, adapter_name=name, save_embedding_layers=False)
    again = set(chain.from_iterable(names[1:] for names in Sharing(root).names.values()))
    return {key: tensor for key, tensor in state.items() if not is_inside(key, again)}


def _inject(config: "PeftConfig", root: nn.Module, name: str) -> None:
    peft = require_peft()
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")  # several are intended
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # copies are tied
        # PEFT corrects it, for GPT-2's layers.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")  # reported when merging
        # PEFT checks a quantised layer's class only if set.
        for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
            if not getattr(root, flag, False):
                stack.callback(patch(root, flag, True))
        if has_fake_parameters(root):
            # PEFT moves its new modules, which fake tensors cannot.
            stack.enter_context(unset_fake_temporarily())
        try:
            with shown_as_parameters(root):
                peft.inject_adapter_in_model(config, root, adapter_name=name)
        except (ValueError, TypeError) as error:
            what = f"{method_of(config)} on {config.target_modules or config.target_parameters}"
            why, way_out = f"PEFT reports: {first_line(error).rstrip('.')}", "Leave these layers out of the targets"
            raise TypeError(explain(what, why, way_out)) from error
    for layer in find_tuners(root).values():
        if hasattr(layer, "ranknum"):
            # PEFT lets AdaLoRA's number of ranks train in another dtype than float32, and never saves it.
            layer.ranknum.requires_grad_(False)
    # Only now, since PEFT creates its wrappers for plain parameters.
    use_held_tensors_(root)


_ROWS = "peft.utils.other.TrainableTokensWrapper"


def _share_rows_(root: Any, name: str) -> None:
    """Have trained rows of a Hugging Face model's input embedding act wherever its weight is used, as in a tied head.

    PEFT does so for the modules that the configuration ties to the embedding it finds, which for Marian are not all.
    """
    embedding: Any = None
    if is_a(root, HUGGING_FACE_MODEL):
        with suppress(NotImplementedError):  # models of images and sound have no such embedding
            embedding = root.get_input_embeddings()
    if not is_a(embedding, _ROWS):
        return
    rows, places = embedding.token_adapter, list_places(root)
    if name not in rows.token_indices:
        return
    for key in Sharing(root).outside([embedding]):
        above = list(map(root.get_submodule, list_names_above(key)))
        wrapper: Any = next((module for module in above if is_a(module, _ROWS)), None)
        if wrapper is None:
            wrapper = type(embedding)(above[-1], name, token_indices=rows.token_indices[name], tied_adapter=rows)
            wrapper.set_adapter(embedding.active_adapter)
            replace_modules_(places, {above[-1]: wrapper})
        elif wrapper.token_adapter.tied_adapter is rows:
            wrapper.update(name, tied_adapter=rows)


def _as_peft_keeps(names: list[str] | str) -> set[str] | str:
    return names if isinstance(names, str) else set(names)  # as PEFT configurations do when they are created


def _root(model: nn.Module, names: Collection[str]) -> tuple[str, nn.Module]:
    """Return the prefix that the adapted module adds to its layers' names, and that module."""
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
    """Set the adapter layers to train mode, since Lightning leaves pretrained modules in eval mode."""
    for layer in switches(root):
        for name, child in layer.named_children():
            if name not in ("base_layer", "original_module"):
                child.train()


def finish_copies_(root: nn.Module, name: str) -> None:
    """Let the copies of adapter ``name`` train as their modules would: with the same ties, and running statistics.

    PEFT copies one module after the other, after everything was frozen.
    """
    first: dict[nn.Parameter, nn.Parameter] = {}
    for wrapper in switches(root):
        copy = trained_copies(wrapper).get(name)
        if copy is None:
            continue
        update_statistics_(copy)
        for key, original in wrapper.original_module.named_parameters(remove_duplicate=False):
            owner, _, own = key.rpartition(".")
            copy.get_submodule(owner)._parameters[own] = first.setdefault(original, copy.get_parameter(key))


_ATTENTION = "peft.tuners.lora.layer.MultiheadAttention"
# Attributes that torch checks only to choose the fast path.
_SWITCHES: dict[type[nn.Module], tuple[str, int]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


class SlowPath(WrappedForward):
    """Replacement forward of torch's encoder layers and encoder that avoids the fused fast path.

    In eval mode the fast path passes the weights of the inner layers to one fused kernel, which would ignore adapters.
    It is avoided only while an adapter is active: otherwise the model equals the pretrained one bit for bit.
    """

    def __call__(self, *args: object, **kwargs: object) -> Any:
        # In train mode torch does not use the fast path.
        if self.module.training or not _is_adapted_inside(self.module):
            return self.inner(*args, **kwargs)
        name, off = next(switch for kind, switch in _SWITCHES.items() if isinstance(self.module, kind))
        with patched(self.module, name, off):
            return self.inner(*args, **kwargs)


class KeepsBaseWeights(WrappedForward):
    """Replacement forward of PEFT's ``nn.MultiheadAttention`` layer that keeps the base weights bit for bit.

    PEFT adds the adapter to the weights, calls the attention, and subtracts the adapter again, which leaves a rounding
    error in the frozen weights at every step.
    """

    def __call__(self, *args: object, **kwargs: object) -> Any:
        layer: Any = self.module
        base = layer.get_base_layer()
        # No copies are needed: PEFT assigns other tensors, and does not write to these.
        before = base.in_proj_weight.data, layer.out_proj.weight.data
        try:
            return self.inner(*args, **kwargs)
        finally:
            base.in_proj_weight.data, layer.out_proj.weight.data = before


def see_adapters_(model: nn.Module, on_error: ExitStack) -> None:
    """Make torch's own layers in ``model`` apply the adapters inside them, in eval mode too."""
    for module in list(model.modules()):
        kind = _kind_for(module)
        if kind is not None and not wrapper_on(module, kind):
            on_error.callback(kind(module).install())


def forget_adapters_(model: nn.Module) -> None:
    """Remove the slow-path wrappers that :func:`see_adapters_` installed."""
    for wrapper in list(wrappers_in(model, SlowPath)):
        wrapper.undo()


def _kind_for(module: nn.Module) -> type[WrappedForward] | None:
    if isinstance(module, tuple(_SWITCHES)) and find_tuners(module):
        return SlowPath
    if is_a(module, _ATTENTION):
        return KeepsBaseWeights
    return None


def _is_adapted_inside(module: nn.Module) -> bool:
    return any(not layer.disable_adapters and not layer.merged for layer in find_tuners(module).values())
