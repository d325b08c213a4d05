"""What survives a full collection is frozen, a few times; later garbage is still collected."""

import gc
import weakref

import pytest

from lightning_fasttrain.guards import freeze_survivors


class Ring:
    """An object that only a collection frees."""

    def __init__(self):
        self.me = self


@pytest.fixture
def _unfrozen():
    gc.unfreeze()  # what the tests themselves have frozen
    yield
    gc.freeze()


@pytest.mark.usefixtures("_unfrozen")
def test_survivors_of_so_many_full_collections_are_frozen_and_thawed():
    undo = freeze_survivors(collections=2)
    counts = [gc.get_freeze_count()]
    gc.collect(1)  # of the younger generations alone
    counts.append(gc.get_freeze_count())
    kept = []
    for _ in range(3):
        kept.append([Ring() for _ in range(1000)])
        gc.collect()
        counts.append(gc.get_freeze_count())
    assert counts[:2] == [0, 0]
    assert counts[2] > 10_000
    assert counts[3] >= counts[2] + 1000
    assert counts[4] <= counts[3]
    ring = weakref.ref(Ring())
    gc.collect()
    assert ring() is None
    undo()
    assert gc.get_freeze_count() == 0
    assert not [one for one in gc.callbacks if one.__module__ == freeze_survivors.__module__]


@pytest.mark.usefixtures("_unfrozen")
def test_what_others_have_frozen_stays_frozen():
    gc.freeze()
    before = gc.get_freeze_count()
    freeze_survivors()()
    assert gc.get_freeze_count() == pytest.approx(before, rel=0.01)
