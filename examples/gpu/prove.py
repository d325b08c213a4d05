"""What only a GPU can settle, in the order of its worth, where one is lent for minutes.

    python examples/gpu/prove.py [--minutes 8.5] [--out DIR]     # the same again goes on with what is left
    python examples/gpu/prove.py --only fairness --minutes 12    # a group of GROUPS in pieces.py, or pieces by name
    python examples/gpu/prove.py --report DIR                    # the README's table, and a picture
    python examples/gpu/prove.py --prepare-tokens FILE.npy       # before, where the extra finetune is at hand

A machine that has torch with CUDA, and this repository, is enough: what this package depends on is installed with pip
if it is missing, unless --no-install is given, and torch stays as it is. Each piece (see pieces.py) runs in a process
of its own and leaves one line of JSON in DIR/lines.jsonl, on disk before the next begins. What has a line is not run
again, unless --again is given. A piece for which the time left is too short, or a package is missing, is skipped and
named; it stays to be run. Without tokens the text is Python's own source, byte by byte. --tiny shrinks every piece, to
try all this on a CPU.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from pieces import GROUPS, PIECES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # this package need not be installed
ENDING_S = 3  # to write the last line within the time
TOKENS = Path(__file__).parent / "tokens" / "gpt2.npy"
ASK = "import json; from lightning_fasttrain.core.device import *; print(json.dumps([hardware(), versions()]))"


def run_pieces(pieces, out, ends, machine, tokens=None, tiny=False, again=False):
    """Run those that have no line yet, until the monotonic clock shows ``ends``; a word about each."""
    hardware, versions = machine
    finished = set() if again else finished_pieces(out, tiny)
    for piece in pieces:
        if piece.name in finished:
            print(f"{piece.name}: there already", flush=True)
            continue
        left = ends - time.monotonic() - ENDING_S
        reason = why_not(piece, left, hardware)
        line = {"piece": piece.name, "status": f"skipped: {reason}", "seconds": 0.0, "result": None}
        if reason is None:
            print(f"{piece.name}: begun, {left:.0f} s left", flush=True)
            line |= run_piece(piece, out, min(left, piece.limit_s), tokens, tiny)
        line |= {"hardware": hardware, "versions": versions, "tiny": tiny}
        append_line(out, line | {"date": datetime.now(UTC).isoformat(timespec="seconds")})
        print(f"{piece.name}: {line['status']}, {line['seconds']:.0f} s", flush=True)


def why_not(piece, left_s, hardware):
    """Why the piece is not begun, or None."""
    if "cuda" in piece.needs and hardware["gpu"] is None:
        return "needs a CUDA device"
    missing = [name for name in piece.needs if name != "cuda" and find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if piece.estimate_s > left_s:
        return f"takes about {piece.estimate_s:.0f} s, and {max(left_s, 0):.0f} s are left"
    return None


def run_piece(piece, out, limit_s, tokens, tiny):
    """The piece in a process group of its own, which ends with it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fasttrain-") as folder:
        places = {"folder": shlex.quote(folder), "out": shlex.quote(str(out.resolve()))}
        places["tokens"] = f"--tokens {shlex.quote(str(tokens.resolve()))}" if tokens is not None else ""
        template = f"{piece.command} {piece.tiny if tiny else piece.full}"
        result = Path(piece.result.format(folder=folder, out=out))
        result.unlink(missing_ok=True)
        status, stdout, stderr = run_group([sys.executable, *shlex.split(template.format(**places))], limit_s, folder)
        found = piece.read(stdout, result)
    shown = template.format(folder="FOLDER", out="DIR", tokens="--tokens FILE" if tokens is not None else "")
    line = {"status": status, "seconds": round(time.monotonic() - started, 1), "result": found}
    line["command"] = " ".join(["python", *shown.split()])
    if status != "done":
        from lightning_fasttrain.bench.ladder.turns import without_paths

        line["last_words"] = [without_paths(text) for text in (stdout + stderr).splitlines()[-30:]]
    return line


def run_group(command, limit_s, folder):
    """Status, stdout and stderr of a command; it and all it started are stopped after ``limit_s``."""
    names = [Path(folder) / name for name in ("stdout", "stderr")]
    with open(names[0], "wb") as stdout, open(names[1], "wb") as stderr:
        environment = make_environment() | {"TMPDIR": folder}
        process = subprocess.Popen(
            command, stdout=stdout, stderr=stderr, cwd=ROOT, env=environment, start_new_session=True
        )
        try:
            process.wait(limit_s)
            status = "done" if process.returncode == 0 else f"failed with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s:.0f} s"
        finally:  # also on Ctrl-C: nothing may be left on the device
            kill_group(process)
    return status, *(name.read_text(errors="replace") for name in names)


def make_environment():
    """The environment of a piece: this repository is importable, and compiled code is kept from piece to piece."""
    compiled = Path(tempfile.gettempdir()) / "fasttrain-compiled"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(compiled), "TRITON_CACHE_DIR": str(compiled / "triton")}
    return caches | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def install_missing(may_install):
    """Install what this package depends on and is not there, beside torch as it is; exits if that cannot be done."""
    missing = find_missing()
    if not missing:
        return
    names = ", ".join(missing)
    if not may_install:
        sys.exit(f"{names}: not installed, and --no-install was given. Install them, or leave --no-install out.")
    print(f"installing {names}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder) / "constraints.txt"
        pinned.write_text(f"torch=={version('torch')}\n")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1", "--constraint", str(pinned)]
        ended = subprocess.run([*command, *missing], env=os.environ | {"PIP_BREAK_SYSTEM_PACKAGES": "1"})
    if ended.returncode:
        sys.exit(f"{names}: pip could not install them. Carry their wheels here, and install these first.")


def find_missing():
    """Requirements of this package that are not installed, in any version."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    missing = []
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)[0]
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(requirement)
    return missing


def kill_group(process):
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ask_about_the_machine():
    """Hardware and versions, from another process: this one must not hold memory of the device."""
    answer = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, cwd=ROOT, env=make_environment()
    )
    if answer.returncode:
        sys.exit(f"this package cannot be imported: {answer.stderr.strip().splitlines()[-1]}")
    return json.loads(answer.stdout.splitlines()[-1])


def finished_pieces(out, tiny):
    """Names of those that ran, however they ended."""
    ran = [line for line in last_lines(out).values() if not line["status"].startswith("skipped")]
    return {line["piece"] for line in ran if line["tiny"] == tiny}


def append_line(out, line):
    path = out / "lines.jsonl"
    cut_short = path.exists() and not path.read_bytes().endswith(b"\n")
    with open(path, "a") as file:
        file.write("\n" * cut_short + json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def last_lines(out):
    """Piece → its last line. A line that was cut short by a crash is none."""
    found = {}
    path = out / "lines.jsonl"
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        found[line["piece"]] = line
    return found


def choose(only):
    """All pieces in the order of their worth, or those of these names and groups in the order of the names."""
    from lightning_fasttrain.core.messages import explain

    pieces = {piece.name: piece for piece in PIECES}
    names = []
    for name in only or pieces:
        if name not in pieces and name not in GROUPS:
            known = ", ".join([*GROUPS, *pieces])
            raise ValueError(explain(f"piece {name!r}", "there is none of this name", f"Use {known}"))
        names += GROUPS.get(name, [name])
    return [pieces[name] for name in dict.fromkeys(names)]


def prepare_tokens(file):
    """The ladder's own text in GPT-2's vocabulary, as a file that the device's machine needs no tokenizer for."""
    import numpy as np

    from lightning_fasttrain.bench.gpt import GPT2_VOCABULARY
    from lightning_fasttrain.bench.text import encode_text, read_text
    from lightning_fasttrain.core.atomic_write import write_atomic

    tokens = encode_text(read_text(), "bpe", GPT2_VOCABULARY).astype(np.uint16)
    write_atomic(file, lambda stream: np.save(stream, tokens))
    print(f"{len(tokens):,} tokens written to {file}")


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.5, help="when to be done; default: 8.5")
    parser.add_argument("--out", type=Path, default=Path("proof"), help="folder for the lines; default: proof")
    parser.add_argument("--only", help=f"these pieces, or groups of them: {', '.join(GROUPS)}; default: all")
    parser.add_argument("--no-install", action="store_true", help="do not install what is missing")
    parser.add_argument("--again", action="store_true", help="also what has a line")
    parser.add_argument("--tiny", action="store_true", help="every piece as small as can be")
    parser.add_argument("--tokens", type=Path, help=f"uint16 .npy; default: {TOKENS.relative_to(ROOT)}, if it is there")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="print what DIR's lines say as Markdown, and draw it"
    )
    parser.add_argument(
        "--prepare-tokens", type=Path, metavar="FILE", help="write such a file of the ladder's own text"
    )
    options = parser.parse_args()
    if options.tokens is not None and not options.tokens.exists():
        parser.error(f"--tokens {options.tokens}: there is no such file. Make it with --prepare-tokens.")
    return parser, options


def main():
    ends = time.monotonic()
    parser, options = parse_options()
    ends += 60 * options.minutes
    install_missing(not options.no_install)
    if options.prepare_tokens is not None:
        prepare_tokens(options.prepare_tokens)
        return
    if options.report is not None:
        from proof_report import write_report

        print(write_report(last_lines(options.report), options.report))
        return
    try:
        pieces = choose([name.strip() for name in options.only.split(",")] if options.only else None)
    except ValueError as error:
        parser.error(str(error))
    tokens = options.tokens or (TOKENS if TOKENS.exists() else None)
    if tokens is None or options.tiny:  # the little models' vocabulary is bytes
        tokens = None
        print("without prepared tokens: the text is Python's own source, byte by byte")
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the piece is ended too
    run_pieces(pieces, options.out, ends, ask_about_the_machine(), tokens, options.tiny, options.again)
    say_what_is_left(pieces, options.out, options.tiny)


def say_what_is_left(pieces, out, tiny):
    """Print what the same command would run next, and how long that takes about."""
    finished = finished_pieces(out, tiny)
    left = [piece for piece in pieces if piece.name not in finished]
    minutes = sum(piece.estimate_s for piece in left) / 60
    print(f"{len(pieces) - len(left)} of {len(pieces)} pieces are there; the others take about {minutes:.0f} minutes")


if __name__ == "__main__":
    main()
