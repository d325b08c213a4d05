"""Add up the time of a step's operators by kind: products, attention, logits, dropout and others."""

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fasttrain.core.device import DeviceTimer

LOGITS, PRODUCTS, ATTENTION, REST = "logits and loss", "matrix products", "attention", "element-wise and other"
# Part of an operator's name → its kind; the first that is found counts.
_KINDS = {
    "scaled_dot_product": ATTENTION,
    "efficient_attention": ATTENTION,
    "flash_attention": ATTENTION,
    "log_softmax": LOGITS,
    "nll_loss": LOGITS,
    "convolution": "convolutions",
    "mm": PRODUCTS,
    "mkldnn_linear": PRODUCTS,
    "_norm": "normalization",
    "dropout": "dropout",
    "bernoulli": "dropout",
    "embedding": "embeddings",
    "rnn": "recurrent layers",
    "lstm": "recurrent layers",
    "pool": "pooling",
    "gelu": "activation functions",
    "relu": "activation functions",
    "silu": "activation functions",
    "_to_copy": "copies and casts",
    "copy_": "copies and casts",
    "clone": "copies and casts",
    "cat": "copies and casts",
}
_FEWEST_CLASSES = 1024  # of a head whose products count as logits, as those of other layers may have its size
_WITHOUT_WORK = ("view", "transpose", "detach", "expand", "permute", "slice", "alias", "::t.", "squeeze")


class OperatorCosts:
    """Times each operator on its device, and adds the times up by kind."""

    def __init__(self, device: torch.device) -> None:
        self._timers: dict[tuple[str, tuple[int, ...]], DeviceTimer] = defaultdict(partial(DeviceTimer, device))
        self._logits = set[tuple[int, int]]()  # samples, classes

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and count its time."""
        name = str(func)
        kind = next((kind for part, kind in _KINDS.items() if part in name), REST)
        sizes: tuple[int, ...] = ()
        tensors = [one for one in args if isinstance(one, Tensor)]
        if kind == PRODUCTS and len(tensors) > 1:
            is_square = any(one.dim() > 2 and one.shape[-1] == one.shape[-2] for one in tensors)
            if is_square or (tensors[0].dim() > 2 and tensors[0].shape[-2] == tensors[-1].shape[-1]):
                kind = ATTENTION  # scores, or their product with the values
            sizes = (*tensors[-2].shape, tensors[-1].shape[-1])
        elif "softmax" in name and kind == REST:
            kind = ATTENTION
        if any(part in name for part in _WITHOUT_WORK):
            return func(*args, **kwargs)
        timer = self._timers[kind, sizes]
        timer.start()
        result = func(*args, **kwargs)
        timer.stop()
        if name.startswith("aten._log_softmax.") and result.shape[-1] >= _FEWEST_CLASSES:
            classes = result.shape[-1]
            self._logits.add((result.numel() // classes, classes))
        return result

    def read(self) -> dict[str, float]:
        """Return the milliseconds by kind; products of the size of a head's classes count as logits."""
        found: dict[str, float] = defaultdict(float)
        for (kind, sizes), timer in self._timers.items():
            found[LOGITS if self._are_of_logits(sizes) else kind] += timer.ms()
        return dict(found)

    def _are_of_logits(self, sizes: tuple[int, ...]) -> bool:
        """Whether one of the sizes of a product is the number of classes; two, if there are as many samples."""
        return any(sizes.count(classes) > (samples == classes) for samples, classes in self._logits)
