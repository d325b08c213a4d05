"""Choose the kernels of attention by measuring them on a model's own shapes, or force one."""

from contextlib import ExitStack
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.distributed import from_rank_zero
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, undo_all, wrappers_on
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.model.kernels.attention_trial import (
    BACKENDS,
    AttentionCalls,
    AttentionChoice,
    choose_backends,
    why_refused,
)
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Technique
from lightning_fasttrain.technique.technique import techniques_of

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
    """The choice for one run: recorded, made, in force, and undone.

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
        self.calls = _Explained(self.backend)
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
        """Put a choice in force. The back end "math" stays allowed, as it runs whatever comes later."""
        self.choice = choice
        order = dict.fromkeys([*choice.order, "math"])
        if choice.order:
            self._undo.enter_context(sdpa_kernel([BACKENDS[name] for name in order], set_priority=True))

    def close(self) -> None:
        self._undo.close()


class _Explained(AttentionCalls):
    """Counts calls; where a forced back end cannot run one, the error has torch's reason."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(self, func: object, types: object, args: object = (), kwargs: object = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except RuntimeError as error:
            if self.backend is None or ("backend" not in str(error) and "kernel" not in str(error)):
                raise
            reasons = [why_refused(call, self.backend) for call in self.found]
            reason = next(filter(None, reasons), str(error))
            way_out = "Use AttentionBackend(), which measures those that can run, or change what torch names"
            raise ValueError(explain(f"AttentionBackend({self.backend!r})", reason.rstrip("."), way_out)) from error


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
            self._saved = {}
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
        self._saved = {}
        if known:
            self._saved = {"device": state_dict.get("device"), "order": known}
