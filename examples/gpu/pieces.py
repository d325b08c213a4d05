"""What ``prove.py`` runs, as data: one row a piece, in order."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def read_json(stdout: str, result: Path) -> Any:
    """What the piece wrote; rows that were written before it was stopped are there too."""
    return json.loads(result.read_text()) if result.exists() else None


def read_text(stdout: str, result: Path) -> Any:
    return {"text": stdout.splitlines()}


def read_tests(stdout: str, result: Path) -> Any:
    """How many tests passed, failed and were skipped, and which failed; also of a run that was stopped."""
    found = re.findall(r"^(\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR)\b", stdout, flags=re.MULTILINE)
    names = {word: [name for name, outcome in found if outcome == word] for word in ("FAILED", "ERROR")}
    counts = {word.lower(): sum(outcome == word for _, outcome in found) for word in ("PASSED", "FAILED", "SKIPPED")}
    return {**counts, "errors": len(names["ERROR"]), "names": names["FAILED"] + names["ERROR"]}


@dataclass(frozen=True)
class Piece:
    """One thing to find out, by one command.

    Args:
        name: for ``--only`` and the lines.
        part: which part of the proof it belongs to.
        estimate_s: begun only if so many seconds are left. Guessed before any GPU was at hand.
        limit_s: stopped after so many.
        command: arguments of Python. ``{folder}`` is a folder of the piece's own, ``{out}`` that of the results,
            ``{tokens}`` stands for ``--tokens FILE``, or for nothing.
        full: more of them, for the real size.
        tiny: others in their place, to try the script.
        needs: modules that must be there, or ``"cuda"``.
        result: the file that the command writes.
        read: makes the result from what was printed and that file.
    """

    name: str
    part: int
    estimate_s: float
    limit_s: float
    command: str
    full: str = ""
    tiny: str = ""
    needs: tuple[str, ...] = ()
    result: str = "{folder}/result.json"
    read: Callable[[str, Path], Any] = read_json


OUT = "--out {folder}/result.json"
LITTLE = "--layers 2 --width 64 --heads 2 --vocabulary 512 --batch 4 --length 32 --steps 1 --precision 32-true"
LITTLE_8B = "--layers 2 --width 128 --vocabulary 512 --length 64"
QLORA = ("transformers", "peft", "bitsandbytes")


def beside(side: str, number: int) -> Piece:
    """One side of the comparison at GPT-2 124M, in its round."""
    command = f"examples/against.py --model gpt2 --side {side} {{tokens}} {OUT}"
    return Piece(f"gpt2 {side} {number}", 1, 50, 120, command, "--steps 20", LITTLE, needs=("transformers",))


SIDES = ("loop", "hf-compile", "ours-blocks", "ours-fast")

PIECES = (
    Piece("doctor", 1, 15, 60, "-m lightning_fasttrain.cli doctor", read=read_text),
    Piece("ceilings", 1, 20, 90, f"examples/gpu/ceilings.py {OUT}", tiny="--sizes 64,256 --mib 8"),
    Piece(
        "tests",
        1,
        90,
        200,
        "-m pytest -m gpu -v --tb=short -p no:cacheprovider",
        tiny="tests/run/test_memory_meter.py",
        needs=("pytest",),
        read=read_tests,
    ),
    Piece(
        "prediction",
        1,
        60,
        150,
        f"examples/memory_prediction.py {OUT}",
        tiny='--models "GPT nano"',
        needs=("transformers",),
    ),
    *(beside(side, number) for number in (1, 2) for side in SIDES),
    Piece(
        "ladder",
        2,
        300,
        460,
        "-m lightning_fasttrain.cli ladder --out {out}",
        full="--size gpt2-small",
        tiny="--size nano --batch 4 --micro-batches 2 --steps 1 --rungs release,micro-batches",
        needs=("tokenizers",),
        result="{out}/ladder.json",
    ),
    Piece(
        "parity naive",
        2,
        170,
        300,
        f"examples/gpu/parity.py naive {{tokens}} {OUT}",
        tiny="--size nano --batch 2 --steps 10",
    ),
    Piece(
        "parity top",
        2,
        70,
        200,
        f"examples/gpu/parity.py top --ladder {{out}}/ladder.json {{tokens}} {OUT}",
        tiny="--size nano --batch 2 --steps 10",
    ),
    Piece(
        "cold start",
        3,
        150,
        260,
        f"examples/compile_cold_start.py {OUT}",
        full="--size gpt2-small --batch 8 --blocks 12",
        tiny="--blocks 1",
    ),
    Piece(
        "budget gpt2-small",
        3,
        45,
        120,
        f"examples/gpu/memory_budget.py {OUT}",
        full="--sizes gpt2-small",
        tiny="--sizes nano --batch 2",
        needs=("cuda",),
    ),
    Piece(
        "budget gpt2-xl",
        3,
        120,
        240,
        f"examples/gpu/memory_budget.py {OUT}",
        full="--sizes gpt2-xl",
        tiny="--sizes tiny --batch 2",
        needs=("cuda",),
    ),
    Piece(
        "offload",
        3,
        60,
        180,
        f"examples/gpu/offload_overlap.py {OUT}",
        full="gpt2-small gpt2-xl",
        tiny="nano --batch 2 --steps 2",
        needs=("cuda",),
    ),
    Piece(
        "chunked loss",
        3,
        40,
        120,
        f"examples/chunked_loss.py {OUT}",
        full="--vocabularies 131072",
        tiny="--vocabularies 300 --tokens 64 --width 32 --rounds 1",
    ),
    *(
        Piece(
            f"qlora {side}",
            3,
            70,
            150,
            f'examples/gpu/qlora_8b.py --side "{side}" {OUT}',
            tiny=LITTLE_8B,
            needs=QLORA,
        )
        for side in ("peft + transformers", "ours", "ours + FusedLossHead")
    ),
    *(
        Piece(
            f"experts {side}",
            3,
            45,
            120,
            f'examples/gpu/experts_in_4_bits.py --side "{side}" {OUT}',
            tiny="--layers 2 --width 128 --experts 4 --vocabulary 256 --length 32 --steps 1",
            needs=QLORA,
        )
        for side in ("bf16", "4 bits")
    ),
    Piece(
        "low precision",
        3,
        120,
        240,
        f"examples/gpu/low_precision.py {OUT}",
        full="--size gpt2-xl",
        tiny='--size nano --batch 2 --steps 1 --least 32 --ways "bf16,float8,int8"',
    ),
    Piece(
        "zero offload",
        3,
        150,
        280,
        f"examples/gpu/zero_offload.py {OUT}",
        full="--stages 2,2+offload",
        tiny="--size nano --batch 1 --steps 1 --stages 0,2+offload",
        needs=("deepspeed",),
    ),
)
