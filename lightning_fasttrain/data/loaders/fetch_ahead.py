"""Loaders that fetch a batch ahead, but whose state is that of the last batch yielded."""

from typing import Any

from lightning_fasttrain.core.host.loader_wrapper import WrappedLoader


def can_resume(loader: object) -> bool:
    """Whether a loader has a state, so that Lightning treats it as one that can resume."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


class AheadLoader(WrappedLoader):
    """A loader that fetches a batch ahead of the one it yields."""

    def _state_now(self) -> Any:
        """Return the state after the batch fetched last."""
        return None

    def _hand_out(self, state: object) -> None:
        """Note the state of the batch that is yielded next."""


class StatefulAheadLoader(AheadLoader):
    """Loader over one that can resume, with the state of the last batch yielded.

    A class of its own, since Lightning treats any loader with these methods as one that can.
    """

    _state: Any = None

    def _state_now(self) -> Any:
        return self.inner.state_dict()

    def _hand_out(self, state: object) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state_now() if self._state is None else self._state

    def load_state_dict(self, state: object) -> None:
        self._state = None
        self.inner.load_state_dict(state)
