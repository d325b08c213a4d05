"""Real text without a download: bytes from this machine, token ids, and windows of them."""

import itertools
import math
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_fasttrain.core.checks import one_of, require
from lightning_fasttrain.core.messages import explain

MIB = 2**20
# Enough for a BPE of fifty thousand tokens and for windows that rarely overlap; read in well under a second.
MAX_TEXT_MIB = 12
# Not the library's own prose: other packages, and test files that hold odd encodings and binary tables.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def read_text(path: str | Path | None = None, max_mib: float = MAX_TEXT_MIB) -> bytes:
    """Read the text to train on, the same bytes in the same order on every call.

    Args:
        path: a file, or a folder of which every text file is read in the order of their names. By default the
            Python source of the standard library of the interpreter that runs this.
        max_mib: stop after this many MiB.

    Returns:
        UTF-8 bytes.

    Raises:
        ValueError: the path is missing or cannot be read, or there is no text in it.

    Example:
        >>> b"def " in read_text(max_mib=0.1)
        True
    """
    limit = int(max_mib * MIB)
    if path is None:
        files = _sorted_files(Path(sysconfig.get_path("stdlib")), ".py")
    elif Path(path).is_dir():
        files = _sorted_files(Path(path))
    elif Path(path).exists():
        files = iter([Path(path)])
    else:
        raise ValueError(explain(f"text {path}", "no such file or folder", "Check the path, or leave --text out"))
    try:
        data = b"\n".join(_first_bytes(files, limit))[:limit]
    except OSError as error:
        raise ValueError(explain(f"text {path}", error.strerror or str(error), "Check its permissions")) from error
    if not data.strip():
        why = "it holds no text"
        raise ValueError(explain(f"text {path or 'of the standard library'}", why, "Give another with --text PATH"))
    return data


def _sorted_files(folder: Path, ending: str = "") -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _SKIPPED_FOLDERS:
                yield from _sorted_files(Path(entry.path), ending)
        elif entry.name.endswith(ending) and entry.is_file():
            yield Path(entry.path)


def _first_bytes(files: Iterator[Path], limit: int) -> Iterator[bytes]:
    taken = 0
    for file in files:
        if taken >= limit:
            return
        with file.open("rb") as stream:
            data = stream.read(limit - taken)
        if b"\0" in data:  # a binary file
            continue
        taken += len(data)
        yield data


def encode_text(data: bytes, tokens: str, vocabulary: int) -> np.ndarray:
    """Turn text into token ids.

    Args:
        data: UTF-8 bytes.
        tokens: ``"bytes"``: each byte is a token id; ``"words"``: the most frequent words, spaces and signs of ``data``
            are, and the last id is for all others; ``"bpe"``: a byte-pair encoding trained on ``data`` itself.
        vocabulary: the model's number of tokens; the encoding uses at most so many.

    Returns:
        Token ids, one-dimensional, uint8 or int32.

    Raises:
        ValueError: unknown ``tokens``, or a vocabulary smaller than the 256 bytes.
        ModuleNotFoundError: ``"bpe"`` without the library `tokenizers`.

    Example:
        >>> encode_text(b"abc", "bytes", 256).tolist()
        [97, 98, 99]
        >>> encode_text(b"to be or not to be", "words", 256)[:5].tolist()
        [1, 0, 2, 0, 3]

    Source:
        BPE: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, on bytes as in GPT-2; trained by `tokenizers`.
    """
    one_of("tokens", tokens, ("bytes", "words", "bpe"))
    if vocabulary < 256:
        raise ValueError(explain(f"vocabulary={vocabulary}", "a byte has 256 values", "Use vocabulary=256 or more"))
    if tokens == "bytes":
        return np.frombuffer(data, dtype=np.uint8)
    if tokens == "words":
        words = re.findall(rb"\w+|\s+|[^\w\s]", data)
        frequent = Counter(words).most_common(vocabulary - 1)
        ids = {word: number for number, (word, _) in enumerate(frequent)}
        return np.fromiter((ids.get(word, vocabulary - 1) for word in words), dtype=np.int32, count=len(words))
    lines = data.decode("utf-8", errors="replace").splitlines(keepends=True)
    bpe = require("tokenizers", extra="finetune").ByteLevelBPETokenizer()
    bpe.train_from_iterator(lines, vocab_size=vocabulary, min_frequency=2, show_progress=False)
    encoded = bpe.encode_batch(lines)
    return np.fromiter(itertools.chain.from_iterable(line.ids for line in encoded), dtype=np.int32)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of (inputs, targets): ``context`` tokens from a place drawn by ``seed``, and the same one token later.

    Args:
        tokens: token ids, one-dimensional.
        context: length of each window, T.
        count: how many windows.
        seed: draws the places; equal seeds give equal windows.
        padded: cut the windows to lengths that differ as those of texts do, log-normally, around a third of
            ``context``; the rest of ``inputs`` is 0, and of ``targets`` -100, which losses ignore.

    Raises:
        ValueError: fewer than ``context + 1`` tokens.

    Example:
        >>> inputs, targets = Windows(np.arange(100), context=4, count=2)[0]
        >>> bool((targets == inputs + 1).all()), inputs.shape, inputs.dtype
        (True, torch.Size([4]), torch.int64)
    """

    def __init__(self, tokens: np.ndarray, context: int, count: int, seed: int = 0, padded: bool = False) -> None:
        if len(tokens) <= context:
            why = f"one window is {context} tokens and their successors"
            way_out = f"Give a text of at least {context + 1} tokens"
            raise ValueError(explain(f"a text of {len(tokens)} tokens", why, way_out))
        self.tokens = tokens
        self.context = context
        drawn = torch.Generator().manual_seed(seed)
        # The highest start leaves room for the last target, one token after the window.
        self.starts = torch.randint(len(tokens) - context, (count,), generator=drawn).tolist()
        self.lengths = None
        if padded:
            drawn_lengths = torch.empty(count).log_normal_(math.log(context / 3), 0.6, generator=drawn)
            self.lengths = drawn_lengths.long().clamp(1, context).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self.starts[index]
        # A copy, since the tokens may lie in a file or in read-only bytes.
        window = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        inputs, targets = window[:-1], window[1:]
        if self.lengths is not None:
            # The targets are copied, as the two share the window.
            inputs, targets = inputs.clone(), targets.clone()
            inputs[self.lengths[index] :] = 0
            targets[self.lengths[index] :] = -100
        return inputs, targets


def check_enough(tokens: np.ndarray, batch: int, context: int) -> None:
    """Refuse a text that is shorter than one batch of windows.

    Raises:
        ValueError: fewer than ``batch · context + 1`` tokens.
    """
    needed = batch * context + 1
    if len(tokens) < needed:
        why = f"it is shorter than one batch of {batch} windows of {context} tokens, {needed:,} in all"
        raise ValueError(explain(f"a text of {len(tokens):,} tokens", why, "Give a longer text, or a smaller --batch"))


def batches(
    tokens: np.ndarray,
    context: int,
    batch: int,
    steps: int,
    seed: int = 0,
    pin_memory: bool = False,
    padded: bool = False,
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return a loader of ``steps`` batches (inputs, targets), each [batch, context], the same for the same ``seed``.

    With ``padded``, texts are of different lengths, as :class:`Windows` says.

    Raises:
        ValueError: the text is shorter than one batch.

    Example:
        >>> loader = batches(np.arange(1000), context=8, batch=4, steps=3)
        >>> [inputs.shape for inputs, targets in loader]
        [torch.Size([4, 8]), torch.Size([4, 8]), torch.Size([4, 8])]
    """
    check_enough(tokens, batch, context)
    return DataLoader(Windows(tokens, context, batch * steps, seed, padded), batch_size=batch, pin_memory=pin_memory)
