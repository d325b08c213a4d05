"""Subcommands without a model of the user's: the ladder, techniques, schedules, checkpoints, and this machine."""

import argparse
import os
from pathlib import Path

from lightning_fasttrain.cli.command import CommandError, refusing

INTERRUPTED = 130  # what shells give for a program that SIGINT ended: 128 + 2


def climb_ladder(options: argparse.Namespace) -> int:
    """Run ``fasttrain ladder``: what each technique gains on this machine."""
    from rich.console import Console

    from lightning_fasttrain.bench.ladder import picture, preflight, report, run_ladder
    from lightning_fasttrain.core.messages import output_width, wrap

    width = output_width()
    names = None
    if options.rungs:
        names = [name.strip() for name in options.rungs.split(",")]
    with refusing(ValueError, ModuleNotFoundError):
        prepared = preflight.prepare(
            options.size,
            text=options.text,
            out=options.out,
            steps=options.steps,
            turns=options.turns,
            minutes=options.minutes,
            each=options.each,
            attention=options.attention,
            batch=options.batch,
            micro_batches=options.micro_batches,
            names=names,
        )
    for one in prepared.skipped:
        print(*wrap(f"{one['title']}: left out: {one['reason']}", width), sep="\n")
    with report.Live(Console(width=width, highlight=False), run_ladder.number_of_rows(prepared)) as live:
        result = run_ladder.climb(prepared, live.row, live.progress)
    # The ladder was interrupted before its first rung was done.
    if not result.rungs:
        return INTERRUPTED
    tables = report.as_table(result), report.as_table_of_each(result), report.as_table_of_finals(result)
    for table in filter(None, tables):
        print()
        table.print()
    print(f"\n{report.summary(result, width)}")
    drawn = picture.save_picture(result, prepared.out / "ladder.png")
    written = filter(None, [prepared.out / "ladder.json", drawn])
    print(f"Written: {', '.join(map(str, written))}")
    if drawn is None:
        print("No picture: matplotlib is missing. pip install 'lightning-fasttrain[plots]'")
    if result.interrupted:
        raise CommandError("interrupted; what was measured is kept", INTERRUPTED)
    naive, *others = result.rungs
    # Without naive and at least one rung there is nothing to compare.
    worked = naive.error is None and any(row.error is None for row in others)
    return int(not worked)


def draw_schedule(options: argparse.Namespace) -> None:
    """Run ``fasttrain schedule``: a learning rate over a run, drawn before it is run."""
    from lightning_fasttrain.core.messages import output_width
    from lightning_fasttrain.optim.schedule_shapes import draw_text, read_request, sample_rates, save_picture

    marks = [mark for mark in options.at.split(",") if mark]
    with refusing(ValueError, OSError, ModuleNotFoundError):
        request = read_request(
            options.shape, options.warmup, options.total, options.final, marks, options.by, options.decay
        )
        in_epochs = [length for length in request.lengths if length.unit == "epochs"]
        if in_epochs and options.epoch_steps is None:
            raise CommandError(f"{in_epochs[0]}: give --epoch-steps, the optimizer steps of an epoch.")
        plan = request.plan(steps_of_epochs=lambda epochs: epochs * options.epoch_steps)
        # 12 columns are for the labels at the left.
        columns = min(88, output_width() - 12)
        print(draw_text(sample_rates(plan, options.lr, columns)))
        title = f"{plan.shape}: {plan.total:,.0f} {plan.clock}, warm-up {plan.warmup:,.0f}"
        print(f"{'':9}{title}, rate {options.lr:g} → {sample_rates(plan, options.lr, 2)[-1][1]:.3g}")
        if options.out:
            written = save_picture(sample_rates(plan, options.lr, 1000), title, plan.clock, options.out)
            print(f"Written: {written}")


def write_consolidated(options: argparse.Namespace) -> None:
    """Run ``fasttrain consolidate``: the whole weights of a sharded checkpoint in one file."""
    from lightning_fasttrain.core.messages import format_bytes
    from lightning_fasttrain.strategy.consolidate import consolidate

    folder = Path(options.folder)
    # Resolved, since "." has no name that could get a suffix.
    out = Path(options.out) if options.out else Path(f"{str(folder.resolve()).removesuffix('.ckpt')}.safetensors")
    with refusing(OSError, ValueError, ModuleNotFoundError):
        written = consolidate(folder, out)
    size = format_bytes(written.nbytes)
    print(
        f"Written: {written.path}, {written.tensors} tensors, {written.numel:,} numbers, {size}, from {written.source}"
    )


def measure_here(options: argparse.Namespace) -> None:
    """Run ``fasttrain machine``: what this machine reaches, as data for predictions."""
    from lightning_fasttrain.cli.command import note, show_report, working
    from lightning_fasttrain.step_time.measure_machine import measure_machine

    with working("Measuring…"):
        machine = measure_machine(options.device)
    if int(os.environ.get("RANK", 0)):
        return
    show_report(machine, options.json)
    if options.out:
        with refusing(OSError):
            note(f"Written: {machine.save(options.out)}")


def describe_techniques(options: argparse.Namespace) -> None:
    """Run ``fasttrain techniques``: the table of all techniques or of those that words find, or the card of one."""
    from lightning_fasttrain.cli import technique_cards

    words = " ".join([*options.words, *([options.goal] if options.goal else [])])
    with refusing(ValueError):
        cards = technique_cards.find_cards(words) if words else technique_cards.read_cards()
    if len(cards) > 1:
        technique_cards.as_table(cards).print()
    else:
        print(technique_cards.as_text(cards[0], _find_idle(cards[0].name) if options.here else None))


def _find_idle(name: str) -> str | None:
    """Return why a technique has no effect on this machine; None if it may have one."""
    from lightning_fasttrain.planner.candidates import class_named
    from lightning_fasttrain.technique import Technique
    from lightning_fasttrain.technique.declarations import facts_of_machine

    technique = class_named(name)
    assert issubclass(technique, Technique)
    return technique.why_not(facts_of_machine())
