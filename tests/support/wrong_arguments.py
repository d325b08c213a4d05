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
import types
import typing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

ROOMS = ("data", "dry_run", "finetune", "loss", "model", "optim", "planner", "predict", "run", "strategy", "technique")
# Arguments for which zero, or a negative number, means something; where they differ by function, with its path.
ZERO = {
    *("compare_ranks_every", "every_n_steps", "first_step", "warmup", "skip_bad_samples", "exit_code", "pad_id"),
    *("weight_decay", "dropout", "label_smoothing", "z_loss", "final", "by", "alpha", "activation_gib", "at", "over"),
    *("ignore_index", "lr", "decay", "feature_weight", "min_mib", "in_flight_mib", "host_bytes", "headroom", "stage"),
    *("momentum", "eps", "prefetch", "persistence", "reuse", "parent_rank", "data.read_length.value"),
    "dry_run.Rehearsal.seconds",
}
NEGATIVE = {"z_loss", "ignore_index", "pad_id"}
# Classes that the package makes for its users, with docstrings that show one.
MADE_HERE = {"loss.DeferredLogits", "run.MemoryRecord"}


@dataclass(frozen=True)
class Case:
    """One call with one wrong argument."""

    path: str
    argument: str
    wrong: str
    value: object

    def __str__(self):
        return f"{self.path}({self.argument}={self.wrong})"


def public_things():
    """Each public class and function once, with the path under which users find it."""
    seen = {}
    for name in ROOMS:
        room = importlib.import_module(f"lightning_fasttrain.{name}")
        for word in room.__all__:
            thing = getattr(room, word)
            raised = isinstance(thing, type) and issubclass(thing, Exception | enum.Enum)
            if callable(thing) and not isinstance(thing, types.ModuleType) and not raised:
                seen.setdefault(thing, f"{name}.{word}")
    return {path: thing for thing, path in seen.items()}


def find_example(thing):
    """The statements of the docstring before the call of the thing, and the call; None if there is no such call."""
    before = []
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(thing) or ""):
        for statement in ast.parse(example.source).body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == thing.__name__:
                    return "\n".join(before), node
            before.append(ast.unparse(statement))
    return None


def right_arguments(thing):
    """The arguments of the docstring's example, bound to names."""
    before, call = find_example(thing)
    names = dict(vars(importlib.import_module(thing.__module__)))
    names["getfixture"] = lambda name: Path(tempfile.mkdtemp(dir="."))
    exec(before, names)
    positional = [eval(ast.unparse(argument), names) for argument in call.args]
    named = {keyword.arg: eval(ast.unparse(keyword.value), names) for keyword in call.keywords}
    return inspect.signature(thing).bind(*positional, **named).arguments


CLASS, MODULE, TENSOR, ARRAY, NOTHING = nn.Linear, nn.Linear(1, 1), torch.zeros(2), np.zeros(2), object()
NUMBERS = {"True": True, "3": 3, "2.5": 2.5, "1j": 1j}
OBJECTS = {"object()": NOTHING, "a module": MODULE, "a tensor": TENSOR, "an array": ARRAY, "bytes": b"x"}


def wrong_values(annotation, name, path):
    """Values that the annotation excludes, and values of the right type that mean nothing."""
    text = re.sub(r"Annotated\[(\w+), [^\]]*\]", r"\1", str(annotation))
    whole = text + f" {getattr(annotation, '__name__', '')}"
    if re.search(r"\bAny\]?$|\bobject\b|^typing.Any", text) or annotation in (typing.Any, object, inspect._empty):
        return {}
    number = re.search(r"\bfloat\b", whole) is not None
    integer = number or re.search(r"\bint\b", whole) is not None
    several = re.search(r"Sequence|Iterable|list|tuple|Collection", whole) is not None
    function = "Callable" in whole
    wrong = {"{0: object()}": {0: NOTHING}, "[object()]": [NOTHING], "[None]": [None]}
    if "Mapping" in whole or "dict" in whole:
        wrong = {}
    if re.search(r"(Sequence|Iterable|list|Collection)\[(typing\.)?Any\]", whole):
        wrong = {}
    wrong |= {"object()": NOTHING, "bytes": b"x", "1j": 1j}
    if "None" not in text and "Optional" not in text:
        wrong["None"] = None
    if "bool" not in whole:
        wrong["True"] = True
    if not integer:
        wrong["3"] = 3
    if not number:
        wrong["2.5"] = 2.5
    if "str" not in whole:
        wrong |= {"'4'": "4", "'nonsense'": "nonsense", "''": ""}
        if "Literal" in whole:
            wrong["'nonsense'"] = "nonsense"
    else:
        wrong["''"] = ""
    if "Module" not in re.sub(r"type\[[\w.]*\]", "", whole) and not function:
        wrong["a module"] = MODULE
    if "Tensor" not in whole and not several:
        wrong |= {"a tensor": TENSOR}
    if not several:
        wrong["an array"] = ARRAY
    if not function and "type[" not in whole and "type]" not in whole:
        wrong["a class"] = CLASS
    if not function:
        wrong["a function"] = repr
    if integer and not {name, f"{path}.{name}"} & ZERO:
        wrong |= {} if "bool" in whole else {"0": 0}
    if integer and name not in NEGATIVE:
        wrong |= {"-1": -1}
    if number:
        wrong |= {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
    return wrong


@functools.cache
def find_cases():
    """All cases, and the public names whose docstring calls them nowhere."""
    cases, without = [], []
    for path, thing in public_things().items():
        signature = inspect.signature(thing)
        if not signature.parameters or inspect.Parameter.VAR_POSITIONAL in {
            p.kind for p in signature.parameters.values()
        }:
            continue
        if path in MADE_HERE:
            continue
        if find_example(thing) is None:
            without.append(path)
            continue
        function = thing.__init__ if isinstance(thing, type) else thing
        try:
            hints = typing.get_type_hints(function)
        except NameError:
            hints = inspect.get_annotations(function)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            for words, value in wrong_values(hints.get(name, inspect._empty), name, path).items():
                if value is not parameter.default and (value == parameter.default) is not True:
                    cases.append(Case(path, name, words, value))
    return cases, without


FORM = re.compile(r"^.+: .+\. .+\.$", re.DOTALL)


def outcome(case, arguments):
    """How a call ends: "refused" in our form of an error, "accepted", or the raw error."""
    thing = public_things()[case.path]
    changed = {**arguments, case.argument: case.value}
    positional = []
    try:
        bound = inspect.signature(thing).bind_partial()
        bound.arguments.update(changed)
        result = thing(*bound.args, **bound.kwargs)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        if FORM.match(str(error)) and "lightning_fasttrain" in inspect.getinnerframes(error.__traceback__)[-1].filename:
            return "refused"
        return f"raw {type(error).__name__}: {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    del result, positional
    return "accepted"
