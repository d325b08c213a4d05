"""A small network with one layer of each class that adapters accept, and every adapter that may be asked of it."""

import itertools
import re
from typing import NamedTuple

import peft
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_fasttrain.finetune import quantize_base_

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


def adapter_of(case, model, prefix=""):
    """Return the PEFT configuration of a case, its targets in the form of the case, and what else trains.

    Args:
        prefix: goes before names, if the model is a part of another one.
    """
    name = prefix + LAYERS[case.layer][1]
    config, targets, trained = KINDS[case.kind](), name, []
    if case.form == "list":
        targets = [name, f"{prefix}first"]
    elif case.form == "expression":
        targets = re.compile(re.escape(name))
    elif case.form == "class":
        targets = type(model.get_submodule(name))
    elif case.form == "all-linear":
        targets = "all-linear"
    elif case.form == "PEFT's list":
        config.target_modules, targets = {name}, None
    elif case.form == "PEFT's expression":
        config.target_modules, targets = f".*{re.escape(name)}", None
    elif case.form == "parameters":
        config.target_parameters, targets = [f"{prefix}part.stack"], None
    elif case.form == "head":
        trained = [f"{prefix}head"]
    return config, targets, trained
