"""The switch of cuDNN's benchmark is on for a run, and is restored."""

import pytest
import torch
from torch import nn

import lightning_fasttrain as ft
from lightning_fasttrain.core.messages import say_once
from lightning_fasttrain.model import CudnnBenchmark, cudnn_benchmark_
from tests.support.nets import TinyLM, fit, heard, lm_batches


@pytest.mark.parametrize("before", [True, False])
def test_the_setting_is_restored_also_after_an_error(before):
    with torch.backends.cudnn.flags(enabled=None, benchmark=before, deterministic=None, allow_tf32=None):
        with ft.apply(nn.Linear(1, 1), [CudnnBenchmark()]):
            assert torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark is before

        class Fails(TinyLM):
            def training_step(self, batch, batch_idx):
                raise ZeroDivisionError(torch.backends.cudnn.benchmark)

        with pytest.raises(ZeroDivisionError, match="True"):
            fit(Fails(), lm_batches(1), [CudnnBenchmark()])
        assert torch.backends.cudnn.benchmark is before


@pytest.mark.skipif(torch.cuda.is_available(), reason="it has an effect here")
def test_without_cuda_it_says_so_before_and_after():
    say_once.cache_clear()
    with heard() as said:
        net = fit(TinyLM(), lm_batches(1), [CudnnBenchmark()])
    assert any("CudnnBenchmark has no effect: there is no CUDA device here" in line for line in said)
    assert CudnnBenchmark().outcome(net).startswith("had no effect: there is no CUDA device")


def test_beside_deterministic_algorithms_it_is_refused():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="cudnn_benchmark_: kernels that are chosen by time may differ"):
            cudnn_benchmark_()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch.backends.cudnn.benchmark
