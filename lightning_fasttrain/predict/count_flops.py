"""Count the floating-point operations of a training step."""

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.host.lightning import attached_trainer
from lightning_fasttrain.data.accumulate_gradients import loss_of
from lightning_fasttrain.predict.fake_model import Factory, fake_batch, fake_module
from lightning_fasttrain.predict.operators.data_dependent_values import AssumedNumbers
from lightning_fasttrain.predict.predict_memory import Loss, explaining_errors, forward_of


@check_arguments
def count_flops(module: nn.Module | Factory, batch: object, *, loss: Loss | None = None) -> int:
    """Count the floating-point operations of a plain forward and backward, without computing anything.

    Matrix products, convolutions and attention (causal attention counts as full) are counted, with two FLOPs per
    multiply-add. Recomputation by techniques is excluded: pass the model as it is before them. The result is therefore
    the count that "model FLOPs utilization" uses.

    Args:
        module: a function that builds the model, or the model, which is not changed.
        batch: one batch of the loader.
        loss: (module, batch) → loss, instead of ``training_step``.

    Raises:
        TypeError: no model, no loss, or a model that cannot be copied.
        ValueError: the code has shapes that depend on tensor values.

    Example:
        >>> import torch
        >>> count_flops(nn.Linear(10, 20), torch.zeros(5, 10), loss=lambda net, batch: net(batch).sum())
        4000

    Source:
        Chowdhery et al. 2022 (PaLM), appendix B, https://arxiv.org/abs/2204.02311; counted by torch's
        ``FlopCounterMode``.
    """
    mode, counter = FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False)
    # Nothing is drawn on CUDA, and asking for its state would initialize it.
    with isolate_rng(include_cuda=False), explaining_errors():
        net = fake_module(module, mode)
        forward = forward_of(net, loss, Precision())
        # Torch does not count the CPU kernel of attention, but does count its matrix products.
        with attached_trainer(net), mode, AssumedNumbers(truth=False), sdpa_kernel(SDPBackend.MATH), counter:
            loss_of(forward(fake_batch(batch, mode))).backward()
    return counter.get_total_flops()
