"""Check one value by its meaning."""

from typing import Any


def positive_int(name: str, value: object) -> int:
    """Return ``value`` if it is a whole number of at least one.

    Raises:
        TypeError: not an ``int`` (a ``bool`` is none either).
        ValueError: smaller than one.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: it counts things, so it must be a whole number. Use {name}=1 or more.")
    if value < 1:
        raise ValueError(f"{name}={value}: it counts things, so it must be at least 1. Use {name}=1 or more.")
    return value


def real_number(name: str, value: object, example: float) -> None:
    """Refuse what is not a number, such as a string read from a file.

    Raises:
        TypeError: neither an ``int`` nor a ``float`` (a ``bool`` is none either).
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(
            f"{name}={value!r}: expected a number, got {type(value).__name__}. Use, for example, {name}={example}."
        )


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of the ``allowed`` words.

    Raises:
        ValueError: it is not; the message lists the allowed ones.
    """
    if value not in allowed:
        words = ", ".join(map(repr, allowed))
        raise ValueError(f"{name}={value!r}: not a known choice. Use one of {words}.")
    return value
