"""Run the forward of a block on the tokens of a padded batch alone."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_fasttrain.core.batch.leaves import list_tensors, walk_leaves
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, wrapper_on
from lightning_fasttrain.micro_batching.padding.document_attention import DocumentMask, Documents, read_documents


class SeenMasks:
    """Documents of the masks that are in use, so that each mask is read once, though all blocks get it.

    Copies of a model start with an empty one.

    Attributes:
        padded: number of tokens so far, with padding.
        tokens: number of tokens that ran.
    """

    def __init__(self) -> None:
        self._by_mask = WeakIdKeyDictionary()
        self.padded = self.tokens = 0

    def read(self, mask: Tensor) -> Documents | None:
        """Return the documents of a mask; None where no row has padding."""
        if mask not in self._by_mask:
            documents = self._by_mask[mask] = read_documents(mask)
            padded = mask.shape[0] * mask.shape[-1]
            self.padded += padded
            self.tokens += padded if documents is None else documents.tokens
        return self._by_mask[mask]

    def __deepcopy__(self, memo: dict[int, Any]) -> "SeenMasks":
        return SeenMasks()

    def __reduce__(self) -> Any:
        return SeenMasks, ()


class PackedForward(WrappedForward):
    """A block's forward on the tokens of a padded batch, as one row.

    Attributes:
        acts: whether it does; otherwise the block runs on the padded batch.
    """

    def __init__(self, module: nn.Module, seen: SeenMasks) -> None:
        super().__init__(module)
        self.seen = seen
        self.acts = True
        self.names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, *args: object, **kwargs: object) -> Any:
        mask = self._find_mask(args, kwargs) if self.acts and self.module.training else None
        documents = None if mask is None else self.seen.read(mask)
        if documents is None or not _has_rows((args, kwargs), documents.size):
            return self.inner(*args, **kwargs)
        self.ran = True
        rows, length = documents.size

        def pack(leaf: Any, path: str) -> Any:
            if leaf is mask:
                return DocumentMask.of(documents, leaf)
            if isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[0] in (1, rows) and leaf.shape[1] == length:
                return documents.pack(leaf)
            return leaf

        def pad(leaf: object, path: str) -> Any:
            if isinstance(leaf, Tensor) and leaf.shape[:2] == (1, documents.tokens):
                return documents.pad(leaf)
            return leaf

        args, kwargs = walk_leaves((args, kwargs), pack, "input")
        return walk_leaves(self.inner(*args, **kwargs), pad, "output")

    def _find_mask(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor | None:
        """Return the mask of the block's attention; None where it has none, or attends to another sequence, too."""
        masks: list[tuple[str, Tensor]] = []
        for name, value in [*zip(self.names, args, strict=False), *kwargs.items()]:
            if name.startswith(("encoder", "memory")) and value is not None:
                return None
            if "mask" not in name or not isinstance(value, Tensor):
                continue
            if value.dtype == torch.bool or value.is_floating_point():
                masks.append((name, value))
        # Of a causal mask beside one of padding, blocks make a third one.
        if len({id(mask) for _, mask in masks}) != 1:
            return None
        name, mask = masks[-1]
        return mask if _is_of_attention(name, mask) else None


def _is_of_attention(name: str, mask: Tensor) -> bool:
    """Whether a mask is one of those that ``read_documents`` reads; others of two axes may mean the opposite."""
    is_of_keys = mask.ndim == 2 and name.endswith("key_padding_mask")
    return is_of_keys or (mask.ndim == 4 and mask.shape[2] in (1, mask.shape[3]))


def _has_rows(arguments: object, size: tuple[int, int]) -> bool:
    """Whether a block gets features of so many rows and of this length, so that its mask is not shared by all rows."""
    for leaf in list_tensors(arguments, "input").values():
        if leaf.ndim == 3 and leaf.is_floating_point() and tuple(leaf.shape[:2]) == size:
            return True
    return False


@check_arguments
def remove_padding_(model: nn.Module, blocks: Blocks | None = None) -> dict[str, Undo]:
    """Run the blocks of a model on the tokens of a batch alone, in place; the rest of the model sees the padded batch.

    In training, each block gets the tokens of all rows as one row of shape (1, tokens, ...), and its output is padded
    again, with zeros. Positions, which are added or computed before the blocks, are those of the padded batch, on
    whichever side it is padded. In the attention, each row's tokens see one another as the mask allows. So the loss and
    head see what they would, and need no other labels. It is exact if nothing but a block's attention connects tokens,
    and the loss ignores the outputs at padding; :func:`check_padding_free` tries that. Dropout draws other masks.

    The attention of the blocks must be ``F.scaled_dot_product_attention`` with a mask of shape (rows, 1, length or 1,
    length) that the block gets as an argument with "mask" in its name, as in Hugging Face's models with
    ``attn_implementation="sdpa"``, or ``nn.MultiheadAttention`` with a ``key_padding_mask`` alone, as in a
    ``nn.TransformerEncoder``. Blocks without such a mask run as before, and so do those that attend to an encoder's
    output.

    Args:
        model: any module.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.

    Returns:
        Qualified name of each block → how to undo it.

    Raises:
        ValueError: no blocks were found; in a forward: the attention computes with its mask itself.

    Example:
        >>> layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(2)])
        >>> list(remove_padding_(layers))
        ['0', '1']

    Source:
        Zeng et al. 2022, "Boosting Distributed Training Performance of the Unpadded BERT Model",
        https://arxiv.org/abs/2208.08124; here as surgery on any model's blocks. On CUDA in half precision, the
        attention is ``torch.nn.attention.varlen``.
    """
    seen = SeenMasks()
    undos: dict[str, Undo] = {}
    for name, block in find_blocks(model, blocks).items():
        if not wrapper_on(block, PackedForward):
            undos[name] = PackedForward(block, seen).install()
    return undos
