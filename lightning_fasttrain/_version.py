"""Floor: the version of the installed package."""

import importlib.metadata

try:
    __version__ = importlib.metadata.version("lightning-fasttrain")
except importlib.metadata.PackageNotFoundError:
    __version__ = "unknown (not installed)"
