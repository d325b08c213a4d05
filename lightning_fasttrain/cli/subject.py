"""Load a model, a batch and techniques that a command line names. Values are literals; nothing is evaluated."""

import ast
import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from lightning_fasttrain.cli.technique_cards import find_cards, plain_spelling
from lightning_fasttrain.core.checks import PositiveInt, check_arguments, require
from lightning_fasttrain.core.device import free_bytes
from lightning_fasttrain.core.host.lightning import TRANSFER_HOOKS
from lightning_fasttrain.core.messages import explain, format_bytes
from lightning_fasttrain.core.modules.fake_mode import FakeMode
from lightning_fasttrain.memory.fake_operators import AssumedNumbers
from lightning_fasttrain.planner.candidates import known_techniques
from lightning_fasttrain.technique import Technique

_BYTES_OF_TRAINING = 4  # for each of the parameters: themselves, gradients, and the two averages of Adam
_LABELS_TOKENS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification")


def load_subject(
    path: str, arguments: Sequence[str] = (), *, data: str = "", fake: bool = True
) -> tuple[nn.Module, Any]:
    """Import a function or class by its path, call it, and take a batch. This runs its code.

    Args:
        path: ``"package.module:name"``, looked for in the current folder too. A LightningModule's class, whose
            batch is the first of its own ``train_dataloader``; or a function that returns (module, batch).
        arguments: ``"key=value"`` each, for the call. Values are Python literals, or else strings.
        data: the same for a LightningDataModule, or a function that returns one, which gives the batch instead.
        fake: whether the model is made of tensors without memory; where it reads values of those, it is made really.

    Returns:
        The module and the batch.

    Raises:
        ValueError: a path or an argument that cannot be read, or a model that is made really and does not fit.
        TypeError: the call returned something else, or a module without a loader.

    Example:
        >>> module, batch = load_subject("torch.nn:Linear", ["in_features=3"])
        Traceback (most recent call last):
        TypeError: torch.nn:Linear with in_features=3: ... missing ... argument: 'out_features'. Check ...
    """
    make = functools.partial(_import_target(path), **dict(_key_and_value(argument) for argument in arguments))
    try:
        made = _make(path, make, fake)
    except TypeError as error:
        what = f"{path} with {' '.join(arguments) or 'no arguments'}"
        why = str(error).partition("\n")[0].rstrip(".")
        raise TypeError(explain(what, why, "Check the --arg values")) from error
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


def _make(name: str, make: Callable[[], Any], fake: bool) -> Any:
    """Call ``make`` without memory if that is asked for, and really where it reads values that it has just made."""
    if fake:
        try:
            with FakeMode():
                return make()
        except DataDependentOutputException:
            pass
    refuse_too_large(name, make, 1 if fake else _BYTES_OF_TRAINING)
    return make()


def refuse_too_large(name: str, make: Callable[[], Any], factor: int = _BYTES_OF_TRAINING) -> None:
    """Raise ``ValueError`` if the parameters take more memory than is free, rather than being killed for it.

    Args:
        name: of the model, for the message.
        make: makes the model, or (module, batch); called once without memory. Where that fails, nothing is refused.
        factor: bytes needed for each byte of the parameters.
    """
    free = free_bytes(torch.device("cpu"))
    try:
        with FakeMode(), AssumedNumbers(truth=False):
            made = make()
        module = made[0] if isinstance(made, tuple) else made
        nbytes = sum(parameter.nbytes for parameter in module.parameters())
    except Exception:  # it is called again, really, and its errors are said then
        return
    if free is not None and factor * nbytes > free:
        why = f"its parameters take {format_bytes(nbytes)}"
        if factor > 1:
            why += f", and training them {factor} times as much"
        what = f"{name}: {why}, of which {format_bytes(free)} are free on this machine"
        raise ValueError(f"{what}. Predict instead: fasttrain memory, shard, or estimate with --gpu.")


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


class _HuggingFaceModel(L.LightningModule):
    def __init__(self, kind: Callable[[Any], nn.Module], config: Any) -> None:
        super().__init__()
        self.model = kind(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@check_arguments
def load_hugging_face(
    folder: str, batch: PositiveInt | None = None, length: PositiveInt | None = None
) -> tuple[Callable[[], L.LightningModule], dict[str, Tensor]]:
    """Return a function that builds the model of a configuration, with AdamW, and a batch of random tokens.

    Weights are random: only the configuration is read, and no code that comes with it.

    Args:
        folder: with a ``config.json``, as ``save_pretrained`` writes it, for example a model's folder in the cache of
            ``huggingface_hub``.
        batch: sequences; by default one.
        length: tokens of each; by default as many as the model has positions, at most 2,048.

    Returns:
        The function, and ``input_ids`` with ``labels``, both of shape (batch, length); a classifier of sequences has
        labels of shape (batch,).

    Raises:
        ValueError: there is no configuration, or one of a model that does not take token ids and labels.

    Example:
        >>> load_hugging_face("no/such/folder")
        Traceback (most recent call last):
        ValueError: --hf no/such/folder: it has no config.json. Name a folder that save_pretrained wrote, or ...
    """
    transformers = require("transformers", extra="finetune")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # which its import has reset; the command restores it
    if not Path(folder, "config.json").is_file():
        way_out = "Name a folder that save_pretrained wrote, or download one: hf download NAME config.json"
        raise ValueError(explain(f"--hf {folder}", "it has no config.json", way_out))
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    name = next(iter(config.architectures or ()), "")
    kind, text = getattr(transformers, name, None), config.get_text_config()
    classifies = name.endswith("ForSequenceClassification")
    if kind is None or not (classifies or name.endswith(_LABELS_TOKENS)):
        why = f"its class, {name}, does not take token ids and labels"
        way_out = "Write a function that returns (module, batch), and name it as TARGET"
        if not name:
            why, way_out = "its config.json names no class", 'Add one, as "architectures": ["LlamaForCausalLM"]'
        raise ValueError(explain(f"--hf {folder}", why, way_out))
    if config.pad_token_id is None:
        config.pad_token_id = 0  # classifiers look for the last token that is not padding
    most = getattr(text, "max_position_embeddings", None) or 2048
    ids = torch.randint(1, text.vocab_size, (batch or 1, length or min(most, 2048)))
    if classifies:
        labels = torch.randint(config.num_labels, ids.shape[:1])
    elif name.endswith("ForTokenClassification"):
        labels = torch.randint(config.num_labels, ids.shape)
    else:
        labels = ids.clone()
    return functools.partial(_HuggingFaceModel, kind, config), {"input_ids": ids, "labels": labels}


def techniques_named(text: str) -> list[Technique]:
    """Make the techniques of a list such as ``"ActivationCheckpointing,MicroBatching=8"``, with a first argument each.

    Calls are read too, ``"MicroBatching(8, check=False)"``, and names in any spelling.

    Raises:
        ValueError: no technique has this name, or an argument is not a literal.
        TypeError, ValueError: it refuses the argument.

    Example:
        >>> checkpointing, micro = techniques_named("activation_checkpointing,MicroBatching=8")
        >>> micro.n
        8
        >>> techniques_named("ft.MicroBatching(4, check=False), FusedLossHead('head')")
        [MicroBatching(n=4, check=False), FusedLossHead(head='head')]
    """
    return [_technique_named(entry) for entry in _split_at_commas(text)]


def _split_at_commas(text: str) -> Iterator[str]:
    """Split a list at the commas that are in no brackets."""
    entry, depth = "", 0
    for character in f"{text},":
        depth += (character in "([{") - (character in ")]}")
        if character != "," or depth:
            entry += character
        elif entry.strip():
            yield entry.strip()
            entry = ""
    if entry.strip(" ,"):
        why = "a bracket is not closed"
        raise ValueError(explain(f"--techniques {text!r}", why, "Write MicroBatching=8 or 'MicroBatching(8)'"))


def _technique_named(entry: str) -> Technique:
    called = re.fullmatch(r"([\w.\- ]+)\((.*)\)", entry, re.DOTALL)
    if called is None:
        name, has_value, value = entry.partition("=")
        return _kind_named(name)(*([_literal(value)] if has_value else []))
    try:
        call = ast.parse(f"made({called[2]})", mode="eval").body
        assert isinstance(call, ast.Call)
        positional = [ast.literal_eval(argument) for argument in call.args]
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
    except (ValueError, SyntaxError) as error:
        why, way_out = "its arguments are no literals", f"Write {called[1]}(8), or verify in Python"
        raise ValueError(explain(f"technique {entry!r}", why, way_out)) from error
    return _kind_named(called[1])(*positional, **named)


def _kind_named(name: str) -> Callable[..., Technique]:
    known = {plain_spelling(kind.__name__): kind for kind in known_techniques()}
    kind = known.get(plain_spelling(name.rpartition(".")[2]))
    if kind is None:  # what words may mean is proposed, and not run
        found = [card.name for card in find_cards(name)[:3]]
        raise ValueError(explain(f"technique {name!r}", "there is none of this name", f"Use {' or '.join(found)}"))
    return kind


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
