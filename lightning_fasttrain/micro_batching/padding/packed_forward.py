"""Run the forward of a block on the tokens of a padded batch alone."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from lightning_fasttrain.core.batch.leaves import list_tensors, walk_leaves
from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.wrapped_forward import Undo, WrappedForward, wrapper_on

_HALF = (torch.bfloat16, torch.float16)
# Functions that change the type or the shape of a mask, not its values, as models call them before the attention.
_TYPES = ("to", "type", "type_as", "double", "float", "half", "bfloat16", "contiguous", "detach", "cuda")
_KEPT = frozenset([*_TYPES, "view", "reshape", "expand", "unsqueeze"])
_READ_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Documents:
    """Rows of a padded batch, as the documents of one packed row.

    Attributes:
        size: rows and length of the padded batch.
        index: the places of the tokens in the flattened batch, of shape (tokens,).
        lengths: number of tokens of each row.
        offsets: the first token of each document, and the end of the last one, on the device: shape (rows + 1,).
        sees: the tokens of its document that a token sees: ``"all"``, ``"earlier"`` ones and itself, or those that the
            ``"mask"`` shows.
    """

    size: tuple[int, int]
    index: Tensor
    lengths: list[int]
    offsets: Tensor
    sees: str

    @property
    def tokens(self) -> int:
        return self.index.shape[0]

    def shape_of(self, shape: torch.Size) -> torch.Size:
        """Return the shape that a mask of the padded batch has for the packed row."""
        packed = [1, *shape[1:]]
        for axis, size in enumerate(packed):
            if axis > 0 and size == self.size[1]:
                packed[axis] = self.tokens
        return torch.Size(packed)

    def pack(self, x: Tensor) -> Tensor:
        """Map a padded tensor of shape (rows or 1, length, ...) to its tokens, of shape (1, tokens, ...)."""
        return x.expand(*self.size, *x.shape[2:]).flatten(0, 1).index_select(0, self.index)[None]

    def pad(self, x: Tensor) -> Tensor:
        """Map tokens of shape (1, tokens, ...) to a padded tensor of shape (rows, length, ...), with zeros between."""
        rows, length = self.size
        padded = x.new_zeros(rows * length, *x.shape[2:])
        return padded.index_copy(0, self.index, x[0]).unflatten(0, self.size)


@torch.no_grad()
def read_documents(mask: Tensor) -> Documents | None:
    """Read from the mask of an attention where the rows of a batch have tokens; None where no row has padding.

    A token is padding if none sees it. The host waits once for the device.

    Args:
        mask: shape (rows, heads or 1, length or 1, length), with True or 0 where a token sees another one, and False
            or the lowest value where it does not, as for ``F.scaled_dot_product_attention``; or (rows, length), with
            True or the lowest value at padding, as the ``key_padding_mask`` of ``nn.MultiheadAttention``.

    Example:
        >>> mask = torch.tensor([[True, True, False], [True, True, True]])[:, None, None]
        >>> documents = read_documents(mask)
        >>> documents.lengths, documents.sees, documents.index.tolist()
        ([2, 3], 'all', [0, 1, 3, 4, 5])
    """
    if mask.ndim == 2:
        mask = (~mask if mask.dtype == torch.bool else mask)[:, None, None]
    sees, has_values = mask, torch.zeros((), dtype=torch.bool, device=mask.device)
    if mask.dtype != torch.bool:
        sees = mask > torch.finfo(mask.dtype).min / 2
        has_values = (sees & (mask != 0)).any()
    is_token = sees.any(2).any(1)
    is_token |= ~is_token.any(1, keepdim=True)  # a row without tokens stays as it is
    both = is_token[:, None, :, None] & is_token[:, None, None]
    among = sees & both
    earlier = both & torch.ones_like(both[0, 0]).tril()
    answers = torch.stack([(among == both).all(), (among == earlier).all(), has_values])
    counts = is_token.sum(1)
    *lengths, sees_all, sees_earlier, biased = torch.cat([counts, answers]).tolist()
    if sum(lengths) in (0, is_token.numel()):
        return None
    kind = "mask"
    if not biased and (sees_all or sees_earlier):
        kind = "all" if sees_all else "earlier"
    index = torch.nonzero_static(is_token.flatten(), size=sum(lengths))[:, 0]
    return Documents((mask.shape[0], mask.shape[-1]), index, lengths, F.pad(counts.cumsum(0), (1, 0)).int(), kind)


class DocumentMask(Tensor):
    """The mask that the blocks of a model get for a packed row, so that their attention keeps documents apart.

    Models pass masks on to ``F.scaled_dot_product_attention`` as they are, cut to the number of keys, or in another
    shape. Whatever else is computed from one raises an error. Its own shape is that of the mask of the packed row.
    """

    documents: Documents

    @classmethod
    def of(cls, documents: Documents, mask: Tensor) -> "DocumentMask":
        """Return the mask of a padded batch in this class."""
        if mask.ndim == 2 and mask.dtype == torch.bool:  # nn.MultiheadAttention would make numbers of it
            mask = torch.zeros_like(mask, dtype=torch.float32)
        made = mask.as_subclass(cls)
        made.documents = documents
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention:
            return attend(*args, **kwargs)
        if name in _KEPT or (name == "__getitem__" and _keeps_all(args[0], args[1])):
            return args[0]
        if func == _READ_SHAPE:  # bound anew at each call
            return args[0].documents.shape_of(super().__torch_function__(func, types, args))
        with suppress(RuntimeError):  # of shapes that differ, since the mask is that of the padded batch
            result = super().__torch_function__(func, types, args, kwargs)
            if not isinstance(result, Tensor) or name == "__get__":
                return result
        why = "its attention computes with the mask of the padded batch"
        way_out = "Load the model with attn_implementation='sdpa', or use MicroBatching(n), which trims padding"
        raise ValueError(explain(f"a block without padding, at {name or func}", why, way_out))


def _keeps_all(mask: DocumentMask, index: object) -> bool:
    """Whether an index keeps a whole mask, as that to the number of keys does."""
    for place in index if isinstance(index, tuple) else (index,):
        is_whole = isinstance(place, slice) and place.start in (None, 0) and place.step is None
        if place is not Ellipsis and not (is_whole and (place.stop is None or place.stop >= mask.documents.tokens)):
            return False
    return True


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: DocumentMask,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention of a packed row; arguments are those of ``F.scaled_dot_product_attention``.

    In half precision on CUDA one kernel runs all documents, if tokens see all or all earlier ones of their document.
    Elsewhere each document runs by itself.

    Raises:
        ValueError: queries or keys are not those of the packed row, as in attention to another sequence.
    """
    documents = attn_mask.documents
    if {query.shape[-2], key.shape[-2]} != {documents.tokens}:
        why = f"queries have {query.shape[-2]} tokens and keys {key.shape[-2]}, but the row has {documents.tokens}"
        raise ValueError(explain("attention without padding", why, "Use MicroBatching(n), which trims padding"))
    if query.is_cuda and query.dtype in _HALF and documents.sees != "mask" and not dropout_p:
        return _attend_in_one_kernel(documents, query, key, value, scale)
    attended: list[Tensor] = []
    start = 0
    for row, length in enumerate(documents.lengths):
        q, k, v = (x.narrow(-2, start, length) for x in (query, key, value))
        mask = _mask_of(attn_mask, row, documents.index[start : start + length], q.dtype)
        causal = documents.sees == "earlier"
        how = {"dropout_p": dropout_p, "is_causal": causal, "scale": scale, "enable_gqa": enable_gqa}
        if length > 0:
            attended.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **how))
        start += length
    return torch.cat(attended, -2)


def _attend_in_one_kernel(
    documents: Documents, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # grouped queries, which not every version of the kernel has
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    longest, offsets = max(documents.lengths), documents.offsets
    window = (-1, 0) if documents.sees == "earlier" else (-1, -1)
    out = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scale, window_size=window)
    return out.transpose(0, 1)[None]


def _mask_of(mask: DocumentMask, row: int, places: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the mask between the tokens of one row: shape (1, heads or 1, tokens or 1, tokens); None for a plain one.

    Args:
        mask: the mask of the padded batch.
        row: the row.
        places: the places of its tokens in the flattened batch.
        dtype: that of the queries, in which values are added.
    """
    if mask.documents.sees != "mask":
        return None
    places = places - row * mask.documents.size[1]
    among = mask.as_subclass(Tensor)[row : row + 1].index_select(-1, places)
    if among.shape[-2] > 1:
        among = among.index_select(-2, places)
    if among.dtype == torch.bool:
        return among
    return among.to(dtype)


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
