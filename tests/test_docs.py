"""The documentation is complete and up to date; the site is built where the extra ``docs`` is installed."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import lightning_fasttrain as ft
from docs.describe_techniques import conflicts_of, describe, markdown_card, markdown_page, source_of
from lightning_fasttrain.cli.main import main
from lightning_fasttrain.cli.technique_cards import read_cards
from lightning_fasttrain.core.package import PACKAGE, ROOMS, SUBPACKAGES
from lightning_fasttrain.planner.candidates import known_techniques, public_path
from tests.support.ranks import run_ranks
from tests.support.run_recipes import read_sections

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MEASURED = ROOT / "examples" / "results"
RECIPES, COMPARISON = ((DOCS / f"{name}.md").read_text() for name in ("recipes", "comparison"))
PAGES = sorted(DOCS.rglob("*.md"))
PROSE = [*PAGES, *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROOM_NAMES = set(ROOMS)


def test_the_page_of_techniques_is_what_its_generator_writes():
    """To update it, see ``CONTRIBUTING.md``."""
    assert (DOCS / "techniques.md").read_text() == f"{markdown_page(read_cards()).rstrip()}\n"


def test_each_technique_has_one_card_with_what_it_states():
    page = markdown_page(read_cards())
    cards = {card.partition("\n")[0]: card for card in page.split("\n### ")[1:]}
    assert sorted(cards) == sorted(public_path(technique) for technique in known_techniques())
    for technique in known_techniques():
        card = cards[public_path(technique)]
        assert technique.when in card
        for other, why, _ in conflicts_of(technique):
            assert f"- `{other}`: {why}." in card
    assert re.search(r"[×≈][\d.]+, ×0\.\d\d", cards["MicroBatching"])
    assert "**Measured (time, peak memory, H200):** ×1.25, ×0.31." in cards["MicroBatching"]
    assert "- `OptimizerInBackward`:" in cards["MicroBatching"]  # declared by the other one


@pytest.mark.parametrize("technique", list(known_techniques()), ids=lambda technique: technique.__name__)
def test_each_technique_names_its_source(technique):
    source = source_of(technique)
    assert source
    assert not source.startswith("See ")


def test_a_card_in_markdown_has_yaml_that_makes_one():
    written = markdown_card(describe(ft.MicroBatching))
    assert written.startswith("### MicroBatching\n")
    spec = yaml.safe_load(written.split("```yaml\n")[1].split("```")[0])["trainer"]["callbacks"][0]
    assert type(ft.MicroBatching(**spec["init_args"])) is ft.MicroBatching


def anchors(page):
    """The anchors of a page's headings, as MkDocs and code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken_links(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" in link or path.startswith("mailto:"):
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"{page.relative_to(ROOT)}: {link}"


def test_every_relative_link_leads_somewhere():
    assert [link for page in PROSE for link in broken_links(page)] == []


def test_a_broken_link_would_be_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# One heading\n[a](page.md) [b](missing.md) [c](#one-heading) [d](#two) [e](https://x.org/y)\n")
    assert list(broken_links(page)) == ["page.md: missing.md", "page.md: #two"]


def pages_of(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            yield from pages_of(entry.values())
        else:
            yield from pages_of(entry)


def test_the_navigation_has_every_page_once():
    nav = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_every_public_subpackage_has_a_page():
    documented = {}
    for page in (DOCS / "api").glob("*.md"):
        documented[page.stem] = re.findall(rf"^::: {PACKAGE}\.(\w+)$", page.read_text(), flags=re.MULTILINE)
    top = documented.pop("index")
    assert documented == {room: [room] for room in ROOM_NAMES}
    elsewhere = {name for name, module in SUBPACKAGES.items() if module.split(".")[1] not in ROOM_NAMES}
    assert set(top) == elsewhere - {"__version__"}


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="needs the extra 'docs'",
)
def test_the_site_is_built_without_warnings_and_documents_every_public_name(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    for room in ROOM_NAMES:
        page = (tmp_path / "site" / "api" / room / "index.html").read_text()
        shown = set(re.findall(rf'id="{PACKAGE}\.{room}\.(\w+)"', page))
        assert set(getattr(ft, room).__all__) - shown == set()
        assert ":class:" not in page
        assert ":func:" not in page
    assert (tmp_path / "site" / "notebooks" / "01_first_speedup.ipynb").exists()
    assert (tmp_path / "site" / "examples" / "results" / "ladder_cpu.png").exists()


@pytest.mark.skipif(importlib.util.find_spec("codespell_lib") is None, reason="needs the extra 'docs'")
def test_no_page_has_a_misspelled_word():
    command = [sys.executable, "-m", "codespell_lib", *map(str, PROSE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


WORKFLOWS = [f".github/workflows/{name}.yml" for name in ("docs", "newest")]
FORMS = [f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug_report", "technique_request", "config")]
YAML = ["mkdocs.yml", "CITATION.cff", ".pre-commit-config.yaml", *WORKFLOWS, *FORMS]


@pytest.mark.parametrize("name", YAML)
def test_yaml_files_can_be_read(name):
    file = ROOT / name
    if not file.exists() and name.startswith("."):
        pytest.skip("not in a source distribution")
    assert isinstance(yaml.safe_load(file.read_text()), dict)


@pytest.mark.skipif(not (ROOT / ".github").exists(), reason="not in a source distribution")
def test_forms_of_issues_have_what_they_need():
    for name in ("bug_report", "technique_request"):
        form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
        assert {"name", "description", "body"} <= form.keys()
        ids = [element["id"] for element in form["body"]]
        assert len(ids) == len(set(ids))
        assert all(element["attributes"]["label"] for element in form["body"])


def test_citation_is_that_of_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]


def test_the_changelog_has_this_version_below_what_is_unreleased():
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert PROJECT["version"] in versions


def find_reference(path):
    """The object that a reference in a docstring names; raises AttributeError where there is none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise AttributeError(path)


SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))
REFERENCE = re.compile(rf":\w+:`~?({PACKAGE}[\w.]*)`")


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT / PACKAGE)))
def test_references_in_docstrings_lead_somewhere(file):
    for reference in set(REFERENCE.findall(file.read_text())):
        find_reference(reference)


def test_a_reference_that_leads_nowhere_would_be_noticed():
    with pytest.raises(AttributeError):
        find_reference("lightning_fasttrain.loaders.no_such_name")


def between(text, name):
    """The lines of a table between two comments with this name."""
    return text.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0].splitlines()


def test_the_recipes_run(tmp_path):
    said = run_ranks("tests.support.run_recipes", DOCS / "recipes.md", tmp_path, log=tmp_path / "log", count=None)
    assert [line for line in said.splitlines() if line in read_sections(RECIPES)] == list(read_sections(RECIPES))
    assert len(read_sections(RECIPES)) == 7


def read_calls(text):
    """Each call of this package in the tables of a page, as ``ast.Call``."""
    for code in re.findall(r"`([^`\n]*\bft\.[^`\n]*)`", re.sub("```.*?```", "", text, flags=re.DOTALL)):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("ft."):
                yield node


def test_what_the_recipes_name_takes_what_they_pass():
    calls = list(read_calls(RECIPES))
    assert len(calls) > 50
    for call in calls:
        found = ft
        for name in ast.unparse(call.func).split(".")[1:]:
            found = getattr(found, name)
        given = [argument for argument in call.args if not isinstance(argument, ast.Constant) or argument.value != ...]
        inspect.signature(found).bind_partial(*given, **{keyword.arg: None for keyword in call.keywords})


def test_the_recipes_name_arguments_that_transformers_has():
    transformers = pytest.importorskip("transformers")
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    table = RECIPES.split("| TrainingArguments | here |")[1].split("\n\n")[0]
    named = []
    for row in table.splitlines()[2:]:
        first = row.split(" | ")[0]
        named += re.findall(r"`([a-z_]+)(?:=[^`]*)?`", first) if "TRL" not in first else []
    named = [name for name in named if name != "push_to_hub"]
    assert len(named) > 25
    assert [name for name in named if name not in known] == []


def test_the_memory_of_a_recipe_is_what_was_predicted(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    rows = json.loads((MEASURED / "recipe_memory_predicted.json").read_text())["rows"]
    assert between(RECIPES, "memory")[2:] == importlib.import_module("recipe_memory").as_lines(rows)


@pytest.mark.benchmark
def test_the_memory_of_a_recipe_is_predicted_again(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    rows = json.loads((MEASURED / "recipe_memory_predicted.json").read_text())["rows"]
    for row in rows:
        found = importlib.import_module("recipe_memory").predict(str(tmp_path), row["techniques"])
        assert found == pytest.approx(row["peak_bytes"], rel=0.01)


def test_the_strategies_of_a_recipe_are_what_the_command_prints(monkeypatch, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained("llama-7b")
    _, command, *written, _ = between(RECIPES, "shard")
    assert main(command.removeprefix("$ fasttrain ").split()) == 0
    assert " ".join(written).split() == capsys.readouterr().out.split()


def test_the_comparison_on_a_cpu_is_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    names = ["against_cpu", *(f"against_{name}_cpu" for name in (
        "llama_fp32", "bert_bf16", "bert_fp32", "vit_bf16", "vit_fp32",
    ))]  # fmt: skip
    results = [json.loads((MEASURED / f"{name}.json").read_text()) for name in names]
    assert between(COMPARISON, "beside") == importlib.import_module("against").beside_rivals(results).splitlines()


def results_of(card):
    lines = map(json.loads, (MEASURED / card / "lines.jsonl").read_text().splitlines())
    return {line["piece"]: line["result"] for line in lines}


def rows_of_gpus():
    """The rows of the table of comparison.md: what, side, speed, memory."""
    for piece, side in (
        ("lightning", "Lightning's Trainer"),
        ("ours-fast", "ours, fast"),
        ("ours-lean-in-one", "ours, lean"),
    ):
        row = results_of("h200")[f"gpt2 {piece} 1"]
        yield (
            "GPT-2 124M, H200",
            side,
            f"{statistics.median(row['step_ms_all']):.1f} ms/step",
            f"{row['peak_mib'] / 1024:.2f} GiB",
        )
    for piece, side in (
        ("peft + transformers", "PEFT in Hugging Face's Trainer"),
        ("ours + FusedLossHead", "ours, with `FusedLossHead`"),
    ):
        row = results_of("h200")[f"qlora {piece}"]
        yield "QLoRA of a Llama of 8B, H200", side, f"{row['tokens_per_s']:,.0f} tokens/s", f"{row['peak_gib']:.2f} GiB"
    sides = {
        "compiled": "`torch.compile` of plain",
        "chunked-compiled": "ours, compiled",
        "chunked": "ours",
        "liger": "Liger",
    }
    rows = {row["way"]: row for row in results_of("h100")["chunked loss"]["rows"]}
    for way, side in sides.items():
        yield "head and loss, H100", side, f"{rows[way]['step_ms']:.0f} ms", f"{rows[way]['added_mib']:,.0f} MiB"


def test_the_comparison_on_a_gpu_is_what_was_measured():
    assert between(COMPARISON, "gpu")[2:] == [f"| {' | '.join(row)} |" for row in rows_of_gpus()]


def test_each_note_of_the_comparison_is_referred_to_and_has_a_source():
    table, notes = COMPARISON.split("## Figures on a CPU")[0], COMPARISON.split("## Notes\n")[1]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", notes, flags=re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {int(number) for number in re.findall(r"\[(\d+)\]\(#notes\)", table)} == set(numbers)
    for note in re.findall(r"^\d+\. .*$", notes, flags=re.MULTILINE):
        assert "](https://" in note or "`" in note
