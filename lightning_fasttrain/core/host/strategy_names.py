"""Register the strategies with Lightning by name, whichever of the two packages is imported first.

Lightning's registries exist only once Lightning is imported, which takes seconds, and importing this package must not.
So the names are written into them when Lightning has made them, and a name brings its class when it is used.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# module that holds a registry: (the registry, {name: class in lightning_fasttrain.strategy})
REGISTRIES = {
    "lightning.fabric.strategies": (
        "STRATEGY_REGISTRY",
        {"fasttrain_fsdp2": "FabricFSDP2Strategy", "fasttrain_zero": "FabricZeROStrategy"},
    ),
    "lightning.pytorch.strategies": (
        "StrategyRegistry",
        {"fasttrain_fsdp2": "FSDP2Strategy", "fasttrain_zero": "ZeROStrategy"},
    ),
}
DESCRIPTIONS = {
    "fasttrain_fsdp2": "FSDP2 over the blocks that are found",
    "fasttrain_zero": "DeepSpeed ZeRO, its stage chosen to fit",
}


def register_strategy_names() -> None:
    """Register the names at once where Lightning is imported, otherwise as soon as it is."""
    missing = [module for module in REGISTRIES if module not in sys.modules]
    for module in REGISTRIES.keys() - missing:
        register_names(sys.modules[module])
    if missing and not any(isinstance(finder, _RegistryWatch) for finder in sys.meta_path):
        # In front, since the search ends at the first finder that knows the module.
        sys.meta_path.insert(0, _RegistryWatch())


def register_names(module: ModuleType) -> None:
    """Write our names into the registry of that module of Lightning."""
    attribute, names = REGISTRIES[module.__name__]
    registry = getattr(module, attribute)
    for name, strategy in names.items():
        # A notebook's autoreload imports the package again, and a name can be registered only once.
        if name not in registry:
            registry.register(name, functools.partial(make_strategy, strategy), description=DESCRIPTIONS[name])


def make_strategy(class_name: str, **settings: object) -> Any:
    return getattr(importlib.import_module("lightning_fasttrain.strategy"), class_name)(**settings)


class _RegistryWatch(MetaPathFinder):
    """Finds nothing by itself: notices that a registry is about to be imported, and leaves when both have been."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in REGISTRIES:
            return None
        spec = find_elsewhere(self, name, path, target)
        if spec is not None and spec.loader is not None:
            # Each spec has a loader of its own, so no other import meets this.
            spec.loader.exec_module = self._register_after(spec.loader.exec_module)
        return spec

    def _register_after(self, execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            register_names(module)
            if all(name in sys.modules for name in REGISTRIES) and self in sys.meta_path:
                sys.meta_path.remove(self)

        return execute_and_register


def find_elsewhere(
    asked: MetaPathFinder, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Ask the other finders."""
    for finder in sys.meta_path:
        # importlib, too, passes over finders without this method.
        find_spec = getattr(finder, "find_spec", None)
        spec = None if finder is asked or find_spec is None else find_spec(name, path, target)
        if spec is not None:
            return spec
    return None
