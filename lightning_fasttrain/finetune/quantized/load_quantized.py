"""Load a quantized model from files, one tensor at a time."""

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from lightning_fasttrain.core.checks import check_arguments, require
from lightning_fasttrain.core.messages import explain, list_some, say
from lightning_fasttrain.core.modules.select import Blocks
from lightning_fasttrain.core.safe_load import local_path, open_safetensors, read_json
from lightning_fasttrain.finetune.quantized.quantized_base import check_settings, choose_compute_dtype, report, sort_out
from lightning_fasttrain.finetune.quantized.quantized_layer import FLOATS, quantize_layer_, round_bias_
from lightning_fasttrain.finetune.quantized.quantized_tensor import keep_quantized_, quantize_tensor_
from lightning_fasttrain.finetune.selection.base_fingerprint import names_in, names_not_in

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


_LONG = 2**30  # bytes; longer loads show a progress bar


@check_arguments
def load_quantized(
    make_model: Callable[[], nn.Module],
    files: Where | Sequence[Where],
    kind: str = "nf4",
    *,
    double_quant: bool = True,
    compute_dtype: torch.dtype | str = "auto",
    skip: Blocks = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Build a model on the meta device, and load it from safetensors files, quantising each weight as it is read.

    Memory holds at any time the part of the model that is quantised already, and one tensor in full precision. The
    result is bit for bit that of :func:`~lightning_fasttrain.finetune.quantize_base_` on the loaded model. Buffers that
    are not in the files, such as the frequencies of rotary embeddings, are computed when the model is built.

    Args:
        make_model: builds the model, such as ``lambda: AutoModelForCausalLM.from_config(config)``. Its parameters get
            no memory; changes to their values are lost.
        files: a ``.safetensors`` file, several, or a folder that Hugging Face's ``save_pretrained`` wrote, with one
            file or with shards and an index.
        kind: as for :func:`~lightning_fasttrain.finetune.quantize_base_`.
        double_quant: as there.
        compute_dtype: as there.
        skip: as there.
        dtype: dtype of all floating-point tensors before they are quantised; None keeps the dtype in the file.
        device: device on which weights are quantised, and of the returned model.

    Returns:
        The model.

    Raises:
        ValueError: as for :func:`~lightning_fasttrain.finetune.quantize_base_`; names or shapes of model and files
            differ; a file is truncated or not a safetensors file; an index names a file outside of its folder.
        TypeError: ``make_model`` does not return a module.
        FileNotFoundError: a file does not exist.
        ModuleNotFoundError: bitsandbytes or safetensors is missing.

    Example:
        >>> from safetensors.torch import save_file
        >>> make = lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        >>> file = getfixture("tmp_path") / "model.safetensors"
        >>> save_file(make().state_dict(), file)
        >>> load_quantized(make, file)
        Sequential(
          (0): Linear4bit(in_features=64, out_features=64, bias=True)
          (1): Tanh()
          (2): Linear(in_features=64, out_features=2, bias=True)
        )

    Source:
        Ours; checked bit for bit against ``quantize_base_`` of the loaded model.
    """
    check_settings(kind, compute_dtype)
    for package in ("bitsandbytes", "safetensors"):
        require(package, extra="finetune")
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(explain(f"dtype={dtype}", "it cannot be quantised", f"Use {', '.join(map(str, FLOATS))}"))
    model = _build_empty(make_model)
    found = sort_out(model, kind, skip)
    slots = _slots(model)
    stored = find_tensors(files)
    wanted = _select_tensors(model, slots, stored, files)
    names = [*(f"{name}.weight" for name in found.layers), *found.stacks]
    _refuse_unfit(names, slots, wanted, dtype)
    layers = {id(layer._parameters["weight"]): layer for layer in found.layers.values()}
    stacks = {id(owner._parameters[key]): (owner, key) for owner, key in found.stacks.values()}
    made: dict[tuple[nn.Module, str], nn.Module] = {}
    before = 0
    total = sum(tensor.nbytes for tensor in wanted.values())
    with _progress(total) as advance:
        for name, tensor in read_tensors(wanted):
            advance(tensor.nbytes)
            tensor = tensor.to(device, dtype if tensor.is_floating_point() else None)
            empty = slots[name]
            layer, stack = layers.get(id(empty.tensor)), stacks.get(id(empty.tensor))
            if layer is not None:
                before += tensor.nbytes
                chosen = choose_compute_dtype(compute_dtype, model, tensor)
                quantize_layer_(layer, tensor, kind, double_quant, chosen)
            elif stack is not None:
                before += tensor.nbytes
                made[stack] = quantize_tensor_(*stack, tensor, kind, double_quant)
            else:
                empty.fill(tensor)
            # Otherwise this tensor would stay in memory while the next one is read.
            del tensor
    # After the loop, as a bias may be read after its weight.
    for layer in layers.values():
        round_bias_(layer)
        keep_quantized_(layer)
    model.to(device)  # buffers that are not in the files
    holders = {name: made[stack] for name, stack in found.stacks.items()}
    say("load_quantized: %s", report(model, kind, found, holders, before))
    return model


class _Slot:
    """All places in a model that hold the same tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.places: list[tuple[dict[str, Any], str]] = []

    def fill(self, tensor: Tensor) -> None:
        filled = tensor.clone()  # the tensor may be memory-mapped
        if isinstance(self.tensor, nn.Parameter):
            filled = nn.Parameter(filled, self.tensor.requires_grad)
        for table, name in self.places:
            table[name] = filled


def _slots(model: nn.Module) -> dict[str, _Slot]:
    """Map the qualified names of parameters and buffers to slots; names of tied tensors share one."""
    by_id: dict[int, _Slot] = {}
    slots: dict[str, _Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        tables: tuple[Any, ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    slot = by_id.setdefault(id(tensor), _Slot(tensor))
                    slot.places.append((table, name))
                    slots[f"{prefix}.{name}".removeprefix(".")] = slot
    return slots


def _build_empty(make: Callable[[], nn.Module]) -> nn.Module:
    """Call ``make``, replacing each parameter by one on the meta device as it is registered; ties are kept."""
    # The hook is global to the process, and other threads may build modules too.
    thread = threading.get_ident()
    # By identity, to keep ties; with weak references, to free each parameter's memory at once.
    empties: Any = WeakIdKeyDictionary()

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None  # keeps the parameter
        if parameter not in empties:
            empties[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        return empties[parameter]

    # Torch's annotation lacks the result that its documentation describes.
    hook: Any = without_memory
    handle = register_module_parameter_registration_hook(hook)
    try:
        model = make()
    finally:
        handle.remove()
    if not isinstance(model, nn.Module):
        why = f"expected an nn.Module, got {type(model).__name__}"
        raise TypeError(explain("make_model()", why, "Return the model from it"))
    return model


def _select_tensors(
    model: nn.Module, slots: dict[str, _Slot], stored: dict[str, StoredTensor], files: object
) -> dict[str, StoredTensor]:
    """Select the stored tensors that the model needs; tied ones only once."""
    # By slot: safetensors files contain only one of several tied names.
    there = {id(slots[name]) for name in names_in(stored, slots)}
    missing: list[str] = []
    shapes: list[str] = []
    read: dict[int, tuple[str, StoredTensor]] = {}
    # A state dict has no non-persistent buffers.
    for name in names_in(model.state_dict(), slots):
        slot = slots[name]
        if id(slot) not in there:
            missing.append(name)
        if name in stored:
            read.setdefault(id(slot), (name, stored[name]))
            in_file, in_model = list(stored[name].shape), list(slot.tensor.shape)
            if in_file != in_model:
                shapes.append(f"{name} is {in_file} in the file and {in_model} in the model")
    unexpected = names_not_in(stored, slots)
    listed = (("missing in the files", missing), ("unknown to the model", unexpected), ("of another shape", shapes))
    wrong = [f"{what}: {list_some(names, most=5)}" for what, names in listed if names]
    if wrong:
        way_out = "Build the class and configuration that the files were saved from"
        raise ValueError(explain(f"{files} does not fit {type(model).__name__}", "; ".join(wrong), way_out))
    return dict(read.values())


def _refuse_unfit(
    names: Iterable[str], slots: dict[str, _Slot], wanted: dict[str, StoredTensor], dtype: torch.dtype | None
) -> None:
    for name in names:
        if (dtype or wanted[name].dtype) not in FLOATS:
            why = "it cannot be quantised"
            raise ValueError(explain(f"{name} is stored in {wanted[name].dtype}", why, "Give dtype="))
    for name, slot in slots.items():
        if slot.tensor.is_meta and not isinstance(slot.tensor, nn.Parameter) and name not in wanted:
            why = "its values are unknown"
            way_out = "Build the model without torch.device('meta'): parameters get no memory in any case"
            raise ValueError(explain(f"buffer {name} is on the meta device and not in the files", why, way_out))


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], object]]:
    if total < _LONG:
        yield lambda nbytes: None
        return
    with Progress(transient=True) as progress:
        task = progress.add_task("Loading and quantising", total=total)
        yield lambda nbytes: progress.advance(task, nbytes)
