"""Time the forward of each block of a model, on the host, or on CUDA by events in the stream."""

from collections import defaultdict
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_fasttrain.core.modules.blocks import find_blocks

_Moment = float | torch.cuda.Event


class BlockTimes:
    """Times the forwards of blocks while ``active``; a model without repeated blocks is divided into its children.

    Attributes:
        active: whether forwards count now.
    """

    def __init__(self, device: torch.device) -> None:
        self.active = False
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._began: dict[str, _Moment] = {}
        self._spans: dict[str, list[tuple[_Moment, _Moment]]] = defaultdict(list)

    def start(self, model: nn.Module) -> None:
        """Add the hooks."""
        for name, block in _parts(model).items():
            self._handles.append(block.register_forward_pre_hook(partial(self._begin, name)))
            self._handles.append(block.register_forward_hook(partial(self._end, name)))

    def stop(self) -> None:
        """Remove the hooks."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def read(self, steps: int) -> dict[str, float]:
        """Return milliseconds of a step by block, in the order of their first calls; waits for CUDA."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found: dict[str, float] = {}
        for name, spans in self._spans.items():
            found[name] = sum(_milliseconds(*span) for span in spans) / max(steps, 1)
        return found

    def _now(self) -> _Moment:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _begin(self, name: str, module: nn.Module, inputs: object) -> None:
        if self.active:
            self._began[name] = self._now()

    def _end(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        began = self._began.pop(name, None)
        if began is not None:
            self._spans[name].append((began, self._now()))

    def __reduce__(self) -> tuple[Any, ...]:  # hooks are copied with a model, and its copy is not watched
        return BlockTimes, (self._device,)


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    try:
        return find_blocks(model)
    except ValueError:
        children = dict(model.named_children())
        return _parts(*children.values()) if len(children) == 1 else children


def _milliseconds(began: _Moment, ended: _Moment) -> float:
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return float(began.elapsed_time(ended))
    assert isinstance(began, float)
    assert isinstance(ended, float)
    return 1e3 * (ended - began)
