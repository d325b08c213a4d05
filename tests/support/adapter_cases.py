"""Every layer class × adapter kind × form of target × base, and the round trips that each combination must survive."""

import argparse
import collections
import copy
import datetime
import gc
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

import lightning as L
import peft
import torch

from lightning_fasttrain.core.device import hardware, versions
from lightning_fasttrain.finetune import (
    Adapter,
    adapter_names,
    add_adapter_,
    load_adapter_,
    merge_adapters_,
    save_adapter,
    unmerge_adapters_,
)
from lightning_fasttrain.finetune.adapters.adapter_checkpoints import trained_state
from tests.support.adapter_nets import IDS, Case, adapter_of, base_of, every_case
from tests.support.nets import as_loader, trainer


def add(model, case):
    config, targets, trained = adapter_of(case, model)
    add_adapter_(model, config, targets, train=trained)
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

    def training_step(self, batch, batch_idx):
        return self.model(batch).float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class SaveFirstStep(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


def fit(case, base, callbacks=(), path=None):
    """Two steps of a Trainer with the adapter of the case; return what they have trained."""
    module = Held(copy.deepcopy(base))
    config, targets, trained = adapter_of(case, module, "model.")
    torch.manual_seed(7)
    one = trainer([Adapter(config, targets, train=trained), *callbacks])
    one.fit(module, as_loader([IDS, IDS]), ckpt_path=path, weights_only=True)
    return trained_state(module)


def is_ours(error):
    """Whether an error says what, why and the way out, or is documented as a refusal."""
    return isinstance(error, ValueError | TypeError) and re.search(r": .*\. .*\.$", str(error), re.DOTALL)


def round_trips(case, folder, in_trainer=True):
    """Return what went wrong, by the name of the round trip; "refused" alone if it was refused when it was added.

    Args:
        in_trainer: whether a Trainer resumes too, for which two steps are trained twice.
    """
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

    def resumed_by_trainer():
        path = folder / "step.ckpt"
        through = fit(case, base, [SaveFirstStep(path)])
        again = fit(case, base, path=path)
        first = torch.load(path, weights_only=True)["state_dict"]
        assert any(not torch.equal(through[name], first[name]) for name in through), "the second step has no effect"
        differ = [name for name in through if not torch.equal(through[name], again[name])]
        assert through.keys() == again.keys()
        assert differ == []

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
    if in_trainer:
        expect("resume in the Trainer", resumed_by_trainer)
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
    resumed = set()
    for number, case in enumerate(cases):
        if time.monotonic() - start > 60 * minutes:
            break
        place = folder / str(number)
        place.mkdir()
        group = case.layer, case.kind, case.base  # a Trainer resumes one form of each
        found = round_trips(case, place, group not in resumed)
        was_added = "refused" not in found
        rows[case.layer].update(cases=1, added=int(was_added), wrong=int(was_added and bool(found)))
        rows[case.layer]["resumed_in_a_trainer"] += int(was_added and group not in resumed)
        resumed.update([group] if was_added else [])
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
    for noisy in ("lightning_fasttrain", "lightning.pytorch", "bitsandbytes"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # in both processes, since it changes the order of sums
    # Each adapter that is added looks for optimizers among all objects; those of imported packages are none.
    gc.freeze()
    if options.folder:
        load_all(options.folder)
        return
    cases = list(every_case())
    random.Random(35).shuffle(cases)
    with tempfile.TemporaryDirectory() as folder:
        found = report(cases, Path(folder), options.minutes)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
