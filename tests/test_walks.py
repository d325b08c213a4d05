"""Each walk of docs/walks.md enters every file that the page lists, and a call enters no more files than it did."""

import json
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_fasttrain as ft
from tests.support.entered_files import PACKAGE, RUNS, entered_by, import_everything, micro_batches, save_and_resume
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer
from tests.support.ranks import run_ranks

PAGE = (PACKAGE.parent / "docs" / "walks.md").read_text()


def listed_in(title):
    """The files of a walk, in the order of the page."""
    walk = next(section for section in PAGE.split("\n## ") if section.startswith(title))
    return re.findall(r"^\| `([\w/]+\.py)` \|", walk, flags=re.MULTILINE)


def measured_auto(folder):
    trainer([ft.Auto(memory_gib=2, seconds=1)], default_root_dir=folder).fit(TinyLM(), as_loader(lm_batches(3)))


def quantized_adapter(folder):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    model = ft.finetune.load_quantized(lambda: LlamaForCausalLM(config), folder / "base")
    ft.apply(model, [ft.LoRA(rank=2)])
    ids = torch.randint(64, (2, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    ft.finetune.export_model(model, folder / "merged", dtype=torch.float32)


WALKS = {
    "A batch": micro_batches,
    "A model": measured_auto,
    "A checkpoint": save_and_resume,
    "A weight": quantized_adapter,
}
# Subpackages of the techniques that a plan considers, of the steps that it runs, and of the strategies it compares.
LEFT_OUT = {
    "A model": (
        *("checkpoint/", "finetune/", "loaders/", "loss/", "micro_batching/", "model/", "optim/"),
        *("proof/", "strategy/", "trial/"),
        "memory/cuda_kernels.py",  # entered on a GPU
    )
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", WALKS)
def test_a_walk_enters_the_files_that_the_page_lists_and_no_others(title, tmp_path):
    import_everything()
    listed, entered = listed_in(title), set(entered_by(lambda: WALKS[title](tmp_path)))
    assert len(listed) >= 8
    assert set(listed) - entered == set()
    # What an earlier test has left, such as a hook on the steps of all optimizers, acts in a plain run too.
    entered -= set(entered_by(lambda: trainer([]).fit(TinyLM(), as_loader(lm_batches(1))))) - set(listed)
    left_out = ("core/", "technique/", *LEFT_OUT.get(title, ()))
    assert {file for file in entered if not file.startswith(left_out)} - set(listed) == set()


PLACES = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", (PACKAGE.parent / "CONTRIBUTING.md").read_text())


@pytest.mark.quick
def test_what_one_may_want_to_change_is_where_the_table_says():
    assert len(PLACES) >= 15
    for file, names in PLACES:
        defined = re.findall(r"^(?:def |class )?(\w+)", (PACKAGE / file).read_text(), flags=re.MULTILINE)
        assert set(re.findall(r"\w+", names)) - set(defined) == set(), file


def test_the_page_has_no_other_walk():
    assert len(re.findall("^## ", PAGE, flags=re.MULTILINE)) == len(WALKS)


# The most files that a call may enter today, and the number to come to.
MOST_FILES = {
    "MicroBatching": (34, 25),
    "Auto": (66, 50),
    "verify": (48, 40),
    "resume": (27, 22),
    "LoRA": (26, 20),
}


@pytest.mark.slow
def test_a_call_enters_no_more_files_than_it_did(tmp_path):
    """Who wants to understand a call opens each of them. Later work lowers the bounds to what it has reached."""
    printed = run_ranks("tests.support.entered_files", log=tmp_path / "log", count=None)
    entered = json.loads(printed[printed.index("{") :])
    print(f"\n{'call':<16}{'files':>6}{'functions':>11}{'bound':>7}{'goal':>6}")
    for name, (bound, goal) in MOST_FILES.items():
        print(f"{name:<16}{len(entered[name]):>6}{sum(entered[name].values()):>11}{bound:>7}{goal:>6}")
    assert entered.keys() == MOST_FILES.keys() == RUNS.keys()
    assert {name: len(files) for name, files in entered.items() if len(files) > MOST_FILES[name][0]} == {}
