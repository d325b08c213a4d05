"""Look up public names when they are first used, so that importing the package imports neither torch nor lightning.

The names of the top level are in ``__init__.pyi``, which type checkers and editors read instead of ``__init__.py``.
Those of a subpackage are the imports of its ``__init__.py`` under ``if TYPE_CHECKING:``.
"""

import ast
import difflib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from functools import cache
from importlib import resources
from types import ModuleType

PACKAGE = __name__.partition(".")[0]

# Public names of the release before that have left the package, and what to use instead; kept for one release.
REMOVED = {
    "finetune.combine_adapters_": "Use add_weighted_adapter of PEFT, which reads and writes the same adapter folders",
    "model.load_compile_cache": "Use torch.compiler.load_cache_artifacts, for files that only you can write",
    "model.save_compile_cache": "Use torch.compiler.save_cache_artifacts, or keep the folder TORCHINDUCTOR_CACHE_DIR",
    "run.PeerMemory": "It gained nothing where it was measured; use checkpoints, or torchft or NVRx",
    "run.PeerSnapshots": "It gained nothing where it was measured; use AtomicCheckpoints, or torchft or NVRx",
    "strategy.ModelStates": "Use MemoryReport, which predict_memory(..., strategy=, world=) returns",
    "strategy.StageChoice": "Use StrategyChoice, which choose_strategy returns",
    "strategy.check_cluster": "Use nccl-tests and PyTorch's flight recorder; docs/cluster.md shows how",
    "strategy.choose_stage": "Use choose_strategy(..., strategies=('zero-1', 'zero-2', 'zero-3'))",
    "strategy.predict_model_states": "Use predict_memory(..., strategy=ZeROStrategy(stage), world=ranks)",
}

# Subpackages of the release before, and those that have their names now; kept for one release.
MOVED = {
    "data": ("micro_batching", "loaders"),
    "dry_run": ("proof",),
    "predict": ("memory",),
    "run": ("checkpoint", "guards", "profiling"),
}

try:
    __version__ = importlib.metadata.version("lightning-fasttrain")
except importlib.metadata.PackageNotFoundError:
    __version__ = "unknown (not installed)"


def read_imports() -> dict[str, str]:
    """Return the module from which the stub imports each name: the package itself, for its subpackages."""
    stub = pkgutil.get_data(PACKAGE, "__init__.pyi")
    assert stub is not None
    return _sources_of_names(ast.parse(stub).body)


def _sources_of_names(statements: list[ast.stmt]) -> dict[str, str]:
    """Return the module from which the statements import each name."""
    found: dict[str, str] = {}
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                found[alias.name] = str(statement.module)
    return found


_IMPORTS = read_imports()
SUBPACKAGES = {name: module for name, module in _IMPORTS.items() if module != PACKAGE}
ROOMS = [name for name, module in _IMPORTS.items() if module == PACKAGE]  # subpackages, with or without names here
# For `import *`, which must not bring a __version__.
PUBLIC = [name for name in SUBPACKAGES if not name.startswith("_")]


def public_path(kind: type) -> str:
    """Return the path under which users find a class of this package.

    Example:
        >>> from lightning_fasttrain import loaders
        >>> public_path(loaders.DevicePrefetch), public_path(loaders.EvenEpochs)
        ('DevicePrefetch', 'loaders.EvenEpochs')
    """
    subpackage = kind.__module__.split(".")[1]  # lightning_fasttrain.SUBPACKAGE.file
    return kind.__name__ if kind.__name__ in PUBLIC else f"{subpackage}.{kind.__name__}"


def find_public(name: str) -> object:
    """Return the public object or subpackage of a name: ``__getattr__`` of the package (PEP 562).

    Raises:
        AttributeError: no public object has this name.

    Example:
        >>> find_public("MicroBatching").__module__
        'lightning_fasttrain.micro_batching.micro_batching'
    """
    if name in MOVED:
        return sys.modules[f"{PACKAGE}.{name}"]
    if name in ROOMS or f"{PACKAGE}.{name}" in SUBPACKAGES.values():
        return importlib.import_module(f"{PACKAGE}.{name}")
    if name not in SUBPACKAGES:
        raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}{_hint(name)}")
    thing = getattr(importlib.import_module(SUBPACKAGES[name]), name)
    setattr(importlib.import_module(PACKAGE), name, thing)  # from now on Python finds it without us
    return thing


@cache  # tools such as pytest ask every module for the same few names
def _hint(name: str) -> str:
    """Return where a name that the top level lacks can be found, or which one it resembles; "" if neither."""
    known = _read_names_of_subpackages() | dict(zip(PUBLIC, PUBLIC, strict=True))
    # As it is written comes first, then any case, then one with a typing mistake, then a longer one.
    by_lower = {word.lower(): place for word, place in known.items()}
    wanted = name.lower()
    near = difflib.get_close_matches(wanted, by_lower, n=1, cutoff=0.7)
    longer = [word for word in by_lower if word.startswith(wanted)]
    for found in [wanted, *near, *longer]:
        if found in by_lower:
            return f". Did you mean {known.get(name, by_lower[found])!r}?"
    return ""


def _read_names_of_subpackages() -> dict[str, str]:
    """Return the full path of each name in a subpackage. Their sources are read; nothing is imported."""
    found: dict[str, str] = {}
    places = {module for module in SUBPACKAGES.values() if module.count(".") == 1}
    for place in sorted(places | {f"{PACKAGE}.{room}" for room in ROOMS}, reverse=True):
        source = resources.files(PACKAGE).joinpath(place.partition(".")[2], "__init__.py")
        if source.is_file():
            for name in _read_names(source.read_bytes()):
                found[name] = f"{place}.{name}"
    return found


def _read_names(source: bytes) -> dict[str, str]:
    """Return the module that a source names for each name which it imports for type checkers."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found |= _sources_of_names(node.body)
    return found


@cache
def _names_of(subpackage: str) -> dict[str, str]:
    source = pkgutil.get_data(subpackage, "__init__.py")
    assert source is not None
    return _read_names(source)


class _LazyModule(ModuleType):
    """A subpackage whose public names are imported when they are first used."""

    def __getattr__(self, name: str) -> object:
        module = _names_of(self.__name__).get(name)
        if module is not None:
            thing = getattr(importlib.import_module(module), name)
            vars(self)[name] = thing
            return thing
        if not name.startswith("_") and importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{self._explain_removal(name)}")

    def _explain_removal(self, name: str) -> str:
        instead = REMOVED.get(f"{self.__name__.partition('.')[2]}.{name}")
        if instead is None:
            return ""
        return f": it was removed. {instead}."

    def __setattr__(self, name: str, value: object) -> None:
        # Python would put the file accumulate_gradients.py in place of the function of that name.
        if not (isinstance(value, ModuleType) and name in _names_of(self.__name__)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        inside = [name for name, value in vars(self).items() if isinstance(value, ModuleType)]
        return sorted({*inside, *_names_of(self.__name__)})


def import_names_when_used(subpackage: str) -> None:
    """Import the public names of a subpackage when they are first used; called by its ``__init__.py``."""
    sys.modules[subpackage].__class__ = _LazyModule


class _MovedModule(ModuleType):
    """A subpackage of the release before: an error says where each of its names is now.

    It is an AttributeError, which ``pickle`` expects of each module that it searches for a name. An import statement
    replaces it by an error of its own, and shows there what it takes for the file.
    """

    def __init__(self, name: str, subpackages: tuple[str, ...]) -> None:
        super().__init__(f"{PACKAGE}.{name}")
        self.__subpackages = [f"{PACKAGE}.{room}" for room in subpackages]
        self.__file__ = f"moved to {' or '.join(self.__subpackages)}"

    def __getattr__(self, name: str) -> object:
        path = f"{self.__name__}.{name}"
        removed = REMOVED.get(path.partition(".")[2])
        if removed is not None:
            raise AttributeError(f"{path} was removed. {removed}.")
        for room in self.__subpackages:
            if name in _names_of(room):
                raise AttributeError(f"{path} was moved: use {room}.{name}.")
        raise AttributeError(f"{path} does not exist: {self.__name__} was {self.__file__}.")


# An import statement asks sys.modules first, and would say only that there is no such module.
sys.modules.update({f"{PACKAGE}.{name}": _MovedModule(name, subpackages) for name, subpackages in MOVED.items()})


def list_names() -> list[str]:
    """Return what ``dir`` shows of the package: public names and subpackages."""
    core = f"{PACKAGE}.core."
    shown = {module.partition(".")[2] for module in SUBPACKAGES.values() if not module.startswith(core)}
    return sorted({*shown, *ROOMS, *SUBPACKAGES})
