"""Let a Trainer resume only from complete checkpoints of a run, and say what is wrong with any other file."""

import os
import pickle
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_fasttrain.core.files.checkpoint_folder import verify_checkpoint
from lightning_fasttrain.core.files.remote_checkpoint import fetched
from lightning_fasttrain.core.files.safe_load import (
    CorruptCheckpoint,
    ForeignObjects,
    existing_path,
    first_line,
    is_object_storage,
)
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch


def guard_loading(strategy: Strategy) -> Undo:
    """Restrict ``strategy.load_checkpoint`` to complete files and folders; errors name the reason.

    Several techniques may call it: a strategy that is guarded already is not changed.
    """
    if isinstance(vars(strategy).get("load_checkpoint"), _GuardedLoad):
        return lambda: None
    return patch(strategy, "load_checkpoint", _GuardedLoad(strategy))


class _GuardedLoad:
    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.load = strategy, strategy.load_checkpoint

    def __call__(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        if is_object_storage(checkpoint_path):
            if getattr(self.strategy, "reads_remote", False):
                return self.load(str(checkpoint_path), *args, **kwargs)
            with fetched(str(checkpoint_path)) as copied:
                return self(copied, *args, **kwargs)
        path = existing_path(checkpoint_path)
        # One of ours reads all of the file anyway and says what is wrong; twice would take twice as long.
        if path.is_file() and not getattr(self.strategy.checkpoint_io, "verifies", False):
            verify_checkpoint(path)
        try:
            checkpoint = self.load(path, *args, **kwargs)
        except IsADirectoryError as error:
            why = "it is a folder, as strategies that shard write them"
            raise ValueError(explain(f"{path}", why, "Use the strategy that saved it, or full_checkpoint")) from error
        except (ValueError, OSError):  # ours, and those that say what they mean
            raise
        except pickle.UnpicklingError as error:
            why = f"it holds what could only be made by running code from it ({first_line(error)})"
            raise ForeignObjects(explain(f"{path}", why, "If you trust it, give weights_only=False")) from error
        except (RuntimeError, EOFError, LookupError, TypeError, AttributeError) as error:
            why = f"it cannot be read ({type(error).__name__}: {first_line(error)})"
            raise CorruptCheckpoint(explain(f"{path}", why, "Use an older one")) from error
        if path.is_file() and not (isinstance(checkpoint, dict) and "pytorch-lightning_version" in checkpoint):
            why = "expected a checkpoint of a Trainer, which holds the progress of its run"
            raise ValueError(explain(f"{path}", why, "Load it with model.load_state_dict, and leave ckpt_path out"))
        return checkpoint
