"""A public name is found when it is first asked for, so importing the package imports no torch and no lightning.

The one list of public names is ``__init__.pyi``, which type checkers and editors read instead of ``__init__.py``.
"""

import ast
import importlib
import importlib.metadata
import pkgutil

PACKAGE = __name__.partition(".")[0]

try:
    __version__ = importlib.metadata.version("lightning-fasttrain")
except importlib.metadata.PackageNotFoundError:
    __version__ = "unknown (not installed)"


def read_rooms() -> dict[str, str]:
    """Each public name, and the module that the stub says it is from."""
    stub = pkgutil.get_data(PACKAGE, "__init__.pyi")
    assert stub is not None
    rooms = {}
    for statement in ast.parse(stub).body:
        if isinstance(statement, ast.ImportFrom) and statement.module != PACKAGE:  # which has the rooms themselves
            rooms |= dict.fromkeys([alias.name for alias in statement.names], statement.module)
    return rooms


ROOMS = read_rooms()
PUBLIC = [name for name in ROOMS if not name.startswith("_")]  # for `import *`, which must not bring a __version__


def find_public(name: str) -> object:
    """The public thing or the room of that name: ``__getattr__`` of the package (PEP 562).

    Raises:
        AttributeError: there is none.

    Example:
        >>> find_public("MicroBatching").__module__
        'lightning_fasttrain.data.micro_batching'
    """
    if f"{PACKAGE}.{name}" in ROOMS.values():
        return importlib.import_module(f"{PACKAGE}.{name}")
    if name not in ROOMS:
        raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
    thing = getattr(importlib.import_module(ROOMS[name]), name)
    setattr(importlib.import_module(PACKAGE), name, thing)  # from now on Python finds it without us
    return thing


def list_names() -> list[str]:
    """What ``dir`` shows of the package: the public names and the rooms."""
    modules = {module.partition(".")[2] for module in ROOMS.values()}
    rooms = [module for module in modules if not module.startswith("core.")]
    return sorted([*rooms, *ROOMS])
