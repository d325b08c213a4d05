"""The files of an adapter: its folder, and the configuration that PEFT reads."""

import dataclasses
import functools
import json
import math
import os
import re
import types
import typing
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_fasttrain.core.atomic_write import TEMPORARY, write_atomic
from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.select import as_list
from lightning_fasttrain.core.safe_load import local_path, parse_json
from lightning_fasttrain.finetune.selection.base_fingerprint import (
    Fingerprint,
    base_fingerprint,
    first_few,
    is_fingerprint,
)
from lightning_fasttrain.finetune.selection.targets import require_peft

if TYPE_CHECKING:
    from peft import PeftConfig

Folder = str | os.PathLike[str]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BASE, SETTINGS = "lightning_fasttrain.base", "lightning_fasttrain.config"  # keys of the metadata, which PEFT ignores
_PICKLES = (".bin", ".ckpt", ".pkl", ".pickle", ".pt", ".pth")
_LEFT = f"{TEMPORARY}{WEIGHTS}-"  # temporary files of a killed process


def refuse_other_things(folder: Path) -> None:
    if folder.is_dir():
        there = sorted(path.name for path in folder.iterdir() if not path.name.startswith(_LEFT))
        if there and WEIGHTS not in there and CONFIG not in there:
            why = "an adapter among a model's files would be loaded together with the model"
            way_out = "Choose a new folder"
            raise ValueError(explain(f"{folder} holds other files than an adapter's: {first_few(there)}", why, way_out))
    elif folder.exists():
        raise ValueError(explain(f"{folder}", "expected a folder, got a file", "Choose a folder"))


@rank_zero_only
def write_adapter(folder: Path, tensors: Mapping[str, Tensor], settings: str, root: nn.Module) -> None:
    safetensors: Any = require("safetensors.torch", extra="finetune")
    metadata = {"format": "pt", SETTINGS: settings, BASE: json.dumps(base_fingerprint(root))}
    # Copies, since tensors that share memory, such as tied ones, cannot be saved in one file.
    own = {key: tensor.to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
    # In memory first, so that the file can be written atomically.
    data = safetensors.save(own, metadata)
    config = folder / CONFIG
    # This order guarantees, as save_adapter promises, that new tensors are never stored with old settings.
    if config.exists() and config.read_bytes() != settings.encode():
        config.unlink()
    write_atomic(folder / WEIGHTS, data)
    if not config.exists():
        write_atomic(config, settings)
    for left in folder.glob(f"{_LEFT}*"):
        left.unlink(missing_ok=True)


def adapter_folder(folder: Folder) -> Path:
    source = local_path(folder)
    found: list[Path] = []
    if source.is_file():
        found = [source]
    elif source.is_dir() and not (source / WEIGHTS).exists():
        found = sorted(source.iterdir())
    for path in found:
        if path.suffix in _PICKLES:
            why = "loading a pickle can execute code, so it was not opened"
            way_out = "Ask its author to save it as safetensors, which PEFT does by default"
            raise ValueError(explain(f"{path} is a pickle", why, way_out))
    if source.is_file():
        raise ValueError(explain(f"{source}", "an adapter is a folder with two files", f"Use '{source.parent}'"))
    if not source.is_dir():
        why = "the folder does not exist locally, and nothing is downloaded"
        raise FileNotFoundError(explain(f"{source}", why, "Download it first: huggingface_hub.snapshot_download"))
    if not (source / WEIGHTS).is_file():
        there = first_few(sorted(os.listdir(source))) or "no files"
        raise FileNotFoundError(explain(f"{source} has no {WEIGHTS}", f"it holds {there}", "Pass an adapter's folder"))
    return source


def stored_fingerprint(metadata: Mapping[str, str], source: Path) -> Fingerprint | None:
    if BASE not in metadata:
        note_once(f"{source} was not saved by save_adapter: names and shapes are checked, the base's weights cannot be")
        return None
    what = f"the fingerprint in {source / WEIGHTS}"
    found = parse_json(metadata[BASE], what)
    if not is_fingerprint(found):
        why = "expected a JSON object of strings"
        raise ValueError(explain(f"{what} cannot be read", why, "Pass check_base=False"))
    return found


_LARGEST = 4 * 2**20  # bytes; a list of 10,000 layers takes 1 MiB
_LONGEST_WORD = 256
# Settings that name the file's origin, or would import or download something: never used.
_ORIGIN = ("auto_mapping", "base_model_name_or_path", "peft_version", "revision")
NOT_FOLLOWED = (*_ORIGIN, "megatron_core", "runtime_config")
IGNORED = {*NOT_FOLLOWED, "inference_mode", "task_type"}
# Never used: tensor names determine the layers.
_PATTERNS = ("target_modules", "exclude_modules", "feedforward_modules")
# Names that PEFT inserts into patterns.
_NAMES = ("modules_to_save", "layers_pattern", "target_parameters", "rank_pattern", "alpha_pattern")
_NEEDS_PEFT = {
    "megatron_config": "it imports a module that the file names",
    "layer_replication": "it changes the model's layers",
    "alora_invocation_tokens": "it needs a PeftModel around your model",
    "arrow_config": "it needs a PeftModel around your model",
    "corda_config": "its initialization used data",
    "lora_ga_config": "its initialization used gradients",
    "loftq_config": "its initialization changed the base weights",
}
_OFF = (None, False, "", [], {})
# Initializations that can be repeated.
_STARTS = (True, False, "gaussian", "orthogonal", "eva", "mica", "pissa", "olora")


def written_config(config: "PeftConfig", root: nn.Module) -> str:
    """Return the contents of ``adapter_config.json``, with sorted keys so that equal settings give equal bytes."""
    settings = config.to_dict()
    # PEFT writes it in this way: the loader decides whether the adapter trains.
    settings["inference_mode"] = True
    if settings["base_model_name_or_path"] is None:
        settings["base_model_name_or_path"] = vars(root).get("name_or_path") or None
    if settings["task_type"] is None:
        kind = type(root)
        settings["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return json.dumps(settings, indent=2, sort_keys=True, default=_sort_any)


def _sort_any(value: object) -> list[Any]:
    if not isinstance(value, set):
        raise TypeError(f"{value!r} is in the adapter's config and cannot be saved as JSON.")
    return sorted(value)


def refuse_unrepeatable(config: "PeftConfig", what: str) -> None:
    """Refuse adapters whose initialization changed the base in a way that cannot be repeated when loading.

    Raises:
        ValueError: the initialization cannot be repeated.
    """
    start = getattr(config, "init_lora_weights", True)
    if start not in _STARTS:
        what += f" was initialized with init_lora_weights='{str(start)[:40]}'"
        why = "that changed the base depending on data or randomness, so it cannot be repeated when loading"
        way_out = "Merge it and save the model, or convert it with PEFT (path_initial_model_for_weight_conversion)"
        raise ValueError(explain(what, why, way_out))


def read_config(folder: Path, copy: str | None) -> Any:
    """Read the configuration of the adapter in ``folder``; all settings are checked before it is created.

    Args:
        folder: folder with ``adapter_config.json``.
        copy: the copy of that file in the tensor file, if :func:`save_adapter` wrote it.

    Raises:
        FileNotFoundError: there is neither the file nor a copy.
        ValueError: the file is not a configuration, has settings that are unknown, of the wrong type or from another
            save than the tensors, or describes a kind of adapter that cannot be added.
    """
    path, of_copy = folder / "adapter_config.json", f"the settings in {folder / 'adapter_model.safetensors'}"
    if path.is_file():
        with path.open("rb") as file:
            # One byte more than allowed, so that a longer file is detected.
            settings = _parse(file.read(_LARGEST + 1), str(path))
        if copy is not None:
            _refuse_mixed(settings, _parse(copy.encode(), of_copy), path)
    elif copy is not None:
        # After an interrupted save the tensor file is complete, and so is its copy of the configuration.
        settings = _parse(copy.encode(), of_copy)
    else:
        raise FileNotFoundError(explain(f"{path}", "the file does not exist", "Pass an adapter's folder"))
    return _make_config(settings, str(path))


def _parse(data: bytes, what: str) -> dict[str, Any]:
    settings = parse_json(data, what, _LARGEST)
    if not isinstance(settings, dict):
        why = f"expected a JSON object, got {type(settings).__name__}"
        raise ValueError(explain(f"{what} cannot be read", why, "Download it again"))
    return settings


def _refuse_mixed(settings: Mapping[str, object], copy: Mapping[str, object], path: Path) -> None:
    differ = [key for key in {**settings, **copy} if key not in IGNORED and settings.get(key) != copy.get(key)]
    if differ:
        why = f"it differs in {first_few(differ)}"
        way_out = "Save the adapter again, or delete this file to use the settings in the tensor file"
        raise ValueError(explain(f"{path} was not saved with the tensors", why, way_out))


def _make_config(settings: Mapping[str, object], path: str) -> Any:
    peft: Any = require_peft()
    kinds = {kind.value: config for kind, config in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = settings.get("peft_type")
    if not isinstance(kind, str) or kind not in kinds:
        version = str(settings.get("peft_version"))[:20]
        why = f"PEFT {peft.__version__} has no such adapter (the file is from version {version})"
        raise ValueError(explain(f"{path} has peft_type={str(kind)[:40]!r}", why, "Install a newer PEFT"))
    settings = {key: value for key, value in settings.items() if key not in (*NOT_FOLLOWED, "peft_type")}
    settings = _check_settings(settings, kinds[kind], path, peft.__version__)
    for key in _PATTERNS:
        if isinstance(settings.get(key), str):
            settings[key] = None
    try:
        with warnings.catch_warnings(action="ignore"):  # about settings without effect
            return kinds[kind](**settings)
    except Exception as error:  # unexpected settings can raise any error in PEFT
        raise ValueError(explain(f"{path}", f"PEFT rejects the settings: {error}", "Save the adapter again")) from error


def _check_settings(settings: dict[str, Any], kind: Any, path: str, version: str) -> dict[str, Any]:
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for key, value in settings.items():
        where = f"{path} has {key[:80]!r}"
        if key in fields and not _fits(value, hints[key], fields[key]):
            why = f"expected {_name_of_type(hints[key])}"
            raise ValueError(explain(f"{where}: {_shorten(value)}", why, "Correct the setting"))
        if value in _OFF:
            continue
        if key not in fields:
            why = f"{kind.__name__} of PEFT {version} has no such setting"
            raise ValueError(explain(where, why, "Install the PEFT that wrote it, or a newer one"))
        if key in _NEEDS_PEFT:
            why = f"{_NEEDS_PEFT[key]}, which is not supported here"
            raise ValueError(explain(where, why, "Load it with peft.PeftModel.from_pretrained, if you trust it"))
        if key in _NAMES:
            for name in as_list(value):
                # Characters that repeat or branch are not accepted.
                if not re.fullmatch(r"[\w.^$\\-]{1,256}", name):
                    why = "only layer names are accepted from files, since matching a pattern can take forever"
                    raise ValueError(explain(f"{where}: {name[:80]!r}", why, "List the layers' names"))
        elif isinstance(value, str) and len(value) > _LONGEST_WORD and key not in _PATTERNS:
            raise ValueError(explain(where, f"the value is {len(value)} characters long", "Do not use this file"))
    # The other settings are off, so they have no effect.
    return {key: value for key, value in settings.items() if key in fields}


@functools.cache
def _hints(kind: object) -> dict[str, Any]:
    return typing.get_type_hints(kind)


_CONTAINERS = (list, set, tuple, dict)


def _fits(value: object, hint: object, field: object = None) -> bool:
    """Check whether a value read from JSON has the type that a config declares."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if field is not None:
        if value is None or value == field.default:
            return True
        if field.name.endswith("alpha") and hint is int:
            hint = float  # PEFT declares int, and floats are common
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, one, field) for one in typing.get_args(hint))
    if kind is typing.Literal:
        return _is_one_of(value, typing.get_args(hint))
    if kind in _CONTAINERS or dataclasses.is_dataclass(hint):
        return _holds(value, kind, typing.get_args(hint))
    return _is_plain(value, hint)


def _is_one_of(value: object, words: tuple[object, ...]) -> bool:
    if isinstance(value, str) and any("[" in str(word) for word in words):  # such as pissa_niter_[number]
        return True
    return isinstance(value, str | int) and value in words


def _holds(value: object, kind: object, arguments: tuple[object, ...]) -> bool:
    """Check the elements of a container, where JSON stores sets, tuples and dataclasses as lists and mappings."""
    if kind in (list, set, tuple):
        inner = next(iter(arguments), typing.Any)
        return isinstance(value, list) and all(_fits(one, inner) for one in value)
    inner = next(iter(arguments[1:]), typing.Any)
    return isinstance(value, dict) and all(_fits(one, inner) for one in value.values())


def _is_plain(value: object, hint: object) -> bool:
    if hint is typing.Any:
        return True
    if hint is bool or isinstance(value, bool):  # a bool is an int
        return hint is bool and isinstance(value, bool)
    if hint in (int, float):
        return isinstance(value, int) or (hint is float and isinstance(value, float))
    if isinstance(hint, type) and issubclass(hint, str):
        return isinstance(value, str)
    return hint in (None, type(None)) and value is None


def _name_of_type(hint: object) -> str:
    if isinstance(hint, type):
        return hint.__name__
    return str(hint).replace("typing.", "")


def _shorten(value: object) -> str:
    text = repr(value)
    if len(text) > 80:
        return f"{text[:80]}…"
    return text
