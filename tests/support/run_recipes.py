"""Runs the Python of a page of recipes in this process, section by section.

``python -m tests.support.run_recipes page folder``: prints the heading of each section that ran.

The code before the first section belongs to all of them. A model of one block, written to the folder under the name
that the recipes load, stands for one of seven billion parameters, and other sizes are replaced too.
"""

import contextlib
import io
import os
import re
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MODEL = "llama-7b"
SMALLER = (  # what stands there, and what is run instead of it
    ("ft.CompileBlocks()", 'ft.CompileBlocks(backend="eager")'),
    ("devices=8", "devices=1"),
    ("(5, 31, 9, 12, 27, 8, 14, 30)", "(3, 12, 5, 7)"),
    ("torch.randn(3, 224, 224)", "torch.randn(3, 32, 32)"),
    ("start=112, full=224", "start=16, full=32"),
    (
        "ViTConfig(num_hidden_layers=12,",
        "ViTConfig(image_size=32, num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8,",
    ),
    ("every_n_train_steps=500", "every_n_train_steps=1"),
    ("L.Trainer(", "L.Trainer(enable_progress_bar=False, enable_model_summary=False, logger=False, "),
)


def read_sections(page):
    """The Python of each section that has some, with that of the page's beginning before it, by heading."""
    beginning, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    found = {}
    for section in sections:
        blocks = python_of(section)
        if blocks:
            found[section.partition("\n")[0]] = "\n".join([*python_of(beginning), *blocks])
    return found


def python_of(text):
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def read_smaller(page):
    for size, instead in SMALLER:
        assert size in page, f"the page has no {size!r}"
        page = page.replace(size, instead)
    return page


def main(path, folder):
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(Path(folder, MODEL))
    for number, (heading, code) in enumerate(read_sections(read_smaller(Path(path).read_text())).items()):
        own = Path(folder, str(number))
        own.mkdir()
        (own / MODEL).symlink_to(Path(folder, MODEL))
        os.chdir(own)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(code, heading, "exec"), {"__name__": "__main__"})
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        print(heading, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
