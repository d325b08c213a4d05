"""Load a model, a batch and techniques that a command line names. Values are literals; nothing is evaluated."""

import ast
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from lightning_fasttrain.core.host.lightning import TRANSFER_HOOKS
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.planner.candidates import known_techniques
from lightning_fasttrain.technique import Technique


def load_subject(
    path: str, arguments: Sequence[str] = (), *, data: str = "", fake: bool = True
) -> tuple[nn.Module, Any]:
    """Import a function or class by its path, call it, and take a batch. This runs its code.

    Args:
        path: ``"package.module:name"``, looked for in the current folder too. A LightningModule's class, whose
            batch is the first of its own ``train_dataloader``; or a function that returns (module, batch).
        arguments: ``"key=value"`` each, for the call. Values are Python literals, or else strings.
        data: the same for a LightningDataModule, or a function that returns one, which gives the batch instead.
        fake: whether the model is made of tensors without memory.

    Returns:
        The module and the batch.

    Raises:
        ValueError: a path or an argument that cannot be read; or, with ``fake``, the call reads values of tensors.
        TypeError: the call returned something else, or a module without a loader.

    Example:
        >>> module, batch = load_subject("torch.nn:Linear", ["in_features=3"])
        Traceback (most recent call last):
        TypeError: torch.nn:Linear with in_features=3: ... missing ... argument: 'out_features'. Check ...
    """
    make = _import_target(path)
    keywords = dict(_key_and_value(argument) for argument in arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        try:
            made = make(**keywords)
        except TypeError as error:
            what = f"{path} with {' '.join(arguments) or 'no arguments'}"
            why = str(error).partition("\n")[0].rstrip(".")
            raise TypeError(explain(what, why, "Check the --arg values")) from error
        except DataDependentOutputException as error:
            what = f"{path} reads the values of a tensor while it makes the model"
            why = "the model is made without memory, so its tensors have no values"
            way_out = "Read data in train_dataloader, or in a LightningDataModule named with --data"
            raise ValueError(explain(what, why, way_out)) from error
    if data:
        return _with_data(made, path, data)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    if not isinstance(made, L.LightningModule) or not is_overridden("train_dataloader", made):
        what = f"{path} gives {type(made).__name__}"
        why = "a batch is needed too, and only a LightningModule with a train_dataloader brings one"
        way_out = "Name a LightningDataModule with --data, or a function that returns (module, batch)"
        raise TypeError(explain(what, why, way_out))
    # Out of the mode, as loaders read real data.
    made.prepare_data()
    made.setup("fit")
    return made, next(iter(made.train_dataloader()))


def _with_data(module: object, path: str, data: str) -> tuple[nn.Module, Any]:
    """Return the module with the datamodule's transfer hooks, and the first batch of the datamodule."""
    if not isinstance(module, nn.Module):
        why = "the data are named beside it, and a model is needed"
        raise TypeError(explain(f"{path} gives {type(module).__name__}", why, "Name a LightningModule's class"))
    datamodule = _import_target(data)()
    if not isinstance(datamodule, L.LightningDataModule):
        why = "a LightningDataModule is needed"
        raise TypeError(explain(f"--data {data} gives {type(datamodule).__name__}", why, "Name its class"))
    datamodule.prepare_data()
    datamodule.setup("fit")
    for hook in TRANSFER_HOOKS:
        if is_overridden(hook, datamodule):
            setattr(module, hook, getattr(datamodule, hook))
    return module, next(iter(datamodule.train_dataloader()))


def techniques_named(text: str) -> list[Technique]:
    """Make the techniques of a list such as ``"ActivationCheckpointing,MicroBatching=8"``, with a first argument each.

    Raises:
        ValueError: no technique has this name.
        TypeError, ValueError: it refuses the argument.

    Example:
        >>> checkpointing, micro = techniques_named("ActivationCheckpointing,MicroBatching=8")
        >>> micro.n
        8
    """
    known: dict[str, Callable[..., Technique]] = {kind.__name__: kind for kind in known_techniques()}
    made = []
    for entry in filter(None, (entry.strip() for entry in text.split(","))):
        name, has_value, value = entry.partition("=")
        if name not in known:
            why = "there is none of this name"
            raise ValueError(explain(f"technique {name!r}", why, f"Use {', '.join(sorted(known))}"))
        made.append(known[name](_literal(value)) if has_value else known[name]())
    return made


def _import_target(path: str) -> Callable[..., Any]:
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(explain(f"{path!r}", "it does not name a thing in a module", "Write package.module:Name"))
    here = os.getcwd()
    # Python puts the folder of an installed command first, not the current one.
    sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(explain(f"{path!r}", str(error), "Check the name and the current folder")) from error
    finally:
        sys.path.remove(here)
    try:
        thing = getattr(found, name)
    except AttributeError as error:
        raise ValueError(explain(f"{path!r}", str(error), "Check the name")) from error
    if not callable(thing):
        raise TypeError(explain(f"{path!r} is a {type(thing).__name__}", "it cannot be called", "Name a class"))
    return thing


def _key_and_value(argument: str) -> tuple[str, Any]:
    key, equals, value = argument.partition("=")
    if not (equals and key.isidentifier()):
        raise ValueError(explain(f"--arg {argument!r}", "it is not of the form key=value", "Write --arg width=128"))
    return key, _literal(value)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
