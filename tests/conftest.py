"""What every process of a test run needs, and no more: the one that only hands out tests imports no torch."""

import gc
import importlib
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: several run at once, on few cores
# pytest's worker processes are told the width of a terminal; reports are compared as in a file, with 120 columns.
os.environ.pop("COLUMNS", None)


def pytest_configure(config):
    if config.option.markexpr == "quick":  # an example in a docstring has no mark, and looking for them takes seconds
        config.args = [path for path in config.args if path != "lightning_fasttrain"]
    hands_out = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out:
        # Lightning's advice: few workers, no val_dataloader, no logger, existing folders; our runs are tiny on purpose.
        # It is not in pyproject.toml, since whoever reads it imports Lightning at once.
        advice = "lightning.fabric.utilities.warnings.PossibleUserWarning"
        config.addinivalue_line("filterwarnings", f"ignore::{advice}")
        gc.disable()  # until all is imported and collected
        config.pluginmanager.register(importlib.import_module("tests.support.fixtures"))


def pytest_ignore_collect(collection_path):
    """What tests import has no examples in its docstrings, and is imported where it is needed."""
    if collection_path.suffix == ".py" and not collection_path.name.startswith("test_"):
        return True
    return None
