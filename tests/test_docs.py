"""The documentation is complete and up to date; the site is built where the extra ``docs`` is installed."""

import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import lightning_fasttrain as ft
from docs.describe_techniques import conflicts_of, describe, markdown_card, markdown_page, source_of
from lightning_fasttrain.cli.technique_cards import read_cards
from lightning_fasttrain.core.package import PACKAGE, ROOMS, SUBPACKAGES
from lightning_fasttrain.planner.candidates import known_techniques, public_path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
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


YAML = ["mkdocs.yml", "CITATION.cff", ".pre-commit-config.yaml", *(f".github/ISSUE_TEMPLATE/{name}.yml" for name in (
    "bug_report", "technique_request", "config",
))]  # fmt: skip


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
