"""Words and forms that readers of PyTorch's documentation would stumble over stay out of texts and names."""

import ast
import io
import json
import re
import tokenize
from pathlib import Path

import pytest

import lightning_fasttrain

pytestmark = pytest.mark.quick

PACKAGE = Path(lightning_fasttrain.__file__).parent
ROOT = Path(__file__).parent.parent
# Pattern, and what to write instead.
BANNED = {
    r"\bnobody\b": "no process, no one, or the passive voice",
    r"\bit is no (?!longer)": "expected X, got Y",
    r"\bput(s|ting)? back\b": "restore",
    r"\b(go|goes|going|went|gone) on\b(?! the| a)": "continue or resume",
    r"\bthaw": "unfreeze",
    r"\bweigh(s|ed|ing|er)?\b": "weight, weighted by",
    r"\btoken numbers\b": "token ids",
    r"\balike\b": "identical, the same",
    r"\byardstick\b": "rounding noise",
    r"\b(take|takes|taken|took|taking) out\b": "remove, unload",
    r"\bfor ever\b": "forever",
    r"\b(is|are|was|were) told\b": "is given, is reported",
    r"\broom(s)?\b(?! for)": "subpackage; of memory: free memory",
    r"\bRoof\b": "name what the file does",
}
ANY_OF_THEM = re.compile("|".join(f"(?:{pattern})" for pattern in BANNED))
LONGEST_TEST_NAME = 80
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def find_banned(text):
    """Each banned form in a text, with what to write instead."""
    if ANY_OF_THEM.search(text) is None:
        return
    for pattern, instead in BANNED.items():
        for match in re.finditer(pattern, text):
            yield f"{match.group(0)!r} (write: {instead})"


def parse_nodes(file):
    """All nodes of a source file."""
    return ast.walk(ast.parse(file.read_text()))


def read_texts(file):
    """Comments and strings of a source file, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in parse_nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def read_names(file):
    """Functions, classes and arguments of a source file, as words."""
    for node in parse_nodes(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name.replace("_", " ")
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg.replace("_", " ")


def banned_in(file):
    for line, text in [*read_texts(file), *read_names(file)]:
        for found in find_banned(text):
            yield f"{file.relative_to(ROOT)}:{line}: {found}"


def test_no_banned_word_is_in_the_package():
    assert [found for file in FILES for found in banned_in(file)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_banned_word_is_in_the_documentation(page):
    text = page.read_text()
    if page.name == "CHANGELOG.md":  # it names what was renamed
        text = re.sub("`[^`]*`", "", text)
    assert list(find_banned(text)) == []


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda file: file.stem)
def test_no_banned_word_is_in_a_notebook(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    assert list(find_banned("\n".join("".join(cell["source"]) for cell in cells))) == []


def read_test_names(file):
    for node in parse_nodes(file):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name.removeprefix("test_")


def test_names_of_tests_are_short():
    names = [name for file in TESTS for name in read_test_names(file)]
    assert len(names) > 1000
    assert [name for name in names if len(name) > LONGEST_TEST_NAME] == []


def first_lines(file):
    """The first line of each docstring of a source file."""
    for node in parse_nodes(file):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield getattr(node, "lineno", 1), docstring.splitlines()[0]


def test_a_first_line_does_not_begin_in_the_middle_of_a_thought():
    begun = re.compile(r"(What|Those|Where|Which|By how|By what|How|Of|As|The one|The same|So that)\b(?!.*\?$)")
    found = []
    for file in FILES:
        found += [
            f"{file.relative_to(ROOT)}:{line}: {first}" for line, first in first_lines(file) if begun.match(first)
        ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    ["nobody knows", "it is no pattern", "it is put back", "the run goes on", "thaw_to", "weighed by targets"],
)
def test_a_banned_word_would_be_noticed(text):
    assert list(find_banned(text))


@pytest.mark.parametrize(
    "text", ["it is no longer there", "it goes on the device", "a weight", "weights", "to unfreeze"]
)
def test_an_ordinary_word_is_let_through(text):
    assert not list(find_banned(text))
