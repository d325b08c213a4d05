"""Answer on the host what a step would otherwise ask the device: the values of a batch, and which masks it needs.

Each forward of a Hugging Face model asks whether a mask hides anything, and whether positions start anew inside a row,
and waits until the device has reached that question. Its own functions answer here too, on the values that
:mod:`~lightning_fasttrain.core.batch.host_copies` keeps; where nothing is known of a tensor, the device is asked.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_fasttrain.core.batch.host_copies import Transfers, host_values, keep_on_host
from lightning_fasttrain.core.modules.select import class_if_imported
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch, patch_all, patched

_MASKING = "transformers.masking_utils"


def answer_on_host(trainer: L.Trainer, model: nn.Module) -> Undo:
    """Keep the integers of each batch of a run on the host, and decide Hugging Face's masks by them.

    Acts where the strategy moves a batch to the device, so the hooks of the module and the datamodule see what they
    always do; a tensor that they change or create is unknown here. Of no use on a CPU.

    Returns:
        A function that ends it.
    """
    strategy = trainer.strategy
    device, move, stack = strategy.root_device, strategy.batch_to_device, ExitStack()
    is_deciding = False

    def move_and_keep(batch: object, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_deciding
        if not is_deciding:  # at the first batch, since only then the model is certainly complete
            is_deciding = True
            stack.callback(decide_masks_on_host(model))
        with Transfers(device):
            return move(batch, *args, **kwargs)

    stack.callback(patch(strategy, "batch_to_device", move_and_keep))
    return stack.close


def decide_masks_on_host(model: nn.Module | None = None) -> Undo:
    """Let transformers decide on the host which attention masks are needed, where the values are known there.

    Args:
        model: the model in which positions that a forward makes by itself are recognized.

    Returns:
        A function that ends it. There may be several at a time.
    """
    with ExitStack() as stack:
        if _MASKING in sys.modules:
            stack.callback(_join_patches())
        kind = class_if_imported("transformers.modeling_utils", "PreTrainedModel")
        for module in model.modules() if model is not None else ():
            if isinstance(module, kind):
                stack.callback(_OwnPositions.watch(module))
        return stack.pop_all().close


@contextmanager
def deciding_masks_on_host() -> Iterator[None]:
    """Context of :func:`decide_masks_on_host`."""
    undo = decide_masks_on_host()
    try:
        yield
    finally:
        undo()


@contextmanager
def one_document_a_row(batch: object) -> Iterator[None]:
    """Let transformers take positions without values, where the model makes them, for those of one document a row.

    Without values it would make a mask for several documents.

    Args:
        batch: the batch; one that brings positions may hold several documents a row.
    """
    masking, find = sys.modules.get(_MASKING), "find_packed_sequence_indices"
    with ExitStack() as stack:
        if hasattr(masking, find) and not _brings_positions(batch):  # private, so another version may lack it
            stack.callback(patch(masking, find, lambda *_: None))
        yield


def _brings_positions(batch: object) -> bool:
    if isinstance(batch, Mapping):
        return any("position_ids" in str(key) or _brings_positions(item) for key, item in batch.items())
    return isinstance(batch, list | tuple) and any(map(_brings_positions, batch))


class _Patches:
    """The replaced functions of ``transformers.masking_utils``, and how many runs use them."""

    users = 0
    undo: Undo = staticmethod(lambda: None)


def _join_patches() -> Undo:
    if _Patches.users == 0:
        masking = sys.modules[_MASKING]
        replaced: dict[str, object] = {}
        for name, replace in _REPLACED.items():
            if hasattr(masking, name):  # private, so another version may lack it
                replaced[name] = replace(getattr(masking, name))
        _Patches.undo = patch_all(masking, replaced)
    _Patches.users += 1

    def leave() -> None:
        _Patches.users -= 1
        if _Patches.users == 0:
            _Patches.undo()

    return leave


def _read_on_host(asks: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function that reads a mask with the values that are known on the host."""

    @functools.wraps(asks)
    def answer(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        known = None
        if padding_mask is not None and not torch.compiler.is_compiling():
            known = host_values(padding_mask)
        if known is None:
            return asks(padding_mask, *args, **kwargs)
        # While a CUDA graph is recorded transformers reads no values, but those on the host may be read.
        with patched(sys.modules[_MASKING], "is_tracing", lambda *_: False):
            return asks(known, *args, **kwargs)

    return answer


def _keep_converted(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the values of a mask through its conversion to booleans."""
    place = list(inspect.signature(prepare).parameters).index("attention_mask")

    @functools.wraps(prepare)
    def prepare_and_keep(*args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        mask = kwargs.get("attention_mask", args[place] if len(args) > place else None)
        if torch.compiler.is_compiling() or not isinstance(mask, Tensor):
            return prepared
        values = host_values(mask)
        for made in prepared:
            is_converted = isinstance(made, Tensor) and made is not mask and made.dtype == torch.bool
            if values is not None and is_converted and made.shape == mask.shape and made.device.type != "cpu":
                keep_on_host(made, values.bool())
        return prepared

    return prepare_and_keep


def _find_packed(find: Callable[..., Any]) -> Callable[..., Any]:
    """Find documents that are packed into rows, as transformers does, from positions that are known."""

    @functools.wraps(find)
    def find_on_host(position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return find(position_ids, *args, **kwargs)
        values = host_values(position_ids)
        if values is None:
            return _OwnPositions.find(find, position_ids, *args, **kwargs)
        with patched(sys.modules[_MASKING], "is_tracing", lambda *_: False):
            packed = find(values, *args, **kwargs)
        if isinstance(packed, Tensor) and position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
            return find(position_ids, *args, **kwargs)  # a copy from the host would be repeated with these values
        if not isinstance(packed, Tensor) or packed.device == position_ids.device:
            return packed
        if position_ids.device.type == "cuda":
            packed = packed.pin_memory()  # otherwise the copy would wait for the device
        return packed.to(position_ids.device, non_blocking=True)

    return find_on_host


_REPLACED: dict[str, Callable[[Any], Any]] = {
    "_ignore_causal_mask_sdpa": _read_on_host,
    "_ignore_bidirectional_mask_sdpa": _read_on_host,
    "_preprocess_mask_arguments": _keep_converted,
    "find_packed_sequence_indices": _find_packed,
}


class _MadeOfShapes(TorchDispatchMode):
    """Records which tensors are computed from shapes and constants alone, so that equal shapes give equal values."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, Tensor] = {}  # by identity; they are held, so that no other tensor gets the same

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._made

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if all(one in self for one in inputs) and torch.Tag.nondeterministic_seeded not in func.tags:
            self._made.update((id(leaf), leaf) for leaf in tree_iter(result) if isinstance(leaf, Tensor))
        elif func._schema.is_mutable:
            self._made.clear()  # one of them, or a view of one, may have been written to
        return result


class _OwnPositions:
    """Remembers where the positions that a model makes by itself start anew inside a row, which they hardly ever do.

    A forward without ``position_ids`` makes them from the shape of its inputs, or from the inputs themselves. Where its
    second forward shows that they come from the shape, the device is asked once for each shape.
    """

    def __init__(self) -> None:
        self.answers: dict[torch.Size, Tensor | None] = {}  # by the shape of the positions
        self.come_from_shape = False
        self._forwards = 0  # in which the device was asked
        self._made: _MadeOfShapes | None = None

    @classmethod
    def watch(cls, module: nn.Module) -> Undo:
        """Note for each forward of a model whether it is given positions."""
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        if "position_ids" not in names:
            return lambda: None
        own, place = cls(), names.index("position_ids")

        # Hooks, since models that generate text read the signature of `forward`.
        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():
                return
            given = kwargs.get("position_ids", args[place] if len(args) > place else None)
            is_given = given is not None or kwargs.get("cache_position") is not None
            _running.set((*_running.get(), None if is_given else own))
            # Not in the first forward, which may never ask: code under such a mode runs uncompiled until then.
            if not is_given and own._forwards == 1:
                own._made = _MadeOfShapes()
                own._made.__enter__()

        def end(*_: object) -> None:
            if not torch.compiler.is_compiling():
                own._stop_recording()
                _running.set(_running.get()[:-1])

        before = module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        after = module.register_forward_hook(end, always_call=True)

        def undo() -> None:
            before.remove()
            after.remove()

        return undo

    def _stop_recording(self) -> None:
        if self._made is not None:
            self._made.__exit__(None, None, None)
            self._made = None

    @staticmethod
    def find(find: Callable[..., Any], position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the packed documents that ``find`` finds, from an earlier forward where positions are those of it."""
        running = _running.get()
        own = running[-1] if running else None
        if own is None:
            return find(position_ids, *args, **kwargs)
        if own._made is not None:
            own.come_from_shape = position_ids in own._made
            own._stop_recording()
        if own.come_from_shape and position_ids.shape in own.answers:
            return own.answers[position_ids.shape]
        packed = find(position_ids, *args, **kwargs)
        own._forwards += 1
        if own.come_from_shape:
            own.answers[position_ids.shape] = packed
        return packed


_running: ContextVar[tuple[_OwnPositions | None, ...]] = ContextVar("_running", default=())
