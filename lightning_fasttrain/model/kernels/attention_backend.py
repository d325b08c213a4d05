"""Choose the kernels of attention by measuring them on a model's own shapes, or force one."""

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.device import GIB, free_bytes, is_out_of_memory, time_ms
from lightning_fasttrain.core.distributed import from_rank_zero
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, patched, undo_all, wrappers_on
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Technique
from lightning_fasttrain.technique.technique import techniques_of

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_ONLY_CUDA = ("cudnn", "efficient")
_ATTEND = F.scaled_dot_product_attention
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
        """Return a tensor with this layout: random numbers, or True everywhere."""
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

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def table_bytes(self) -> int:
        """Bytes of one table of weights, (…, queries, keys) in float32, which the back end "math" makes."""
        query, key, _ = self.tensors
        return 4 * torch.Size(query.shape[:-1]).numel() * key.shape[-2]

    def prepare(self) -> Callable[[], None]:
        """Return a function that runs the call and its backward on random values."""
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

    Args:
        forced: the only back end in use, if there is one; where it cannot run a call, the error has torch's reason.

    Attributes:
        found: how often each call was made.
    """

    def __init__(self, forced: str | None = None) -> None:
        super().__init__()
        self.forced = forced
        self.found: Counter[AttentionCall] = Counter()

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATTEND:
            return self._attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            # While a function is handled the mode is off, so what it calls in turn would not be seen.
            with patched(F, "scaled_dot_product_attention", self._attend):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        call = AttentionCall.of(*args, **kwargs)
        if torch.is_grad_enabled():
            self.found[call] += 1
        try:
            return _ATTEND(*args, **kwargs)
        except RuntimeError as error:
            if self.forced is None or is_out_of_memory(error):
                raise
            reason = why_refused(call, self.forced)
            if not reason:
                raise
            way_out = "Use AttentionBackend(), which measures those that can run, or change what torch names"
            raise ValueError(explain(f"AttentionBackend({self.forced!r})", reason.rstrip("."), way_out)) from error


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
        except RuntimeError as error:
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
                shortest_ms[name] = min(shortest_ms[name], time_ms(call.device, run))
    return shortest_ms


Backend = Literal["flash", "cudnn", "efficient", "math"]


@check_arguments
def attention_backend_(model: nn.Module, backend: Backend | None = None) -> Undo:
    """Choose torch's back end of ``F.scaled_dot_product_attention`` by measuring it, or force one.

    The first call of ``model`` with gradients records what attention is called with: shapes, strides, dtype, mask,
    dropout. Before the second one the back ends flash, cuDNN, efficient and math run each of these calls, forward and
    backward, in turns; the fastest that can run all of them is used from there on, before one that is faster for some.
    The choice is logged, with the back ends that torch refuses and its reason. It holds for the whole process until it
    is undone.

    Args:
        model: the module that the training loop calls.
        backend: ``"flash"``, ``"cudnn"``, ``"efficient"`` or ``"math"`` to force it; then nothing is measured.

    Returns:
        How to restore torch's own choice.

    Raises:
        ValueError: an unknown back end; or, in the first call, the forced one cannot run it: with torch's reason.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> undo = attention_backend_(layer)
        >>> for _ in range(2):
        ...     layer(torch.randn(2, 4, 8)).sum().backward()
        >>> undo()

    Source:
        ``torch.nn.attention.sdpa_kernel``, https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html,
        which leaves the choice to the user. Without it torch takes the first that can run, in a fixed order.
    """
    return _install(model, backend)[1]


def _install(model: nn.Module, backend: str | None) -> "tuple[_Switch, Undo]":
    existing = next(wrappers_on(model, _RecordingForward), None)
    if existing is not None:
        return existing.switch, lambda: None
    switch = _Switch(backend)
    # Nothing is measured of a forced one, so calls of parts alone, as by a ``training_step``, can be explained as well.
    parts = [model] if backend is None else [model, *model.children()]
    callable_parts = [part for part in parts if not isinstance(part, nn.ModuleList | nn.ModuleDict)]
    return switch, undo_all([switch.close, *(_RecordingForward(part, switch).install() for part in callable_parts)])


class _Switch:
    """The choice of back ends for one run: it records the first step, decides, and restores torch's own choice.

    Attributes:
        choice: None until it is made.
    """

    def __init__(self, backend: str | None) -> None:
        self.backend = backend
        self.choice: AttentionChoice | None = None
        self.calls: AttentionCalls | None = None
        self._undo = ExitStack()
        if backend is not None:
            self._undo.enter_context(sdpa_kernel(BACKENDS[backend]))

    @property
    def is_waiting(self) -> bool:
        """Whether the next step is the first, which is recorded."""
        return self.calls is None and self.choice is None

    def record(self) -> AttentionCalls:
        self.calls = AttentionCalls(self.backend)
        return self.calls

    def decide(self) -> None:
        """Measure and choose, on rank zero for all, after a step was recorded."""
        if self.backend is not None or self.choice is not None or self.calls is None:
            return
        found = self.calls.found
        with keep_random_state():
            choice = from_rank_zero(lambda: choose_backends(found))
        self.use(choice)
        if choice.order:
            say("AttentionBackend: %s", choice)

    def use(self, choice: AttentionChoice) -> None:
        """Use a choice from now on. The back end "math" stays allowed, as it runs whatever comes later."""
        self.choice = choice
        order = dict.fromkeys([*choice.order, "math"])
        if choice.order:
            self._undo.enter_context(sdpa_kernel([BACKENDS[name] for name in order], set_priority=True))

    def close(self) -> None:
        self._undo.close()


class _RecordingForward(WrappedForward):
    """Records the first call with gradients, and decides before the second."""

    def __init__(self, module: nn.Module, switch: _Switch) -> None:
        super().__init__(module)
        self.switch = switch

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        if self.switch.is_waiting:
            with self.switch.record():
                return self.inner(*args, **kwargs)
        self.switch.decide()
        return self.inner(*args, **kwargs)


class AttentionBackend(Technique):
    """Measure torch's back ends of attention on the run's own shapes, and use the fastest; see
    :func:`attention_backend_`.

    The first training batch is recorded, and the back ends are timed when it has ended, when no activations are in
    memory. The choice is saved in checkpoints, so a resumed run on the same kind of device uses it without measuring.
    Blocks that are compiled keep the back end that was allowed when they were traced, so beside
    :class:`~lightning_fasttrain.CompileBlocks` one has to be forced.

    Args:
        backend: as for the function.

    Attributes:
        choice: an ``AttentionChoice`` with ``order``, ``step_ms`` and ``refused``, once it is made.

    Raises:
        ValueError: an unknown back end; in ``fit``: the forced one cannot run the model's attention.

    Example:
        >>> import lightning_fasttrain as ft
        >>> measured, forced = ft.model.AttentionBackend(), ft.model.AttentionBackend("flash")

    Source:
        See :func:`attention_backend_`.
    """

    exactness: ClassVar[Exactness] = Exactness.TOLERANCE
    bound: ClassVar[float] = 1e-3
    keeps_draws: ClassVar[bool] = False
    effect: ClassVar[str] = "attention runs in the back end that is fastest on the model's own shapes"
    when: ClassVar[str] = "attention takes much of a step, and the model calls F.scaled_dot_product_attention"
    in_a_loop: ClassVar[str] = "model.attention_backend_(model)"
    predicted: ClassVar[bool] = True

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend: Backend | None = backend
        self._switch: _Switch | None = None
        self._saved: dict[str, Any] = {}
        self._recording: ExitStack | None = None
        self._compiles = False  # whether another technique of the run compiles blocks

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "compiled code keeps the back end that it was traced with, so a later choice has no effect"
        way_out = "Force one: AttentionBackend('flash')"
        measures = lambda backend, _: backend.backend is None  # noqa: E731
        return (Conflict(Capability.COMPILES_BLOCKS, why, way_out, measures),)

    @property
    def choice(self) -> AttentionChoice | None:
        """The back ends in use, once they are measured."""
        if self._switch is None:
            return None
        return self._switch.choice

    def apply(self, model: nn.Module) -> Undo:
        self._switch, undo = _install(model, self.backend)
        return undo

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo:
        self._switch = switch = _Switch(self.backend)
        self._compiles = any(technique.does(Capability.COMPILES_BLOCKS) for technique in techniques_of(trainer))

        def undo() -> None:
            self._stop_recording()
            switch.close()

        return undo

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: nothing has been computed from the batch."""
        switch = self._switch
        if switch is None or self._compiles:  # the compiler would trace the recording
            return
        if self._saved.get("device") == pl_module.device.type and switch.is_waiting and self.backend is None:
            switch.use(AttentionChoice(list(self._saved["order"])))
        if switch.is_waiting:
            self._recording = ExitStack()
            self._recording.enter_context(switch.record())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Hook: the batch is done, and its activations are freed."""
        if self._recording is not None and self._switch is not None:
            self._stop_recording()
            self._switch.decide()
            if self.choice is not None and self.choice.order:
                self._saved = {"device": pl_module.device.type, "order": list(self.choice.order)}

    def _stop_recording(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()

    def outcome(self, model: nn.Module) -> str:
        if self._switch is None:
            return ""
        calls, choice = self._switch.calls, self._switch.choice
        if calls is not None and not calls.found:
            return "had no effect: F.scaled_dot_product_attention was not called in the first step"
        if choice is None or not choice.order:
            return ""
        return f"used {choice}"

    def state_dict(self) -> dict[str, Any]:
        return dict(self._saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        known = [name for name in state_dict.get("order", ()) if name in BACKENDS]
        self._saved = {"device": state_dict.get("device"), "order": known} if known else {}
