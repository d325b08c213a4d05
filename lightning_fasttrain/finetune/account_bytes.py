"""Account of the bytes of a model's tensors: quantised weights, adapters, embeddings, heads and the rest."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import ReportTable, list_some
from lightning_fasttrain.core.modules.heads import find_heads
from lightning_fasttrain.core.modules.select import base_of, group_by_reason
from lightning_fasttrain.finetune.adapters.add_adapter import adapter_parameters
from lightning_fasttrain.finetune.quantized.quantized_base import sort_out
from lightning_fasttrain.finetune.quantized.quantized_layer import in_8_bits, is_quantized, quantization_of
from lightning_fasttrain.finetune.selection.base_fingerprint import is_torchaos, prefix_of

_KINDS: tuple[str, ...] = ("4 bits", "8 bits", "matrices", "embeddings", "heads", "adapters", "vectors", "buffers")


@dataclass(frozen=True)
class ByteAccount:
    """The bytes of a model's tensors, each counted once; print it for a table.

    Args:
        kinds: name of each parameter and buffer, and of each tensor of a quantised weight → its kind: ``"4 bits"``,
            ``"8 bits"``, ``"matrices"`` in floating point, ``"embeddings"``, ``"heads"``, ``"adapters"``,
            ``"vectors"`` (norms and biases) or ``"buffers"``. A tensor that shares memory with
            an earlier one is not listed.
        nbytes: the same names → bytes.
        trained: bytes of the parameters that train.
        left: name of each floating-point matrix → why it is not quantised; empty for a model without quantised layers.
    """

    kinds: dict[str, str]
    nbytes: dict[str, int]
    trained: int
    left: dict[str, str]

    @property
    def total(self) -> int:
        """Total bytes of the model in memory."""
        return sum(self.nbytes.values())

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind that the model has."""
        sums = dict.fromkeys(_KINDS, 0)
        for name, kind in self.kinds.items():
            sums[kind] += self.nbytes[name]
        return {kind: nbytes for kind, nbytes in sums.items() if nbytes}

    def __str__(self) -> str:
        whole = max(self.total, 1)
        notes = [f"not quantised: {list_some(names)}: {reason}" for reason, names in group_by_reason(self.left).items()]
        table = ReportTable("", {"kind": "name", "MiB": "number", "share": "number"}, notes)
        for kind, nbytes in self.by_kind().items():
            table.add(kind, f"{nbytes / 2**20:,.2f}", f"{nbytes / whole:.1%}")
        table.add("all", f"{self.total / 2**20:,.2f}", "")
        table.add("trains", f"{self.trained / 2**20:,.2f}", "")
        return str(table)


@check_arguments
def account_bytes(model: nn.Module) -> ByteAccount:
    """Account for every byte of ``model`` by kind, including adapters and quantised weights.

    Args:
        model: any module.

    Returns:
        The account. Gradients and optimizer state of the parameters that train are not included: see
        :func:`~lightning_fasttrain.predict_memory`.

    Example:
        >>> import lightning_fasttrain as ft
        >>> net = nn.Sequential(nn.Embedding(64, 64), *[nn.Linear(64, 64) for _ in range(2)], nn.Linear(64, 9))
        >>> undo = ft.apply(net, [ft.QLoRA(rank=2)])
        >>> account = account_bytes(net)
        >>> account.by_kind()["adapters"], account.trained
        (2048, 2048)
        >>> print(account)
        kind         MiB  share
        ───────────────────────
        4 bits      0.01  23.2%
        embeddings  0.02  59.1%
        ...

    Source:
        Ours.
    """
    brought, heads = adapter_parameters(model), set(map(model.get_submodule, find_heads(model)))
    kinds: dict[str, str] = {}
    nbytes: dict[str, int] = {}
    trained, seen = 0, set[int]()
    for name, tensor, kind in _tensors(model, heads):
        # ``_cdata`` distinguishes storages on the meta device, which have no memory and a ``data_ptr()`` of 0.
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kinds[name] = "adapters" if name in brought else kind
            nbytes[name] = storage.nbytes()
            if tensor.requires_grad:
                trained += storage.nbytes()
    return ByteAccount(kinds, nbytes, trained, _find_left(model))


def _tensors(model: nn.Module, heads: set[nn.Module]) -> Iterator[tuple[str, Tensor, str]]:
    for prefix, module in model.named_modules():
        inside = prefix_of(prefix)
        parts: dict[str, Tensor] = {}
        if is_quantized(module):
            parts = quantization_of(module)
            kind = "4 bits"
            if in_8_bits(module):
                kind = "8 bits"
            for key, tensor in parts.items():
                yield f"{inside}{key}", tensor, kind
        for key, parameter in module.named_parameters(recurse=False):
            # torchao's tensor is a wrapper, and only its inner tensors take memory.
            if is_torchaos(parameter):
                inner: Any = parameter
                for part in inner.__tensor_flatten__()[0]:
                    yield f"{inside}{key}.{part}", getattr(inner, part), "8 bits"
            elif key not in parts:
                yield f"{inside}{key}", parameter, _kind_of(module, parameter, base_of(module) in heads)
        for key, buffer in module.named_buffers(recurse=False):
            yield f"{inside}{key}", buffer, "buffers"


def _kind_of(module: nn.Module, parameter: nn.Parameter, is_head: bool) -> str:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embeddings"
    if is_head:
        return "heads"
    if parameter.ndim > 1:
        return "matrices"
    return "vectors"


def _find_left(model: nn.Module) -> dict[str, str]:
    if not any(map(is_quantized, model.modules())):
        return {}
    found = sort_out(model, "nf4", ())
    could = dict.fromkeys((*found.layers, *found.stacks), "it was skipped, or added later")
    return {**could, **found.left}
