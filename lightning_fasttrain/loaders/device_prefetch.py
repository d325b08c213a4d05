"""Fetch batches ahead, and copy the next one to the device while the current one is computed."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_fasttrain.core.batch.host_copies import Transfers
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.host.host_answers import answer_on_host, deciding_masks_on_host
from lightning_fasttrain.core.host.loader_wrapper import WrappedLoader
from lightning_fasttrain.core.messages import explain, note_once, warn
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch, undo_all
from lightning_fasttrain.technique import Setting, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep


def can_resume(loader: object) -> bool:
    """Whether a loader has a state, so that Lightning treats it as one that can resume."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


class AheadLoader(WrappedLoader):
    """A loader that fetches a batch ahead of the one it yields."""

    def _state_now(self) -> Any:
        """Return the state after the batch fetched last."""
        return None

    def _hand_out(self, state: object) -> None:
        """Note the state of the batch that is yielded next; None before a pass and after it, where nothing is ahead."""


class StatefulAheadLoader(AheadLoader):
    """Loader over one that can resume, with the state of the last batch yielded.

    A class of its own, since Lightning treats any loader with these methods as one that can.
    """

    _state: Any = None

    def _state_now(self) -> Any:
        return self.inner.state_dict()

    def _hand_out(self, state: object) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state_now() if self._state is None else self._state

    def load_state_dict(self, state: object) -> None:
        self._state = None
        self.inner.load_state_dict(state)


@check_arguments
def prefetch_to_device(iterable: Iterable[object], device: torch.device | str) -> "DevicePrefetcher":
    """Iterate over ``iterable`` with each batch on ``device``, copying the next batch during the current step.

    On CUDA the copy runs on a side stream and the current stream waits for it by an event, so the host never waits; the
    copy overlaps only if the batches are in pinned memory (``DataLoader(pin_memory=True)``). On a CPU batches pass
    through unchanged and nothing is fetched ahead.

    The values of token ids, masks and labels stay known on the host, where Hugging Face's models and ``MicroBatching``
    read masks, lengths and target counts while the loop runs, instead of waiting for the device in each forward.

    Args:
        iterable: usually a ``DataLoader``. Its attributes (``dataset``, ``sampler``, ``__len__``…) are forwarded; if it
            has ``state_dict``, the returned state is that of the last batch yielded, not of the one fetched ahead.
        device: the target device of the batches.

    Returns:
        An iterable that can be iterated as often as ``iterable``: every batch once, in order.

    Example:
        >>> loader = torch.utils.data.DataLoader(range(4), batch_size=2)
        >>> [batch.tolist() for batch in prefetch_to_device(loader, "cpu")]
        [[0, 1], [2, 3]]

    Source:
        The side-stream pattern of NVIDIA Apex's ``data_prefetcher``, with ``Tensor.record_stream`` for the allocator.
    """
    kind = StatefulDevicePrefetcher if can_resume(iterable) else DevicePrefetcher
    return kind(iterable, torch.device(device))


class DevicePrefetcher(AheadLoader):
    """See :func:`prefetch_to_device`."""

    device: torch.device

    def __init__(self, inner: Iterable[Any], device: torch.device) -> None:
        super().__init__(inner)
        object.__setattr__(self, "device", device)  # of this object, where other attributes are those of the loader
        self._pinned: bool | None = None
        self._in_turn = False  # the copy starts after the device's earlier work

    def __iter__(self) -> Iterator[Any]:
        if self.device.type == "cpu":
            yield from self.inner
            return
        stream = _side_stream(self.device) if self.device.type == "cuda" else None
        ahead: list[Any] = []
        self._hand_out(None)
        with deciding_masks_on_host():
            for batch in self.inner:
                ahead.append(self._start_copy(batch, stream))
                if len(ahead) > 1:
                    yield self._finish_copy(*ahead.pop(0))
            for item in ahead:
                yield self._finish_copy(*item)
        self._hand_out(None)

    def _start_copy(self, batch: object, stream: "torch.cuda.Stream | None") -> tuple[Any, Any, Any, Any]:
        state = self._state_now()  # after this batch and before the next one is read
        if stream is None:
            with Transfers(self.device):
                return move_data_to_device(batch, self.device), None, None, state
        if self._in_turn:
            # Types without record_stream may occupy the memory that this copy uses, and still be in use.
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), Transfers(self.device) as copies:
            moved = move_data_to_device(batch, self.device)
            event = stream.record_event()
        self._check_pinned(copies)
        return moved, event, (batch, copies.made), state  # the host tensors must outlive the copy

    def _finish_copy(self, moved: Any, event: "torch.cuda.Event | None", kept: Any, state: Any) -> Any:
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            for tensor in kept[1]:  # allocated on the side stream, used on this one
                try:
                    tensor.record_stream(current)
                except NotImplementedError:  # sparse and nested tensors
                    self._in_turn = True
        self._hand_out(state)
        return moved

    def _check_pinned(self, copies: "Transfers") -> None:
        if self._pinned is None:
            self._pinned = all(map(Tensor.is_pinned, copies.sources))
            if not self._pinned:
                warn(
                    "DevicePrefetch: the batches are not in pinned memory, so the host waits for each copy and "
                    "no copy overlaps with the step. Use DataLoader(pin_memory=True)."
                )


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies to a device: the allocator keeps the memory of each stream for that stream."""
    return torch.cuda.Stream(device)


class StatefulDevicePrefetcher(StatefulAheadLoader, DevicePrefetcher):
    """A prefetcher over a loader that can resume."""


class DevicePrefetch(Technique):
    """Copy the next batch to the device while the current one is computed, for every loader of the run.

    Masks, lengths and target counts are then read on the host: see
    :func:`~lightning_fasttrain.loaders.prefetch_to_device`.

    Acts where the strategy processes its loaders. ``Precision.convert_input`` and ``on_after_batch_transfer`` then see
    tensors that are already on the device; a module or datamodule that overrides ``on_before_batch_transfer`` or
    ``transfer_batch_to_device`` keeps Lightning's path, with a warning. On a CPU nothing is done.

    Example:
        >>> prefetch = DevicePrefetch()

    Source:
        See :func:`~lightning_fasttrain.loaders.prefetch_to_device`.
    """

    bitwise: ClassVar[bool] = True
    effect: ClassVar[str] = "the next batch is copied to the device during the current step"
    when: ClassVar[str] = "copying a batch to the GPU takes a notable share of the step; not on a CPU"
    in_a_loop: ClassVar[str] = "loaders.prefetch_to_device(loader, device)"
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("loader", "prefetched", cost=0.98),)
    predicted: ClassVar[bool] = True

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.device == "cpu":
            return "batches are already on the CPU"
        return None

    def outcome(self, model: nn.Module) -> str:
        if all(parameter.device.type == "cpu" for parameter in model.parameters()):
            return f"no effect: {self.why_not(Facts('cpu'))}"
        return ""

    def predict(self, step: PredictedStep) -> None:
        step.prefetches = True

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        device = trainer.strategy.root_device
        if device.type == "cpu":
            note_once("DevicePrefetch: batches are already on the CPU and are passed through unchanged")
            return None
        for owner in (pl_module, trainer.datamodule):
            for hook in ("on_before_batch_transfer", "transfer_batch_to_device"):
                if owner is not None and is_overridden(hook, owner):
                    why = "that hook must see each batch before it is copied, so nothing is prefetched"
                    way_out = f"Do its work in the dataset's collate_fn, or in on_after_batch_transfer ({device})"
                    warn(explain(f"DevicePrefetch with {type(owner).__name__}.{hook}", why, way_out))
                    return None
        process = trainer.strategy.process_dataloader

        def prefetch_loader(loader: object) -> DevicePrefetcher:
            inner: Any = process(loader)
            return prefetch_to_device(inner, device)

        return undo_all(
            [answer_on_host(trainer, pl_module), patch(trainer.strategy, "process_dataloader", prefetch_loader)]
        )
