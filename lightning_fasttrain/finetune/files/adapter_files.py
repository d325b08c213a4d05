"""Save adapters atomically in PEFT's file format, and load them without trusting the files."""

import copy
import re
from collections import Counter
from collections.abc import Mapping
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, list_some, warn
from lightning_fasttrain.core.modules.select import (
    TUNER,
    WRAPPER,
    Sharing,
    is_a,
    is_inside,
    list_names_above,
    list_places,
)
from lightning_fasttrain.core.safe_load import open_safetensors
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.finetune.adapters.adapter_checks import (
    check_config,
    check_name,
    find_namesakes,
    refuse_namesake,
)
from lightning_fasttrain.finetune.adapters.add_adapter import (
    adapted_modules,
    adapter_parameters,
    adapter_state,
    add_adapter_,
    use_prompt_,
)
from lightning_fasttrain.finetune.files.adapter_config import (
    SETTINGS,
    WEIGHTS,
    Folder,
    adapter_folder,
    read_config,
    refuse_other_things,
    refuse_unrepeatable,
    stored_fingerprint,
    write_adapter,
    written_config,
)
from lightning_fasttrain.finetune.files.expected_tensors import (
    PREFIX,
    WRONG_BASE,
    Place,
    expected_tensors,
    find_place,
    refuse_not_finite,
    refuse_other_copies,
    refuse_other_model,
    refuse_other_tensors,
    refuse_other_ties,
    refuse_other_tokens,
    refuse_sizes_beyond_the_layers,
)
from lightning_fasttrain.finetune.prompt_tuning import (
    add_prompt_,
    check_prompt_config,
    fill_,
    find_language_model,
    plain_model,
    task_of,
)
from lightning_fasttrain.finetune.selection.base_fingerprint import (
    Fingerprint,
    adapters_on,
    base_names,
    first_few,
    list_trainable,
    names_not_in,
    prefix_of,
    refuse_other_base,
    strip_prefix,
)
from lightning_fasttrain.finetune.selection.float32_adapters import trained_copies
from lightning_fasttrain.finetune.selection.targets import has_ending, match_exactly, method_of

if TYPE_CHECKING:
    from peft import PeftConfig


@check_arguments
def save_adapter(model: nn.Module, folder: Folder, *, name: str | None = None) -> Path:
    """Save an adapter as PEFT does, without the base: ``adapter_model.safetensors`` and ``adapter_config.json``.

    Load it with :func:`load_adapter_` or ``peft.PeftModel.from_pretrained(base, folder)``. The tensor file's metadata
    also holds a fingerprint of the base, with which :func:`load_adapter_` refuses another base, and a copy of the
    settings. If the process dies, the folder holds either the old or the new adapter: the tensor file is replaced
    atomically, and differing settings are deleted first, so that PEFT never finds settings of another adapter. In
    distributed runs every process must call this function, and rank 0 writes.

    A module in several places that trains in full is saved under each of its names, since PEFT has a copy for each
    place, which it trains apart. An adapter of a layer in several places is saved once, with a warning: PEFT would add
    it to the first place only.

    Args:
        model: any module with an adapter, or one that holds the adapted module.
        folder: path of the folder, created if missing. In a folder with an adapter only these two files are replaced.
        name: name of the adapter; optional if there is only one.

    Returns:
        The folder.

    Raises:
        ValueError: there is no adapter, or there are several and ``name`` is not given; its initialization changed the
            base in a way that cannot be repeated; the model is sharded; or the folder holds other files and no adapter.

    Example:
        >>> import peft
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> _ = add_adapter_(net, peft.LoraConfig(r=2), "0")
        >>> folder = save_adapter(net, getfixture("tmp_path") / "summaries")
        >>> sorted(path.name for path in folder.iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']

    Source:
        ``peft.PeftModel.save_pretrained``; the tensors are identical bit for bit.
    """
    prefix, root, name = _find_adapter(model, name)
    config = adapters_on(root)[name]
    refuse_unrepeatable(config, f"adapter '{name}'")
    for one in adapters_on(root):
        refuse_namesake(one, base_names(root).values())
    target = Path(folder)
    refuse_other_things(target)
    try:
        state = adapter_state(root, name)
    except (ValueError, KeyError) as error:
        why = "a part of this adapter is in the PeftModel, outside of the layers"
        raise ValueError(explain(f"adapter '{name}'", why, "Save it with the PeftModel's save_pretrained")) from error
    _warn_of_what_is_left_out(model, {f"{prefix}{key}" for key in state})
    refuse_shards(state)
    config, state = _repeat_in_all_places(root, name, config, state)
    before = "" if config.is_prompt_learning else PREFIX  # PEFT's prefix in files
    tensors = {f"{before}{key}": tensor.detach() for key, tensor in state.items()}
    write_adapter(target, tensors, written_config(config, plain_model(root)), root)
    return target


@check_arguments
def load_adapter_(
    model: nn.Module, folder: Folder, *, name: str = "default", trainable: bool = False, check_base: bool = True
) -> list[str]:
    """Load an adapter saved by :func:`save_adapter` or PEFT into ``model``, in place, and activate it.

    If ``model`` has no adapter of this name, one is added, as by :func:`~lightning_fasttrain.finetune.add_adapter_`;
    otherwise the weights of the existing adapter are replaced. All checks run before the model changes: settings,
    names, shapes, and that the base has the weights that the adapter was trained with; files saved by PEFT do not
    identify their base. A base in another precision is accepted; for a quantised base and its original only the names
    are compared.

    Nothing in the folder is executed, imported, downloaded or used as a pattern: pickles are refused unopened, and the
    layers are determined by the names of the tensors.

    Args:
        model: any module that has the layers, or that holds the module with the layers.
        folder: path of the folder with ``adapter_model.safetensors`` and ``adapter_config.json``.
        name: name of the adapter in this model.
        trainable: whether the adapter continues training; otherwise it is frozen, and its dropout is disabled. All
            other parameters are frozen.
        check_base: whether to refuse a base with another fingerprint.

    Returns:
        Qualified names of the adapted layers.

    Raises:
        FileNotFoundError: the folder does not exist, or holds no adapter.
        ValueError: a file is damaged, not in safetensors format, holds NaN, or does not belong to this model; the
            message names the first difference. Or the existing adapter of this name has other settings.
        TypeError: the layers are quantised, and PEFT has no such adapter for them.

    Example:
        >>> import peft
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> again = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> _ = again.load_state_dict(net.state_dict())
        >>> _ = add_adapter_(net, peft.LoraConfig(r=2, init_lora_weights=False), "0")
        >>> folder = save_adapter(net, getfixture("tmp_path") / "summaries")
        >>> load_adapter_(again, folder)
        ['0']
        >>> torch.equal(net(torch.ones(1, 4)), again(torch.ones(1, 4)))
        True

    Source:
        ``peft.PeftModel.load_adapter``, which checks less.
    """
    check_name(name)
    source = adapter_folder(folder)
    # PEFT draws initial values, which loading replaces.
    with keep_random_state(), open_safetensors(source / WEIGHTS) as file:
        metadata = file.metadata() or {}
        config = read_config(source, metadata.get(SETTINGS))
        fingerprint = stored_fingerprint(metadata, source) if check_base else None
        config.inference_mode = not trainable
        if config.is_prompt_learning:
            return load_prompts_(model, source, file, config, name, trainable, fingerprint)
        check_config(config)
        refuse_unrepeatable(config, f"the adapter in {source}")
        keys = _layer_keys(list(file.keys()), source)
        place = find_place(model, keys, config, name, source, fingerprint)
        refuse_other_copies(place, file, str(source))
        keys = names_not_in(keys, place.copies)
        refuse_namesake(name, base_names(place.root).values())
        if hasattr(config, "feedforward_modules"):
            place.scaled = _scaled_at_input(place, config, keys, file)
        refuse_other_tokens(place, file, str(source))
        refuse_sizes_beyond_the_layers(place, config, file, str(source))
        expected = expected_tensors(place, config)
        refuse_other_tensors(place.root, file, keys, expected, str(source))
        refuse_not_finite(file, str(source))
        refuse_other_ties(place, file, str(source))
        names, root_prefix, root = _add(model, place, config, name)
        _fill_(root, root_prefix, place, name, file)
    _use(root, name, trainable)
    return names


def _find_adapter(model: nn.Module, name: str | None) -> tuple[str, nn.Module, str]:
    """Return the prefix, module and name of the selected adapter."""
    roots = adapted_modules(model)
    there = [(prefix, one) for prefix, root in roots.items() for one in adapters_on(root)]
    meant = [(prefix, one) for prefix, one in there if name in (None, one)]
    if len(meant) == 1:
        prefix, one = meant[0]
        return prefix_of(prefix), roots[prefix], one
    form = "'{1}'"
    if len(roots) > 1:
        form = "'{1}' in {0}"
    listed = ", ".join(starmap(form.format, there))
    if not meant:
        raise ValueError(explain(f"name={name!r}", "there is no such adapter", f"Existing adapters: {listed}"))
    one = meant[0][1]
    places = [prefix for prefix, other in meant if other == one and prefix]
    way_out = f"Select one, for example name='{one}'"
    if len(places) > 1:
        way_out = f"Name the module: save_adapter(model.{places[0]}, …)"
    raise ValueError(explain(f"{type(model).__name__} has several adapters", listed, way_out))


def _warn_of_what_is_left_out(model: nn.Module, saved: set[str]) -> None:
    """Warn about trainable parameters that belong to no adapter, since they are not saved."""
    lost = names_not_in(list_trainable(model), adapter_parameters(model) | saved)
    if lost:
        warn(f"save_adapter: {first_few(lost)} train too, but belong to no adapter. Name their modules in train=.")


def refuse_shards(state: Mapping[str, Tensor]) -> None:
    shards = [key for key, tensor in state.items() if isinstance(tensor, DTensor) or not tensor.numel()]
    if shards:
        why = "the model is sharded, and this process holds only a shard of it"
        raise ValueError(explain(f"{first_few(shards)}", why, "Gather the model first, or save Lightning's checkpoint"))


def _repeat_in_all_places(
    root: nn.Module, name: str, config: "PeftConfig", state: dict[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """Return settings and tensors with all names of each module in several places, as far as PEFT can use them."""
    config, state, sharing = copy.copy(config), dict(state), Sharing(root)
    for module, number in Counter(child for _, _, child in list_places(root)).items():
        if number < 2 or not is_a(module, TUNER, WRAPPER):
            continue
        first, *others = sharing.names[module]
        if name not in trained_copies(module) or find_namesakes(others, root):
            why = f"it is also {list_some(list(map(repr, others)))}, and PEFT would adapt '{first}' alone"
            way_out = "Load the file with load_adapter_, or export the model with export_model"
            warn(explain(f"save_adapter: '{first}' has an adapter", why, way_out))
            continue
        config.modules_to_save = list(dict.fromkeys([*(config.modules_to_save or ()), *others]))
        for key in [key for key in state if is_inside(key, [first])]:
            state.update({f"{other}{key.removeprefix(first)}": state[key] for other in others})
    return config, state


def _layer_keys(keys: list[str], source: Path) -> list[str]:
    odd = [key for key in keys if not key.startswith(PREFIX)]
    if odd or not keys:
        why = "it is empty"
        if odd:
            why = f"it has {first_few(odd)}, but names must begin with '{PREFIX}'"
        what = f"{source / WEIGHTS} is not an adapter file"
        raise ValueError(explain(what, why, "Save it with save_adapter or PEFT"))
    return strip_prefix(keys, PREFIX)


def _add(model: nn.Module, place: Place, config: "PeftConfig", name: str) -> tuple[list[str], str, nn.Module]:
    """Add the adapter, and return its layers, and the prefix and module that it was added to."""
    if hasattr(config, "feedforward_modules"):
        config.feedforward_modules = _match_exactly(place, place.scaled)
    targets, train = _match_exactly(place, place.targets), _match_exactly(place, place.whole)
    if place.tensors:
        config.target_parameters = [f"{place.prefix}{tensor}" for tensor in place.tensors]
    # They are passed as ``train=``, in patterns that match only these modules.
    config.modules_to_save = None
    if place.tokens:
        config.trainable_token_indices = place.tokens
    # ``()`` is not None: a data-dependent initialization is accepted, and the file's values replace it.
    names = add_adapter_(model, config, targets, train=train, name=name, batches=())
    for prefix, root in adapted_modules(model).items():
        before = prefix_of(prefix)
        if name in adapters_on(root) and names[0].startswith(before):
            return names, before, root
    raise AssertionError("the added adapter was not found")


def _match_exactly(place: Place, names: list[str]) -> list[re.Pattern[str]]:
    if not names:
        return []
    in_model = [f"{place.prefix}{name}" for name in names]
    return [re.compile(match_exactly(in_model))]


def _scaled_at_input(place: Place, config: "PeftConfig", keys: list[str], file: object) -> list[str]:
    """Return the targets that (IA)³ scales at the input, [1, in], rather than at the output, [out, 1]."""
    ends = config.feedforward_modules or []
    found = []
    for target in place.targets:
        key = f"{target}.ia3_l"
        if key not in keys:
            continue
        shape = file.get_slice(f"{PREFIX}{key}").get_shape()
        # Shapes [1, 1] and those of convolutions, [1, channels, 1, 1], can be either, so the settings decide.
        either = len(shape) != 2 or set(shape) == {1}
        if shape[:1] == [1] and (not either or has_ending(target, ends)):
            found.append(target)
    return found


def _fill_(root: nn.Module, root_prefix: str, place: Place, name: str, file: object) -> None:
    """Copy the values in the file into the adapter."""
    own = adapter_state(root, name)
    with torch.no_grad():
        for key, tensor in own.items():  # shares memory with the parameters
            tensor.copy_(file.get_tensor(f"{PREFIX}{(root_prefix + key).removeprefix(place.prefix)}"))


def _use(root: nn.Module, name: str, trainable: bool) -> None:
    from peft.tuners.tuners_utils import set_adapter

    set_adapter(root, name, inference_mode=not trainable)
    for module in root.modules():
        if isinstance(module, nn.ModuleDict) and not trainable and name in module:
            module[name].eval()


# Settings that are not taken from a file: no tokenizer may be loaded, and the model determines the sizes.
_FROM_HERE: dict[str, Any] = {
    "prompt_tuning_init": "RANDOM",
    "prompt_tuning_init_text": None,
    "tokenizer_name_or_path": None,
    **dict.fromkeys(("num_layers", "token_dim", "num_attention_heads", "num_transformer_submodules")),
    "encoder_hidden_size": None,
}


def load_prompts_(
    model: nn.Module,
    source: Path,
    file: object,
    config: "PeftConfig",
    name: str,
    trainable: bool,
    fingerprint: Fingerprint | None,
) -> list[str]:
    """Load a file of virtual tokens into ``model``, and return the name of the Hugging Face model.

    See :func:`~lightning_fasttrain.finetune.load_adapter_`.
    """
    from peft.utils.save_and_load import set_peft_model_state_dict

    check_prompt_config(config)
    what, place, root = f"the adapter in {source}", *find_language_model(model)
    there, task = adapters_on(root).get(name), task_of(plain_model(root))
    if fingerprint is not None:
        refuse_other_base(fingerprint, root, what, WRONG_BASE)
    network = method_of(config) == "P_TUNING" or getattr(config, "prefix_projection", False)
    if network and (trainable or (there is not None and not there.inference_mode)):
        why = "a network computed its virtual tokens, and the file does not hold that network"
        way_out = "Resume from Lightning's checkpoint, or load it under another name with trainable=False"
        raise ValueError(explain(f"training {what} on", why, way_out))
    for key, value in _FROM_HERE.items():
        if hasattr(config, key):
            # Settings of the existing adapter, so that the two are identical.
            setattr(config, key, getattr(there, key, value))
    if task != "unknown" and config.task_type not in (None, task):
        why = f"its task is {config.task_type}, and this model's task is {task}"
        refuse_other_model(what, why)
    shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    expected = _shapes_here(config, plain_model(root))
    wrong = [key for key in {**expected, **shapes} if expected.get(key) != shapes.get(key)]
    if wrong:
        key = wrong[0]
        why = f"'{key[:120]}' is {shapes.get(key, 'missing')}, expected {expected.get(key, 'no such tensor')}"
        refuse_other_model(what, why)
    refuse_not_finite(file, str(source))
    add_prompt_(model, config, name=name)
    prompted = model.get_submodule(place)
    set_peft_model_state_dict(prompted, {key: file.get_tensor(key) for key in shapes}, adapter_name=name)
    use_prompt_(prompted, name, trainable)
    return [place]


def _shapes_here(config: Any, base: Any) -> dict[str, list[int]]:
    """Return the shapes of the tensors in PEFT's file of such virtual tokens for this model."""
    from peft.utils.other import _prepare_prompt_learning_config

    filled = copy.deepcopy(config)
    fill_(filled, base)
    # The number of layers is not in the dictionary of every model, and older versions of PEFT take no configuration.
    filled.num_layers = filled.num_layers or getattr(base.config, "num_hidden_layers", filled.num_layers)
    _prepare_prompt_learning_config(filled, base.config.to_dict())
    virtual = [filled.num_virtual_tokens * (1 + base.config.is_encoder_decoder), filled.token_dim]
    if method_of(filled) == "PREFIX_TUNING":
        virtual = [filled.num_virtual_tokens, 2 * filled.num_layers * filled.token_dim]
    shapes = {"prompt_embeddings": virtual}
    whole = tuple(filled.modules_to_save or ())
    if filled.task_type == "SEQ_CLS":
        whole += ("classifier", "score")  # PEFT trains these
    for name, plain in base_names(base).items():
        # PEFT trains a module in full if its name has one of these suffixes.
        if any(module.endswith(whole) for module in list_names_above(plain)):
            shapes[f"base_model.{plain}"] = list(base.get_parameter(name).shape)
    return shapes
