"""The rules of the house, read from the sources: imports go down only, packages do nothing, names keep their root."""

import ast
import functools
import graphlib
import re
import sys
from pathlib import Path

import pytest

import lightning_fasttrain

pytestmark = pytest.mark.quick

PACKAGE = Path(lightning_fasttrain.__file__).parent
# Rooms by floor, the lowest first. A room imports lower floors only: those of one floor do not know one another.
FLOORS = (
    ("core",),
    ("technique", "trial"),
    ("architecture", "checkpoint", "loss", "micro_batching", "model", "optim"),
    ("finetune", "guards", "loaders", "profiling"),
    ("memory",),
    ("proof", "step_time", "strategy"),
    ("planner", "estimate"),
    ("bench", "doctor"),
    ("cli", "mixin", "__init__"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS, start=1) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def place(parts):
    """The room or file that a module belongs to, and its floor."""
    first = parts[0] if parts else "__init__"
    return first, FLOOR[first]


@functools.cache
def parsed(file):
    return ast.parse(file.read_text())


@functools.cache
def nodes_of(file):
    return list(ast.walk(parsed(file)))


@functools.cache
def imported(file):
    found = []
    for node in nodes_of(file):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [(node.lineno, f"{node.module}.{alias.name}", node.module) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, alias.name) for alias in node.names]
    return found


def imports_upward(file):
    room, height = place(file.relative_to(PACKAGE).with_suffix("").parts)
    for line, name, module in imported(file):
        if not module.startswith("lightning_fasttrain"):
            continue
        module = name if module == "lightning_fasttrain" and name.split(".")[1] in FLOOR else module
        other, other_height = place(module.split(".")[1:])
        if other != room and other_height >= height:
            yield f"{file}:{line} imports {module}, which is on floor {other_height}, not below {height}"


def test_imports_go_down_only():
    assert broken_in_any(imports_upward) == [], floor_plan()


def floor_plan():
    """What stands where, the highest floor first, for a reader of a failure (or of ``pytest -s -k floor_plan``)."""
    lines = []
    for number, rooms in reversed(list(enumerate(FLOORS, start=1))):
        lines.append(f"{number}  {'  '.join(f'{room} ({count_files(room)})' for room in rooms)}")
    return "\n".join(lines)


def count_files(room):
    return sum(1 for file in FILES if file.relative_to(PACKAGE).with_suffix("").parts[0] == room)


def test_the_floor_plan_is_that_of_the_package():
    print(floor_plan())
    assert len(FLOORS) <= 9
    assert {file.relative_to(PACKAGE).with_suffix("").parts[0] for file in FILES} == set(FLOOR)


def broken_in_any(find):
    """Each place in the package that breaks a rule."""
    return [place for file in FILES for place in find(file)]


FOLDERS = sorted({file.parent for file in FILES} - {PACKAGE})


def members(folder):
    """The files and sub-rooms of a folder, and of each the others that it imports."""
    needs = {}
    for one in sorted(folder.iterdir()):
        if not one.name.startswith("__") and (one.suffix == ".py" or (one / "__init__.py").exists()):
            files = sorted(one.rglob("*.py")) if one.is_dir() else [one]
            needs[one.stem] = {name for file in files for name in _imported_from(folder, file)} - {one.stem}
    return {name: others & needs.keys() for name, others in needs.items()}


def _imported_from(folder, file):
    dotted = ".".join(("lightning_fasttrain", *folder.relative_to(PACKAGE).parts)) + "."
    for _, name, _ in imported(file):
        if name.startswith(dotted):
            yield name.removeprefix(dotted).partition(".")[0]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE)))
def test_a_room_has_no_circles_and_its_docstring_lists_it_from_the_bottom_up(folder):
    needs = members(folder)
    list(graphlib.TopologicalSorter(needs).static_order())  # raises where there is a circle, for type checkers too
    docstring = ast.get_docstring(parsed(folder / "__init__.py"))
    listed = re.findall(r"``(\w+)``", docstring.partition("From the bottom up:")[2])
    assert sorted(listed) == sorted(needs)
    for place, name in enumerate(listed):
        assert needs[name] <= set(listed[:place]), f"{name} stands before what it imports"


ABOUT_TEN = 12


def test_a_room_has_about_ten_files():
    """Its names are read at a glance. Twelve at most: a file more than ten need not open a room of its own."""
    crowded = {str(folder.relative_to(PACKAGE)): len(members(folder)) for folder in FOLDERS}
    assert {name: number for name, number in crowded.items() if number > ABOUT_TEN} == {}


MOST_LINES = 600


def longer_than_one_sitting(file):
    lines = len(file.read_text().splitlines())
    if lines > MOST_LINES:
        yield f"{file} has {lines} lines"


def test_a_file_is_read_in_one_sitting():
    """A file holds one subject, in 150 to 500 lines; a subject that needs more than 600 is two."""
    assert broken_in_any(longer_than_one_sitting) == []


def named_with_an_underscore(file):
    if file.name.startswith("_") and file.stem not in {"__init__", "__main__"}:
        yield str(file)


def test_no_file_name_begins_with_an_underscore():
    """What a package offers is in its ``__init__``: no file of it is less private than another."""
    assert broken_in_any(named_with_an_underscore) == []


def test_a_circle_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    room = tmp_path / "room"
    room.mkdir()
    for one, other in (("a", "b"), ("b", "a")):
        (room / f"{one}.py").write_text(f"if False:\n    from lightning_fasttrain.room.{other} import x\n")
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter(members(room)).static_order())


@pytest.mark.parametrize("file", [f for f in FILES if f.name == "__init__.py"], ids=lambda f: f.parent.name)
def test_packages_only_re_export(file):
    for node in parsed(file).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Assign):
            assert sorted(ast.literal_eval(node.value)) == sorted(imported_names(file)), f"{file}:{node.lineno}"
            assert ast.unparse(node.targets[0]) == "__all__"
            continue
        call = isinstance(node, ast.Expr) and ast.unparse(node)
        allowed = call in {
            "refuse_compromised_hosts()",
            "import_names_when_used(__name__)",
        }
        lazy = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        assert docstring or allowed or lazy or isinstance(node, ast.ImportFrom), f"{file}:{node.lineno}"


def imported_names(file):
    found = []
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module not in ("typing", "lightning_fasttrain.core.package"):
            found += [alias.asname or alias.name for alias in node.names]
    return found


OPTIONAL = {
    "bitsandbytes",
    "deepspeed",
    "peft",
    "torchao",
    "matplotlib",
    "transformers",
    "tokenizers",
    "safetensors",
    "liger_kernel",
}


def imports_of_what_is_optional(file):
    for node in parsed(file).body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if {name.partition(".")[0] for name in names} & OPTIONAL:
            yield f"{file}:{node.lineno}"


def test_optional_packages_are_imported_where_they_are_used():
    assert broken_in_any(imports_of_what_is_optional) == []


UNSAFE = {"pickle.load", "pickle.loads", "eval", "exec"}


def drawers_and_unpickling(file):
    if file.stem in {"utils", "helpers", "common", "misc"}:
        yield str(file)
    for node in nodes_of(file):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
        if name in UNSAFE or (name == "torch.load" and not safe):
            yield f"{file}:{node.lineno}"


def test_no_drawers_and_nothing_is_unpickled():
    assert broken_in_any(drawers_and_unpickling) == []


def takes_anything(parameter):
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(parameter.annotation))


def test_few_parameters_are_annotated_with_any():
    """It is for objects of others whose attributes are read; ``object`` is for what may be anything."""
    arguments = [node for file in FILES for node in nodes_of(file) if isinstance(node, ast.arg)]
    parameters = [argument for argument in arguments if argument.annotation is not None]
    assert sum(map(takes_anything, parameters)) < 0.08 * len(parameters)


DENSE = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp)


def dense_expressions(node):
    """The comprehensions and conditional expressions of a statement, without those of the statements inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from [child] if isinstance(child, DENSE) else []
            yield from dense_expressions(child)


def dense_statements(file):
    for node in nodes_of(file):
        if isinstance(node, ast.stmt) and len(list(dense_expressions(node))) > 1:
            yield f"{file}:{node.lineno}"


def test_a_statement_has_at_most_one_comprehension_or_conditional():
    assert broken_in_any(dense_statements) == []


@pytest.mark.parametrize(
    ("find", "code"),
    [
        (imports_upward, "from lightning_fasttrain.proof import verify"),
        (imports_upward, "from lightning_fasttrain.optim import build_optimizer"),
        (imports_of_what_is_optional, "import peft"),
        (drawers_and_unpickling, "torch.load('x')"),
        (drawers_and_unpickling, "pickle.loads(b'x')"),
        (dense_statements, "x = [a for a in b] if c else 1"),
        (longer_than_one_sitting, "\n" * MOST_LINES),
    ],
)
def test_a_broken_rule_would_be_noticed(find, code, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "new.py"
    file.write_text(f"{code}\n")
    assert len(list(find(file))) == 1
    file.with_name("old.py").write_text("import torch\n")
    assert list(find(file.with_name("old.py"))) == []


def test_a_broken_name_would_be_noticed():
    names = ("_new.py", "__new.py", "__init__.py", "__main__.py", "new.py")
    assert sum(len(list(named_with_an_underscore(PACKAGE / name))) for name in names) == 2
