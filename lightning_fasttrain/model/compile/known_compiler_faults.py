"""Known faults of torch's compiler, with the versions that have them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from lightning_fasttrain.core.modules.without_dropout import has_dropout


@dataclass(frozen=True)
class CompilerFault:
    """One fault, and the conditions under which it occurs.

    Attributes:
        issue: its number among the issues of pytorch/pytorch.
        what: half a sentence.
        since: the first version that has it.
        until: the first version that was not tried, or no longer has it.
        device: the only device that has it; "" for all.
        with_dropout: whether it needs dropout.
        options: inductor options that avoid it; given only if a comparison with the eager block cannot find it.
    """

    issue: int
    what: str
    since: str
    until: str
    device: str = ""
    with_dropout: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


FAULTS = (
    CompilerFault(193061, "gradients of a modulation that several norms share", "2.10", "2.14"),
    CompilerFault(190758, "dropout in the backward under activation_memory_budget", "2.4", "2.14", with_dropout=True),
    # Groups of four entries share one draw, which is consistent with the gradient but still wrong.
    CompilerFault(198333, "masks of dropout", "2.13", "2.14", "cuda", True, {"fallback_random": True}),
)


def list_faults(block: nn.Module, version: str = torch.__version__) -> list[CompilerFault]:
    """List the known faults that a block may trigger when it is compiled.

    Example:
        >>> [fault.issue for fault in list_faults(nn.Linear(2, 2), version="2.12.1")]
        [193061]
    """
    device = next((parameter.device.type for parameter in block.parameters()), "cpu")
    drops = has_dropout(block)
    found: list[CompilerFault] = []
    for fault in FAULTS:
        has_it = TorchVersion(fault.since) <= TorchVersion(version) < TorchVersion(fault.until)
        if has_it and fault.device in ("", device) and (drops or not fault.with_dropout):
            found.append(fault)
    return found
