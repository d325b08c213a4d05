"""The foundation of all subpackages. Nothing in here belongs to a single technique.

``batch`` reads a batch of any structure, ``modules`` finds and wraps parts of a model, ``state`` saves and restores
what a step changes, ``atomic_write`` and ``safe_load`` write and read files, ``host`` is the door to what Lightning
keeps to itself.

From the bottom up: ``messages``, ``checks``, ``distributed``, ``package``, ``device``, ``state``, ``batch``,
``modules``, ``host``, ``peak_memory``, ``atomic_write``, ``safe_load``.
"""
