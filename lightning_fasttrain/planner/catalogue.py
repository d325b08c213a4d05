"""What the package has by name: its techniques and the policies they take, and where users find them."""

import inspect
from collections.abc import Iterator

from lightning_fasttrain import data, finetune, loss, model, optim, run
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.package import PUBLIC, find_public
from lightning_fasttrain.technique import Technique

ROOMS = (data, model, finetune, loss, optim, run)


def known_techniques() -> Iterator[type[Technique]]:
    """Every technique of the package, room by room, in alphabetical order.

    Example:
        >>> [technique.__name__ for technique in known_techniques()][:2]
        ['BatchSizeWarmup', 'DevicePrefetch']
    """
    for room in ROOMS:
        found = inspect.getmembers(room, inspect.isclass)
        yield from (thing for _, thing in found if issubclass(thing, Technique))


def class_named(name: str) -> type:
    """The public class of that name, in whichever room it is.

    Raises:
        ValueError: there is none.

    Example:
        >>> class_named("EveryBlock").__module__
        'lightning_fasttrain.model.activation_checkpointing'
    """
    if name in PUBLIC:
        found = find_public(name)
    else:
        found = next((getattr(room, name) for room in ROOMS if hasattr(room, name)), None)
    if not isinstance(found, type):
        raise ValueError(explain(f"{name!r}", "this package has no class of this name", "Check how it is written"))
    return found


def public_path(kind: type) -> str:
    """Where users find a class under the package.

    Example:
        >>> public_path(data.MicroBatching), public_path(data.EvenEpochs)
        ('MicroBatching', 'data.EvenEpochs')
    """
    room = kind.__module__.split(".")[1]  # lightning_fasttrain.ROOM.file
    return kind.__name__ if kind.__name__ in PUBLIC else f"{room}.{kind.__name__}"
