"""Keep activations that the forward saves in host memory, or on disk, until the backward needs them."""

import os
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_fasttrain.core.checks import NonNegativeFloat, check_arguments
from lightning_fasttrain.core.messages import note_once
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    WrappedForward,
    count_wrapped,
    undo_all,
    why_none_ran,
    wrapper_on,
)
from lightning_fasttrain.model.offloaded_tensors import Offload
from lightning_fasttrain.technique import Setting, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep, why_no_blocks


@check_arguments
def offload_activations(
    model: nn.Module,
    min_mib: NonNegativeFloat = 1.0,
    *,
    in_flight_mib: NonNegativeFloat = 1024.0,
    folder: str | os.PathLike[str] | None = None,
) -> AbstractContextManager[None]:
    """Offload tensors that autograd saves in this context to pinned host memory; for any code.

    Copies run beside the computation: to the host during the forward, and back, in the reverse order of saving, ahead
    of the backward. A storage that is saved several times, also through different views, is copied once. Values are
    bitwise the same; changing a saved tensor in place before the backward is an error, as it is without hooks. A
    storage whose copy is still running when the backward needs it is used from the device.

    Host memory comes from torch's cache of pinned memory, which later steps reuse, and which rounds each size up to a
    power of two. On the CPU nothing is moved, since tensors are in host memory already, unless ``folder`` is given.
    Sparse, quantized and nested tensors and tensor subclasses are not moved.

    Args:
        model: the model whose parameters and buffers, and views of them, are not moved. Neither are the copies that
            autocast makes of trained parameters; those of frozen ones, and those in compiled code, are treated as
            activations.
        min_mib: smaller storages, in MiB, are not moved, since launching a small copy takes longer than copying.
        in_flight_mib: maximum size of running copies in MiB, in each direction, or one storage if it is larger. A
            larger value smooths the traffic, and takes that much device memory.
        folder: spill to files in a private folder inside this existing one, for machines short of host memory. The
            computation waits for the disk. A folder in memory, such as ``/dev/shm``, saves nothing.

    Returns:
        A context manager for the forward; the backward may run later.

    Raises:
        TypeError, ValueError: a size is not a number of at least 0, or the folder does not exist.
        RuntimeError: in the backward, if a saved tensor was changed in place.
        OSError: the disk is full, or the files were changed.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> with offload_activations(net, min_mib=0, folder=getfixture("tmp_path")):
        ...     loss = net(torch.ones(2, 4)).sum()
        >>> loss.backward()

    Source:
        The saved-tensor hooks of ``torch.autograd.graph.save_on_cpu``, which copies every tensor, including
        parameters, on the computing stream. Two streams as in torchtune's activation offloading; the rest is ours.
    """
    return Offload(min_mib, in_flight_mib, folder).watch_forward(model)


class OffloadedForward(WrappedForward):
    """A forward whose saved tensors are offloaded until the backward."""

    def __init__(self, module: nn.Module, offload: Offload) -> None:
        super().__init__(module)
        self.offload = offload

    def __call__(self, *args: object, **kwargs: object) -> Any:
        self.ran = True
        if torch.compiler.is_compiling():
            _say_compiled()
            return self.inner(*args, **kwargs)
        with self.offload.watch_forward(self.module):
            return self.inner(*args, **kwargs)


# With this, the compiler runs the method instead of tracing it.
@torch.compiler.assume_constant_result
def _say_compiled() -> bool:
    note_once("ActivationOffload: a compiled graph keeps its saved tensors. Compile the blocks with CompileBlocks")
    return True


class ActivationOffload(Technique):
    """Move activations that the model's blocks save for the backward to pinned host memory, and back in time.

    Acts right after ``configure_model`` and after compilation, because the hooks must lie outside of compiled and
    checkpointed blocks: for compiled ones they receive tensors that the graph saves; for checkpointed ones, the inputs.
    Tensors saved outside of the blocks are not moved. Undone at teardown.

    Args:
        min_mib: as for :func:`~lightning_fasttrain.offload_activations`.
        in_flight_mib: as for :func:`~lightning_fasttrain.offload_activations`.
        folder: as for :func:`~lightning_fasttrain.offload_activations`.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.

    Raises:
        TypeError, ValueError: as for :func:`~lightning_fasttrain.offload_activations`.

    Example:
        >>> offload = ActivationOffload(min_mib=4)

    Source:
        See :func:`~lightning_fasttrain.offload_activations`.
    """

    surgery: ClassVar[Surgery | None] = Surgery.OFFLOAD
    effect: ClassVar[str] = "saved activations are kept in host memory, or on disk"
    when: ClassVar[str] = (
        "activations of long sequences do not fit, and recomputing them would cost more than moving them; not on a CPU"
    )
    in_a_loop: ClassVar[str] = "with offload_activations(model): ..."
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("offload", "activations", cost=1.4),)
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        min_mib: NonNegativeFloat = 1.0,
        *,
        in_flight_mib: NonNegativeFloat = 1024.0,
        folder: str | os.PathLike[str] | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self.settings = min_mib, in_flight_mib, folder
        self.blocks = blocks
        Offload(*self.settings)  # raises now rather than in the first forward

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.device == "cpu":
            return "activations on a CPU are in host memory already"
        return why_no_blocks(facts)

    def predict(self, step: PredictedStep) -> None:
        step.leave_out(self, "offloaded activations are counted as if they stayed, so this is an upper bound")

    def apply(self, model: nn.Module) -> Undo:
        offload = Offload(*self.settings)
        undos: list[Undo] = [offload.close]
        for block in find_blocks(model, self.blocks).values():
            if not wrapper_on(block, OffloadedForward):
                undos.append(OffloadedForward(block, offload).install())
        return undo_all(undos)

    def took_hold(self, model: nn.Module) -> str:
        blocks = count_wrapped(model, OffloadedForward)
        where = "host memory" if self.settings[2] is None else "files"
        return blocks and f"activations of {blocks} are kept in {where}"

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        return why_none_ran(model, OffloadedForward)
