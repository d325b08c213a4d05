"""Try on a few images whether a step accepts the sizes that they will have."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fasttrain.core.batch.leaves import batch_size, can_be_cut
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import first_line
from lightning_fasttrain.data.normalizer.trial.runs import Trial
from lightning_fasttrain.data.normalizer.trial.sample_rows import Sample
from lightning_fasttrain.data.normalizer.trial.step_function import loss_of
from lightning_fasttrain.data.normalizer.trial.try_split import Stage, run_again
from lightning_fasttrain.data.split_batch import pick_rows

_POSITIONS = re.compile(r"position|(^|_)pos(_|$)", re.IGNORECASE)


def sample_images(batch: object) -> Any:
    """Return two samples of a batch, or the batch where it cannot be split; one image is too few for a BatchNorm."""
    if not can_be_cut(batch):
        return batch
    return pick_rows(batch, [0, batch_size(batch) - 1])


def try_image_sizes(stage: Stage, sample: object, sizes: Sequence[int], resize: Callable[[Any, int], object]) -> None:
    """Run the step on a few samples in each size, without a trace.

    Args:
        stage: the step.
        sample: a few samples in full size.
        sizes: the sizes below the full one, the smallest first.
        resize: (sample, size) → the sample in that size.

    Raises:
        ValueError: the step failed in a size, or position embeddings are cut off there; names the module.
    """
    for name, side in _find_patches(stage.models):
        odd = [size for size in sizes if size % side]
        if odd:
            why = f"'{name}' reads patches of {side} pixels, so the last {odd[0] % side} rows and columns would be lost"
            raise ValueError(explain(f"images of {odd[0]} pixels", why, f"Use a start and a grid that {side} divides"))
    for size in sizes:
        with _note_failure(stage.models) as running:
            try:
                _run(stage, resize(sample, size), size)
            except _PositionsError:
                raise
            except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                where = f" in '{running[-1]}'" if running and running[-1] else ""
                why = f"the step fails{where} with {type(error).__name__}: {first_line(error)}"
                raise ValueError(explain(f"images of {size} pixels", why, _way_out(stage.models))) from error


def _run(stage: Stage, sample: object, size: int) -> None:
    step = functools.partial(_check_positions, stage, size)
    # No gradients are needed beside those of the position embeddings.
    trying = replace(stage, step=step, gradients=False)
    run_again(trying, Trial(Sample(sample, 1, []), precision="as it is"))


def _check_positions(stage: Stage, size: int, sample: object) -> Any:
    """Run the step, and refuse position embeddings of which only the first are used."""
    output = stage.step(sample)
    if output is None:  # the step skips this batch
        return torch.zeros(())
    tables = dict(itertools.chain.from_iterable(map(_find_positions, stage.models)))
    loss = loss_of(output)
    if not tables or not stage.gradients or not loss.requires_grad:
        return output
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
