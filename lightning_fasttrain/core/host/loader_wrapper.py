"""Base class of loader wrappers, which forwards unknown attributes; and a patch that wraps a run's training loaders.

Techniques of other subpackages wrap loaders, too; all of them keep the wrapped loader as ``inner``.
"""

import itertools
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import IterableDataset

from lightning_fasttrain.core.host.lightning import without_fabric
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch, undo_all


class WrappedLoader:
    """Forwards attribute reads and writes to ``inner``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        # Without an `inner`, as during unpickling, the line below would recurse endlessly.
        if name == "inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        own = name == "inner" or (name.startswith("_") and name != "_iterator")
        # Lightning sets worker_init_fn and _iterator, which the wrapped loader must see.
        object.__setattr__(self if own else self.inner, name, value)


def find_innermost(loader: object) -> Any:
    """Return the user's own loader, below all wrappers."""
    loader = without_fabric(loader)
    while "inner" in getattr(loader, "__dict__", {}):
        loader = without_fabric(loader.inner)
    return loader


def wrap_training_loaders(trainer: L.Trainer, wrap: Callable[[Any], object]) -> Undo:
    """Wrap a run's training loaders, but not its validation loaders, with ``wrap``; return how to undo it."""
    fit_loop, strategy = trainer.fit_loop, trainer.strategy
    setup_data, process = fit_loop.setup_data, strategy.process_dataloader
    # Validation loaders pass through process_dataloader as well, but outside of setup_data.
    taken: list[bool] = []

    def setting_up_data() -> None:
        taken.append(True)
        try:
            setup_data()
        finally:
            taken.clear()

    def process_dataloader(loader: object) -> object:
        return wrap(process(loader)) if taken else process(loader)

    restore_setup = patch(fit_loop, "setup_data", setting_up_data)
    return undo_all([restore_setup, patch(strategy, "process_dataloader", process_dataloader)])


def replace_training_loaders(trainer: L.Trainer, replace: Callable[[Any], object]) -> Undo:
    """Replace a run's training loaders before Lightning gives them a ``DistributedSampler``; return how to undo it."""
    connector = trainer._data_connector
    prepare = connector._prepare_dataloader

    def prepare_dataloader(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if mode == RunningStage.TRAINING:
            return replace(dataloader)
        return prepare(dataloader, shuffle=shuffle, mode=mode)

    return patch(connector, "_prepare_dataloader", prepare_dataloader)


def look_ahead_in_streams(trainer: L.Trainer) -> Undo:
    """Have Lightning find the last batch of a stream by reading one batch ahead, also where its dataset has a length.

    A stream may end before its length. Lightning reads ahead only without a length, and otherwise learns of the end
    when the last batch is trained.
    """
    fit_loop = trainer.fit_loop
    setup_data = fit_loop.setup_data

    def setting_up_data() -> None:
        before = fit_loop._data_fetcher
        setup_data()
        fetcher = fit_loop._data_fetcher
        if fetcher is before or not isinstance(fetcher, _PrefetchDataFetcher) or not _has_stream(fit_loop):
            return
        reset = fetcher.reset

        def reset_without_length() -> None:
            reset()
            if fetcher.length is not None:
                fetcher.length, fetcher.done = None, fetcher.length == 0

        patch(fetcher, "reset", reset_without_length)  # the fetcher lives as long as this run
        if fetcher.length is not None:  # setup_data has begun a pass, without reading ahead
            begun: Any = fetcher.iterator
            reset_without_length()
            if not fetcher.done:
                fetcher.batches.extend(itertools.islice(begun, 1))
                fetcher.fetched = len(fetcher.batches)

    return patch(fit_loop, "setup_data", setting_up_data)


def _has_stream(fit_loop: Any) -> bool:
    loaders = [find_innermost(loader) for loader in fit_loop._combined_loader.flattened]
    return any(isinstance(getattr(loader, "dataset", None), IterableDataset) for loader in loaders)


def iterate_again(trainer: L.Trainer) -> None:
    """Restart the pass over the training loaders, since an existing iterator is at the old position."""
    if trainer.fit_loop._data_fetcher is not None:
        iter(trainer.fit_loop._data_fetcher)
