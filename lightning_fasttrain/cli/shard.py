"""``fasttrain shard``: DDP, FSDP2 and ZeRO for a model on any number of devices, without them."""

import argparse

from lightning_fasttrain.cli.target import (
    BAD_INPUT,
    Commands,
    add_target,
    find_report,
    load_target_without_memory,
    refuse,
    show_report,
)


def add(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "shard",
        help="compare DDP, FSDP2 and ZeRO for a model on any number of devices, without them",
        description="Predict what a model takes on each device under DDP, FSDP2 and the stages of ZeRO, what each "
        "sends in a step, and choose. No GPU is needed, and the model is not allocated. TARGET is imported and called, "
        "which runs its code.",
    )
    add_target(parser, "with --size: sequences on each device, to predict activations from")
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="devices, on all nodes together")
    parser.add_argument("--nodes", type=int, default=1, metavar="M", help="machines they are in; default: 1")
    parser.add_argument("--memory", type=float, required=True, metavar="GIB", help="GiB of each device")
    parser.add_argument("--host", type=float, metavar="GIB", help="GiB of each node for offload; default: enough")
    parser.add_argument("--precision", default="32-true", help="32-true (default), bf16-mixed or bf16-true")
    parser.add_argument(
        "--optimizer", metavar="NAME", help="known to ft.build_optimizer: adamw, muon, adamw8bit; default: TARGET's own"
    )
    parser.add_argument("--activations", type=float, metavar="GIB", help="GiB of activations, instead of a prediction")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from lightning_fasttrain.strategy.choose._optimizer_state import optimizer_named
    from lightning_fasttrain.strategy.choose_strategy import StrategyChoice, choose_strategy

    if options.size is None and options.batch is not None:
        return refuse("shard", "--batch goes with --size; TARGET brings its own batch.")

    def find(_: object) -> StrategyChoice:
        optimizer = optimizer_named(options.optimizer) if options.optimizer else None
        module, batch = load_target_without_memory(options)
        # Of a reference GPT activations are counted only if --batch asks for them.
        counted = options.activations is None and (options.size is None or options.batch is not None)
        return choose_strategy(
            module,
            optimizer,
            options.devices,
            memory_gib=options.memory,
            batch=batch if counted else None,
            nodes=options.nodes,
            precision=options.precision,
            activation_gib=options.activations,
            host_gib=options.host,
        )

    choice = find_report("shard", "Predicting…", find)
    if choice is None:
        return BAD_INPUT
    show_report(choice, options.json)
    return 0
