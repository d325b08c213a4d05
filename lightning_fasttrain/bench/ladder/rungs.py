"""The rungs of the ladder, as data. Adding one is a single entry in :func:`rungs`."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_fasttrain.bench.ladder.results import MEMORY_WORTH, Row, State
from lightning_fasttrain.core.checks import positive_int
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.model import CompileBlocks
from lightning_fasttrain.technique import Exactness

_ROOM_TO_PLAN = 0.05

NAIVE: State = {
    "callbacks": {},
    "trainer": {"precision": "32-true"},
    "optimizer": {"fused": False},
    "loop": {"print_loss": True, "pin_memory": False},
}


@dataclass(frozen=True)
class Rung:
    """One step up the ladder.

    Args:
        name: one word, for ``--rungs`` and the JSON.
        title: for the table and the picture.
        change: what it adds to the state below it, in the form of :data:`NAIVE`; or a function that says so from the
            row of that state.
        free: whether it should cost neither time nor memory, as compiled blocks. It is then carried only if that is so
            on this machine. All other rungs trade time for memory.
        exactness: how near it keeps to the run without it.
        needs: ``"cuda"``, ``"mixed"`` for a device that multiplies 16-bit numbers, ``"bf16"`` for one that multiplies
            bfloat16, or ``"bitsandbytes"``; nothing elsewhere.
    """

    name: str
    title: str
    change: State | Callable[[Row], State]
    exactness: Exactness = Exactness.EXACT
    needs: str | None = None
    free: bool = False

    def on(self, below: Row) -> State:
        """Return the state of this rung on top of that of the row ``below``."""
        change = self.change
        if callable(change):
            change = change(below)
        return on_top_of(below.state, change)


def rungs(micro_batches: int = 4, mixed: str | None = None) -> tuple[Rung, ...]:
    """Return all rungs above naive, bottom up: what is free, on the unsplit batch, then what trades time for memory.

    Args:
        micro_batches: parts that a batch is split into.
        mixed: the mixed precision in which the device multiplies faster; None: bf16, which is left out elsewhere.

    Example:
        >>> [rung.name for rung in rungs() if rung.free][:5]
        ['prefetch', 'tf32', 'bf16', 'fused', 'compile']
    """
    n, precision = positive_int("micro_batches", micro_batches), mixed or "bf16-mixed"
    prefetch: State = {"callbacks": {"DevicePrefetch": {}}, "loop": {"print_loss": False, "pin_memory": True}}
    # Gradients cannot be summed by an optimizer in the backward.
    in_parts: State = {"callbacks": {"MicroBatching": {"n": n}, "OptimizerInBackward": None}}
    compiled_head: State = {"callbacks": {"CompileBlocks": {"head": True}}}
    by_chance: State = {"trainer": {"precision": "bf16-true"}, "optimizer": {"name": "adamw", "updates": "stochastic"}}
    changes, tolerance, compiled = Exactness.CHANGES_TRAINING, Exactness.TOLERANCE, CompileBlocks.exactness
    tf32: State = {"callbacks": {"MatmulPrecision": {"precision": "tf32"}}}
    in_mixed: State = {"trainer": {"precision": precision}}
    return (
        Rung("prefetch", "no host syncs + prefetch", prefetch, free=True),
        Rung("tf32", "TF32", tf32, tolerance, needs="cuda", free=True),
        Rung("bf16", f"{_short(precision)} mixed", in_mixed, tolerance, needs="mixed", free=True),
        Rung("fused", "fused AdamW", {"optimizer": {"fused": True}}, free=True),
        Rung("compile", "compiled blocks", {"callbacks": {"CompileBlocks": {}}}, compiled, free=True),
        # Faster where logits are large and costly to store, slower elsewhere: so it is judged as a trade.
        Rung("chunked-loss", "fused loss head", {"callbacks": {"FusedLossHead": {"head": "gpt.head"}}}),
        Rung("compiled-head", "head compiled too", compiled_head, compiled, free=True),
        Rung("optimizer-in-backward", "optimizer in backward", {"callbacks": {"OptimizerInBackward": {}}}, free=True),
        Rung("micro-batches", f"micro-batches ×{n}", in_parts),
        Rung("release", "gradients None early", {"callbacks": {"EagerGradientRelease": {}}}, free=True),
        # A device waits for the host in micro-batches, not on the unsplit batch.
        Rung("cuda-graphs", "CUDA graphs", _replay_graphs, compiled, needs="cuda", free=True),
        Rung("selective", "selective checkpointing", _checkpoint_by({"SelectiveOps": {}})),
        Rung("checkpointing", "activation checkpointing", _checkpoint_by({"EveryBlock": {}})),
        Rung("budget", "same peak, less recomputed", _budget),
        Rung("offload", "activation offload", _offload, needs="cuda"),
        # What changes training is shown, and never carried.
        Rung("8-bit", "8-bit AdamW", {"optimizer": {"name": "adamw8bit"}}, changes, needs="bitsandbytes"),
        Rung("bf16-alone", "bf16 alone, rounded by chance", by_chance, changes, needs="bf16"),
    )


def _checkpoint_by(policy: Mapping[str, object]) -> State:
    return {"callbacks": {"ActivationCheckpointing": {"policy": policy}}}


def _replay_graphs(below: Row) -> State:
    """Return compiled blocks as below, replayed as CUDA graphs."""
    arguments = below.state["callbacks"].get("CompileBlocks", {})
    return {"callbacks": {"CompileBlocks": {**arguments, "mode": "reduce-overhead"}}}


def _offload(below: Row) -> State:
    """Return offloaded activations, without CUDA graphs, whose memory cannot be offloaded."""
    callbacks: dict[str, object] = {"ActivationOffload": {}}
    arguments = below.state["callbacks"].get("CompileBlocks", {})
    if arguments.get("mode") == "reduce-overhead":
        callbacks["CompileBlocks"] = {name: value for name, value in arguments.items() if name != "mode"}
    return {"callbacks": callbacks}


def _budget(below: Row) -> State:
    """Return a budget: the peak of a checkpointed state below, to be kept in less time; otherwise four fifths of it.

    What compiled blocks take is known for one plan only, so with them the others need a margin.
    """
    if below.error is not None:
        return _checkpoint_by({"MemoryBudget": {}})
    callbacks = below.state["callbacks"]
    share = 0.8
    if "ActivationCheckpointing" in callbacks:
        share = 1 + (_ROOM_TO_PLAN if "CompileBlocks" in callbacks else MEMORY_WORTH)
    # Rounded here, so that the code to paste has the value that was measured.
    budget_gib = float(f"{below.peak_mib / 1024 * share:.6g}")
    return _checkpoint_by({"MemoryBudget": {"budget_gib": budget_gib}})


def warmup_of(state: State) -> int:
    """Return the smallest number of steps after which all steps of this state take the same work.

    Example:
        >>> warmup_of(NAIVE), warmup_of({"callbacks": {"CompileBlocks": {}}})
        (1, 2)
    """
    callbacks, is_compiled = state["callbacks"], "CompileBlocks" in state["callbacks"]
    if "MemoryBudget" in callbacks.get("ActivationCheckpointing", {}).get("policy", {}):
        # A budget measures two steps, and checks each plan in one step, or in two with compiled blocks; the sixth plan
        # is the last, and with a margin the fourth.
        return 10 if is_compiled else 8
    return 2 if is_compiled or "compile" in state.get("loop", {}) else 1


def choose_rungs(
    everything: tuple[Rung, ...], names: list[str] | None, extra: tuple[str, ...] = ()
) -> tuple[Rung, ...]:
    """Return the rungs with these names, in the ladder's order; all of them for None.

    Args:
        everything: the rungs to choose from.
        names: what was asked for.
        extra: names that are allowed but are no rungs.

    Raises:
        ValueError: an unknown name; the message lists the known ones.

    Example:
        >>> [rung.name for rung in choose_rungs(rungs(), ["fused", "bf16"])]
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
    """Return ``state`` with ``change`` applied, on copies. A callback named again gets new arguments, or is removed.

    Example:
        >>> on_top_of(NAIVE, {"optimizer": {"fused": True}})["optimizer"], NAIVE["optimizer"]
        ({'fused': True}, {'fused': False})
    """
    result = copy.deepcopy(state)
    for section, entries in copy.deepcopy(change).items():
        merged = {**result.get(section, {}), **entries}
        result[section] = {name: entry for name, entry in merged.items() if section != "callbacks" or entry is not None}
    return result


def _short(precision: str) -> str:
    return {"bf16-mixed": "bf16", "16-mixed": "fp16"}[precision]


def strong_baselines(mixed: str | None) -> tuple[Rung, Rung]:
    """Return the strong baselines: the settings that an informed user writes without this package.

    Fused AdamW, SDPA, no loss printed, and the mixed precision in which the device multiplies faster; the second also
    compiles the model with its loss.

    Args:
        mixed: that precision; None if there is none.
    """
    name, exactness = ("fp32", Exactness.EXACT) if mixed is None else (_short(mixed), Exactness.TOLERANCE)
    loop = {"print_loss": False, "pin_memory": True}
    change: State = {"trainer": {"precision": mixed or "32-true"}, "optimizer": {"fused": True}, "loop": loop}
    compiled: State = {**change, "loop": {**loop, "compile": {}}}
    return (
        Rung("strong", f"{name}, SDPA, fused AdamW", change, exactness),
        Rung("compiled", f"{name}, SDPA, fused AdamW, torch.compile", compiled, Exactness.TOLERANCE),
    )


def padded_rungs(mixed: str | None, micro_batches: int) -> tuple[Rung, Rung]:
    """Return the strong baseline in micro-batches for padded texts: with the padding, and with it cut off.

    Args:
        mixed: the mixed precision in which the device multiplies faster; None if there is none.
        micro_batches: parts that a batch is split into.
    """
    strong, _ = strong_baselines(mixed)
    assert not callable(strong.change)
    whole: State = {**strong.change, "callbacks": {"MicroBatching": {"n": micro_batches, "trim_padding": False}}}
    cut: State = {"callbacks": {"MicroBatching": {"n": micro_batches}}}
    return (
        Rung("padded", "padded texts, micro-batches", whole, strong.exactness),
        Rung("trimmed", "padded texts, padding cut off", cut),
    )
