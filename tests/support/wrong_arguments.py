"""Wrong values for each argument of each public name: what the docstring's example calls, with one argument replaced.

Which values are wrong is read from the text of the annotation, by rules simpler than those of the package.
"""

import ast
import doctest
import enum
import functools
import importlib
import inspect
import re
import tempfile
import typing
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

ROOMS = (
    "architecture",
    "checkpoint",
    "estimate",
    "finetune",
    "guards",
    "loaders",
    "loss",
    "memory",
    "micro_batching",
    "model",
    "optim",
    "planner",
    "profiling",
    "proof",
    "strategy",
    "technique",
)
# Arguments for which zero, or a negative number, means something; where functions differ, with the path.
ZERO = {
    *("compare_ranks_every", "every_n_steps", "first_step", "warmup", "skip_bad_samples", "exit_code", "pad_id"),
    *("weight_decay", "dropout", "label_smoothing", "z_loss", "final", "by", "alpha", "activation_gib", "at", "over"),
    *("ignore_index", "lr", "decay", "feature_weight", "min_mib", "in_flight_mib", "host_bytes", "headroom", "stage"),
    *("momentum", "eps", "prefetch", "persistence", "reuse", "reduce_bucket", "sub_group", "parent_rank", "amount"),
    *("balance", "proof.Rehearsal.seconds"),
    "estimate.palm_flops_per_token.layers",
}
NEGATIVE = {"z_loss", "ignore_index", "pad_id"}
# Calls of what is shown by no example of its own.
CALLS = {
    "loaders.Length": "Length(3, 'steps')",
    "micro_batching.check_padding_free": "check_padding_free(print, {})",
    "finetune.adapter_names": "adapter_names(nn.Linear(1, 1))",
    "finetune.count_parameters": "count_parameters(nn.Linear(1, 1))",
    "finetune.enable_adapters_": "enable_adapters_(nn.Linear(1, 1))",
    "checkpoint.set_random_state": "set_random_state(random_state())",
    "checkpoint.verify_checkpoint": "verify_checkpoint('last.ckpt')",
    "technique.check_together": "check_together([])",
    "technique.Conflict": "Conflict(int, 'it counts', 'Use float')",
    "technique.Setting": "Setting('parts', '4')",
}
# Classes that the package makes for its users: reports, and what functions return. The first is for other checks.
MADE_HERE = {
    "loaders.read_length",
    *("micro_batching.Normalizers", "micro_batching.PackedDocuments", "proof.Distance", "proof.RehearsalReport"),
    *("proof.Verification", "proof.Verified", "finetune.ByteAccount", "finetune.MergeReport"),
    *("finetune.QuantizedReport", "loss.DeferredLogits", "model.AttentionChoice", "model.BlockPlan"),
    "model.CheckpointPlan",
    *("model.CompileReport", "model.LowPrecisionReport", "optim.Schedule", "planner.Choice", "planner.Plan"),
    *("planner.ClusterPlan", "planner.Layout", "planner.PlannedLayout"),
    *("planner.Tried", "planner.Unused", "planner.UnusedReport", "memory.MemoryReport", "profiling.MemoryRecord"),
    *("checkpoint.ResumableLoader", "strategy.Consolidated"),
    *(
        "strategy.StrategyChoice",
        "strategy.Traffic",
        "estimate.StepFlops",
        "estimate.TrainingEstimate",
        "technique.Facts",
        "technique.PredictedStep",
    ),
}
CLASS, MODULE, TENSOR, ARRAY, OBJECT = nn.Linear, nn.Linear(1, 1), torch.zeros(2), np.zeros(2), object()


@dataclass(frozen=True)
class Case:
    """One call with one wrong argument."""

    path: str
    argument: str
    words: str
    value: object

    def __str__(self):
        return f"{self.path}({self.argument}={self.words})"


@functools.cache
def public_things():
    """The public classes and functions that users call, by the path under which they find them."""
    found = {}
    for name in ROOMS:
        room = importlib.import_module(f"lightning_fasttrain.{name}")
        for word in room.__all__:
            thing = getattr(room, word)
            declared = isinstance(thing, type) and issubclass(thing, Exception | enum.Enum)
            if callable(thing) and not declared and thing not in found.values():
                found[f"{name}.{word}"] = thing
    return {path: thing for path, thing in found.items() if path not in MADE_HERE}


def find_example(path, thing):
    """The statements of the docstring before the call of the thing, and the call."""
    if path in CALLS:
        return "", ast.parse(CALLS[path], mode="eval").body
    before = []
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(thing) or ""):
        for statement in ast.parse(example.source).body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == thing.__name__:
                    return "\n".join(before), node
            before.append(ast.unparse(statement))
    raise LookupError(f"{path}: its docstring calls it nowhere. Add an example, or a line to CALLS.")


def right_arguments(path):
    """The arguments of the docstring's example, by name; lists and dicts are new, since optimizers write to groups."""
    return tree_map(lambda value: value, dict(_find_arguments(path)))


@functools.cache
def _find_arguments(path):
    thing = public_things()[path]
    before, call = find_example(path, thing)
    names = {**vars(importlib.import_module(thing.__module__)), "nn": nn}
    names["getfixture"] = lambda name: Path(tempfile.mkdtemp(dir="."))
    exec(before, names)
    positional = [eval(ast.unparse(argument), names) for argument in call.args]
    named = {keyword.arg: eval(ast.unparse(keyword.value), names) for keyword in call.keywords}
    return inspect.signature(thing).bind(*positional, **named).arguments


def wrong_values(annotation, names):
    """Values that the annotation excludes, and values of the right type that mean nothing, by the way they are shown.

    Args:
        annotation: of the argument.
        names: the argument's name, alone and with its path.
    """
    text = f"{annotation} {getattr(annotation, '__name__', '')}"
    if annotation is inspect.Parameter.empty or re.search(r"\bAny\b(?!.*\])|\bobject\b", text):
        return {}
    number = re.search(r"\bfloat\b", text) is not None
    integer = number or re.search(r"\bint\b", text) is not None
    several = re.search(r"Sequence|Iterable|list|tuple|Collection", text) is not None
    function, module = "Callable" in text, "Module" in re.sub(r"type\[[\w.]*\]", "", text)
    wrong = {"object()": OBJECT, "bytes": b"x", "1j": 1j}
    of_anything = re.search(r"(Sequence|Iterable|list|Collection)\[(typing\.)?Any\]|Mapping|dict", text)
    excluded = [
        (of_anything is None, {"{0: object()}": {0: OBJECT}, "[object()]": [OBJECT], "[None]": [None]}),
        ("None" not in text and "Optional" not in text, {"None": None}),
        ("bool" not in text, {"True": True}),
        (not integer, {"3": 3}),
        (not number, {"2.5": 2.5}),
        ("str" not in text, {"'4'": "4", "'nonsense'": "nonsense"}),
        (not module and not function, {"a module": MODULE}),
        (not function and "Trainer" not in text, {"a Trainer": make_trainer()}),
        ("Tensor" not in text and not several, {"a tensor": TENSOR}),
        (not several, {"an array": ARRAY}),
        (not function and not re.search(r"\btype\b", text), {"a class": CLASS}),
        (not function, {"a function": repr}),
        (True, {"''": ""}),
    ]
    for is_wrong, values in excluded:
        wrong |= values if is_wrong else {}
    if integer and not names & ZERO and "bool" not in text:
        wrong["0"] = 0
    if integer and not names & NEGATIVE:
        wrong["-1"] = -1
    if number:
        wrong |= {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
    return wrong


@functools.cache
def make_trainer():
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def find_cases():
    """All cases."""
    cases = []
    for path, thing in public_things().items():
        function = thing.__init__ if isinstance(thing, type) else thing
        try:
            annotations = typing.get_type_hints(function)
        except NameError:  # of an optional package
            annotations = inspect.get_annotations(function)
        for name, parameter in inspect.signature(thing).parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            annotation = annotations.get(name, parameter.empty)
            for words, value in wrong_values(annotation, {name, f"{path}.{name}"}).items():
                if type(value) is not type(parameter.default) or value != parameter.default:
                    cases.append(Case(path, name, words, value))
    return cases


def outcome(thing, arguments, name, value):
    """How a call with one argument replaced ends: "refused" in our form of an error, "accepted", or the raw error."""
    bound = inspect.signature(thing).bind_partial()
    bound.arguments.update({**arguments, name: value})
    try:
        thing(*bound.args, **bound.kwargs)
    except Exception as error:
        ours = "lightning_fasttrain" in inspect.getinnerframes(error.__traceback__)[-1].filename
        if ours and re.fullmatch(r".+: .+\. .+\.", str(error), re.DOTALL):
            return "refused"
        return f"{type(error).__name__}: {error}"
    return "accepted"
