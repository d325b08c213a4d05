"""What a ladder needs, checked before anything runs: what can go wrong goes wrong before the first rung."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lightning_fasttrain._checks import one_of, positive_int
from lightning_fasttrain._messages import explain
from lightning_fasttrain.bench.gpt import ATTENTIONS
from lightning_fasttrain.bench.rungs import Rung, chosen, rungs
from lightning_fasttrain.bench.sizes import Size, size_named
from lightning_fasttrain.bench.text import check_enough, encode_text, read_text

STRONG, BARE = "strong", "bare-loop"


@dataclass(frozen=True)
class Ladder:
    """Everything a ladder needs, checked. Made by :func:`prepare`."""

    size_name: str
    size: Size
    tokens: np.ndarray
    rungs: tuple[Rung, ...]
    baselines: tuple[str, ...]
    out: Path
    each: bool
    device: str
    warmup: int
    repeats: int
    command: str


def prepare(
    size: str | Size = "nano",
    *,
    text: str | Path | None = None,
    out: str | Path = "ladder",
    steps: int | None = None,
    each: bool = False,
    attention: str = "sdpa",
    batch: int | None = None,
    micro_batches: int | None = None,
    names: list[str] | None = None,
    ladder: Callable[[int], tuple[Rung, ...]] = rungs,
    warmup: int = 5,
    repeats: int = 1,
) -> Ladder:
    """Check every argument and read the text, so that what can go wrong goes wrong before the first rung.

    Args:
        size: a name of :data:`.sizes.SIZES`, or a Size of your own.
        text: see :func:`.read_text`.
        out: folder for ``ladder.json`` and ``ladder.png``; made if missing.
        steps: timed steps per rung; the size's own number by default.
        each: also run each rung alone on top of naive.
        attention: ``"sdpa"`` or ``"naive"``, in every rung.
        batch: sequences per step; the size's own number by default.
        micro_batches: parts that the rung of micro-batches splits a batch into; the size's own number by default.
        names: the rungs to run; all by default. ``strong`` and ``bare-loop`` are names too; naive always runs.
        ladder: number of micro-batches → the rungs to choose from.
        warmup: steps before the clock counts; compilation falls into them, and what a memory budget measures.
        repeats: fresh processes per rung, of which the fastest counts.

    Returns:
        What :func:`climb` takes.

    Raises:
        ValueError: a bad argument; the message is one line.
    """
    chosen_size = size if isinstance(size, Size) else size_named(size)
    name = size if isinstance(size, str) else "custom"
    model = replace(chosen_size.model, attention=one_of("attention", attention, ATTENTIONS))
    chosen_size = Size(
        model,
        positive_int("batch", chosen_size.batch if batch is None else batch),
        chosen_size.tokens,
        positive_int("steps", chosen_size.steps if steps is None else steps),
        positive_int("micro_batches", chosen_size.micro_batches if micro_batches is None else micro_batches),
    )
    micro_batches = chosen_size.micro_batches
    if chosen_size.batch < micro_batches:
        raise ValueError(
            explain(
                f"batch={chosen_size.batch} with micro_batches={micro_batches}",
                "each micro-batch needs a sequence",
                f"Use --batch {micro_batches} or more, or --micro-batches {chosen_size.batch} or fewer",
            )
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    positive_int("repeats", repeats)
    picked = chosen(ladder(micro_batches), names, extra=(STRONG, BARE))
    baselines = tuple(b for b in (STRONG, BARE) if names is None or b in names)
    folder = writable_folder(out)
    tokens = encode_text(read_text(text), chosen_size.tokens, model.vocabulary)
    check_enough(tokens, chosen_size.batch, model.context)
    command = f"fasttrain ladder --size {name} --batch {chosen_size.batch} --steps {chosen_size.steps}"
    command += f" --attention {attention} --micro-batches {micro_batches} --repeats {repeats}" + (
        " --each" if each else ""
    )
    command += f" --rungs {','.join(names)}" if names else ""
    command += f" --text {Path(text).name}" if text is not None else ""
    return Ladder(name, chosen_size, tokens, picked, baselines, folder, each, device, warmup, repeats, command)


def writable_folder(path: str | Path) -> Path:
    """The folder, made if missing, with a file written to it and removed again.

    Raises:
        ValueError: it cannot be made, or nothing can be written there.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tmp-"):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(
            explain(f"output folder {path}", f"results cannot be written there ({reason})", "Give another with --out")
        ) from error
    return folder
