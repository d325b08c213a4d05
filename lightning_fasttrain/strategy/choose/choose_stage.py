"""Choice of the ZeRO stage: the first that fits, from the cheapest to the most expensive."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.strategy.choose._limits import Fit, Limits, check_headroom, find_nearest, gib, name_leaner_ways
from lightning_fasttrain.strategy.choose._model_sizes import ZeROSizes, held_by
from lightning_fasttrain.strategy.choose._optimizer_state import MakeOptimizer
from lightning_fasttrain.strategy.choose.model_states import STAGES, ModelStates, states_of, usual_sizes


@dataclass(frozen=True)
class StageChoice:
    """The chosen stage of ZeRO, and the memory that each stage needs.

    Args:
        stage: one of :data:`~lightning_fasttrain.strategy.STAGES`.
        rows: the states at every stage considered, in bytes on one rank.
        why: the reason, in one sentence.
        activation_bytes: bytes of activations on each device.
        usable_bytes: usable bytes of each device, without ``headroom``.
        sizes: the bucket sizes assumed; ``sizes.as_config()`` sets them in DeepSpeed.
    """

    stage: str
    rows: tuple[ModelStates, ...]
    why: str
    activation_bytes: int
    usable_bytes: int
    sizes: ZeROSizes

    @property
    def states(self) -> ModelStates:
        """Model states at the chosen stage."""
        return next(row for row in self.rows if row.stage == self.stage)

    def as_table(self) -> Table:
        """Return a ``rich`` table of every stage, in GiB on one rank; it fits into 80 columns."""
        caption = (
            f"{self.why}\nOn each device {gib(self.usable_bytes)} GiB are usable; "
            f"activations take {gib(self.activation_bytes)} GiB at every stage."
        )
        table = Table(title="ZeRO, GiB on one rank", caption=caption, title_justify="left", caption_justify="left")
        table.add_column("stage", no_wrap=True)
        headings = ["params", "grads", "optimizer", "buffers", "device", "host"]
        if any(row.nvme for row in self.rows):
            headings.append("disk")
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            on_device = (row.parameters, row.gradients, row.optimizer, row.buffers, row.device + self.activation_bytes)
            figures = (*on_device, row.host, row.nvme)[: len(headings)]
            name, style = row.stage, None
            if row.stage == self.stage:
                name, style = f"{row.stage} ←", "bold"
            table.add_row(name, *map(gib, figures), style=style)
        return table


@check_arguments
def choose_stage(
    module: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | MakeOptimizer | None = None,
    *,
    world_size: PositiveInt,
    free_bytes: int,
    host_bytes: int | None = None,
    nvme_path: str | os.PathLike | None = None,
    activation_bytes: int = 0,
    precision: str = "32-true",
    headroom: float = 0.1,
    sizes: ZeROSizes | None = None,
) -> StageChoice:
    """Choose the first stage of ZeRO that fits, from the cheapest in communication to the most expensive.

    A stage fits if its states and the activations stay below (1 - ``headroom``) · ``free_bytes``, and its host memory
    below (1 - ``headroom``) · ``host_bytes``.

    Args:
        module, optimizer: as for :func:`~lightning_fasttrain.strategy.predict_model_states`.
        world_size: number of ranks.
        free_bytes: free bytes of the device of the rank that has least.
        host_bytes: bytes of host memory per rank: the machine's memory divided by its ranks; None means enough.
        nvme_path: folder on a fast disk; None excludes offload to disk.
        activation_bytes: bytes that forward and backward need in addition to the states, on each device.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"bf16-true"``.
        headroom: fraction of the memory left for usage that is not predicted: fragmentation, workspaces, and the
            optimizer's temporaries.
        sizes: bucket sizes.

    Returns:
        The choice; its ``as_table()`` shows every stage.

    Raises:
        ValueError: no stage fits; the message has the shortfall and the cheapest remedy. Also if memory is not
            positive, ``headroom`` is outside [0, 1), ``nvme_path`` does not exist, or ``predict_model_states`` raises.

    Example:
        >>> import torch
        >>> net = nn.Linear(1000, 1000, bias=False)
        >>> adam = torch.optim.AdamW(net.parameters())
        >>> choose_stage(net, adam, world_size=4, free_bytes=40_000_000).stage
        '0'
        >>> print(choose_stage(net, adam, world_size=4, free_bytes=15_000_000).why)
        Stage 3 is the first that fits: ... GiB of ... GiB on each device; stage 2 would be ... GiB over.

    Source:
        Ours.
    """
    _check(free_bytes, host_bytes, nvme_path, activation_bytes, headroom)
    stages = list(STAGES)
    if nvme_path is None:
        stages.remove("3+nvme")
    held = held_by(module, optimizer, world_size, precision)
    sizes = sizes or usual_sizes(held)
    usable_host = None if host_bytes is None else int(host_bytes * (1 - headroom))
    limits = Limits(int(free_bytes * (1 - headroom)), activation_bytes, usable_host)
    rows = states_of(held, stages, sizes)
    fits = list(map(limits.check, rows))
    cheaper = None
    for fit in fits:
        if fit.fits:
            why = _explain_choice(fit.states, cheaper, limits)
            return StageChoice(fit.states.stage, tuple(rows), why, activation_bytes, limits.usable, sizes)
        cheaper = fit
    raise ValueError(_nothing_fits(fits, limits, world_size, precision))


def _check(
    free_bytes: int, host_bytes: int | None, nvme_path: str | os.PathLike | None, activations: int, headroom: float
) -> None:
    for name, value, least in (("free_bytes", free_bytes, 1), ("activation_bytes", activations, 0)):
        if value < least:
            raise ValueError(explain(f"{name}={value}", f"it must be at least {least}", f"Give {name} in bytes"))
    if host_bytes is not None and host_bytes < 0:
        raise ValueError(explain(f"host_bytes={host_bytes}", "it cannot be negative", "Give bytes for each rank"))
    check_headroom(headroom)
    if nvme_path is not None and not Path(nvme_path).is_dir():
        raise ValueError(explain(f"nvme_path={str(nvme_path)!r}", "there is no such folder", "Create it first"))


def _explain_choice(states: ModelStates, before: Fit | None, limits: Limits) -> str:
    takes = limits.describe(states)
    if before is None:
        return f"Stage {states.stage} fits, and sends least: {takes}."
    return f"Stage {states.stage} is the first that fits: {takes}; stage {before.states.stage} would be {before.over}."


def _nothing_fits(fits: list[Fit], limits: Limits, world_size: PositiveInt, precision: str) -> str:
    nearest = find_nearest(fits)
    states = nearest.states
    if not nearest.short and fits[-1].states.stage != "3+nvme" and limits.host is not None:
        way_out = "Give nvme_path=, a folder on a fast disk"
    # DeepSpeed's default buckets can be larger than a small model.
    elif states.buffers > states.device - states.buffers:
        way_out = "Use smaller buckets: sizes=ZeROSizes(...), or reduce_bucket_size= in ZeROStrategy"
    else:
        leaner = []
        if states.optimizer > states.parameters:
            leaner.append("AdamW8bit")
        way_out = name_leaner_ways(leaner, precision, world_size)
    return limits.explain_shortage(f"No stage fits, the nearest is {states.stage}", nearest, "for each rank", way_out)
