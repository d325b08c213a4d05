"""Record the attention calls of a step, and time torch's back ends on their shapes."""

import inspect
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lightning_fasttrain.core.device import GIB, device_clock, free_bytes

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_ONLY_CUDA = ("cudnn", "efficient")
_MHA = inspect.signature(F.multi_head_attention_forward)
# Of the timing of one call.
_FEWEST_ROUNDS, _MOST_ROUNDS, _SECONDS = 3, 30, 0.3


@dataclass(frozen=True)
class Layout:
    """Shape, strides, dtype and device of a tensor, and whether it requires a gradient."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def make(self) -> Tensor:
        """Return a tensor like it: random numbers, or True everywhere."""
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            if self.dtype.is_floating_point:
                tensor.normal_()
            else:
                tensor.fill_(1)
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of ``F.scaled_dot_product_attention``, without values."""

    tensors: tuple[Layout, ...]  # query, key, value
    mask: Layout | None
    settings: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: object,
        **settings: object,
    ) -> "AttentionCall":
        named = dict(zip(("dropout_p", "is_causal"), args, strict=False)) | settings
        mask = None if attn_mask is None else Layout.of(attn_mask)
        return cls(tuple(map(Layout.of, (query, key, value))), mask, tuple(sorted(named.items())))

    @classmethod
    def in_multi_head(cls, *args: object, **kwargs: object) -> "AttentionCall | None":
        """Return the call that ``F.multi_head_attention_forward`` makes; None if it computes the weights itself."""
        given = _MHA.bind(*args, **kwargs)
        given.apply_defaults()
        found = given.arguments
        if found["need_weights"] or found["query"].dim() != 3:
            return None
        heads, (length, rows, width) = found["num_heads"], found["query"].shape
        query, key = (
            found["query"].new_empty(rows, heads, size, width // heads).requires_grad_(torch.is_grad_enabled())
            for size in (length, found["key"].shape[0])
        )
        masked = found["attn_mask"] is not None or found["key_padding_mask"] is not None
        dropout = found["dropout_p"] if found["training"] else 0.0
        causal = bool(found["is_causal"]) and found["key_padding_mask"] is None
        mask = None
        if masked and not causal:
            mask = query.detach().new_empty(rows, heads, length, key.shape[2])
        return cls.of(query, key, key, mask, dropout_p=dropout, is_causal=causal)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def table_bytes(self) -> int:
        """Bytes of one table of weights, (…, queries, keys) in float32, which the back end "math" makes."""
        query, key, _ = self.tensors
        return 4 * torch.Size(query.shape[:-1]).numel() * key.shape[-2]

    def prepare(self) -> Callable[[], None]:
        """Return a function that runs it on random values, and its backward."""
        query, key, value = map(Layout.make, self.tensors)
        mask = None if self.mask is None else self.mask.make()
        inputs = [tensor for tensor in (query, key, value, mask) if tensor is not None and tensor.requires_grad]

        def run() -> None:
            output = F.scaled_dot_product_attention(query, key, value, mask, **dict(self.settings))
            if inputs:
                torch.autograd.grad(output, inputs, torch.ones_like(output))

        return run


class AttentionCalls(TorchFunctionMode):
    """Context that counts the attention calls of a step.

    Attributes:
        found: how often each call was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[AttentionCall] = Counter()

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = None
        if func is F.scaled_dot_product_attention:
            call = AttentionCall.of(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            call = AttentionCall.in_multi_head(*args, **kwargs)
        if call is not None and torch.is_grad_enabled():
            self.found[call] += 1
        return func(*args, **kwargs)


def why_refused(call: AttentionCall, name: str) -> str:
    """Return why a back end cannot run a call, in torch's words; "" if it can. It is run once for this."""
    if name in _ONLY_CUDA and call.device.type != "cuda":
        return f"it runs on CUDA devices only, and this is {call.device.type}"
    free = free_bytes(call.device)
    if name == "math" and free is not None and 3 * call.table_bytes > free:
        return (
            f"its tables of attention weights need {3 * call.table_bytes / GIB:.1f} GiB, and {free / GIB:.1f} are free"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(BACKENDS[name]):
                call.prepare()()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            said = [str(warning.message).partition(" (Triggered")[0].strip() for warning in caught]
            reasons = [line for line in said if not line.endswith("because:")]
            return " ".join(reasons) or str(error).strip().splitlines()[0]
    return ""


@dataclass
class AttentionChoice:
    """Back ends of one model's attention, the fastest first.

    Attributes:
        order: names of the back ends to use, of which torch takes the first that can run a call.
        step_ms: name → measured time of all attention calls of a step, forward and backward.
        refused: name → why it cannot run some call.
    """

    order: list[str]
    step_ms: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        measured = ", ".join(f"{name} {ms:.2f} ms/step" for name, ms in self.step_ms.items())
        refused = "; ".join(f"{name} is refused: {reason}" for name, reason in self.refused.items())
        return f"{' before '.join(self.order)} ({measured or 'chosen earlier'}). {refused}".strip()


def choose_backends(calls: Mapping[AttentionCall, int]) -> AttentionChoice:
    """Time all back ends on the calls of a step, forward and backward, in turns.

    A back end that cannot run some of the calls is used for the others if it is the fastest there.

    Args:
        calls: call → how often a step makes it.

    Example:
        >>> q = torch.zeros(1, 2, 8, 4)
        >>> choice = choose_backends({AttentionCall.of(q, q, q, is_causal=True): 2})
        >>> sorted(choice.step_ms), sorted(choice.refused)
        (['flash', 'math'], ['cudnn', 'efficient'])
    """
    refused: dict[str, str] = {}
    step_ms: dict[str, float] = {}
    wins: Counter[str] = Counter()
    for call, count in calls.items():
        able = []
        for name in BACKENDS:
            reason = why_refused(call, name)
            if reason:
                refused.setdefault(name, reason)
            else:
                able.append(name)
        times_ms = _time(call, able)
        for name, ms in times_ms.items():
            step_ms[name] = step_ms.get(name, 0.0) + count * ms
        if times_ms:
            wins[min(times_ms, key=times_ms.__getitem__)] += 1
    everywhere = [name for name in step_ms if name not in refused]
    fastest = sorted(everywhere, key=step_ms.__getitem__)
    partly = sorted(set(wins) & set(refused), key=wins.__getitem__, reverse=True)
    if any(call.device.type == "cpu" for call in calls):
        fastest = fastest[:1]  # a CPU takes flash wherever it is allowed and can run, whatever the order
    return AttentionChoice([*partly, *fastest], step_ms, refused)


def _time(call: AttentionCall, names: Sequence[str]) -> dict[str, float]:
    """Return the shortest time of a call by back end, in ms; back ends take turns, so that all see the same machine."""
    shortest_ms = dict.fromkeys(names, math.inf)
    run, until = call.prepare(), time.monotonic() + _SECONDS
    rounds = 0
    while rounds < _FEWEST_ROUNDS or (rounds < _MOST_ROUNDS and time.monotonic() < until):
        rounds += 1
        for name in names:
            with sdpa_kernel(BACKENDS[name]):
                began = device_clock(call.device)
                run()
                shortest_ms[name] = min(shortest_ms[name], 1e3 * (device_clock(call.device) - began))
    return shortest_ms
