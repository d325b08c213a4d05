"""Look up public names when they are first used, so that importing the package imports neither torch nor lightning.

The one list of public names is ``__init__.pyi``, which type checkers and editors read instead of ``__init__.py``.
"""

import ast
import difflib
import importlib
import importlib.metadata
import pkgutil
from importlib import resources

PACKAGE = __name__.partition(".")[0]

try:
    __version__ = importlib.metadata.version("lightning-fasttrain")
except importlib.metadata.PackageNotFoundError:
    __version__ = "unknown (not installed)"


def read_subpackages() -> dict[str, str]:
    """Return the module that the stub names for each public name."""
    stub = pkgutil.get_data(PACKAGE, "__init__.pyi")
    assert stub is not None
    found = {}
    for statement in ast.parse(stub).body:
        if (
            isinstance(statement, ast.ImportFrom) and statement.module != PACKAGE
        ):  # lines of that kind import the subpackages themselves
            found |= dict.fromkeys([alias.name for alias in statement.names], statement.module)
    return found


def read_modules() -> set[str]:
    """Return the modules of the package that the stub names, without the package's own name."""
    stub = pkgutil.get_data(PACKAGE, "__init__.pyi")
    assert stub is not None
    found = {module.partition(".")[2] for module in SUBPACKAGES.values()}
    for statement in ast.parse(stub).body:
        if isinstance(statement, ast.ImportFrom) and statement.module == PACKAGE:
            found |= {alias.name for alias in statement.names}
    return found


SUBPACKAGES = read_subpackages()
MODULES = read_modules()  # also subpackages of which the top level has no name
PUBLIC = [
    name for name in SUBPACKAGES if not name.startswith("_")
]  # for `import *`, which must not bring a __version__


def find_public(name: str) -> object:
    """Return the public object or subpackage of a name: ``__getattr__`` of the package (PEP 562).

    Raises:
        AttributeError: no public object has this name.

    Example:
        >>> find_public("MicroBatching").__module__
        'lightning_fasttrain.data.micro_batching'
    """
    if name in MODULES:
        return importlib.import_module(f"{PACKAGE}.{name}")
    if name not in SUBPACKAGES:
        raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}{_hint(name)}")
    thing = getattr(importlib.import_module(SUBPACKAGES[name]), name)
    setattr(importlib.import_module(PACKAGE), name, thing)  # from now on Python finds it without us
    return thing


def _hint(name: str) -> str:
    """Return where a name that the top level lacks can be found, or which one it resembles; "" if neither."""
    known = {**_read_names_of_subpackages(), **{public: public for public in PUBLIC}}
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
    for module in sorted({module for module in MODULES if "." not in module}, reverse=True):
        place = f"{PACKAGE}.{module}"
        source = resources.files(PACKAGE).joinpath(module, "__init__.py")
        for statement in ast.parse(source.read_bytes() if source.is_file() else b"").body:
            if isinstance(statement, ast.ImportFrom):
                found |= {alias.name: f"{place}.{alias.name}" for alias in statement.names}
    return found


def list_names() -> list[str]:
    """Return what ``dir`` shows of the package: public names and subpackages."""
    shown = [module for module in MODULES if not module.startswith("core.")]
    return sorted([*shown, *SUBPACKAGES])
