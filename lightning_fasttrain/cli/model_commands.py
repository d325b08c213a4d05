"""Subcommands about one model: its memory, its plan, its strategy, unused techniques, and verification."""

import argparse
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fasttrain.cli.command import (
    USUAL_BATCH,
    CommandError,
    load_model,
    load_model_without_memory,
    note,
    refusing,
    show_report,
    working,
)
from lightning_fasttrain.cli.rehearsal.rehearse import ask_script
from lightning_fasttrain.cli.rehearsal.run_script import VERIFY

if TYPE_CHECKING:
    from lightning_fasttrain.planner import Plan

_PICTURES = (".png", ".svg", ".pdf")


def predict_peak(options: argparse.Namespace) -> None:
    """Run ``fasttrain memory``: the peak memory of a training step, without the memory."""
    from lightning_fasttrain.cli.subject import techniques_named
    from lightning_fasttrain.memory import predict_memory

    with working("Predicting…"):
        report = predict_memory(
            *load_model_without_memory(options),
            techniques=techniques_named(options.techniques),
            precision=options.precision,
            device=options.device,
        )
    show_report(report, options.json)


def estimate_run(options: argparse.Namespace) -> None:
    """Run ``fasttrain estimate``: FLOPs, time, energy, loss, batch size and memory of a training."""
    from lightning_fasttrain.cli.subject import techniques_named
    from lightning_fasttrain.core.atomic_write import write_atomic
    from lightning_fasttrain.core.batch import count_batch
    from lightning_fasttrain.estimate import estimate_training
    from lightning_fasttrain.estimate.estimate_training import read_count

    if (options.tokens is None) == (options.samples is None):
        raise CommandError("give either --tokens or --samples, the length of the training, as --tokens 10B.")
    name, other, holds = "--tokens", "--samples", "no token ids"
    if options.tokens is None:
        name, other, holds = "--samples", "--tokens", "token ids"
    # Only to measure, the model must exist.
    load = load_model if options.gpu is None else load_model_without_memory
    with working("Measuring a few steps…" if options.gpu is None else "Counting…"):
        length = read_count(name, options.tokens or options.samples)
        critical = options.critical_batch and read_count("--critical-batch", options.critical_batch)
        module, batch = load(options)
        if (count_batch(batch)[1] > 0) != (options.tokens is not None):
            raise CommandError(f"{name}: the batch holds {holds}. Use {other}.")
        estimate = estimate_training(
            module,
            batch,
            length,
            gpu=options.gpu,
            mfu=options.mfu,
            precision=options.precision,
            critical_batch=critical,
            techniques=techniques_named(options.techniques),
        )
    show_report(estimate, options.json)
    if options.out:
        note(f"Written: {write_atomic(Path(options.out), json.dumps(estimate.as_dict(), indent=2))}")


def list_unused(options: argparse.Namespace) -> None:
    """Run ``fasttrain why-not``: every technique that is not in use, and why."""
    from lightning_fasttrain.cli.subject import techniques_named
    from lightning_fasttrain.planner import why_not

    with working("Asking each technique…"):
        module, batch = load_model_without_memory(options)
        techniques = techniques_named(options.techniques) or None
        report = why_not(module, batch, techniques, precision=options.precision)
    show_report(replace(report, most=None) if options.all else report, options.json)


def compare_strategies(options: argparse.Namespace) -> None:
    """Run ``fasttrain shard``: DDP, FSDP2 and ZeRO for a model on any number of devices, without them."""
    if options.gpu is None and (options.devices is None or options.memory is None):
        raise CommandError("give --gpu, as H100:8, or --devices and --memory.")
    from lightning_fasttrain.cli.subject import techniques_named
    from lightning_fasttrain.step_time.accelerators import read_devices
    from lightning_fasttrain.strategy.choose_strategy import choose_strategy, optimizer_named

    if options.target is not None and options.batch is not None:
        raise CommandError("--batch goes with --size and --hf; TARGET brings its own batch.")
    if options.size is not None and options.batch is None:
        options.batch = 1
    with working("Predicting…") as status:
        devices, memory = options.devices, options.memory
        if options.gpu is not None:
            accelerator, count = read_devices(options.gpu)
            devices = count if devices is None else devices
            memory = accelerator.memory_gib if memory is None else memory
        optimizer = optimizer_named(options.optimizer) if options.optimizer else None
        module, batch = load_model_without_memory(options)
        choice = choose_strategy(
            module,
            batch,
            devices,
            memory_gib=memory,
            optimizer=optimizer,
            techniques=techniques_named(options.techniques),
            nodes=options.nodes,
            precision=options.precision,
            host_gib=options.host,
            tell=lambda text: status.update(f"Predicting: {text}…"),
        )
    show_report(choice, options.json)


def plan_training(options: argparse.Namespace) -> None:
    """Run ``fasttrain plan``: the fastest way to train a model within a limit of memory."""
    if options.gpu is not None or options.machine is not None:
        _plan_cluster(options)
        return
    for name in ("network", "batch_tokens", "tokens", "techniques"):
        if getattr(options, name):
            raise CommandError(f"--{name.replace('_', '-')} goes with --gpu. Give --gpu H100, or leave it out.")
    from lightning_fasttrain.planner import make_plan
    from lightning_fasttrain.planner.make_plan import device_here

    with working("looking at the model") as status:
        # What is planned for another machine may be larger than this one.
        if options.device in (None, device_here()):
            module, batch = load_model(options)
        else:
            module, batch = load_model_without_memory(options, USUAL_BATCH)
        plan = make_plan(
            module,
            batch,
            _number_or_word(options.memory),
            options.devices,
            nodes=options.nodes,
            keep=options.keep,
            precision=options.precision,
            device=options.device,
            steps=options.steps,
            seconds=options.seconds,
            tell=status.update,
        )
    show_report(plan, options.json)
    if not options.json:
        print(f"\n{plan.code()}")
    if options.out:
        _write(plan, Path(options.out))


def _plan_cluster(options: argparse.Namespace) -> None:
    """Plan for devices that need not be at hand, by predicted time."""
    from lightning_fasttrain.cli.subject import techniques_named
    from lightning_fasttrain.estimate.estimate_training import read_count
    from lightning_fasttrain.planner import plan_cluster

    if options.memory != "fit":
        raise CommandError("--memory goes without --gpu, whose memory is known. Leave one of them out.")
    if options.out and Path(options.out).suffix not in _PICTURES:
        raise CommandError(f"--out {options.out}: with --gpu it is a picture. Write --out plan.png, .svg or .pdf.")
    with working("looking at the model") as status:
        given: dict[str, Any] = {
            "batch_tokens": options.batch_tokens and _count_in_powers("--batch-tokens", options.batch_tokens),
            "tokens": options.tokens and read_count("--tokens", options.tokens),
            "machine": options.machine,
        }
        if options.gpu is not None:
            given["gpu"] = options.gpu
        techniques = techniques_named(options.techniques)
        module, batch = load_model_without_memory(options, usual_batch=1)
        plan = plan_cluster(
            module,
            batch,
            devices=options.devices,
            nodes=options.nodes,
            network=options.network,
            precision=options.precision,
            techniques=techniques,
            top=options.top,
            tell=lambda text: status.update(f"Predicting: {text}…"),
            **given,
        )
    show_report(plan, options.json)
    if not options.json:
        print(f"\n{plan.code()}")
    if options.out:
        with refusing(ModuleNotFoundError, OSError):
            note(f"Written: {plan.save_picture(options.out)}")


def _count_in_powers(name: str, text: str) -> int:
    """Parse a number of which k, M and B are powers of 1,024, as global batches are stated."""
    from lightning_fasttrain.estimate.estimate_training import read_count

    count, suffix = read_count(name, text), text.strip()[-1:].lower()
    power = " kmb".find(suffix) if suffix.isalpha() else 0
    return round(count * (1024 / 1000) ** power)


def _number_or_word(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text  # "fit", or what make_plan will refuse


def _write(plan: "Plan", folder: Path) -> None:
    from lightning_fasttrain.core.atomic_write import write_atomic

    folder.mkdir(parents=True, exist_ok=True)
    written = [plan.save(folder / "plan.json"), write_atomic(folder / "plan.yaml", plan.yaml())]
    try:
        written.append(plan.save_picture(folder / "plan.png"))
    except ModuleNotFoundError as error:
        note(error)
    note(f"Written: {', '.join(map(str, written))}")


def verify_training(options: argparse.Namespace) -> int:
    """Run ``fasttrain verify``: whether training is the same with techniques, for a model or a script."""
    if options.script is not None:
        return _verify_script(options)
    from lightning_fasttrain.cli.subject import techniques_named
    from lightning_fasttrain.proof import verify

    with working("Running the same steps without and with techniques…"):
        module, batch = load_model(options)
        verified = verify(
            module,
            batch,
            techniques_named(options.techniques) or None,
            precision=options.precision,
            steps=options.steps,
            operators=options.operators,
            accelerator=options.accelerator,
        )
    show_report(verified, options.json)
    return int(not verified.ok)


def _verify_script(options: argparse.Namespace) -> int:
    if options.target is not None or options.size is not None:
        raise CommandError("give either TARGET, --size or --script, see --help.")
    orders = {VERIFY: json.dumps({"techniques": options.techniques, "steps": options.steps})}
    result, code = ask_script(options.script, shlex.split(options.script_args), orders, quiet=options.json)
    if result is None:
        raise CommandError(f"the script ended with {code} before a first step. Nothing was verified.")
    if "error" in result:
        raise CommandError(result["error"])
    if options.json:
        print(json.dumps(result["report"], indent=2))
    else:
        print(result["table"])
    return int(not result["ok"])
