"""A state of the ladder as the code that a user writes for it."""

from typing import Any

from lightning_fasttrain.bench.ladder.results import State
from lightning_fasttrain.planner.catalogue import class_named, public_path


def as_code(state: State) -> str:
    """Return code to paste into a training script for the same techniques. It needs ``L``, ``ft`` and ``torch``.

    Args:
        state: in the form of :data:`.rungs.NAIVE`.

    Example:
        >>> print(as_code({"callbacks": {"MicroBatching": {"n": 4}}, "trainer": {"precision": "bf16-mixed"},
        ...                "optimizer": {"fused": True}, "loop": {"print_loss": False, "pin_memory": True}}))
        trainer = L.Trainer(
            precision="bf16-mixed",
            callbacks=[
                ft.MicroBatching(n=4),
            ],
        )
        # in configure_optimizers: torch.optim.AdamW(..., fused=True)
        # no loss.item() or print in the step; DataLoader(..., pin_memory=True) for a GPU
    """
    lines = ["trainer = L.Trainer("]
    lines += [f"    {name}={_value(value)}," for name, value in state["trainer"].items()]
    if state["callbacks"]:
        callbacks = [f"        {_call(name, arguments)}," for name, arguments in state["callbacks"].items()]
        lines += ["    callbacks=[", *callbacks, "    ],"]
    lines.append(")")
    named = {key: value for key, value in state["optimizer"].items() if key != "fused"}
    if named:
        arguments = ", ".join(f"{key}={_value(value)}" for key, value in named.items())
        lines.append(f"# in configure_optimizers: ft.build_optimizer(self, {arguments})")
    elif state["optimizer"].get("fused"):
        lines.append("# in configure_optimizers: torch.optim.AdamW(..., fused=True)")
    if not state["loop"].get("print_loss"):
        lines.append("# no loss.item() or print in the step; DataLoader(..., pin_memory=True) for a GPU")
    return "\n".join(lines)


def _call(name: str, arguments: dict[str, Any]) -> str:
    given = ", ".join(f"{key}={_value(value)}" for key, value in arguments.items())
    return f"ft.{public_path(class_named(name))}({given})"


def _value(value: object) -> str:
    if isinstance(value, dict):  # a policy: its name and its arguments
        ((name, arguments),) = value.items()
        return _call(name, arguments)
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.4g}" if isinstance(value, float) else repr(value)
