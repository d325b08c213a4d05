"""Counts what a training step costs the host of a CUDA device: waits, allocations from the driver, kernel launches."""

import ctypes
import os
from contextlib import contextmanager

import lightning as L
import torch

STAND_IN = "FAKE_CUDA" in os.environ  # a driver that does nothing, and counts; the profiler does not work on it
_LAUNCHES = 9  # of its counts


class DeviceCalls(L.Callback):
    """Counts between the start and the end of one batch, in which any wait for the device is an error.

    Put it last: then it begins after the other callbacks' hooks of the start, and ends after those of the end.

    Attributes:
        launches: kernel launches of that step.
        allocations: segments that torch's allocator asked the driver for.
    """

    def __init__(self, batch_idx):
        self.batch_idx = batch_idx

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch_idx:
            self.counting = count_calls(self)
            self.counting.__enter__()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch_idx:
            self.counting.__exit__(None, None, None)


@contextmanager
def count_calls(found):
    allocations = torch.cuda.memory_stats()["num_device_alloc"]
    with count_launches(found):
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")  # not in a finally: a step that failed is not counted
    found.allocations = torch.cuda.memory_stats()["num_device_alloc"] - allocations


@contextmanager
def count_launches(found):
    if STAND_IN:
        counts = ctypes.CDLL("libcudart.so.13").fake_counts
        counts.restype = ctypes.POINTER(ctypes.c_long)
        before = counts()[_LAUNCHES]
        yield
        found.launches = counts()[_LAUNCHES] - before
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
    events = profile.key_averages()
    found.launches = sum(event.count for event in events if "LaunchKernel" in event.key)
