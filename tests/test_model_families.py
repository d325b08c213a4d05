"""What a user may bring: small models of many families, each with blocks, parts, adapters and a predicted peak."""

from collections import Counter

import pytest

from lightning_fasttrain import find_blocks
from tests.families import FAMILIES, built

each = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@each
def test_blocks_of_every_kind_are_found_or_refused(family):
    model = built(family.name)
    if not family.blocks:
        with pytest.raises(ValueError, match="no repeated blocks"):
            find_blocks(model)
        return
    found = find_blocks(model)
    assert Counter(type(block).__name__ for block in found.values()) == family.blocks
    assert not any(name.startswith(f"{other}.") for name in found for other in found)
    assert list(found) == [name for name, _ in model.named_modules() if name in found]
