"""Files of the package that a call enters: what a reader must open to follow it.

``python -m tests.support.entered_files`` prints them. Each run has a process of its own, so that neither caches nor the
order of the runs change what is counted.
"""

import importlib
import inspect
import io
import json
import os
import pkgutil
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_fasttrain as ft
from tests.support.nets import TinyLM, as_loader, lm_batches, trainer

PACKAGE = Path(ft.__file__).parent
ENTERED = "entered.json"


def entered_by(run: Callable[[], object]) -> Counter[str]:
    """The number of functions that were called in each file of the package, in all threads."""
    entered = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        """Called once a call, and not for each of its lines: it returns no tracer of them."""
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function, not the body of a class or module
            entered.add(frame.f_code)

    before = sys.gettrace()
    threading.settrace(note)
    sys.settrace(note)
    try:
        run()
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]
    files = [Path(code.co_filename) for code in entered]
    inside = [str(file.relative_to(PACKAGE)) for file in files if file.is_relative_to(PACKAGE)]
    return Counter(name for name in inside if name != "core/package.py")  # it finds public names at their first use


def micro_batches(folder: Path) -> None:
    """A fit with ``MicroBatching``."""
    trainer([ft.MicroBatching(2)]).fit(TinyLM(), as_loader(lm_batches(3)))


def auto(folder: Path) -> None:
    """A fit with ``Auto``, which measures nothing in so short a run."""
    trainer([ft.Auto(memory_gib=2)], default_root_dir=folder).fit(TinyLM(), as_loader(lm_batches(3)))


def verify(folder: Path) -> None:
    """A proof of ``MicroBatching``."""
    ft.verify(TinyLM(), lm_batches(1)[0], [ft.MicroBatching(2)])


def save_and_resume(folder: Path) -> None:
    """A fit that is saved, and one that resumes from the checkpoint."""
    for steps in (2, 4):
        saves = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        callbacks: list[Any] = [ft.ExactResume(), ft.AtomicCheckpoints(), saves]
        run = trainer(callbacks, enable_checkpointing=True, max_steps=steps)
        run.fit(TinyLM(), as_loader(lm_batches(4)), ckpt_path=ft.newest_checkpoint(folder))


def adapter(folder: Path) -> None:
    """A fit with ``LoRA``."""
    trainer([ft.LoRA(rank=2)]).fit(TinyLM(), as_loader(lm_batches(3)))


RUNS = {"MicroBatching": micro_batches, "Auto": auto, "verify": verify, "resume": save_and_resume, "LoRA": adapter}


def import_everything() -> None:
    """Import what the runs import, except commands: an import calls functions too, which are no part of a run."""
    for module in pkgutil.walk_packages(ft.__path__, "lightning_fasttrain."):
        if not module.name.startswith("lightning_fasttrain.cli"):
            importlib.import_module(module.name)
    importlib.import_module("peft")


def fork(run: Callable[[Path], object], folder: Path) -> int:
    """Start a process that writes what the run enters, and return its number."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            entered = entered_by(lambda: run(folder))
        (folder / ENTERED).write_text(json.dumps(entered))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def main() -> None:
    """Print file → number of functions of each run, or of those that are named, as JSON."""
    names = sys.argv[1:] or list(RUNS)
    import_everything()
    with tempfile.TemporaryDirectory() as parent:
        folders = {name: Path(parent) / name for name in names}
        for folder in folders.values():
            folder.mkdir()
        children = [fork(RUNS[name], folder) for name, folder in folders.items()]
        for child in children:
            os.waitpid(child, 0)
        entered = {name: json.loads((folder / ENTERED).read_text()) for name, folder in folders.items()}
    print(json.dumps(entered, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
