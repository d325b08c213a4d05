"""A linear layer with a quantised weight: creation, dequantisation and size in bytes."""

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor

from lightning_fasttrain.core.checks import PositiveInt, check_arguments, one_of, require
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import quantized_tensors
from lightning_fasttrain.core.modules.select import CONV1D, find_imported_class, is_a

KINDS = ("nf4", "fp4", "int8")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that can be quantised, and used as compute dtype
BLOCK = 64  # 4-bit weights that share one constant
NESTED_BLOCK = 256  # constants that share one, with double quantisation
_CODE, _NESTED_CODE = 16, 256  # entries of the tables, in float32


@check_arguments
def quantized_bytes(
    out_features: PositiveInt, in_features: PositiveInt, kind: str = "nf4", *, double_quant: bool = True
) -> int:
    """Compute the bytes of the quantised weight of one linear layer, including its constants and tables.

    For n = out_features · in_features and b = ⌈n/64⌉ blocks: in 4 bits ⌈n/2⌉ + 4b, with double quantisation
    ⌈n/2⌉ + b + 4⌈b/256⌉, and a few hundred bytes of tables; in int8 n + 4·out_features.

    Args:
        out_features: rows of the weight.
        in_features: columns of the weight.
        kind: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        double_quant: whether the constants of 4-bit blocks are quantised too.

    Returns:
        Bytes, without the bias.

    Raises:
        ValueError: unknown kind.

    Example:
        >>> quantized_bytes(4096, 4096) / (4096 * 4096 * 2)  # of a weight in bfloat16
        0.2579...

    Source:
        Dettmers et al. 2023, "QLoRA", https://arxiv.org/abs/2305.14314, section 3; the tables as bitsandbytes keeps
        them, one set a layer.
    """
    one_of("kind", kind, KINDS)
    elements = out_features * in_features
    if kind == "int8":
        return elements + 4 * out_features
    blocks = -(-elements // BLOCK)
    constants = 4 * blocks
    if double_quant:
        constants = blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 * _NESTED_CODE + 4
    return -(-elements // 2) + 4 * _CODE + constants


class OncePerMessage(logging.Filter):
    """Let each message through once per process.

    Example:
        >>> record = logging.makeLogRecord({"msg": "inputs will be cast"})
        >>> once = OncePerMessage()
        >>> once.filter(record), once.filter(record)
        (True, False)
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self.seen
        self.seen.add(message)
        return is_new


_once = OncePerMessage()


def require_bitsandbytes() -> Any:
    """Import bitsandbytes, or raise an error that names the extra which installs it."""
    bitsandbytes = require("bitsandbytes", extra="finetune")
    # An int8 layer logs in each forward that it casts its inputs.
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_once)
    return bitsandbytes


def is_quantized(module: nn.Module) -> bool:
    """Check whether ``module`` is a linear layer of bitsandbytes with a quantised weight."""
    return is_a(module, "bitsandbytes.nn.Linear4bit") or in_8_bits(module)


def in_8_bits(module: object) -> bool:
    return is_a(module, "bitsandbytes.nn.Linear8bitLt") and not module.state.has_fp16_weights


def is_transposed(module: nn.Module) -> bool:
    """Check whether ``module`` is a ``Conv1D`` of transformers, as in GPT-2: a linear layer with weight [in, out]."""
    return type(module) is find_imported_class(CONV1D)


def was_transposed(layer: nn.Module) -> bool:
    """Check whether a quantised layer replaces one with weight [in, out]; it is stored as [out, in]."""
    return vars(layer).get("was_transposed", False)


def quantize_layer_(
    layer: Any, weight: Tensor, kind: str, double_quant: bool, compute_dtype: torch.dtype | None
) -> None:
    """Convert ``layer`` in place to a bitsandbytes layer with ``weight`` quantised on its device, and freeze it.

    It stays the same object, so references to it, its hooks and its wrappers stay valid.
    """
    if is_transposed(layer):
        layer.out_features, layer.in_features, layer.was_transposed = layer.nf, layer.nx, True
        weight = weight.detach().T  # from here on [out, in]
    bnb, size = require_bitsandbytes(), (layer.in_features, layer.out_features)
    # Parameters of bitsandbytes cannot be created under a fake mode, not even on the meta device.
    with unset_fake_temporarily():
        like: Any
        if kind == "int8":
            like = bnb.nn.Linear8bitLt(*size, bias=False, has_fp16_weights=False, device="meta")
        else:
            like = bnb.nn.Linear4bit(*size, bias=False, compute_dtype=compute_dtype, device="meta")
    packed, state = pack(weight.detach(), kind, double_quant)
    layer.__class__ = type(like)
    # Only missing attributes: hooks, replaced forwards and the bias stay.
    for name, value in vars(like).items():
        vars(layer).setdefault(name, value)
    if kind == "int8":
        layer._parameters["weight"] = _int8_parameter(packed)
        # As the first forward of bitsandbytes would do.
        layer.state.CB, layer.state.SCB = packed, state
    else:
        layer._parameters["weight"] = _4bit_parameter(packed, state)
        layer.quant_state = state
    if layer.bias is not None:
        layer.bias.requires_grad_(False)


def round_bias_(layer: object) -> None:
    """Round the bias to the compute dtype now, as bitsandbytes would in the first forward."""
    if layer.bias is not None and not in_8_bits(layer):
        layer.bias.data = layer.bias.data.to(layer.compute_dtype)


def pack(weight: Tensor, kind: str, double_quant: bool) -> tuple[Tensor, Any]:
    """Quantise a weight; return it with its row constants (int8) or its ``QuantState`` (4 bits)."""
    functional: Any = require_bitsandbytes().functional
    if isinstance(weight, FakeTensor):
        return _pack_fake(functional, weight, kind, double_quant)
    if kind == "int8":
        # The CUDA kernel accepts only contiguous float16.
        packed, row_constants, _ = functional.int8_vectorwise_quant(weight.to(torch.float16).contiguous())
        return packed, row_constants
    return functional.quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, compress_statistics=double_quant, quant_type=kind
    )


def _pack_fake(functional: object, weight: Tensor, kind: str, double_quant: bool) -> tuple[Tensor, Any]:
    """Create the result of :func:`pack` as fake tensors, so that bitsandbytes does not cache a fake table."""
    if kind == "int8":
        return torch.empty(weight.shape, dtype=torch.int8), torch.empty(weight.shape[0])
    blocks = -(-weight.numel() // BLOCK)
    state = functional.QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8 if double_quant else torch.float32),
        shape=weight.shape,
        code=torch.empty(_CODE),
        blocksize=BLOCK,
        quant_type=kind,
        dtype=weight.dtype,
    )
    if double_quant:
        # The mean of the constants, and whether there is a ``state2``.
        state.offset, state.nested = torch.empty(()), True
        nested_absmax, nested_code = torch.empty(-(-blocks // NESTED_BLOCK)), torch.empty(_NESTED_CODE)
        state.state2 = functional.QuantState(
            absmax=nested_absmax, code=nested_code, blocksize=NESTED_BLOCK, dtype=torch.float32
        )
    return torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8), state


def fake_parts(layer: Any) -> dict[int, Any]:
    """Create fake replacements of a quantised layer's tensors, for a copy of its model under the active fake mode.

    The ``__deepcopy__`` of bitsandbytes' parameters does not support fake tensors.

    Returns:
        ``id`` of the original → the fake replacement: a ``memo`` for ``copy.deepcopy``.
    """
    shape = layer.out_features, layer.in_features
    settle_(layer)
    if in_8_bits(layer):
        packed, row_constants = _pack_fake(None, torch.empty(shape), "int8", False)
        state = copy.copy(layer.state)
        state.CB, state.SCB = packed, row_constants
        # Weight and state share the packed tensor, as in the layer itself.
        return {id(layer.weight): _int8_parameter(packed), id(layer.state): state}
    old, functional = layer.quant_state, require_bitsandbytes().functional
    packed, state = _pack_fake(functional, torch.empty(shape, dtype=old.dtype), old.quant_type, old.nested)
    return {id(layer.weight): _4bit_parameter(packed, state), id(old): state}


def _4bit_parameter(packed: Tensor, state: object) -> nn.Parameter:
    settings = {"quant_state": state, "quant_type": state.quant_type, "blocksize": state.blocksize}
    settings |= {"compress_statistics": state.nested, "quant_storage": packed.dtype}
    # A fake tensor cannot be converted to another tensor class.
    if isinstance(packed, FakeTensor):
        parameter = nn.Parameter(packed, requires_grad=False)
        vars(parameter).update(settings)
        return parameter
    return require_bitsandbytes().nn.Params4bit(packed, requires_grad=False, bnb_quantized=True, **settings)


def _int8_parameter(packed: Tensor) -> nn.Parameter:
    if isinstance(packed, FakeTensor):
        parameter: Any = nn.Parameter(packed, requires_grad=False)
        parameter.CB = parameter.SCB = None
        return parameter
    return require_bitsandbytes().nn.Int8Params(packed, requires_grad=False, has_fp16_weights=False)


def settle_(layer: nn.Module) -> None:
    """Make the weight and the quantisation state of a layer consistent."""
    if in_8_bits(layer):
        settle_8bit_(layer)
    else:
        settle_4bit_(layer)


def settle_4bit_(layer: object, *_: object) -> None:
    """Make weight and quantisation state of a 4-bit layer consistent; also used as a forward pre-hook.

    It never synchronizes with the device. It repairs what bitsandbytes leaves inconsistent: pickling, and loading with
    ``assign=True``, turn the weight into a plain parameter; ``model.to`` moves the weight but not all of its state;
    copying duplicates the state that layer and weight share. FSDP2 gathers the weight as a plain parameter; a sharded
    weight may be on another device than its state.
    """
    weight: Any = layer.weight
    # The state of a shard of FSDP2 is that of the unsharded weight.
    if isinstance(weight, DTensor):
        weight.quant_state = layer.quant_state
        return
    # By ``is``: parameters of bitsandbytes are subclasses.
    if type(weight) is nn.Parameter:
        layer.weight = weight = _4bit_parameter(weight.data, layer.quant_state)
    state = weight.quant_state
    if layer.quant_state is not state:
        layer.quant_state = state
    if state.absmax.device != weight.device:
        state.to(weight.device)


def settle_8bit_(layer: object, *_: object) -> None:
    """Make weight and ``layer.state`` of an int8 layer consistent, like :func:`settle_4bit_`."""
    weight: Any = layer.weight
    if type(weight) is nn.Parameter:
        layer.weight = weight = _int8_parameter(weight.data)
    if weight.CB is not None:
        # PEFT's DoRA moves the weight in each forward, which leaves the constants behind.
        if weight.SCB is None:
            weight.SCB = layer.state.SCB
        layer.init_8bit_state()
    if layer.state.CB.device != weight.device:
        layer.state.CB, layer.state.SCB = weight.data, layer.state.SCB.to(weight.device)


def quantization_of(layer: Any) -> dict[str, Tensor]:
    """Return all tensors that represent the weight of a quantised layer."""
    settle_(layer)
    beside = {name.removeprefix("weight."): tensor for name, tensor in quantized_tensors(layer)}
    return {"weight": layer.weight, **beside}


@check_arguments
def dequantized_weight(layer: Any) -> Tensor:
    """Dequantise the weight of a quantised layer to [out_features, in_features].

    Args:
        layer: a ``Linear4bit`` or ``Linear8bitLt`` of bitsandbytes.

    Returns:
        The weight; for 4 bits in the dtype before quantisation, for int8 in float32: q · constant of the row / 127.

    Raises:
        TypeError: the layer is not quantised.
        ValueError: the weight is sharded, and not gathered at present.

    Example:
        >>> from lightning_fasttrain.finetune import quantize_base_
        >>> net = nn.Sequential(nn.Linear(64, 64))
        >>> before = net[0].weight.detach().clone()
        >>> report = quantize_base_(net, "int8")
        >>> error = (dequantized_weight(net[0]) - before).norm() / before.norm()
        >>> bool(error < 0.005)
        True

    Source:
        bitsandbytes.
    """
    if not is_quantized(layer):
        raise TypeError(f"dequantized_weight: {type(layer).__name__} has no quantised weight. Use its weight directly.")
    if isinstance(layer.weight, DTensor):
        why = "the model is sharded, and this process has only a shard of the weight"
        raise ValueError(explain(f"a {type(layer).__name__}", why, "Load the run's checkpoint into a plain model"))
    settle_(layer)
    if in_8_bits(layer):
        return layer.weight.detach().float() * (layer.state.SCB / 127).unsqueeze(1)
    return dequantize_4bit(layer.weight.data, layer.quant_state, layer.quant_state.dtype)


def dequantize_4bit(packed: Tensor, state: object, dtype: torch.dtype) -> Tensor:
    """Dequantise a packed weight to ``dtype``, as if it were one long row.

    Blocks of 64 values extend over the end of a row. The AVX-512 kernel of bitsandbytes assumes that each row begins
    with a block, and reads wrong constants if the row length is not a multiple of 64; for odd lengths it compiles a
    slow kernel. With one row, the result is correct and fast.
    """
    ops, constants = torch.ops.bitsandbytes, state.absmax  # operators, since their wrappers cannot be compiled
    if state.nested:
        nested = state.state2
        constants = ops.dequantize_blockwise(constants, nested.absmax, nested.code, nested.blocksize, torch.float32)
        constants = constants + state.offset  # their mean, which was subtracted before they were quantised
    elements = state.shape.numel()
    row = ops.dequantize_4bit(packed, constants, state.blocksize, state.quant_type, [1, elements + elements % 2], dtype)
    return row.flatten()[:elements].view(state.shape)
