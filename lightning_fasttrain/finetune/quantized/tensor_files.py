"""Tensors in safetensors files: list them, and read them one by one; and the weights from before quantising."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.files import local_path, open_safetensors, read_json
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.finetune.selection.qualified_names import names_not_in

Where = str | os.PathLike[str]
Original = nn.Module | Mapping[str, Tensor] | Where
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
# Relative distance: quantising causes 0.1, and the weights of another model are at 1.4.
_UNRELATED = 0.5

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file that has not been read yet."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def find_tensors(where: Where | Sequence[Where]) -> dict[str, StoredTensor]:
    """List the tensors in a file, several files, or a folder with one file or an index; only headers are read.

    Raises:
        FileNotFoundError: no such file, or a folder without one.
        ValueError: a file is truncated or not a safetensors file, a name occurs in two files, or an index cannot be
            read, names a file outside of its folder, or a tensor that is not in the file.
    """
    if isinstance(where, str | os.PathLike):
        path = local_path(where)
        if path.is_dir():
            # In the order in which ``from_pretrained`` looks for them.
            path = path / INDEX if (path / INDEX).exists() else path / WHOLE
        if path.name.endswith(".index.json"):
            return _read_index(path)
        return _in_file(path)
    found: dict[str, StoredTensor] = {}
    for one in where:
        for name, tensor in find_tensors(one).items():
            if name in found:
                both = f"{found[name].path} and {tensor.path}"
                raise ValueError(explain(f"{name!r} is in {both}", "only one can be loaded", "Pass one of them"))
            found[name] = tensor
    return found


def read_tensors(stored: dict[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Read tensors one by one, file after file; copy those to keep, since a tensor may be memory-mapped."""
    by_path: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        by_path.setdefault(tensor.path, []).append(name)
    for path, names in by_path.items():
        with open_safetensors(path) as file:
            for name in names:
                yield name, file.get_tensor(name)


def _in_file(path: Path) -> dict[str, StoredTensor]:
    found = {}
    with open_safetensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            part = file.get_slice(name)
            if part.get_dtype() not in DTYPES:
                why = "torch has no such dtype"
                raise ValueError(explain(f"{name!r} in {path} is in {part.get_dtype()}", why, "Convert it"))
            found[name] = StoredTensor(path, tuple(part.get_shape()), DTYPES[part.get_dtype()])
    return found


def _read_index(path: Path) -> dict[str, StoredTensor]:
    """Read the index of a folder of shards; refuse names of files outside of the folder."""
    try:
        index = read_json(path)
    except ValueError as error:
        raise ValueError(explain(f"{path}", f"not an index of shards ({error})", "Fetch it again")) from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        why = "not an index of shards: it has no weight_map from names to files"
        raise ValueError(explain(f"{path} cannot be read", why, "Fetch it again"))
    shards = {file: _in_file(_locate_inside(path, file)) for file in sorted(set(names.values()))}
    found: dict[str, StoredTensor] = {}
    for name, file in names.items():
        if name not in shards[file]:
            raise ValueError(explain(f"{path} names {name} in {file}", "it is not there", "Fetch them again"))
        found[name] = shards[file][name]
    return found


def _locate_inside(index: Path, file: str) -> Path:
    folder = index.parent.resolve()
    roots = [folder]
    # The cache of Hugging Face, whose files are links to its blobs.
    if folder.parent.name == "snapshots":
        roots.append(folder.parent.parent / "blobs")
    path = index.parent / file
    # A backslash separates folders on Windows.
    plain = file == Path(file).name and "\\" not in file and file.endswith(".safetensors")
    if not plain or not any(map(path.resolve().is_relative_to, roots)):
        why = "not a .safetensors file in its folder"
        raise ValueError(explain(f"{index} names {file!r}", why, "Do not use this model"))
    return path


class OriginalWeights:
    """Full-precision weights of a quantised model, read one by one from a module, a state dict or files.

    Args:
        original: the full-precision model: a module, its state dict, a safetensors file or folder.
        names: qualified names of the quantised weights that it must have.
    """

    def __init__(self, original: Original, names: Sequence[str]) -> None:
        self.stored: dict[str, StoredTensor] | None = None
        if isinstance(original, str | os.PathLike):
            self.stored = find_tensors(original)
            keys = {name: name for name in self.stored}
        else:
            self.tensors = original.state_dict() if isinstance(original, nn.Module) else original
            keys = {_strip_wrappers(name): name for name in self.tensors}
        self.keys = keys
        self.renamed = _find_prefix(list(map(_strip_wrappers, names)), keys)

    def read_weight(
        self, name: str, base: object, dequantized: Tensor, whole: str = ""
    ) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of a layer, on its device; or the tensor named ``whole`` that the layer stands for.

        Raises:
            ValueError: the weight has another shape, or belongs to another model.
        """
        cut, added = self.renamed
        key = added + _strip_wrappers(name)[cut:]
        called = added + _strip_wrappers(whole or f"{name}.weight")[cut:]
        weight = self._read(called)
        bias = base.bias
        if bias is not None and f"{key}.bias" in self.keys:
            bias = self._read(f"{key}.bias").to(base.weight.device)
        found = f"{list(weight.shape)} of {weight.dtype}"
        # Hugging Face transposes GPT-2's layers when it quantises them.
        for one in (weight, weight.mT):
            if one.is_floating_point() and one.shape == dequantized.shape:
                one = one.to(base.weight.device)
                if relative_error(one.float(), dequantized) < _UNRELATED:
                    return one.contiguous(), bias
                found = "further from the quantised weight than quantising explains"
        way_out = f"Pass the weights that were quantised, {list(dequantized.shape)}"
        raise ValueError(explain(f"original= for '{name}'", f"its '{called}' is {found}", way_out))

    def _read(self, key: str) -> Tensor:
        if self.stored is None:
            return self.tensors[self.keys[key]].detach()
        ((_, tensor),) = read_tensors({key: self.stored[key]})
        return tensor.clone()  # the tensor may be memory-mapped from the file


def _find_prefix(names: list[str], keys: Mapping[str, str]) -> tuple[int, str]:
    """Return the length of the prefix to cut from tensor names, and its replacement, so that all are in ``keys``.

    The original may have been saved from an outer or an inner module of the merged one.
    """
    first = names[0]
    # The full name, and the rest after each dot.
    cuts = [0, *(i + 1 for i, c in enumerate(first) if c == ".")]
    for cut in cuts:
        tail = first[cut:]
        for key in keys:
            if key == tail or key.endswith(f".{tail}"):
                added = key[: -len(tail)]
                if all(name[:cut] == first[:cut] and f"{added}{name[cut:]}" in keys for name in names):
                    return cut, added
    missing, why = names_not_in(names, keys), "it is empty"
    if keys:
        why = f"it has {', '.join(list(keys)[:3])}"
    way_out = "Pass the full-precision weights of this model"
    raise ValueError(explain(f"original= lacks {list_some(missing)}", why, way_out))


def _strip_wrappers(name: str) -> str:
    return ".".join(names_not_in(name.split("."), ("base_layer", "original_module")))


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).norm() / expected.norm().clamp_min(1e-30))
