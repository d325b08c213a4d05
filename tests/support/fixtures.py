"""Shared fixtures: every test starts from the same seed, and leaves no global switch changed."""

import functools
import gc
import os
import random
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support import host_costs

torch.set_num_threads(1)  # small tensors: threads only get in each other's way
host_costs.spare()


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


_cuda = torch.backends.cuda
_MODES = (  # of a GPU: (what reads it, what sets it)
    (torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
)


@pytest.fixture(autouse=True)
def _modes_of_the_gpu_are_put_back(request):
    """A test that fails with a mode switched on must not take the later ones with it."""
    if "gpu" not in request.keywords:
        yield
        return
    torch.cuda.synchronize()  # an error of the device belongs to the test before
    before = [get() for get, _ in _MODES]
    yield
    for (_, put), mode in zip(_MODES, before, strict=True):
        put(mode)


_SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")  # of Lightning, which seeds each rank by them
_CURRENT_TEST = "PYTEST_CURRENT_TEST"  # with its phase


@pytest.fixture(autouse=True)
def _nothing_distributed_stays():
    """Lightning and DeepSpeed leave process groups, ranks and ports, which whatever is started later would believe."""
    grouped, environment = dist.is_initialized(), dict(os.environ)
    for seed in _SEEDS:  # by a fixture of several tests, perhaps
        environment.pop(seed, None)
    yield
    if dist.is_initialized() and not grouped:
        dist.destroy_process_group()
    environment[_CURRENT_TEST] = os.environ[_CURRENT_TEST]
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)


# The long ones first, since whatever begins last is what the other worker waits for; where ranks keep both cores busy,
# the other worker has those that mostly wait.
_FIRST = (
    *("test_zero.py", "test_hang_watch.py", "test_elastic.py", "test_tensor_parallel.py", "test_hang_watch_readers.py"),
    *("test_prove.py", "test_kill.py", "test_tune_command.py", "test_steady_ranks.py", "test_fsdp2.py"),
    *("trial/test_faults.py", "test_contracts.py", "test_notebooks.py", "test_ladder.py", "test_example_benchmarks.py"),
    *("test_examples.py", "test_failing_ranks.py", "test_compile_blocks.py", "test_distributed.py", "test_losses.py"),
    *("test_memory_budget.py", "test_make_plan.py", "test_exact_resume.py", "test_micro_batch_forward.py"),
    *("test_scale.py", "test_fitting.py"),
    "test_consolidate.py",  # reads what test_zero.py leaves
)


@functools.cache
def _turn_of(path):
    """The place of a file of tests among those that come first."""
    found = [turn for turn, name in enumerate(_FIRST) if path.as_posix().endswith(f"/{name}")]
    return found[0] if found else len(_FIRST)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session):
    """All is imported: nobody need look through it again, and processes that tests start begin from here."""
    gc.freeze()
    gc.enable()
    if "tests.support.ranks" in sys.modules:
        output = session.config.pluginmanager.getplugin("capturemanager")
        output.resume_global_capture()
        sys.modules["tests.support.ranks"].start_server()
        output.suspend_global_capture()
    return (yield)


class _Frozen:
    at = 0.0


def pytest_runtest_setup(item):
    """The garbage collector, and whoever asks it for all objects, need not look at half a million of imported ones."""
    if time.monotonic() - _Frozen.at > 1:
        gc.collect()
        gc.freeze()
        _Frozen.at = time.monotonic()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: _turn_of(item.path))
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
