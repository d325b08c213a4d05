"""Disable the key-value cache of Hugging Face models."""

from torch import nn

from lightning_fasttrain.core.modules.wrapped_forward import Undo, patch


def disable_cache_(model: nn.Module) -> dict[str, Undo]:
    """Set ``use_cache=False`` in the configurations of the models inside ``model``.

    Returns:
        Qualified name of each setting that was changed → how to restore it.
    """
    undos: dict[str, Undo] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            # Modules share configs: the next one with this config finds False, so it is restored only once.
            undos[f"{name}.config.use_cache"] = patch(config, "use_cache", False)
    return undos
