"""Progressive resizing: small images at first, and larger ones later."""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fasttrain.core.batch.leaves import batch_size, can_be_cut, list_tensors, pick_rows, walk_leaves
from lightning_fasttrain.core.checks import PositiveFloat, PositiveInt, check_arguments
from lightning_fasttrain.core.device import is_out_of_memory
from lightning_fasttrain.core.host.lightning import in_fabric_backward
from lightning_fasttrain.core.messages import describe_error, explain
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.loaders.growth_schedule import GrowingBatches, Growth, grow_batches
from lightning_fasttrain.micro_batching.normalizer.find_split import trial_step_of, trial_step_of_trainer
from lightning_fasttrain.technique import Exactness
from lightning_fasttrain.technique.declarations import Facts
from lightning_fasttrain.technique.duration import LENGTHS, Length
from lightning_fasttrain.trial.runs import Trial, loss_of
from lightning_fasttrain.trial.sample_rows import Sample
from lightning_fasttrain.trial.try_split import TrialStep, run_again

Resize = Callable[[Any, float], Any]


@check_arguments
def resize_images(batch: object, scale: PositiveFloat, grid: PositiveInt = 1, *, targets: bool = False) -> Any:
    """Return the batch with its images made smaller by area interpolation.

    Images are the tensors (B, C, H, W) of floating-point numbers or bytes. Their sides become the multiples of ``grid``
    nearest to ``scale`` times their length, at least one. Containers are traversed, and keep their type.

    Args:
        batch: images (B, C, H, W), in any nesting.
        scale: ratio of the new sides to the old ones; from 1 on the batch is returned unchanged.
        grid: the new sides are multiples of this number of pixels.
        targets: also resize labels that are images, integers or booleans (B, ..., H, W) of the same sides as an image,
            to the nearest entry.

    Raises:
        ValueError: no tensor looks like images.

    Example:
        >>> images, masks = torch.rand(2, 3, 32, 48), torch.zeros(2, 32, 48, dtype=torch.long)
        >>> [tuple(tensor.shape) for tensor in resize_images((images, masks), 0.5, grid=8, targets=True)]
        [(2, 3, 16, 24), (2, 16, 24)]
    """
    sides = {leaf.shape[-2:] for leaf in list_tensors(batch).values() if _is_image(leaf)}
    if not sides:
        why = "no tensor (B, C, H, W) of floating-point numbers or bytes is in it"
        raise ValueError(explain(f"a batch of type {type(batch).__name__}", why, "Give resize=(batch, scale) → batch"))
    if scale >= 1:
        return batch

    def resize(leaf: object, path: str) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if _is_image(leaf):
            return _average_areas(leaf, *_scaled(leaf.shape[-2:], scale, grid))
        if targets and leaf.ndim > 2 and not leaf.is_floating_point() and leaf.shape[-2:] in sides:
            return _pick_nearest(leaf, *_scaled(leaf.shape[-2:], scale, grid))
        return leaf

    return walk_leaves(batch, resize, "batch")


def _is_image(leaf: Tensor) -> bool:
    return leaf.ndim == 4 and (leaf.is_floating_point() or leaf.dtype is torch.uint8) and min(leaf.shape[-2:]) > 1


def _scaled(sides: Iterable[int], scale: float, grid: int) -> list[int]:
    return [max(1, int(side * scale / grid + 0.5)) * grid for side in sides]


def _average_areas(images: Tensor, height: int, width: int) -> Tensor:
    if images.dtype is torch.uint8:
        return F.interpolate(images.float(), (height, width), mode="area").round().to(torch.uint8)
    return F.interpolate(images, (height, width), mode="area")


def _pick_nearest(labels: Tensor, height: int, width: int) -> Tensor:
    """Return the entries at the centres of the new pixels; ``F.interpolate`` supports no integers."""
    for axis, new in ((-2, height), (-1, width)):
        places = ((torch.arange(new, device=labels.device) + 0.5) * (labels.shape[axis] / new)).long()
        labels = labels.index_select(axis, places)
    return labels


@check_arguments
def grow_images(
    batches: Iterable[object], growth: Growth, window: PositiveInt = 1, resize: Resize | None = None
) -> Iterator[Any]:
    """Yield the batches with their images resized by ``growth.size / growth.full``, which grows.

    Args:
        batches: the batches of an epoch.
        growth: counts batches, and continues over epochs if it is passed to each; its state can be resumed. Its sizes
            are the sides of images whose full side is ``growth.full``, and its ``grid`` that of the sides.
        window: number of batches per optimizer step.
        resize: (batch, scale) → batch; by default :func:`resize_images` without targets.

    Example:
        >>> batches = [torch.rand(2, 3, 32, 32)] * 4
        >>> [batch.shape[-1] for batch in grow_images(batches, Growth(16, 32, over=3, grid=8))]
        [16, 16, 24, 32]
    """
    change = resize or functools.partial(resize_images, grid=growth.grid)
    yield from grow_batches(batches, growth, window, lambda batch, size: change(batch, size / growth.full))


@check_arguments
def check_image_sizes(
    step: Callable[[Any], object], batch: object, growth: Growth, resize: Resize | None = None
) -> list[int]:
    """Raise unless a step accepts images in all sizes of a growth; returns the sizes that were tried.

    The step runs forward once for each size, on two samples, and what it changes is undone.

    Args:
        step: maps a batch to its loss, as for :func:`~lightning_fasttrain.accumulate_gradients`.
        batch: a batch with images of the full size.
        growth: as for :func:`grow_images`.
        resize: as for :func:`grow_images`.

    Raises:
        ValueError: the step fails in a size (the message names the module), an image would lose its last rows, or the
            model takes the first position embeddings for a smaller grid.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1))
        >>> check_image_sizes(lambda images: net(images).mean(), torch.rand(4, 3, 32, 32), Growth(16, 32, 8, grid=8))
        [16, 24]
    """
    change = resize or functools.partial(resize_images, grid=growth.grid)
    sizes = _sizes_below(growth)
    try_image_sizes(
        trial_step_of(step), sample_images(batch), sizes, lambda sample, size: change(sample, size / growth.full)
    )
    return sizes


def _sizes_below(growth: Growth) -> list[int]:
    return list(range(growth.start, growth.full, growth.grid))


class ProgressiveResizing(GrowingBatches):
    """Start with images whose side is ``start`` pixels, and grow to ``full`` in equal increments of ``grid``.

    Small images cost less: at half the side, a quarter of the pixels. The last part of the run trains on the full size,
    as validation always does. Sizes of other images are scaled by the same ratio, to multiples of ``grid``.

    Acts on a training batch after its transfer to the device. Before the first step, the training step runs forward on
    two samples in each size, without a trace; a model that does not accept a size is refused with the module that
    fails. Of a ViT, position embeddings must be interpolated: ``interpolate_pos_encoding=True`` in the call of Hugging
    Face's models, ``dynamic_img_size=True`` when timm's are created. In networks with BatchNorm, statistics of small
    images are in the running ones until the full size has replaced them. A compiled model is recompiled for some of the
    sizes; a large ``grid`` reduces their number.

    Args:
        start: side of the images at first, in pixels.
        full: side of the loader's images.
        over: duration of the growth: optimizer steps, ``"1ep"``, ``"50%"`` of the run, ``"1e6 samples"``. The shorter
            the run, the larger the share that the full size needs; ``examples/progressive_resizing.py`` measures it.
        grid: sizes are multiples of this number of pixels: of a ViT's patch size.
        targets: also resize labels that are images, as in segmentation, to the nearest entry.
        resize: (batch, scale) → batch, for batches that :func:`~lightning_fasttrain.loaders.resize_images` refuses, or
            whose labels are boxes in pixels.

    Attributes:
        growth: the current ``size``, and the number of ``samples`` so far.

    Raises:
        TypeError, ValueError: sizes that do not grow or are not multiples of ``grid``, or a duration that cannot be
            parsed; in ``fit``: the length of the run is unknown, a batch has no images, or the model refuses a size.

    Example:
        >>> resizing = ProgressiveResizing(start=112, full=224, over="50%", grid=16)

    Source:
        Howard 2018, https://www.fast.ai/posts/2018-04-30-dawnbench-fastai.html; Composer's ``ProgressiveResizing``,
        whose ``initial_scale`` is start / full here, ``finetune_fraction`` the rest after ``over``, and
        ``size_increment`` is ``grid``. Ours averages areas instead of interpolating linearly.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    ways_out: ClassVar[Mapping[str, str]] = {"over": LENGTHS}
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        "initial_scale": "start=112, full=224 for 0.5",
        "finetune_fraction": "over='80%' for 0.2",
        "size_increment": "grid",
        "resize_targets": "targets",
    }
    effect: ClassVar[str] = "small images at first, of growing size: cheaper early steps"
    when: ClassVar[str] = "you train on images from scratch; not where small details decide, or the loader is the limit"
    in_a_loop: ClassVar[str] = "for batch in loaders.grow_images(loader, growth)"
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        start: int,
        full: int,
        over: int | str | Length = "50%",
        grid: int = 16,
        targets: bool = False,
        resize: Resize | None = None,
    ) -> None:
        self.growth = Growth(start, full, over, grid)
        if start % grid and start < full:
            nearest = max(1, round(start / grid)) * grid
            raise ValueError(explain(f"{start=} with {grid=}", "sizes are multiples of grid", f"Use start={nearest}"))
        self.targets = targets
        self.resize = resize or functools.partial(resize_images, grid=grid, targets=targets)
        self._sample: Any = None
        self._is_tried = False

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        return None if facts.batch in (None, "images") else "the batch holds no images"

    def describe_effect(self, model: torch.nn.Module) -> str:
        growth = self.growth
        return f"images grow from {growth.start} to {growth.full} pixels over {growth.over}"

    def change(self, batch: object, size: int) -> Any:
        if self._sample is None:
            self._sample = sample_images(batch)
        return self.resize(batch, size / self.growth.full)

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        self._sample, self._is_tried = None, False
        return super().attach(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Hook: the first batch is on its device, and nothing has been computed from it."""
        if self._is_tried:
            return
        self._is_tried, sample, self._sample = True, self._sample, ()
        # A step that updates by itself cannot be tried.
        if sample is None or not pl_module.automatic_optimization:
            return
        full = self.growth.full
        trial_step = trial_step_of_trainer(trainer, pl_module, batch_idx)
        try_image_sizes(
            trial_step, sample, _sizes_below(self.growth), lambda rows, size: self.resize(rows, size / full)
        )


_POSITIONS = re.compile(r"position|(^|_)pos(_|$)", re.IGNORECASE)


def sample_images(batch: object) -> Any:
    """Return two samples of a batch, or the batch where it cannot be split; one image is too few for a BatchNorm."""
    if not can_be_cut(batch):
        return batch
    return pick_rows(batch, [0, batch_size(batch) - 1])


def try_image_sizes(
    trial_step: TrialStep, sample: object, sizes: Sequence[int], resize: Callable[[Any, int], object]
) -> None:
    """Run the step on a few samples in each size, without a trace.

    Args:
        trial_step: the step.
        sample: a few samples in full size.
        sizes: the sizes below the full one, the smallest first.
        resize: (sample, size) → the sample in that size.

    Raises:
        ValueError: the step failed in a size, or position embeddings are cut off there; names the module.
    """
    for name, side in _find_patches(trial_step.models):
        odd = [size for size in sizes if size % side]
        if odd:
            why = f"'{name}' reads patches of {side} pixels, so the last {odd[0] % side} rows and columns would be lost"
            raise ValueError(explain(f"images of {odd[0]} pixels", why, f"Use a start and a grid that {side} divides"))
    for size in sizes:
        with _note_failure(trial_step.models) as running:
            try:
                _run(trial_step, resize(sample, size), size)
            except _PositionsError:
                raise
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                if is_out_of_memory(error):
                    raise
                where = f" in '{running[-1]}'" if running and running[-1] else ""
                why = f"the step fails{where} with {describe_error(error)}"
                raise ValueError(explain(f"images of {size} pixels", why, _way_out(trial_step.models))) from error


def _run(trial_step: TrialStep, sample: object, size: int) -> None:
    step = functools.partial(_check_positions, trial_step, size)
    # No gradients are needed beside those of the position embeddings.
    trying = replace(trial_step, step=step, gradients=False)
    run_again(trying, Trial(Sample(sample, 1, []), precision="as it is"))


def _check_positions(trial_step: TrialStep, size: int, sample: object) -> Any:
    """Run the step, and refuse position embeddings of which only the first are used."""
    output = trial_step.step(sample)
    if output is None:  # the step skips this batch
        return torch.zeros(())
    tables = dict(itertools.chain.from_iterable(map(_find_positions, trial_step.models)))
    loss = loss_of(output)
    if not tables or not trial_step.gradients or not loss.requires_grad:
        return output
    with in_fabric_backward():
        gradients = torch.autograd.grad(loss, list(tables.values()), retain_graph=True, allow_unused=True)
    for name, gradient in zip(tables, gradients, strict=True):
        if gradient is not None and _is_prefix(gradient):
            why = f"the first rows of '{name}' are taken for a smaller grid, whose positions are others"
            raise _PositionsError(explain(f"images of {size} pixels", why, "Interpolate the position embeddings"))
    return output


class _PositionsError(ValueError):
    """Position embeddings that are cut off, which no step reports by itself."""


def _find_positions(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        last_two = name.split(".")[-2:]
        if parameter.requires_grad and any(map(_POSITIONS.search, last_two)) and parameter.ndim in (2, 3):
            yield name, parameter


def _is_prefix(gradient: Tensor) -> bool:
    """Whether only the first rows of position embeddings (..., T, D) have a gradient."""
    used = gradient.flatten(0, -2).abs().sum(dim=-1) != 0
    count = int(used.sum())
    return 1 < count < len(used) and bool(used[:count].all())


def _find_patches(models: Sequence[nn.Module]) -> Iterator[tuple[str, int]]:
    """Yield the first convolution of each model, and the side of its patches, if these do not overlap."""
    for model in models:
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Conv2d):
                if layer.stride == layer.kernel_size and layer.stride[0] > 1:
                    yield name, layer.stride[0]
                break


def _way_out(models: Sequence[nn.Module]) -> str:
    modules = list(itertools.chain.from_iterable(map(nn.Module.modules, models)))
    if any(hasattr(type(module), "interpolate_pos_encoding") for module in modules):
        return "Call the model with interpolate_pos_encoding=True"
    if any(hasattr(module, "dynamic_img_size") for module in modules):
        return "Create the model with dynamic_img_size=True"
    return (
        "Pool adaptively before linear layers (nn.AdaptiveAvgPool2d(1)), interpolate position embeddings, and resize "
        "labels that are images with targets=True; or leave ProgressiveResizing out"
    )


@contextmanager
def _note_failure(models: Sequence[nn.Module]) -> Iterator[list[str]]:
    """Yield the names of the modules whose forward is running, the innermost last; a failure leaves them there."""
    running: list[str] = []

    def enter(name: str, module: nn.Module, args: object) -> None:
        running.append(name)

    def leave(module: nn.Module, args: object, output: object) -> None:
        running.pop()

    with ExitStack() as hooks:
        for model in models:
            for name, module in model.named_modules():
                hooks.enter_context(module.register_forward_pre_hook(functools.partial(enter, name)))
                hooks.enter_context(module.register_forward_hook(leave))
        yield running
