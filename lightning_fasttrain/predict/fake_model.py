"""Models and batches without memory: the same shapes, dtypes and ties, on the CPU."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.finetune.quantized.quantized_layer import fake_parts, is_quantized
from lightning_fasttrain.finetune.selection.float32_adapters import kept_in_float32
from lightning_fasttrain.predict.operators.data_dependent_values import AssumedNumbers
from lightning_fasttrain.technique import Technique, apply

Factory = Callable[[], nn.Module]


@contextmanager
def fake_model(
    module: nn.Module | Factory,
    techniques: Sequence[Technique] = (),
    dtype: torch.dtype | None = None,
    mode: FakeTensorMode | None = None,
) -> Iterator[nn.Module]:
    """Yield a model without memory on which ``techniques`` operate; random states stay as they are.

    Args:
        module: as for :func:`fake_module`.
        techniques: those with surgery.
        dtype: as for :func:`fake_module`.
        mode: the fake mode of its tensors; by default a new one.
    """
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    net = fake_module(module, mode, dtype)
    # Adapters draw their first weights; nothing is on a GPU.
    with mode, torch.random.fork_rng(devices=[]), apply(net, techniques):
        yield net


def fake_module(module: nn.Module | Factory, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """Build a module without memory, or copy an existing one, which is not changed.

    Args:
        module: a function that builds it, or the module itself, on any device (including ``"meta"``).
        mode: the fake mode of its tensors.
        dtype: dtype of its floating-point parameters and buffers; None keeps theirs.

    Raises:
        TypeError: not a module nor a function that returns one, or a module that cannot be copied.
    """
    # An existing module may have no parameters before its configure_model.
    exists = isinstance(module, nn.Module)
    if not isinstance(module, nn.Module):
        with mode, AssumedNumbers(truth=False), warnings.catch_warnings():  # for nn.init.trunc_normal_
            # Modules such as nn.TransformerEncoder copy their layers, and copying reads an address.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            built = module() if callable(module) else module
        if not isinstance(built, nn.Module):
            why = f"expected an nn.Module, got {type(built).__name__}"
            way_out = "Pass an nn.Module, or a function without arguments that returns one"
            raise TypeError(explain(f"module={module!r}", why, way_out))
        module = built
    if exists or any(not _belongs(tensor, mode) for tensor in [*module.parameters(), *module.buffers()]):
        module = _copy_module(module, mode)
    if isinstance(module, L.LightningModule):
        with mode, AssumedNumbers(truth=False):
            # By Lightning's documentation a second call must do nothing.
            module.configure_model()
        module.log = module.log_dict = _say_nothing  # there is no Trainer to log to
    settle_(module, mode, dtype)
    return module


def fake_batch(batch: object, mode: FakeTensorMode) -> Any:
    """Replace every tensor in ``batch`` by a fake one of the same shape and strides, on the CPU."""
    return apply_to_collection(batch, Tensor, lambda tensor: _make_fake(tensor, mode, tensor.dtype))


def find_longest_axis(batch: object) -> int:
    """Return the size of the longest axis of the tensors in ``batch``, at least 1."""
    longest = 1

    def measure(tensor: Tensor) -> Tensor:
        nonlocal longest
        longest = max(longest, *tensor.shape, 1)
        return tensor

    apply_to_collection(batch, Tensor, measure)
    return longest


def _belongs(tensor: Tensor, mode: FakeTensorMode) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_mode is mode


def _copy_module(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    try:
        with FakeCopyMode(mode):
            # The second argument is deepcopy's memo: its entries count as copied already.
            return copy.deepcopy(module, _quantized_parts(module, mode))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        way_out = "Pass a function that builds it: lambda: MyModule(...)"
        raise TypeError(explain(f"{type(module).__name__} cannot be copied", why, way_out)) from error


def _quantized_parts(module: nn.Module, mode: FakeTensorMode) -> dict[int, Any]:
    with mode:
        return {key: part for m in module.modules() if is_quantized(m) for key, part in fake_parts(m).items()}


def settle_(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
    """Replace real tensors, or those on other devices, by fake CPU tensors in ``dtype``; tied parameters stay tied.

    Adapters stay in float32, as in the run.
    """
    settled: dict[Tensor, Tensor] = {}  # tensors hash by identity
    unrounded = kept_in_float32(module)
    for owner in module.modules():
        tables: tuple[Any, ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                rounded = tensor.is_floating_point() and tensor not in unrounded
                wanted = dtype if dtype is not None and rounded else tensor.dtype
                if tensor not in settled:
                    settled[tensor] = tensor
                    if tensor.device.type != "cpu" or tensor.dtype != wanted or not _belongs(tensor, mode):
                        settled[tensor] = _make_fake(tensor, mode, wanted)
                table[name] = settled[tensor]


def _make_fake(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> Tensor:
    plain = not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" and tensor.dtype == dtype
    if plain and not isinstance(tensor, nn.Parameter):
        # The mode keeps tensors on one storage together.
        return mode.from_tensor(tensor, static_shapes=True)
    with mode:
        # With its strides: an expanded tensor takes no extra memory.
        like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, tensor.requires_grad)
    return like


def _say_nothing(*_: object, **__: object) -> None:
    pass
