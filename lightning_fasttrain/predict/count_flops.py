"""How much arithmetic a training step is."""

from typing import Any

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_fasttrain.data.accumulate_gradients import loss_of
from lightning_fasttrain.predict.data_dependent_values import AssumedNumbers
from lightning_fasttrain.predict.fake_model import Factory, fake_batch, fake_module
from lightning_fasttrain.predict.predict_memory import Loss, explaining_errors, forward_of


def count_flops(module: nn.Module | Factory, batch: Any, *, loss: Loss | None = None) -> int:
    """Count the floating-point operations of a plain forward and backward, without computing anything.

    Counted are matrix products, convolutions and attention (a causal one as if it were not), a multiplication and an
    addition as two. What techniques compute once more is no progress and not in it: give the model as it is before
    them. So this is what "model FLOPs utilization" counts.

    Args:
        module: what builds the model, or the model, which is left as it is.
        batch: one batch, as the loader gives it.
        loss: (module, batch) → loss, instead of ``training_step``.

    Raises:
        TypeError: no model, no loss, or a model that cannot be copied.
        ValueError: code whose shapes depend on the values in tensors.

    Example:
        >>> import torch
        >>> count_flops(nn.Linear(10, 20), torch.zeros(5, 10), loss=lambda net, batch: net(batch).sum())
        4000

    Source:
        Chowdhery et al. 2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311; counted by torch's
        ``FlopCounterMode``.
    """
    mode, counter = FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False)
    with isolate_rng(include_cuda=False), explaining_errors():  # nothing on CUDA is drawn, and asking would start it
        net = fake_module(module, mode)
        forward = forward_of(net, loss, Precision())
        # Attention's own kernel for CPUs is one that torch does not count; as matrix products it is counted.
        with mode, AssumedNumbers(truth=False), sdpa_kernel(SDPBackend.MATH), counter:
            loss_of(forward(fake_batch(batch, mode))).backward()
    return counter.get_total_flops()
