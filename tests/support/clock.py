"""A clock that a test advances, so that what it asserts of times does not depend on how busy the machine is."""


class Clock:
    """Stands for ``time.perf_counter``, and advances only when a test says so, in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def __call__(self) -> float:
        return self.now_ms / 1e3

    def passes(self, ms: float) -> None:
        self.now_ms += ms
