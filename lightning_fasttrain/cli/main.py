"""The ``fasttrain`` command: a row for each subcommand, which imports heavy packages only when it runs."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from lightning_fasttrain.cli import examine_script, model_commands, tool_commands
from lightning_fasttrain.cli.command import BAD_INPUT, Command, CommandError, model_options, option
from lightning_fasttrain.cli.rehearsal.rehearse import rehearse
from lightning_fasttrain.cli.tool_commands import INTERRUPTED
from lightning_fasttrain.cli.tuning import tune
from lightning_fasttrain.core.messages import quiet_libraries
from lightning_fasttrain.core.package import __version__

_PRECISION = option("--precision", default="32-true", help="32-true (default), bf16-mixed, 16-mixed or bf16-true")
_JSON = option("--json", action="store_true", help="print JSON; sizes are in bytes")
_NODES = option("--nodes", type=int, default=1, metavar="M", help="machines they are in; default: 1")


def _techniques(default: str) -> tuple[tuple[str, ...], dict[str, str]]:
    return option("--techniques", default="", metavar="A,B=8", help=f"or A,B(8,check=False); {default}")


COMMANDS = (
    Command(
        "ladder",
        "measure on this machine what each technique gains",
        [
            option("--size", default="mini", help="nano, tiny, mini (default), gpt2-small, gpt2-medium or gpt2-xl"),
            option("--text", metavar="PATH", help="file or folder; default: source of Python's standard library"),
            option("--out", metavar="DIR", default="ladder", help="folder for the results; default: ladder"),
            option("--steps", type=int, metavar="N", help="timed steps of a turn; default: the size's own"),
            option(
                "--turns",
                type=int,
                metavar="N",
                default=12,
                help="the most turns in which a rung and the state below it are compared; default: 12",
            ),
            option("--minutes", type=float, metavar="M", help="compare in 3 turns after; default: the size's own"),
            option("--each", action="store_true", help="also run each rung alone"),
            option("--attention", default="sdpa", help="sdpa (default) or naive, in every rung"),
            option("--batch", type=int, metavar="N", help="sequences per step; default: the size's own"),
            option("--micro-batches", type=int, metavar="N", help="parts of a batch; default: the size's own"),
            option("--rungs", metavar="A,B,C", help="only these, a wrong name lists them; default: all"),
        ],
        tool_commands.climb_ladder,
        "Train a reference GPT on real text, with one optimisation after the other; then run the fastest, the leanest "
        "and a balanced state in turn with strong baselines. Print tables and code, write ladder.json and ladder.png.",
    ),
    Command(
        "memory",
        "predict the peak memory of a training step, without the memory",
        [
            *model_options("sequences of that GPT's batch; default: the size's own"),
            _techniques("default: none"),
            _PRECISION,
            option("--device", default="cuda", help="cuda (default) or cpu; none is touched"),
            _JSON,
        ],
        model_commands.predict_peak,
        "Predict the peak memory of one training step, by category, on a machine that need not fit it. TARGET is "
        "imported and called, which runs its code.",
    ),
    Command(
        "estimate",
        "FLOPs, hours, energy, loss and memory of a training, before it runs",
        [
            *model_options("sequences of that GPT's batch; default: the size's own, or 4 to measure"),
            option("--tokens", metavar="N", help="of the training, as 10B or 1.4T"),
            option("--samples", metavar="N", help="of the training, if batches hold no token ids"),
            option("--gpu", metavar="NAME:N", help="as H100:8, a wrong name lists them; default: measure here"),
            option("--mfu", type=float, metavar="SHARE", help="of that GPU's peak; default: of the predicted step"),
            option(
                "--precision", help="32-true, bf16-mixed or bf16-true; default: bf16-mixed with --gpu, else 32-true"
            ),
            option("--critical-batch", metavar="N", help="as GradientNoiseScale measured it, in tokens or samples"),
            _techniques("of the run; default: none"),
            option("--out", metavar="FILE", help="also write JSON to this file"),
            _JSON,
        ],
        model_commands.estimate_run,
        "Count the FLOPs of a step, and estimate the training: time and energy, predicted on a named GPU or measured "
        "on this machine; the loss that scaling laws expect, and the best use of the same budget; the critical batch "
        "size; memory. Each value states how it is known. TARGET is imported and called, which runs its code.",
    ),
    Command(
        "tune",
        "what to add to a script of yours, what it gains there, and that it is the same training",
        [
            option(
                "--memory", default="fit", metavar="GIB", help="limit for a step's peak memory; default: what is free"
            ),
            option("--keep", choices=tune.KEEPS, default="tolerance", help="exact, tolerance (default) or anything"),
            option("--minutes", type=float, default=2.0, metavar="M", help="for measurements, at most; default: 2"),
            option("--apply", action="store_true", help="write SCRIPT_tuned.py, a copy with the advice applied"),
            option("--out", metavar="FILE", help="also a page with a picture of time against memory: an .html file"),
            _JSON,
            option("script", metavar="SCRIPT", help="a Python file that trains with a Trainer, Fabric or a loop"),
            option("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script"),
        ],
        tune.tune_script,
        "Run a script, unchanged, up to the first step of its first fit. There its model, batches, precision and "
        "clipping are measured on copies: the step as it is, and with each technique that may help. Printed are what "
        "its time goes to, the fastest mix, its time in turn with the script as it is, and whether it is the same "
        "training on its batches. Nothing is trained further, and no checkpoint or log is written.",
    ),
    Command(
        "verify",
        "run a step without and with techniques: is it the same training, on this model?",
        [
            *model_options("sequences of that GPT's batch; default: 4"),
            option("--script", metavar="FILE", help="a Python script that trains with Lightning, instead of TARGET"),
            option("--script-args", default="", metavar="ARGS", help="of the script, in one quoted word"),
            _techniques("default: those of the model"),
            option("--precision", default="32-true", help="as for the Trainer; default: 32-true"),
            option("--steps", type=int, default=2, metavar="N", help="optimizer steps; default: 2"),
            option("--operators", action="store_true", help="if it is another training, name the first operator"),
            option("--accelerator", default="auto", help="as for the Trainer: auto (default), cpu or gpu"),
            _JSON,
        ],
        model_commands.verify_training,
        "Run the same steps without and with techniques on copies of a model, and compare loss, gradients, updates and "
        "evaluation with what rounding alone does. The exit code is 0 if every technique keeps what it promises, 1 if "
        "not. TARGET is imported and called, which runs its code. A script is run, unchanged, up to the first step of "
        "its first fit, whose techniques, batches and precision are verified.",
    ),
    Command(
        "rehearse",
        "run a script up to its first step, and try out what its later hours will do",
        [
            option("--seconds", type=float, default=60.0, metavar="S", help="about how long; default: 60"),
            option(
                "--kill",
                type=int,
                default=0,
                metavar="N",
                help="kill it N times; write {folder} where it takes its folder",
            ),
            option("--steps", type=int, default=20, metavar="N", help="with --kill: of a run; default: 20"),
            option("--seed", type=int, default=0, metavar="N", help="with --kill: for its moments; default: 0"),
            option("--json", action="store_true", help="print JSON; what the script prints goes to stderr"),
            option("script", metavar="SCRIPT", help="a Python file that trains with Lightning"),
            # All that comes after the script is its own, even if it looks like an option of ours.
            option("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script"),
        ],
        rehearse,
        "Run a Python script, unchanged, with ft.proof.Rehearsal() in each of its Trainers. The script ends before "
        "the first step of its first fit. With --kill it trains instead, once whole and once killed and started again, "
        "and both must end identically, bit for bit. The exit code is 0 if all went well, 1 if the run would fail, 2 "
        "if there is nothing to rehearse.",
    ),
    Command(
        "plan",
        "choose the fastest mix of techniques that fits: measured here, or predicted for any cluster",
        [
            *model_options("sequences of that GPT's batch; default: 4"),
            option("--gpu", metavar="NAME", help="predict for devices such as H100; a wrong name lists them"),
            option("--machine", metavar="FILE", help="instead of --gpu: a profile, from fasttrain machine --out"),
            option("--network", type=float, metavar="GBIT", help="with --gpu: Gbit/s of each device to other nodes"),
            option("--batch-tokens", metavar="N", help="with --gpu: of a step, as 4M, which is 4 × 2^20"),
            option("--tokens", metavar="N", help="with --gpu: of the training, as 1T, for its hours"),
            option("--top", type=int, default=5, metavar="N", help="with --gpu: layouts to print; default: 5"),
            _techniques("with --gpu, in every layout; default: none"),
            option("--memory", metavar="GIB", default="fit", help="limit in GiB; default: what is free here"),
            option("--devices", type=int, default=1, metavar="N", help="that train together; default: 1"),
            _NODES,
            option("--keep", default="tolerance", help="exact, tolerance (default) or changes_training"),
            option("--precision", help="of your training, which then stays; default: it may be chosen"),
            option("--device", help="cuda or cpu; one that is not here is planned for by prediction alone"),
            option("--steps", type=int, default=1000, metavar="N", help="of the coming run; default: 1000"),
            option("--seconds", type=float, default=120, metavar="S", help="for measuring, about; default: 120"),
            option("--out", metavar="DIR", help="folder for plan.json, plan.yaml, plan.png; with --gpu: a FILE.png"),
            _JSON,
        ],
        model_commands.plan_training,
        "Measure a model, predict what each mix of techniques takes, and choose the fastest that fits, for the same "
        "global batch. With --gpu nothing is measured or allocated: strategy, micro-batches, recomputation and head "
        "are chosen by predicted time, and --out draws tokens per second against devices. Prints a table, reasons and "
        "code. TARGET is imported and called, which runs its code.",
    ),
    Command(
        "why-not",
        "every technique that is not in use: why not, and what it would bring",
        [
            *model_options("sequences of that GPT's batch; default: the size's own"),
            _techniques("those in use"),
            _PRECISION,
            option("--all", action="store_true", help="print all, not the first ten"),
            _JSON,
        ],
        model_commands.list_unused,
        "Say of every technique that is not in use why it cannot, or need not, act on a model on this machine, and "
        "predict what it would bring in memory. TARGET is imported and called, which runs its code.",
    ),
    Command(
        "schedule",
        "draw a learning rate over a run",
        [
            option(
                "shape",
                nargs="?",
                default="cosine",
                metavar="SHAPE",
                help="cosine (default), linear, constant, inverse-sqrt, exponential, step, one-cycle or wsd",
            ),
            option("--total", required=True, metavar="LENGTH", help="of the run"),
            option("--warmup", default="0", metavar="LENGTH", help="default: 0"),
            option("--lr", type=float, default=1.0, metavar="RATE", help="the highest rate; default: 1"),
            option("--final", type=float, default=0.0, metavar="SHARE", help="of the rate, at the end; default: 0"),
            option("--at", default="", metavar="A,B", help="of step: when it falls"),
            option("--by", type=float, default=0.1, metavar="FACTOR", help="of step: to what; default: 0.1"),
            # In help, argparse takes a single % for the beginning of a format.
            option("--decay", default="20%", metavar="LENGTH", help="of wsd: the fall at the end; default: 20%%"),
            option("--epoch-steps", type=int, metavar="N", help="optimizer steps of an epoch, for lengths in ep"),
            option("--out", metavar="FILE", help="also a picture: an .svg or .png file"),
        ],
        tool_commands.draw_schedule,
        "Draw a schedule of build_schedule, with its numbers. Lengths are steps, or as 2ep, 50_000samples, 1e9tok, 5% "
        "of the whole.",
    ),
    Command(
        "shard",
        "compare DDP, FSDP2 and ZeRO for a model on any number of devices, without them",
        [
            *model_options("with --size or --hf: sequences on each device; default: 1"),
            option("--gpu", metavar="NAME:N", help="as H100:8, on all nodes together; a wrong name lists them"),
            option("--devices", type=int, metavar="N", help="their number, if not given with --gpu"),
            _NODES,
            option("--memory", type=float, metavar="GIB", help="GiB of each device; default: of the --gpu"),
            option("--host", type=float, metavar="GIB", help="GiB of each node for offload; default: enough"),
            _PRECISION,
            _techniques("of the run; default: none"),
            option(
                "--optimizer",
                metavar="NAME",
                help="known to ft.build_optimizer: adamw, muon, adamw8bit; default: TARGET's own",
            ),
            _JSON,
        ],
        model_commands.compare_strategies,
        "Predict what a model takes on each device under DDP, FSDP2 and the stages of ZeRO, what each sends in a step, "
        "and choose. No GPU is needed, and the model is not allocated. TARGET is imported and called, which runs its "
        "code.",
    ),
    Command(
        "consolidate",
        "write the whole weights of a sharded checkpoint to one file",
        [
            option("folder", metavar="DIR", help="the checkpoint, a folder"),
            option("--out", metavar="FILE", help="file to write; default: DIR.safetensors, beside it"),
        ],
        tool_commands.write_consolidated,
        "Write the float32 weights of a checkpoint of ZeRO or FSDP2 to one safetensors file, with the keys of the "
        "plain model.",
    ),
    Command(
        "doctor",
        "what this machine lacks, and what a script wastes, with lines and cures",
        [
            option("--steps", type=int, default=20, metavar="N", help="optimizer steps to watch; default: 20"),
            option("--warmup", type=int, default=3, metavar="N", help="steps before them; default: 3"),
            option("--out", metavar="DIR", default="doctor", help="folder for doctor.html and doctor.json"),
            option("--machine", metavar="GPU|FILE", help="compare the step with: by default the GPU by its data sheet"),
            option("--json", action="store_true", help="print JSON; what the script prints goes to stderr"),
            option("script", nargs="?", metavar="SCRIPT", help="a Python file that trains; default: the machine alone"),
            option("arguments", nargs=argparse.REMAINDER, metavar="...", help="of the script"),
        ],
        examine_script.run_doctor,
        "Say what this machine offers and how to get what is missing. With a script, also run its training, unchanged, "
        "for a few steps: with Lightning, Fabric or a loop of its own. Each finding has its measured cost, the line of "
        "the script, and a cure. The script ends after these steps.",
    ),
    Command(
        "machine",
        "measure what this machine reaches, for predictions of step times",
        [
            option("--out", metavar="FILE", help="JSON file for machine= of ft.predict_time"),
            option("--device", help="cpu or cuda; default: a GPU where there is one"),
            _JSON,
        ],
        tool_commands.measure_here,
        "Measure products, attention, element-wise kernels and the host, in about 25 seconds; under torchrun also the "
        "links between the ranks. Run it on an idle machine.",
    ),
    Command(
        "techniques",
        "the table of techniques, those for a goal, or all about one of them",
        [
            option("words", nargs="*", metavar="WORD", help="a name in any spelling, or words such as: out of memory"),
            option("--for", dest="goal", metavar="GOAL", help='the same, in quotes: --for "gradient accumulation"'),
            option("--here", action="store_true", help="of one: state also if it has no effect on this machine"),
        ],
        tool_commands.describe_techniques,
    ),
)


# Commands of the release before, and what to use instead; kept for one release.
REMOVED_COMMANDS = {"cluster-check": "Use nccl-tests and PyTorch's flight recorder; docs/cluster.md shows how"}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}. See {self.prog} --help.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        The exit code: 0, 1 if the job failed, 2 for bad input.
    """
    parser = _Parser(prog="fasttrain", description="Train Lightning models faster and in less memory, with proof.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for command in COMMANDS:
        subparser = parsers.add_parser(command.name, help=command.help, description=command.description)
        for names, settings in command.options:
            subparser.add_argument(*names, **settings)
        subparser.set_defaults(run=command.run)
    given = sys.argv[1:] if arguments is None else arguments
    for name in REMOVED_COMMANDS.keys() & set(given[:1]):
        parser.error(f"{name} was removed. {REMOVED_COMMANDS[name]}")
    options = parser.parse_args(given)
    try:
        with quiet_libraries("transformers"):
            return options.run(options) or 0
    except CommandError as error:
        # Errors of torch have many lines, and a refusal is one.
        print(f"fasttrain {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("fasttrain: interrupted", file=sys.stderr)
        return INTERRUPTED
