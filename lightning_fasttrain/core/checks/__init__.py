"""Checks of arguments and of installed packages. Nothing in here imports torch or lightning when it is imported.

From the bottom up: ``annotations``, ``arguments``.
"""

from lightning_fasttrain.core.checks.annotations import (
    Batch,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Share,
    find_place,
)
from lightning_fasttrain.core.checks.arguments import (
    NotACallback,
    bind_arguments,
    check_arguments,
    list_untested,
    one_of,
    positive_int,
    read_bounds,
    real_number,
    refuse_compromised_hosts,
    refuse_mixed_lightning,
    require,
    show,
)
