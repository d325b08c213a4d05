"""Each walk of docs/walks.md is run, and enters every file that the page lists."""

import re
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_fasttrain as ft
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer

PACKAGE = Path(ft.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "walks.md").read_text()


def listed_in(title):
    """The files of a walk, in the order of the page."""
    walk = next(section for section in PAGE.split("\n## ") if section.startswith(title))
    return re.findall(r"^\| `([\w/]+\.py)` \|", walk, flags=re.MULTILINE)


def entered_by(run):
    """Files of the package in which a function was called."""
    entered = set()

    def note(frame, event, arg):
        if event == "call":
            entered.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {str(Path(file).relative_to(PACKAGE)) for file in entered if Path(file).is_relative_to(PACKAGE)}


def micro_batches(folder):
    trainer([ft.MicroBatching(2)]).fit(TinyLM(), as_loader(lm_batches(3)))


def auto(folder):
    trainer([ft.Auto(memory_gib=2, seconds=1)], default_root_dir=folder).fit(TinyLM(), as_loader(lm_batches(3)))


def save_and_resume(folder):
    for steps in (2, 4):
        saves = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        callbacks = [ft.ExactResume(), ft.AtomicCheckpoints(), saves]
        run = trainer(callbacks, enable_checkpointing=True, max_steps=steps)
        run.fit(TinyLM(), as_loader(lm_batches(4)), ckpt_path=ft.newest_checkpoint(folder))


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
    "A model": auto,
    "A checkpoint": save_and_resume,
    "A weight": quantized_adapter,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", WALKS)
def test_a_walk_enters_every_file_that_the_page_lists(title, tmp_path):
    listed = listed_in(title)
    assert len(listed) >= 8
    assert set(listed) - entered_by(lambda: WALKS[title](tmp_path)) == set()


def test_the_page_has_no_other_walk():
    assert len(re.findall("^## ", PAGE, flags=re.MULTILINE)) == len(WALKS)
