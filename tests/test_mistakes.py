"""Each mistake of ``mistakes.py`` is answered in words that help: what is wrong, why, and the way out."""

import re
import traceback

import lightning as L
import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from tests.mistakes import MISTAKES
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer


def make_mixin(techniques):
    return type("Net", (ft.FastTrainMixin, L.LightningModule), {"techniques": techniques})()


def names_for(folder):
    """The names that the code of a row uses; models are new for each."""
    batches, lm = lm_batches(1), TinyLM()

    def fit(callbacks, module=lm, **settings):
        trainer(callbacks, **settings).fit(module, as_loader(batches))

    return {
        **{"ft": ft, "L": L, "torch": torch, "nn": nn, "lm": lm, "batch": batches[0], "loader": as_loader(batches)},
        **{"net": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "adamw": torch.optim.AdamW, "folder": str(folder)},
        **{"fit": fit, "trainer": trainer, "mixin": make_mixin},
    }


@pytest.mark.parametrize("code", MISTAKES)
@pytest.mark.filterwarnings("default")
def test_a_mistake_is_answered_with_what_why_and_the_way_out(code, tmp_path):
    with pytest.raises(Exception) as caught:
        exec(code, names_for(tmp_path))
    message = str(caught.value)
    assert [word for word in MISTAKES[code] if word not in message] == [], message
    # A hint at another name is one sentence; all else has three parts.
    if not isinstance(caught.value, AttributeError):
        assert re.fullmatch(r".+?: .+\. .+\.", message, re.DOTALL), message
    raised_in = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert "lightning_fasttrain" in raised_in, raised_in
