"""Check everything a ladder needs before anything runs, so that errors come before the first rung."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_fasttrain.bench.gpt import ATTENTIONS, Size, size_named
from lightning_fasttrain.bench.ladder.rungs import Rung, choose_rungs, rungs
from lightning_fasttrain.bench.ladder.turns import FEWEST_TURNS
from lightning_fasttrain.bench.text import check_enough, encode_text, read_text
from lightning_fasttrain.core.checks import one_of, positive_int
from lightning_fasttrain.core.device import bf16_slowdown, fast_mixed_precision
from lightning_fasttrain.core.messages import explain

STRONG, BARE, PADDED = "strong", "bare-loop", "padded"


@dataclass(frozen=True)
class Ladder:
    """Checked arguments of a ladder, made by :func:`prepare`."""

    size_name: str
    size: Size
    tokens: np.ndarray
    rungs: tuple[Rung, ...]
    skipped: tuple[dict[str, str], ...]
    baselines: tuple[str, ...]
    out: Path
    each: bool
    device: str
    mixed: str | None
    warmup: int
    turns: int
    command: str = ""


def prepare(
    size: str | Size = "mini",
    *,
    text: str | Path | None = None,
    out: str | Path = "ladder",
    steps: int | None = None,
    each: bool = False,
    attention: str = "sdpa",
    batch: int | None = None,
    micro_batches: int | None = None,
    names: list[str] | None = None,
    ladder: Callable[[int, str | None], tuple[Rung, ...]] = rungs,
    turns: int = 12,
    minutes: float | None = None,
) -> Ladder:
    """Check every argument and read the text, so that errors come before the first rung.

    Args:
        size: a name of :data:`.sizes.SIZES`, or a Size of your own.
        text: see :func:`.read_text`.
        out: folder for ``ladder.json`` and ``ladder.png``; made if missing.
        steps: timed steps of a turn; the size's own number by default.
        each: also run each rung alone on top of naive.
        attention: ``"sdpa"`` or ``"naive"``, in every rung.
        batch: sequences per step; the size's own number by default.
        micro_batches: parts that the rung of micro-batches splits a batch into; the size's own number by default.
        names: the rungs to run; all by default. ``strong``, the two strong baselines, ``bare-loop``, and ``padded``,
            two rows on texts of different lengths that run only if named, are names too; naive always runs.
        ladder: number of micro-batches, mixed precision of the device → the rungs to choose from.
        turns: the most turns in which a rung and the state below it are run to compare their times.
        minutes: after which a comparison ends after the fewest turns; the size's own number by default.

    Returns:
        What :func:`climb` takes.

    Raises:
        ValueError: a bad argument; the message is one line.
    """
    given = {"batch": batch, "steps": steps, "micro_batches": micro_batches, "minutes": minutes}
    size_name = "custom"
    if isinstance(size, str):
        size_name, size = size, size_named(size)
    resized = _resize(size, attention, given)
    if positive_int("turns", turns) < FEWEST_TURNS:
        why = "fewer have no interval that could decide"
        raise ValueError(explain(f"turns={turns}", why, f"Use {FEWEST_TURNS} or more"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mixed = fast_mixed_precision(torch.device(device))
    runnable: list[Rung] = []
    skipped: list[dict[str, str]] = []
    for rung in choose_rungs(ladder(resized.micro_batches, mixed), names, extra=(STRONG, BARE, PADDED)):
        reason = _why_not(rung, device, mixed)
        if reason:
            skipped.append({"name": rung.name, "title": rung.title, "reason": reason})
        else:
            runnable.append(rung)
    asked = (STRONG, BARE) if names is None else names
    baselines = tuple(name for name in (STRONG, BARE, PADDED) if name in asked)
    folder = writable_folder(out)
    tokens = encode_text(read_text(text), resized.tokens, resized.model.vocabulary)
    check_enough(tokens, resized.batch, resized.model.context)
    # On a GPU steps are short, and the first ones set up libraries and the allocator.
    how = {"each": each, "device": device, "mixed": mixed, "warmup": 5 if device == "cuda" else 1, "turns": turns}
    chosen = {"rungs": tuple(runnable), "skipped": tuple(skipped), "baselines": baselines}
    prepared = Ladder(size_name=size_name, size=resized, tokens=tokens, out=folder, **chosen, **how)
    return replace(prepared, command=_command_of(prepared, names, text))


def _resize(size: Size, attention: str, given: dict[str, float | None]) -> Size:
    """Return ``size`` with the given values instead of its own, checked."""
    values: dict[str, Any] = dict(given)
    for name, value in given.items():
        if value is None:
            values[name] = getattr(size, name)
    for name in ("batch", "steps", "micro_batches"):
        positive_int(name, values[name])
    batch, micro_batches, minutes = values["batch"], values["micro_batches"], values["minutes"]
    if batch < micro_batches:
        way_out = f"Use --batch {micro_batches} or more, or --micro-batches {batch} or fewer"
        what = f"batch={batch} with micro_batches={micro_batches}"
        raise ValueError(explain(what, "each micro-batch needs a sequence", way_out))
    if not minutes >= 0:
        raise ValueError(explain(f"minutes={minutes}", "time does not run backwards", "Use 0 for the fewest turns"))
    model = replace(size.model, attention=one_of("attention", attention, ATTENTIONS))
    return replace(size, model=model, **values)


def _command_of(ladder: Ladder, names: list[str] | None, text: str | Path | None) -> str:
    """Return the command that runs this ladder again."""
    size = ladder.size
    options = [f"--size {ladder.size_name}", f"--batch {size.batch}", f"--steps {size.steps}"]
    options += [f"--attention {size.model.attention}", f"--micro-batches {size.micro_batches}"]
    options += [f"--turns {ladder.turns}", f"--minutes {size.minutes:g}"]
    if ladder.each:
        options.append("--each")
    if names:
        options.append(f"--rungs {','.join(names)}")
    if text is not None:
        # The name alone, since results say nothing about the folders of this machine.
        options.append(f"--text {Path(text).name}")
    return " ".join(["fasttrain ladder", *options])


def _why_not(rung: Rung, device: str, mixed: str | None) -> str:
    """Return why a rung cannot be run on this machine; empty if it can."""
    met = {"bf16-mixed": {"mixed", "bf16"}, "16-mixed": {"mixed"}, None: set()}[mixed]
    if rung.needs in {None, device, *met}:
        return ""
    if device == "cuda" and rung.needs in ("mixed", "bf16"):
        return "needs a GPU that multiplies bf16; this one emulates it"
    if rung.needs in ("mixed", "bf16"):
        slower = f"a product in bf16 takes {bf16_slowdown():.2g} times as long here as in fp32"
        return f"needs a processor with bf16 units, {slower}; so expect memory to fall, and time hardly"
    if rung.needs != "bitsandbytes":
        return f"needs {rung.needs}"
    if find_spec("bitsandbytes"):
        return ""
    return 'needs bitsandbytes: pip install "lightning-fasttrain[finetune]"'


def writable_folder(path: str | Path) -> Path:
    """Return the folder, created if missing, after a test that files can be written to it.

    Raises:
        ValueError: it cannot be made, or nothing can be written there.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions show less: a disk may be full, or mounted to be read only.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tmp-"):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        why = f"results cannot be written there ({reason})"
        raise ValueError(explain(f"output folder {path}", why, "Give another with --out")) from error
    return folder
