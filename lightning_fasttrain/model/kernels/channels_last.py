"""Store the weights of 2-D convolutions channels-last, so that convolutions run on that layout of images."""

from collections.abc import Iterator
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import explain, note_once, number_of
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo, undo_all
from lightning_fasttrain.technique import Conflict, Facts, Setting, Surgery, Technique

_FLATTENED = "sharded parameters are flattened, and lose their layout"
_WAY_OUT = "Remove ChannelsLast, or train with DDP"
_KINDS = (nn.Conv2d, nn.ConvTranspose2d)
_BLOCK = 16  # input channels that oneDNN handles together, with AVX-512


@check_arguments
def channels_last_(model: nn.Module) -> dict[str, Undo]:
    """Store the 4-D weights of the model's 2-D convolutions channels-last (NHWC in memory), in place.

    A convolution with such a weight runs channels-last, whatever the layout of its input, and so do the layers after
    it, since they keep the layout of what they get. Shapes, values and names are not changed; sums are taken in another
    order. An optimizer that is created afterwards has states in the same layout. Strided 1 × 1 convolutions of fewer
    than 16 channels stay as they are on a CPU, where oneDNN's gradient of their weights would be wrong, or crash.

    Args:
        model: any module.

    Returns:
        Qualified name of each weight that is stored channels-last → how to restore its former strides; and of each
        that stays as it is on a CPU → how to leave its layer alone again.

    Raises:
        ValueError: there is no 2-D convolution, or its weights are sharded.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))
        >>> list(channels_last_(net)), net[0].weight.is_contiguous(memory_format=torch.channels_last)
        (['0.weight'], True)

    Source:
        https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html; unlike
        ``model.to(memory_format=torch.channels_last)`` it touches no 4-D tensor that is not a convolution's weight. The
        faulty gradient is https://github.com/uxlfoundation/oneDNN/issues/6035.
    """
    weights = dict(_find_weights(model))
    if not weights:
        why = "it has no nn.Conv2d or nn.ConvTranspose2d"
        raise ValueError(explain(f"channels_last_({type(model).__name__})", why, "Leave it out"))
    if is_sharded(model):
        raise ValueError(explain(f"channels_last_({type(model).__name__})", _FLATTENED, _WAY_OUT))
    undos = {name: _store(weight) for name, weight in weights.items()}
    for name, module in model.named_modules():
        if _has_faulty_gradient(module):
            undos[f"{name}.weight"] = module.register_forward_pre_hook(_give_rows).remove
    return undos


def _has_faulty_gradient(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d) or module.in_channels // module.groups >= _BLOCK:
        return False
    return max(module.kernel_size) == 1 and max(module.stride) > 1


def _give_rows(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a convolution on a CPU its input in the usual layout; its weight is in that layout too."""
    images, *others = args
    return images if images.is_cuda else images.contiguous(), *others


def _find_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in model.named_modules():
        if isinstance(module, _KINDS) and not _has_faulty_gradient(module):
            for name, parameter in module.named_parameters(prefix):
                if parameter.dim() == 4:
                    yield name, parameter


def _store(weight: nn.Parameter) -> Undo:
    before = weight.stride()
    if weight.is_contiguous(memory_format=torch.channels_last):
        return lambda: None  # by an earlier call, which restores it, or by the user
    weight.data = weight.detach().contiguous(memory_format=torch.channels_last)

    def undo() -> None:
        weight.data = _with_strides(weight.detach(), before)

    return undo


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def match_layout_(optimizer: Optimizer) -> int:
    """Give the states of an optimizer the layout of their parameters, as fused optimizers require; return the number.

    States that are loaded have the layout that they were saved with.

    Example:
        >>> layer = nn.Conv2d(2, 2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> layer(torch.zeros(1, 2, 2, 2)).sum().backward(), optimizer.step()
        (None, None)
        >>> match_layout_(optimizer)
        0
        >>> undos = channels_last_(layer)
        >>> match_layout_(optimizer)
        1
    """
    changed = 0
    for parameter in parameters_of(optimizer):
        state = optimizer.state.get(parameter, {})
        for name, value in state.items():
            fits = isinstance(value, Tensor) and value.dim() == 4 and value.shape == parameter.shape
            if fits and value.stride() != parameter.stride():
                state[name] = _with_strides(value, parameter.stride())
                changed += 1
    return changed


def _row_major(tensor: Tensor) -> Tensor:
    is_ours = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.contiguous() if is_ours else tensor


class ChannelsLast(Technique):
    """Store the weights of 2-D convolutions channels-last; see :func:`channels_last_`.

    Acts right after ``configure_model``, before DDP lays out its buckets of gradients; the former strides are restored
    at teardown. Checkpoints hold tensors in the usual layout, so a run without the technique can load them.

    Example:
        >>> import lightning_fasttrain as ft
        >>> techniques = [ft.model.ChannelsLast()]

    Source:
        See :func:`channels_last_`.
    """

    surgery: ClassVar[Surgery | None] = Surgery.ARCHITECTURE
    effect: ClassVar[str] = "2-D convolutions run channels-last, the layout that most of their fast kernels want"
    when: ClassVar[str] = "a ConvNet trains, best in 16 bits on a GPU with tensor cores; measure it where it is grouped"
    in_a_loop: ClassVar[str] = "model.channels_last_(model)"
    predicted: ClassVar[bool] = True
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("layout", "channels last"),)

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        return "the model has no 2-D convolutions" if facts.convolutions == 0 else None

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        return (
            Conflict(FSDPStrategy, _FLATTENED, _WAY_OUT),
            Conflict(ModelParallelStrategy, _FLATTENED, _WAY_OUT),
            Conflict(DeepSpeedStrategy, _FLATTENED, _WAY_OUT),
        )

    def apply(self, model: nn.Module) -> Undo:
        if not dict(_find_weights(model)):
            note_once(f"ChannelsLast has no effect: {type(model).__name__} has no 2-D convolutions.")
            return lambda: None
        return undo_all(channels_last_(model).values())

    def describe_effect(self, model: nn.Module) -> str:
        weights = dict(_find_weights(model))
        if not weights:
            return ""
        return f"{number_of(len(weights), 'weight')} channels-last"

    def outcome(self, model: nn.Module) -> str:
        if dict(_find_weights(model)):
            return ""
        return "had no effect: the model has no 2-D convolutions"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: states of optimizers are restored, and nothing is trained yet."""
        for optimizer in trainer.optimizers:
            match_layout_(getattr(optimizer, "optimizer", optimizer))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Hook: the checkpoint is complete, and not written yet."""
        for part in ("state_dict", "optimizer_states"):
            if part in checkpoint:
                checkpoint[part] = tree_map_only(Tensor, _row_major, checkpoint[part])
