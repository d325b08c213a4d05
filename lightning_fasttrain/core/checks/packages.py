"""Import optional packages or say which extra brings them, and refuse releases of Lightning that cannot be used."""

import importlib
import importlib.metadata
from types import ModuleType

# Published with a credential stealer that ran on import (CVE-2026-44484).
_STOLE_CREDENTIALS = {"2.6.2", "2.6.3"}


def refuse_compromised_hosts() -> None:
    """Refuse to be imported beside a release of Lightning that is known to steal credentials.

    Reads the installed metadata only: the point is that nothing of the bad release has been imported yet.

    Raises:
        ImportError: ``lightning`` or ``pytorch_lightning`` is 2.6.2 or 2.6.3.
    """
    for package in ("lightning", "pytorch-lightning"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version in _STOLE_CREDENTIALS:
            raise ImportError(
                f"{package} {version}: this release ran a credential stealer when imported (CVE-2026-44484). "
                f"Rotate the secrets of this machine, then: pip install 'lightning>=2.6.6,<2.7'."
            )


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say which extra brings it.

    Example:
        >>> require("json", extra="plots").__name__
        'json'
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # here, for the check above comes before torch

    try:
        # Some packages make tables when they are imported, which must hold real values in a prediction too.
        with unset_fake_temporarily():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        what = f"{module.partition('.')[0]} is not installed: it comes with the extra '{extra}'"
        raise ModuleNotFoundError(f"{what}. pip install 'lightning-fasttrain[{extra}]'.") from error


def refuse_mixed_lightning(*objects: object) -> None:
    """Refuse objects made with ``pytorch_lightning`` beside ours, which are made with ``lightning``.

    The two packages hold the same code under two names, so ``isinstance`` fails across them and a foreign
    callback is silently taken for something it is not.

    Raises:
        TypeError: one of the ``objects`` comes from ``pytorch_lightning``.
    """
    for thing in objects:
        # A user's class comes from a module of their own; one of its bases shows which package it is made with.
        origins = [base.__module__.partition(".")[0] for base in type(thing).__mro__]
        if "pytorch_lightning" in origins:
            raise TypeError(
                f"{type(thing).__name__} comes from `pytorch_lightning`, lightning_fasttrain from `lightning`: "
                "to Python these are two unrelated packages, so hooks and isinstance checks miss each other. "
                "Import from `lightning` everywhere (`import lightning as L`)."
            )
