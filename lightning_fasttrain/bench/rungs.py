"""The rungs of the ladder, as data. Adding one is a single entry in :func:`rungs`."""

import copy
from dataclasses import dataclass
from typing import Any

from lightning_fasttrain._checks import positive_int
from lightning_fasttrain._messages import explain
from lightning_fasttrain._technique import Exactness

# How a run is made, in plain JSON, so that a fresh process can make it:
#   callbacks: name of a callback of this package → its keyword arguments
#   trainer:   keyword arguments of L.Trainer
#   optimizer: keyword arguments of GPTModule.configure_optimizers' AdamW
#   loop:      how the loop around it behaves
State = dict[str, dict[str, Any]]

NAIVE: State = {
    "callbacks": {},
    "trainer": {"precision": "32-true"},
    "optimizer": {"fused": False},
    "loop": {"print_loss": True, "pin_memory": False},
}

_RANK = {Exactness.EXACT: 0, Exactness.TOLERANCE: 1, Exactness.CHANGES_TRAINING: 2}


@dataclass(frozen=True)
class Rung:
    """One step up the ladder.

    Args:
        name: one word, for ``--rungs`` and the JSON.
        title: for the table and the picture.
        change: what it adds to the state below it, in the form of :data:`NAIVE`.
        exactness: how near it keeps to the run without it.
        needs: ``"cuda"`` if it means nothing elsewhere.
    """

    name: str
    title: str
    change: State
    exactness: Exactness = Exactness.EXACT
    needs: str | None = None


def rungs(micro_batches: int = 4) -> tuple[Rung, ...]:
    """All rungs above naive, from the bottom up.

    Args:
        micro_batches: parts that a batch is split into.

    Example:
        >>> [rung.name for rung in rungs()][:3]
        ['release', 'micro-batches', 'prefetch']
    """
    n = positive_int("micro_batches", micro_batches)
    return (
        Rung("release", "gradients None early", {"callbacks": {"EagerGradientRelease": {}}}),
        Rung("micro-batches", f"micro-batches ×{n}", {"callbacks": {"MicroBatching": {"n": n}}}),
        Rung(
            "prefetch",
            "no host syncs + prefetch",
            {"callbacks": {"DevicePrefetch": {}}, "loop": {"print_loss": False, "pin_memory": True}},
        ),
        Rung(
            "tf32",
            "TF32",
            {"callbacks": {"MatmulPrecision": {"precision": "tf32"}}},
            Exactness.TOLERANCE,
            needs="cuda",
        ),
        Rung("bf16", "bf16 mixed", {"trainer": {"precision": "bf16-mixed"}}, Exactness.TOLERANCE),
        Rung("checkpointing", "activation checkpointing", {"callbacks": {"ActivationCheckpointing": {}}}),
        Rung("compile", "compiled blocks", {"callbacks": {"CompileBlocks": {}}}, Exactness.TOLERANCE),
        Rung("fused", "fused AdamW", {"optimizer": {"fused": True}}),
        # Without CUDA graphs: they replay into the same memory, which micro-batches still sum gradients in.
        Rung(
            "max-autotune",
            "max-autotune",
            {"callbacks": {"CompileBlocks": {"mode": "max-autotune-no-cudagraphs"}}},
            Exactness.TOLERANCE,
        ),
    )


def chosen(everything: tuple[Rung, ...], names: list[str] | None, extra: tuple[str, ...] = ()) -> tuple[Rung, ...]:
    """The rungs with these names, in the ladder's order; all of them for None.

    Args:
        everything: the rungs to choose from.
        names: what was asked for.
        extra: names that are allowed but are no rungs.

    Raises:
        ValueError: an unknown name; the message lists the known ones.

    Example:
        >>> [rung.name for rung in chosen(rungs(), ["fused", "bf16"])]
        ['bf16', 'fused']
    """
    if names is None:
        return everything
    allowed = [*(rung.name for rung in everything), *extra]
    for name in names:
        if name not in allowed:
            raise ValueError(explain(f"rung {name!r}", "there is none of this name", f"Use {', '.join(allowed)}"))
    return tuple(rung for rung in everything if rung.name in names)


def on_top_of(state: State, change: State) -> State:
    """``state`` with ``change`` in it; neither is altered. A callback named again gets the new arguments.

    Example:
        >>> on_top_of(NAIVE, {"optimizer": {"fused": True}})["optimizer"], NAIVE["optimizer"]
        ({'fused': True}, {'fused': False})
    """
    result = copy.deepcopy(state)
    for section, entries in copy.deepcopy(change).items():
        result.setdefault(section, {}).update(entries)
    return result


def least_exact(*classes: Exactness) -> Exactness:
    """The class of several techniques together: that of the least exact one.

    Example:
        >>> least_exact(Exactness.EXACT, Exactness.TOLERANCE).value
        'tolerance'
    """
    return max(classes, key=_RANK.__getitem__)


def strong_baseline(device: str) -> Rung:
    """What an informed user writes without this package: to be compared with, not carried.

    On a GPU bf16 + SDPA + fused AdamW. On a CPU fp32 + SDPA + fused AdamW, because bf16 is slower than fp32 on many
    processors. Either prints no loss.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
    """
    precision = "bf16-mixed" if device == "cuda" else "32-true"
    change: State = {
        "trainer": {"precision": precision},
        "optimizer": {"fused": True},
        "loop": {"print_loss": False, "pin_memory": device == "cuda"},
    }
    title = f"strong ({'bf16' if device == 'cuda' else 'fp32'} + SDPA + fused AdamW)"
    return Rung("strong", title, change, Exactness.TOLERANCE if device == "cuda" else Exactness.EXACT)
