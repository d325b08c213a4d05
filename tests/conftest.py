"""Shared fixtures: every test starts from the same seed, leaves no global switch changed and reaches no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: several run at once, on few cores

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)  # small tensors: threads only get in each other's way


@pytest.fixture(autouse=True)
def _same_seed():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_global_changed():
    before = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    yield
    after = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    assert after == before


@pytest.fixture(autouse=True)
def _nothing_distributed_stays():
    """Lightning and DeepSpeed leave process groups, ranks and ports, which whatever is started later would believe."""
    grouped, environment = dist.is_initialized(), dict(os.environ)
    yield
    if dist.is_initialized() and not grouped:
        dist.destroy_process_group()
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
