"""What ``prove.py`` runs, as data: one row a piece, in the order of their worth."""

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
        estimate_s: begun only if so many seconds are left. Measured on an H200 for what is in examples/results/h200,
            else guessed.
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
LLAMA_SIDES = ("lightning", "ours-fast", "hf-liger", "loop-layers", "ours-lean", "ours-lean-graphs")
GPT2_RIVALS = ("loop", "loop-layers", "loop-without-masks", "ours-fast")
QLORA = ("transformers", "peft", "bitsandbytes")
QLORA_SIDES = ("ours + FusedLossHead", "peft + Liger + bf16 head", "peft + transformers", "ours")


def beside(model: str, side: str, number: int, estimate_s: float = 40, limit_s: float = 120) -> Piece:
    """One side of the comparison on a GPT-2, in its round."""
    command = f"examples/against.py --model {model} --side {side} {{tokens}} {OUT}"
    steps = "--steps 20" if model == "gpt2" else "--steps 6"
    needs = ("transformers", "liger_kernel") if side == "hf-liger" else ("transformers",)
    return Piece(f"{model} {side} {number}", estimate_s, limit_s, command, steps, LITTLE, needs=needs)


def qlora(side: str) -> Piece:
    command = f'examples/gpu/qlora_8b.py --side "{side}" {OUT}'
    needs = (*QLORA, "liger_kernel") if "Liger" in side else QLORA
    return Piece(f"qlora {side}", 70, 150, command, tiny=LITTLE_8B, needs=needs)


def experts(side: str) -> Piece:
    command = f'examples/gpu/experts_in_4_bits.py --side "{side}" {OUT}'
    tiny = "--layers 2 --width 128 --experts 4 --vocabulary 256 --length 32 --steps 1"
    return Piece(f"experts {side}", 45, 120, command, tiny=tiny, needs=QLORA)


# The naive loop, ours and the limits of the card come first, so that a run that is cut off has the figures that count.
PIECES = (
    beside("gpt2", "naive", 1),
    beside("gpt2", "lightning", 1),
    beside("gpt2", "ours-fast", 1),
    beside("gpt2", "ours-lean", 1),
    beside("gpt2", "ours-lean-graphs", 1),
    Piece("ceilings", 10, 90, f"examples/gpu/ceilings.py {OUT}", tiny="--sizes 64,256 --mib 8"),
    beside("gpt2", "loop", 1),
    beside("gpt2", "loop-layers", 1),
    beside("gpt2", "loop-without-masks", 1),
    beside("gpt2", "hf-compile", 1),
    beside("gpt2", "hf-all", 1),
    Piece(
        "parity top",
        60,
        200,
        f"examples/gpu/parity.py top --ladder {{out}}/ladder.json {{tokens}} {OUT}",
        full="--batch 4",
        tiny="--size nano --batch 2 --steps 10",
    ),
    Piece(
        "parity naive",
        120,
        300,
        f"examples/gpu/parity.py naive {{tokens}} {OUT}",
        full="--batch 4",
        tiny="--size nano --batch 2 --steps 10",
    ),
    beside("gpt2-medium", "ours-fast", 1, 60, 150),
    beside("gpt2-xl", "ours-lean", 1, 90, 200),
    *(beside("llama-1b", side, 1, 60, 150) for side in LLAMA_SIDES),
    *(qlora(side) for side in QLORA_SIDES[:3]),
    Piece(
        "prediction",
        50,
        150,
        f"examples/memory_prediction.py {OUT}",
        "--cuda --models GPT-2,Llama,ViT",
        '--models "GPT nano"',
        needs=("transformers",),
    ),
    beside("gpt2", "lightning", 2),
    beside("gpt2", "ours-between", 1),
    beside("gpt2", "ours-lean-in-one", 1),
    *(beside("gpt2", side, 2) for side in GPT2_RIVALS),
    beside("gpt2", "ours-lean", 2),
    beside("gpt2", "ours-lean-graphs", 2),
    Piece(
        "chunked loss",
        40,
        120,
        f"examples/chunked_loss.py {OUT}",
        full="--vocabularies 131072",
        tiny="--vocabularies 300 --tokens 64 --width 32 --rounds 1",
    ),
    Piece(
        "ladder",
        430,
        500,
        "-m lightning_fasttrain.cli ladder --out {out}",
        full="--size gpt2-small --minutes 5",
        tiny="--size nano --batch 4 --micro-batches 2 --steps 1 --rungs release,micro-batches",
        needs=("tokenizers",),
        result="{out}/ladder.json",
    ),
    Piece(
        "padded texts",
        60,
        150,
        "-m lightning_fasttrain.cli ladder --out {folder}",
        full="--size gpt2-small --minutes 1 --rungs padded",
        tiny="--size nano --batch 4 --micro-batches 2 --steps 1 --rungs padded",
        needs=("tokenizers",),
        result="{folder}/ladder.json",
    ),
    Piece(
        "low precision",
        260,
        330,
        f"examples/gpu/low_precision.py {OUT}",
        full="--size gpt2-xl",
        tiny='--size nano --batch 2 --steps 1 --least 32 --ways "bf16,float8,int8"',
    ),
    Piece(
        "low precision 4096",
        80,
        200,
        f"examples/gpu/low_precision.py {OUT}",
        full="--width 4096 --heads 32 --layers 8",
        tiny='--size nano --batch 2 --steps 1 --least 32 --ways "bf16,float8,int8"',
    ),
    Piece(
        "budget gpt2-xl",
        60,
        150,
        f"examples/gpu/memory_budget.py {OUT}",
        full="--sizes gpt2-xl",
        tiny="--sizes tiny --batch 2",
        needs=("cuda",),
    ),
    Piece(
        "offload",
        95,
        180,
        f"examples/gpu/offload_overlap.py {OUT}",
        full="gpt2-small gpt2-xl --batch 8",
        tiny="nano --batch 2 --steps 2",
        needs=("cuda",),
    ),
    qlora(QLORA_SIDES[3]),
    experts("bf16"),
    experts("4 bits"),
    Piece(
        "budget gpt2-small",
        45,
        120,
        f"examples/gpu/memory_budget.py {OUT}",
        full="--sizes gpt2-small",
        tiny="--sizes nano --batch 2",
        needs=("cuda",),
    ),
    Piece(
        "cold start",
        150,
        260,
        f"examples/compile_cold_start.py {OUT}",
        full="--size gpt2-small --batch 8 --blocks 12",
        tiny="--blocks 1",
    ),
    Piece(
        "zero offload",
        135,
        280,
        f"examples/gpu/zero_offload.py {OUT}",
        full="--stages 2,2+offload",
        tiny="--size nano --batch 1 --steps 1 --stages 0,2+offload",
        needs=("deepspeed",),
    ),
    Piece(
        "step profile",
        60,
        150,
        f"examples/gpu/step_profile.py {{tokens}} {OUT}",
        tiny="--layers 2 --width 64 --heads 2 --vocabulary 512 --batch 4 --length 32",
        needs=("cuda", "transformers"),
    ),
    Piece("doctor", 15, 60, "-m lightning_fasttrain.cli doctor", read=read_text),
    Piece(
        "tests",
        200,
        460,
        # Files that import a package which is missing here are errors of their own.
        "-m pytest -m gpu -v --tb=short -p no:cacheprovider --continue-on-collection-errors",
        tiny="tests/profiling/test_memory_meter.py",
        needs=("pytest",),
        read=read_tests,
    ),
)

# What answers one question together, within the twelve minutes of one lease, in the order of its worth.
GROUPS = {
    "fairness": (
        *(f"gpt2 {side} 1" for side in GPT2_RIVALS),
        *(f"llama-1b {side} 1" for side in ("ours-fast", "loop-layers", "hf-liger", "lightning")),
        "ceilings",
        "step profile",
        *(f"gpt2 {side} 2" for side in GPT2_RIVALS),
    ),
    "correctness": ("tests", "parity top", "parity naive", "padded texts", "prediction", "doctor"),
    "fine-tuning": (
        *(f"qlora {side}" for side in QLORA_SIDES),
        "experts bf16",
        "experts 4 bits",
        "low precision 4096",
        "gpt2-xl ours-lean 1",
        "budget gpt2-small",
    ),
    "stacks": ("gpt2 ours-between 1", "ladder", "chunked loss", "ceilings"),
}
