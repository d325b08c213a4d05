"""Read an adapter's folder, and write it atomically."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from lightning_fasttrain.core.atomic_write import TEMPORARY, write_atomic
from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.safe_load import local_path, parse_json
from lightning_fasttrain.finetune.selection.base_fingerprint import (
    Fingerprint,
    base_fingerprint,
    first_few,
    is_fingerprint,
)

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
