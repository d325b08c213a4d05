"""The card of each technique, and code on it that runs."""

import re
import signal
import subprocess
import sys
from dataclasses import replace

import peft
import pytest
import torch
import yaml

import lightning_fasttrain as ft
from docs.describe_techniques import describe
from lightning_fasttrain.cli.main import BAD_INPUT, main
from lightning_fasttrain.cli.technique_cards import _SYNONYMS, find_cards, plain_spelling, read_cards
from lightning_fasttrain.planner.candidates import known_techniques, public_path
from lightning_fasttrain.technique.declarations import Facts


def test_the_cards_on_file_are_those_of_the_classes():
    written = {card.name: card for card in read_cards()}
    described = {technique.__name__: describe(technique) for technique in known_techniques()}
    remedy = "write them anew: python docs/describe_techniques.py"
    assert list(written) == list(described), remedy
    for name, card in described.items():
        assert written[name] == card, remedy


def test_the_table_and_the_cards_are_printed_without_importing_torch():
    program = (
        "import sys; from lightning_fasttrain.cli.main import main; main(['techniques']); "
        "main(['techniques', 'MicroBatching']); assert not {'torch', 'lightning'} & sys.modules.keys()"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "\nMicroBatching  " in printed
    assert "MicroBatching: " in printed


@pytest.mark.parametrize("technique", list(known_techniques()), ids=lambda technique: technique.__name__)
def test_each_technique_has_a_card_whose_code_runs(technique, capsys):
    assert main(["techniques", technique.__name__]) == 0
    said = capsys.readouterr().out
    lines = {line[:11].strip(): line[11:] for line in said.splitlines()[2:] if line[:1].strip()}
    assert technique.when in " ".join(said.split())
    made = lines["Trainer"].removeprefix("L.Trainer(callbacks=[").removesuffix("])")
    if "teacher" not in made:  # a model, which only the docstring makes
        assert type(eval(made, {"ft": ft, "peft": peft, "signal": signal})) is technique
    if "YAML" in lines:
        spec = yaml.safe_load(lines["YAML"].removeprefix("trainer: "))["callbacks"][0]
        assert spec["class_path"] == f"lightning_fasttrain.{public_path(technique)}"
        assert type(technique(**spec.get("init_args", {}))) is technique


def test_a_card_names_both_sides_of_a_conflict_and_what_was_measured(capsys):
    assert main(["techniques", "MicroBatching"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"[×≈][\d.]+ ×0\.\d\d \(time, peak memory\) in the ladder, 2 CPU cores", said)
    assert "OptimizerInBackward: each gradient is used" in said
    assert main(["techniques", "ActivationOffload"]) == 0
    assert "CompileBlocks: CUDA graphs" in capsys.readouterr().out


@pytest.mark.parametrize("card", read_cards(), ids=lambda card: card.name)
def test_a_technique_is_found_by_any_spelling_of_its_name(card):
    in_words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", card.name)
    for spelled in (card.name, card.path, card.name.lower(), in_words, in_words.lower().replace(" ", "_")):
        assert find_cards(spelled) == [card], spelled


@pytest.mark.parametrize("word", [word for words in _SYNONYMS for word in words.split()])
def test_a_word_of_the_field_finds_techniques_and_is_no_name(word):
    assert plain_spelling(word) == word
    assert find_cards(word)
    assert word not in {plain_spelling(card.name) for card in read_cards()}


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("gradient accumulation", "MicroBatching"),
        ("Gradient-Checkpointing", "ActivationCheckpointing"),
        ("fp8", "LowPrecisionProducts"),
        ("ema", "WeightEMA"),
        ("out of memory", "MicroBatching"),
        ("clip", "FusedClipping"),  # a part of names
        ("virtual tokens", "PromptTuning"),  # only in descriptions
    ],
)
def test_words_find_the_technique_to_try_first(words, first, capsys):
    assert first in [card.name for card in find_cards(words)][:2]
    assert main(["techniques", "--for", words]) == 0
    said = capsys.readouterr().out
    assert main(["techniques", *words.split()]) == 0
    assert capsys.readouterr().out == said
    assert first in said


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("MicroBtaching", "Did you mean MicroBatching?"),
        ("zero", "ft.ZeROStrategy"),
        ("ddp", "ft.FSDP2Strategy"),
        ("xyzzy", "`fasttrain techniques` lists all"),
        ("", None),
    ],
)
def test_what_is_not_found_says_what_is_close_or_where_to_look(words, hint, capsys):
    assert main(["techniques", *words.split()]) == (0 if hint is None else BAD_INPUT)
    assert (hint or "") in capsys.readouterr().err


NOTHING = {"device": "cpu", "devices": 2, "compiler": False, "blocks": 0, "heads": 0, "trains": 1.0}


def test_what_cannot_act_says_so_and_the_rest_says_nothing():
    idle = {kind.__name__ for kind in known_techniques() if kind.why_not(Facts(**NOTHING))}
    assert idle == {
        *("DevicePrefetch", "ActivationCheckpointing", "ActivationOffload", "CompileBlocks", "GradualUnfreezing"),
        *("QuantizedBase", "FusedLossHead", "OptimizerInBackward", "MatmulPrecision", "LowPrecisionProducts"),
        *(
            "PaddingFree",
            "MixtureOfDepths",
            "StochasticDepth",
            "Upcycling",
            "CudnnBenchmark",
            "TiledMLP",
            "FrozenCache",
        ),
    }
    able = Facts("cuda", 2, True, blocks=4, heads=1, trains=0.5)
    assert {kind.__name__ for kind in known_techniques() if kind.why_not(able)} == {"OptimizerInBackward"}
    alone = replace(able, devices=1)
    assert {kind.__name__ for kind in known_techniques() if kind.why_not(alone)} == {"EvenEpochs", "GlobalBatch"}
    unknown = replace(Facts("cuda"), devices=2)  # what is not known rules nothing out
    assert not [kind for kind in known_techniques() if kind.why_not(unknown) and kind is not ft.OptimizerInBackward]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_card_says_that_there_is_nothing_to_do_here(capsys):
    assert main(["techniques", "DevicePrefetch", "--here"]) == 0
    assert "not here   batches are already on the CPU" in capsys.readouterr().out
