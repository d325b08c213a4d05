"""``fasttrain schedule``: a learning rate over a run, drawn before it is run."""

import argparse

from lightning_fasttrain.cli.target import Commands, refuse


def add(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "schedule",
        help="draw a learning rate over a run",
        description="Draw a schedule of build_schedule, with its numbers. Lengths are steps, or as 2ep, 50_000samples, "
        "1e9tok, 5%% of the whole.",
    )
    parser.add_argument(
        "shape",
        nargs="?",
        default="cosine",
        metavar="SHAPE",
        help="cosine (default), linear, constant, inverse-sqrt, exponential, step, one-cycle or wsd",
    )
    parser.add_argument("--total", required=True, metavar="LENGTH", help="of the run")
    parser.add_argument("--warmup", default="0", metavar="LENGTH", help="default: 0")
    parser.add_argument("--lr", type=float, default=1.0, metavar="RATE", help="the highest rate; default: 1")
    parser.add_argument("--final", type=float, default=0.0, metavar="SHARE", help="of the rate, at the end; default: 0")
    parser.add_argument("--at", default="", metavar="A,B", help="of step: when it falls")
    parser.add_argument("--by", type=float, default=0.1, metavar="FACTOR", help="of step: to what; default: 0.1")
    # In help, argparse takes a single % for the beginning of a format.
    parser.add_argument("--decay", default="20%", metavar="LENGTH", help="of wsd: the fall at the end; default: 20%%")
    parser.add_argument("--epoch-steps", type=int, metavar="N", help="optimizer steps of an epoch, for lengths in ep")
    parser.add_argument("--out", metavar="FILE", help="also a picture: an .svg or .png file")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from lightning_fasttrain.optim.schedule.picture import draw_text, sample_rates, save_picture
    from lightning_fasttrain.optim.schedule.schedule_shapes import read_request

    marks = [mark for mark in options.at.split(",") if mark]
    try:
        request = read_request(
            options.shape, options.warmup, options.total, options.final, marks, options.by, options.decay
        )
        in_epochs = [length for length in request.lengths if length.unit == "epochs"]
        if in_epochs and options.epoch_steps is None:
            return refuse("schedule", f"{in_epochs[0]}: give --epoch-steps, the optimizer steps of an epoch.")
        plan = request.plan(steps_of_epochs=lambda epochs: epochs * options.epoch_steps)
        console = Console(highlight=False)
        # 12 columns are for the labels at the left.
        columns = min(100, console.width - 12) if console.is_terminal else 88
        print(draw_text(sample_rates(plan, options.lr, columns)))
        title = f"{plan.shape}: {plan.total:,.0f} {plan.clock}, warm-up {plan.warmup:,.0f}"
        print(f"{'':9}{title}, rate {options.lr:g} → {sample_rates(plan, options.lr, 2)[-1][1]:.3g}")
        if options.out:
            written = save_picture(sample_rates(plan, options.lr, 1000), title, plan.clock, options.out)
            print(f"Written: {written}")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return refuse("schedule", error)
    return 0
