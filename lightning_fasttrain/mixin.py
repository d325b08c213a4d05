"""Roof: the mixin that lets a ``LightningModule`` bring its techniques along."""

import functools
from collections.abc import Sequence
from typing import Any

import lightning as L

from lightning_fasttrain._technique import Technique, patch


class FastTrainMixin:
    """A ``LightningModule`` that names its own techniques; any Trainer that fits it uses them.

    Name them in ``techniques``, or build them in :meth:`configure_techniques`. They are handed over through
    Lightning's own ``configure_callbacks``; a ``configure_callbacks`` of your own keeps working beside it, with or
    without ``super()``.

    Example:
        >>> import lightning as L
        >>> import lightning_fasttrain as ft
        >>> class Net(ft.FastTrainMixin, L.LightningModule):
        ...     techniques = [ft.MicroBatching(4)]
        >>> [type(callback).__name__ for callback in Net().configure_callbacks()]
        ['MicroBatching']
    """

    techniques: Sequence[Technique] = ()

    def configure_techniques(self) -> Sequence[Technique]:
        """The techniques to use; override where they depend on the module's arguments."""
        return self.techniques

    def configure_callbacks(self) -> list[L.Callback]:
        """Hook: served to the Trainer before it sets anything up."""
        return _with_techniques(self, super().configure_callbacks())  # type: ignore[misc]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("configure_callbacks")
        if own is not None:

            @functools.wraps(own)
            def configure_callbacks(self: Any) -> list[L.Callback]:
                techniques = list(self.configure_techniques())
                restore = patch(self, "configure_techniques", lambda: techniques)  # `own` may ask again, by super()
                try:
                    return _with_techniques(self, own(self))
                finally:
                    restore()

            cls.configure_callbacks = configure_callbacks


def _with_techniques(module: FastTrainMixin, callbacks: Sequence[L.Callback] | L.Callback | None) -> list[L.Callback]:
    listed = [callbacks] if isinstance(callbacks, L.Callback) else list(callbacks or [])
    missing = [t for t in module.configure_techniques() if not any(t is c for c in listed)]
    return [*listed, *missing]
