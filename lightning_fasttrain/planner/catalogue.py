"""Look up the techniques of the package, and the policies they take, by name."""

import inspect
from collections.abc import Iterator

from lightning_fasttrain import data, finetune, loss, model, optim, run
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.package import PUBLIC, find_public
from lightning_fasttrain.technique import Technique

SUBPACKAGES = (data, model, finetune, loss, optim, run)


def known_techniques() -> Iterator[type[Technique]]:
    """Yield every technique of the package, one subpackage after another, in alphabetical order.

    Example:
        >>> [technique.__name__ for technique in known_techniques()][:2]
        ['BatchSizeWarmup', 'DevicePrefetch']
    """
    for subpackage in SUBPACKAGES:
        found = inspect.getmembers(subpackage, inspect.isclass)
        yield from (thing for _, thing in found if issubclass(thing, Technique))


def class_named(name: str) -> type:
    """Return the public class of a name, from whichever subpackage has it.

    Raises:
        ValueError: no public class has this name.

    Example:
        >>> class_named("EveryBlock").__module__
        'lightning_fasttrain.model.activation_checkpointing'
    """
    if name in PUBLIC:
        found = find_public(name)
    else:
        found = next((getattr(subpackage, name) for subpackage in SUBPACKAGES if hasattr(subpackage, name)), None)
    if not isinstance(found, type):
        raise ValueError(explain(f"{name!r}", "this package has no class of this name", "Check how it is written"))
    return found


def public_path(kind: type) -> str:
    """Return the path under which users find a class.

    Example:
        >>> public_path(data.MicroBatching), public_path(data.EvenEpochs)
        ('MicroBatching', 'data.EvenEpochs')
    """
    subpackage = kind.__module__.split(".")[1]  # lightning_fasttrain.SUBPACKAGE.file
    return kind.__name__ if kind.__name__ in PUBLIC else f"{subpackage}.{kind.__name__}"
