"""No wrong argument of a public name ends in a raw error from below, and none is accepted in silence."""

import random
import warnings

import pytest

from tests.support.wrong_arguments import find_cases, outcome, public_things, right_arguments

CASES = find_cases()
# Their examples import PEFT or write files.
SLOW = {path for path in public_things() if path.startswith("finetune.") and path.split(".")[1].islower()}
SAMPLE = random.Random(0).sample([case for case in CASES if case.path not in SLOW | {"finetune.Adapter"}], 600)


def find_unanswered(cases, folder, monkeypatch):
    monkeypatch.chdir(folder)
    unanswered = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the examples do
        for case in cases:
            how = outcome(public_things()[case.path], right_arguments(case.path), case.argument, case.value)
            if how != "refused":
                unanswered.append(f"{case}: {how}")
    return unanswered


def test_a_sample_of_wrong_arguments_is_refused(tmp_path, monkeypatch):
    assert find_unanswered(SAMPLE, tmp_path, monkeypatch) == []


@pytest.mark.benchmark
def test_every_wrong_argument_is_refused(tmp_path, monkeypatch):
    assert find_unanswered(CASES, tmp_path, monkeypatch) == []


def test_thousands_of_wrong_arguments_are_known():
    assert len(CASES) > 3000
    assert len({case.path for case in CASES}) > 120


def test_a_raw_error_and_an_acceptance_would_be_noticed():
    assert outcome(lambda n: 2 / n, {"n": 1}, "n", "4").startswith("TypeError: unsupported operand")
    assert outcome(lambda n: 2 / n, {"n": 1}, "n", -1) == "accepted"
