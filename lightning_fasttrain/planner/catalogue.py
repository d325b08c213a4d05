"""Look up the techniques of the package and their policies by name, and write the code that makes them."""

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from lightning_fasttrain import (
    architecture,
    checkpoint,
    finetune,
    guards,
    loaders,
    loss,
    micro_batching,
    model,
    optim,
    profiling,
)
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.package import PUBLIC, find_public, public_path
from lightning_fasttrain.technique import Technique

SUBPACKAGES = (micro_batching, model, loss, optim, finetune, architecture, loaders, checkpoint, guards, profiling)


def known_techniques() -> Iterator[type[Technique]]:
    """Yield every technique of the package, one subpackage after another, in alphabetical order.

    Example:
        >>> [technique.__name__ for technique in known_techniques()][:2]
        ['MicroBatching', 'PaddingFree']
    """
    for subpackage in SUBPACKAGES:
        found = inspect.getmembers(subpackage, inspect.isclass)
        yield from (thing for _, thing in found if issubclass(thing, Technique))


def class_named(name: str) -> type:
    """Return the public class of a name, from whichever subpackage has it.

    Raises:
        ValueError: no public class has this name.

    Example:
        >>> class_named("EveryBlock").__module__
        'lightning_fasttrain.model.activation_checkpointing'
    """
    if name in PUBLIC:
        found = find_public(name)
    else:
        found = next((getattr(subpackage, name) for subpackage in SUBPACKAGES if hasattr(subpackage, name)), None)
    if not isinstance(found, type):
        raise ValueError(explain(f"{name!r}", "this package has no class of this name", "Check how it is written"))
    return found


def code_of(made: object) -> str:
    """Return the Python that makes a technique or a policy like this one.

    Example:
        >>> code_of(model.ActivationCheckpointing(model.EveryBlock(2)))
        'ft.ActivationCheckpointing(policy=ft.model.EveryBlock(k=2))'
    """
    call = _call_that_makes(made)
    for node in ast.walk(call):
        if isinstance(node, ast.Call):
            node.func = ast.Name(f"ft.{public_path(_class_in(node))}")
    return ast.unparse(call)


def config_of(made: object) -> dict[str, Any]:
    """Return the configuration with which LightningCLI makes one like this.

    Example:
        >>> config_of(micro_batching.MicroBatching(4))
        {'class_path': 'lightning_fasttrain.MicroBatching', 'init_args': {'n': 4}}
    """
    return config_of_call(_call_that_makes(made))


def config_of_call(call: ast.Call) -> dict[str, Any]:
    """Return the configuration with which LightningCLI makes what a call of one of our classes makes.

    Raises:
        ValueError: an argument is neither a literal nor such a call.
    """
    kind = _class_in(call)
    values: dict[str, ast.expr] = dict(zip(inspect.signature(kind).parameters, call.args, strict=False))
    values |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        arguments[name] = config_of_call(value) if isinstance(value, ast.Call) else ast.literal_eval(value)
    config: dict[str, Any] = {"class_path": f"lightning_fasttrain.{public_path(kind)}"}
    return {**config, "init_args": arguments} if arguments else config


def _call_that_makes(made: object) -> ast.Call:
    # Techniques keep their arguments in words alone: a reference to a teacher, say, would be copied with them.
    call = ast.parse(repr(made), mode="eval").body
    assert isinstance(call, ast.Call)
    return call


def _class_in(call: ast.Call) -> type:
    return class_named(ast.unparse(call.func).split(".")[-1])
