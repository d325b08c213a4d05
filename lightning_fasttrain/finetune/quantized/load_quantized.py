"""Load a quantised model from files without holding the full-precision model in memory."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from lightning_fasttrain.core.checks import check_arguments, require
from lightning_fasttrain.core.messages import explain, list_some, say
from lightning_fasttrain.core.modules.select import Blocks
from lightning_fasttrain.finetune.quantized.quantized_base import check_settings, choose_compute_dtype, report, sort_out
from lightning_fasttrain.finetune.quantized.quantized_layer import FLOATS, quantize_layer_, round_bias_
from lightning_fasttrain.finetune.quantized.quantized_state import keep_quantized_
from lightning_fasttrain.finetune.quantized.quantized_tensor import quantize_tensor_
from lightning_fasttrain.finetune.quantized.tensor_files import StoredTensor, Where, find_tensors, read_tensors
from lightning_fasttrain.finetune.selection.qualified_names import names_in, names_not_in

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
