"""Every layer class × adapter kind × form of target × base, and the round trips that each combination must survive."""

import argparse
import collections
import copy
import datetime
import gc
import itertools
import json
import logging
import pickle
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import lightning as L
import peft
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_fasttrain.core.machine import hardware, versions
from lightning_fasttrain.finetune import (
    adapter_names,
    add_adapter_,
    load_adapter_,
    merge_adapters_,
    quantize_base_,
    save_adapter,
    unmerge_adapters_,
)
from lightning_fasttrain.finetune.adapters.adapter_checkpoints import trained_state

WIDTH = 64  # rows of whole blocks, which bitsandbytes multiplies by itself when they are in 4 bits


class Experts(nn.Module):
    """Multiplies with a stack of weights."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 8)

    def forward(self, x):
        return sum(x @ weight for weight in self.stack)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x, need_weights=False)[0]


class Convolution(nn.Module):
    """A convolution over the width, of one to three axes."""

    def __init__(self, axes):
        super().__init__()
        self.conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](4, 4, 3, padding=1)
        self.axes = axes

    def forward(self, x):
        shape = (x.shape[0], 4, *(4,) * self.axes)
        wide = torch.zeros(shape, dtype=x.dtype).flatten(1)
        length = min(wide.shape[1], x[0].numel())
        wide[:, :length] = x.flatten(1)[:, :length]
        return x + self.conv(wide.view(shape)).mean()


# The part of the network between two linear layers: its builder, and the name of the layer to adapt.
LAYERS = {
    "Linear": (lambda: nn.Linear(WIDTH, WIDTH), "part"),
    "Linear without bias": (lambda: nn.Linear(WIDTH, WIDTH, bias=False), "part"),
    "Conv1D": (lambda: Conv1D(WIDTH, WIDTH), "part"),
    "Conv1d": (lambda: Convolution(1), "part.conv"),
    "Conv2d": (lambda: Convolution(2), "part.conv"),
    "Conv3d": (lambda: Convolution(3), "part.conv"),
    "MultiheadAttention": (Attention, "part.mha"),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), "part"),
    "Embedding": (lambda: nn.Identity(), "embed"),
    "experts": (Experts, "part"),
}
KINDS = {
    "lora": lambda: peft.LoraConfig(r=2, lora_alpha=3),
    "rslora": lambda: peft.LoraConfig(r=2, use_rslora=True),
    "dora": lambda: peft.LoraConfig(r=2, use_dora=True),
    "pissa": lambda: peft.LoraConfig(r=2, init_lora_weights="pissa"),
    "bias": lambda: peft.LoraConfig(r=2, bias="lora_only"),
    "ia3": lambda: peft.IA3Config(feedforward_modules=[]),
    "adalora": lambda: peft.AdaLoraConfig(init_r=2, target_r=1, total_step=10),
    "loha": lambda: peft.LoHaConfig(r=2),
    "lokr": lambda: peft.LoKrConfig(r=2),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4),
    "vera": lambda: peft.VeraConfig(r=2),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=10),
    "hra": lambda: peft.HRAConfig(r=2),
    "ln": lambda: peft.LNTuningConfig(),
    "shira": lambda: peft.ShiraConfig(r=2),
    "miss": lambda: peft.MissConfig(r=2),
    "randlora": lambda: peft.RandLoraConfig(r=2),
    "c3a": lambda: peft.C3AConfig(block_size=8),
    "road": lambda: peft.RoadConfig(group_size=8),
    "waveft": lambda: peft.WaveFTConfig(n_frequency=10),
}
FORMS = ("name", "list", "expression", "class", "all-linear", "PEFT's list", "PEFT's expression", "parameters", "head")
BASES = ("float32", "bfloat16", "nf4", "int8")


class Case(NamedTuple):
    layer: str
    kind: str
    form: str
    base: str

    def __str__(self):
        return " · ".join(self)


def every_case():
    """All combinations that differ: only experts have parameters to name, and no other form reaches them."""
    for case in itertools.starmap(Case, itertools.product(LAYERS, KINDS, FORMS, BASES)):
        if (case.layer == "experts") == (case.form == "parameters"):
            yield case


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), LAYERS[layer][0](), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids):
        x = self.first(self.embed(ids))
        return self.head(torch.tanh(self.last(torch.tanh(x + self.part(x)))))


IDS = torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(1))


def base_of(case):
    torch.manual_seed(3)
    model = Net(case.layer)
    if case.base == "bfloat16":
        model.bfloat16()
    elif case.base != "float32":
        quantize_base_(model, kind=case.base)
    return model.eval()


def add(model, case):
    """Add the adapter of the case, its targets in the form of the case."""
    name = LAYERS[case.layer][1]
    layer = model.get_submodule(name)
    config, targets, more = KINDS[case.kind](), name, {}
    if case.form == "list":
        targets = [name, "first"]
    elif case.form == "expression":
        targets = re.compile(re.escape(name))
    elif case.form == "class":
        targets = type(layer)
    elif case.form == "all-linear":
        targets = "all-linear"
    elif case.form == "PEFT's list":
        config.target_modules, targets = {name}, None
    elif case.form == "PEFT's expression":
        config.target_modules, targets = f".*{re.escape(name)}", None
    elif case.form == "parameters":
        config.target_parameters, targets = ["part.stack"], None
    elif case.form == "head":
        more = {"train": ["head"]}
    add_adapter_(model, config, targets, **more)
    return model


def train(model):
    """Give everything that trains other values."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((0.1 * noise).to(parameter.dtype))
    return model


def output(model):
    with torch.no_grad():
        return model.eval()(IDS)


class Held(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model


def is_ours(error):
    """Whether an error says what, why and the way out, or is documented as a refusal."""
    return isinstance(error, ValueError | TypeError) and re.search(r": .*\. .*\.$", str(error), re.DOTALL)


def round_trips(case, folder):
    """Return what went wrong, by the name of the round trip; "refused" alone if it was refused when it was added."""
    base = base_of(case)
    plain = output(base)
    model = copy.deepcopy(base)
    try:
        add(model, case)
    except Exception as error:
        unchanged = torch.equal(output(model), plain)
        if is_ours(error) and unchanged:
            return {"refused": str(error)}
        return {"add": f"{error!r}" if unchanged else f"{error!r} left the model changed"}
    try:
        expected = output(train(model))
    except Exception as error:
        return {"forward": f"{error!r}"}
    wrong = {}
    if torch.equal(expected, plain):
        wrong["effect"] = "the adapter has none"

    def expect(trip, run):
        try:
            found = run()
        except Exception as error:
            if trip == "merge" and is_ours(error):
                return
            wrong[trip] = f"{type(error).__name__}: {str(error)[:300]}"
            return
        if found is not None and not torch.equal(found, expected):
            wrong[trip] = f"differs by {(found.float() - expected.float()).abs().max():.3g}"

    def load(source):
        again = copy.deepcopy(base)
        load_adapter_(again, source)
        return output(again)

    def merged_and_back():
        way = {"into": "dequantized"} if case.base in ("nf4", "int8") else {}
        merge_adapters_(model, **way)
        unmerge_adapters_(model)
        return output(model)

    def through_peft():
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder / "ours")
        found = output(theirs)
        theirs.save_pretrained(folder / "theirs", save_embedding_layers=False)
        return found

    def resumed(module, state):
        again = Held(add(copy.deepcopy(base), case))
        missing = again.load_state_dict(state, strict=False)
        assert not missing.unexpected_keys, missing
        return output(again.model)

    expect("save", lambda: save_adapter(model, folder / "ours") and None)
    torch.save(expected, folder / "expected.pt")
    (folder / "case").write_text(str(case))
    expect("load", lambda: load(folder / "ours"))
    # PEFT rounds the copies of LN tuning to the base's dtype when it loads them.
    in_peft = case.base == "float32" or (case.base == "bfloat16" and case.kind != "ln")
    if in_peft and "load" not in wrong:
        expect("to PEFT", through_peft)
        # PEFT adds RandLoRA's random bases to its file, which must be those of this model.
        if "to PEFT" not in wrong and case.kind != "randlora":
            expect("from PEFT", lambda: load(folder / "theirs"))
    expect("copy", lambda: output(copy.deepcopy(model)))
    expect("pickle", lambda: output(pickle.loads(pickle.dumps(model))))
    expect("resume", lambda: resumed(case, trained_state(Held(model))))
    expect("resume all", lambda: resumed(case, Held(model).state_dict()))
    expect("merge", merged_and_back)
    expect("after all", lambda: output(model))
    assert adapter_names(model) == ["default"]
    return wrong


def load_all(folder):
    """Load each adapter under ``folder`` as a fresh process does, and print the cases whose output differs."""
    for place in sorted(Path(folder).glob("*/case")):
        case = Case(*place.read_text().split(" · "))
        model = base_of(case)
        load_adapter_(model, place.parent / "ours")
        if not torch.equal(output(model), torch.load(place.parent / "expected.pt", weights_only=True)):
            print(case)
    print("loaded all")


def report(cases, folder, minutes):
    """Try the cases in this process, load them in a fresh one, and return what was found.

    Args:
        minutes: after which no further case is begun.
    """
    start, rows, wrong = time.monotonic(), collections.defaultdict(collections.Counter), {}
    for number, case in enumerate(cases):
        if time.monotonic() - start > 60 * minutes:
            break
        place = folder / str(number)
        place.mkdir()
        found = round_trips(case, place)
        was_added = "refused" not in found
        rows[case.layer].update(cases=1, added=int(was_added), wrong=int(was_added and bool(found)))
        if was_added and found:
            wrong[str(case)] = found
    again = subprocess.run([sys.executable, "-m", __spec__.name, folder], capture_output=True, text=True)
    return {
        "hardware": hardware(),
        "versions": {**versions(), "peft": peft.__version__},
        "command": shlex.join(["python", "-m", __spec__.name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "rows": {layer: dict(row) for layer, row in rows.items()},
        "wrong": wrong,
        "differs_in_a_fresh_process": again.stdout.splitlines()[:-1],
        "loaded_in_a_fresh_process": again.returncode == 0 and again.stdout.endswith("loaded all\n"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="load the adapters that another process has written here")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="how long cases are begun, in random order")
    parser.add_argument("--out", type=Path, help="try the cases, and write a JSON file of what was found")
    options = parser.parse_args()
    if options.folder:
        load_all(options.folder)
        return
    for noisy in ("lightning_fasttrain", "bitsandbytes"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Each adapter that is added looks for optimizers among all objects; those of imported packages are none.
    gc.freeze()
    cases = list(every_case())
    random.Random(35).shuffle(cases)
    with tempfile.TemporaryDirectory() as folder:
        found = report(cases, Path(folder), options.minutes)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
