"""Table of the optimizers available by name: their classes, defaults and limitations."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from lightning_fasttrain.core.checks import require
from lightning_fasttrain.core.messages import explain


@dataclass(frozen=True)
class Known:
    """One optimizer that is available by name.

    Args:
        places: dotted paths of the class; the first one whose package is installed is used.
        extra: this package's extra that installs the first path; "" if the class is torch's or ours.
        lr: default learning rate.
        weight_decay: default weight decay; 0 for optimizers that add it to the gradient, where its effect differs.
        marks: ``"muon"`` or ``"galore"``: matrices of blocks are in separate groups.
        fuses: whether it supports ``fused=`` on CUDA.
        refuses: maps ``"offload"`` or ``"updates"`` to the reason why it is not supported.
    """

    places: tuple[str, ...]
    extra: str = ""
    lr: float = 1e-3
    weight_decay: float = 0.01
    marks: str = ""
    fuses: bool = False
    refuses: Mapping[str, str] = field(default_factory=dict)

    def find_class(self) -> Any:
        """Import and return the class.

        Raises:
            ModuleNotFoundError: no package that provides it is installed; names the extra.
        """
        missing = []
        for place in self.places:
            module, _, name = place.rpartition(".")
            try:
                return getattr(require(module, self.extra), name)
            except ModuleNotFoundError as error:
                missing.append(error)
        raise missing[0]  # the first one's, whose extra this package defines


_PAGED = {"offload": "its state moves to host memory by itself when the device is full"}
_OWN_AVERAGE = {
    "offload": "it swaps the weights for their average in place",
    "updates": "it keeps counters for a whole group of parameters",
}
_OURS = "lightning_fasttrain.optim"

KNOWN: dict[str, Known] = {
    "sgd": Known(("torch.optim.SGD",), weight_decay=0.0, fuses=True),
    "adagrad": Known(("torch.optim.Adagrad",), lr=1e-2, weight_decay=0.0),
    "rmsprop": Known(("torch.optim.RMSprop",), weight_decay=0.0),
    "adam": Known(("torch.optim.Adam",), weight_decay=0.0, fuses=True),
    "adamw": Known(("torch.optim.AdamW",), fuses=True),
    "adafactor": Known(("torch.optim.Adafactor",), lr=1e-2),
    "lion": Known((f"{_OURS}.named.lion.Lion",), lr=1e-4),
    "muon": Known((f"{_OURS}.named.muon.MuonAdamW",), marks="muon", fuses=True),
    "galore": Known((f"{_OURS}.galore.GaLoreAdamW",), marks="galore"),
    "adamw8bit": Known(("bitsandbytes.optim.AdamW8bit", "torchao.optim.AdamW8bit"), extra="finetune"),
    "adamw4bit": Known(("torchao.optim.AdamW4bit",), extra="ao"),
    "lion8bit": Known(("bitsandbytes.optim.Lion8bit",), extra="finetune", lr=1e-4),
    "paged-adamw": Known(("bitsandbytes.optim.PagedAdamW",), extra="finetune", refuses=_PAGED),
    "paged-adamw8bit": Known(("bitsandbytes.optim.PagedAdamW8bit",), extra="finetune", refuses=_PAGED),
    "paged-lion8bit": Known(("bitsandbytes.optim.PagedLion8bit",), extra="finetune", lr=1e-4, refuses=_PAGED),
    "schedule-free": Known(("schedulefree.AdamWScheduleFree",), extra="schedule-free", refuses=_OWN_AVERAGE),
}


def find_known(name: str) -> Known:
    """Look up an optimizer by name; case, spaces, dashes and underscores do not matter.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.

    Example:
        >>> find_known("AdamW_8bit").places[0]
        'bitsandbytes.optim.AdamW8bit'
    """
    for known, row in KNOWN.items():
        if _normalize(known) == _normalize(name):
            return row
    why = "unknown optimizer name"
    raise ValueError(explain(f"optimizer {name!r}", why, f"Use one of {', '.join(KNOWN)}"))


def is_known(name: str) -> bool:
    """Whether :func:`find_known` knows the name."""
    return _normalize(name) in map(_normalize, KNOWN)


def _normalize(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def refuse_settings(name: str, kind: type[Optimizer], settings: Mapping[str, Any]) -> None:
    """Refuse settings that the class does not have.

    Raises:
        TypeError: names these settings, and the allowed ones.
    """
    allowed = [key for key in inspect.signature(kind).parameters if key not in ("params", "lr", "weight_decay")]
    unknown = [key for key in settings if key not in allowed]
    if unknown:
        what = f"{', '.join(unknown)} for {name!r}"
        raise TypeError(explain(what, f"{kind.__name__} has no such setting", f"It has {', '.join(allowed)}"))
