"""The foundation of all subpackages. Nothing in here belongs to a single technique.

``batch`` reads a batch of any structure, ``modules`` finds and wraps parts of a model, ``state`` saves and restores
what a step changes, ``files`` writes and reads without trust, ``host`` is the door to what Lightning keeps to itself.

From the bottom up: ``messages``, ``checks``, ``distributed``, ``package``, ``state``, ``batch``, ``modules``,
``device``, ``host``, ``peak_memory``, ``files``.
"""
