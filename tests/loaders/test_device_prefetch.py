"""DevicePrefetch yields every batch once, in order, with the right resume state, and overlaps copies on CUDA."""

import ctypes
import dataclasses

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import BatchEncoding

import lightning_fasttrain as ft
from lightning_fasttrain.checkpoint import resumable
from lightning_fasttrain.core.batch.host_copies import Transfers
from lightning_fasttrain.loaders import prefetch_to_device
from tests.micro_batching.test_token_weighted_accumulation import StatefulLoader
from tests.support.nets import TinyLM, fit, lm_batches, weights


def numbered(count):
    return [{"x": torch.full((2,), float(i)), "name": i} for i in range(count)]


# The meta device uses the prefetching path without a GPU; values other than tensors distinguish the batches.
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_every_batch_once_and_in_order(device, count):
    seen = list(prefetch_to_device(numbered(count), device))
    assert [batch["name"] for batch in seen] == list(range(count))
    assert all(batch["x"].device.type == device for batch in seen)


def test_on_cpu_batches_pass_through_without_prefetching():
    batches, fetched = numbered(3), []

    def loader():
        for batch in batches:
            fetched.append(batch["name"])
            yield batch

    for i, batch in enumerate(prefetch_to_device(loader(), "cpu")):
        assert batch is batches[i]
        assert fetched == list(range(i + 1))


def test_on_other_devices_one_batch_is_fetched_ahead():
    fetched = []

    def loader():
        for batch in numbered(4):
            fetched.append(batch["name"])
            yield batch

    iterator = iter(prefetch_to_device(loader(), "meta"))
    next(iterator)
    assert fetched == [0, 1]
    next(iterator)
    assert fetched == [0, 1, 2]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_state_is_that_of_the_last_batch_yielded(device):
    prefetcher = prefetch_to_device(StatefulLoader(numbered(5)), device)
    iterator = iter(prefetcher)
    assert [next(iterator)["name"] for _ in range(2)] == [0, 1]
    state = prefetcher.state_dict()
    resumed = prefetch_to_device(StatefulLoader(numbered(5)), device)
    resumed.load_state_dict(state)
    assert [batch["name"] for batch in resumed] == [2, 3, 4]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("make", [StatefulDataLoader, lambda *args: resumable(DataLoader(*args))])
def test_the_state_after_a_pass_is_the_beginning_of_the_next(make, device):
    prefetcher, resumed = (prefetch_to_device(make(range(5)), device) for _ in range(2))
    assert len(list(prefetcher)) == 5
    resumed.load_state_dict(prefetcher.state_dict())
    assert len(list(resumed)) == 5
    next(iter(prefetcher))
    resumed.load_state_dict(prefetcher.state_dict())  # of a second pass
    assert len(list(resumed)) == 4


def test_a_loader_without_state_stays_without_state():
    prefetcher = prefetch_to_device(numbered(2), "meta")
    assert not hasattr(prefetcher, "state_dict")


def test_attributes_of_the_loader_are_forwarded():
    loader = DataLoader(range(6), batch_size=2)
    prefetcher = prefetch_to_device(loader, "meta")
    assert len(prefetcher) == 3
    assert prefetcher.dataset is loader.dataset
    assert prefetcher.batch_sampler is loader.batch_sampler
    prefetcher.worker_init_fn = print  # as Lightning does, to seed the workers
    assert loader.worker_init_fn is print


def test_trainer_on_cpu_trains_the_same():
    batches = lm_batches(4)
    plain, ours = fit(TinyLM(dropout=0.1), batches), fit(TinyLM(dropout=0.1), batches, [ft.DevicePrefetch()])
    assert all(torch.equal(a, b) for a, b in zip(weights(plain).values(), weights(ours).values(), strict=True))


class HookedLM(TinyLM):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch


def test_a_custom_transfer_hook_is_kept_with_a_warning(monkeypatch):
    from lightning.pytorch.strategies import SingleDeviceStrategy

    monkeypatch.setattr(SingleDeviceStrategy, "root_device", torch.device("meta"))
    t = pytest.importorskip("lightning").Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.warns(ft.FastTrainWarning, match="HookedLM.on_before_batch_transfer: that hook must see"):
        assert ft.DevicePrefetch().attach(t, HookedLM()) is None
    undo = ft.DevicePrefetch().attach(t, TinyLM())
    assert isinstance(t.strategy.process_dataloader(numbered(1)), ft.loaders.device_prefetch.DevicePrefetcher)
    undo()
    assert "process_dataloader" not in vars(t.strategy)


@pytest.mark.gpu
def test_cuda_copies_run_on_a_side_stream_and_are_complete():
    loader = DataLoader(torch.arange(64.0).view(16, 4), batch_size=4, pin_memory=True)
    seen = [batch.clone() for batch in prefetch_to_device(loader, "cuda")]
    assert torch.equal(torch.cat(seen).cpu(), torch.arange(64.0).view(16, 4))


@pytest.mark.gpu
def test_cuda_copy_overlaps_with_compute():
    """The copy of the next batch ends while the kernels of the current one still run."""
    big = [torch.randn(2**22).pin_memory() for _ in range(3)]
    a = torch.randn(4096, 4096, device="cuda")
    iterator = iter(prefetch_to_device(big, "cuda"))
    next(iterator)
    for _ in range(50):
        a = a @ a / 64
    busy = torch.cuda.Event()
    busy.record()
    next(iterator)  # queues the copy of the third batch
    assert not busy.query()  # yielding the second did not wait for the kernels


@pytest.mark.gpu
def test_further_passes_reserve_no_further_memory():
    loader = [torch.zeros(2**20).pin_memory() for _ in range(4)]
    reserved = []
    for _ in range(6):
        for batch in prefetch_to_device(loader, "cuda"):
            batch.sum()
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] == reserved[1]


@dataclasses.dataclass
class Rows:
    x: torch.Tensor


class Graph:
    """Like a batch of torch_geometric: it defines its own transfer, and is opaque to others."""

    __slots__ = ("edges",)

    def __init__(self, edges):
        self.edges = edges

    def to(self, device, non_blocking=False):
        return Graph(self.edges.to(device, non_blocking=non_blocking))


CONTAINERS = {
    "list": (lambda x: [x], lambda batch: batch[0]),
    "BatchEncoding": (lambda x: BatchEncoding({"x": x}), lambda batch: batch["x"]),
    "dataclass": (Rows, lambda batch: batch.x),
    "in a list": (lambda x: [Rows(x)], lambda batch: batch[0].x),
    "own object": (Graph, lambda batch: batch.edges),
}
of_every_kind = pytest.mark.parametrize(("wrap", "tensor_in"), CONTAINERS.values(), ids=CONTAINERS)


@of_every_kind
def test_copied_and_created_tensors_are_recorded_in_any_container(wrap, tensor_in):
    x = torch.zeros(4)
    with Transfers(torch.device("meta")) as copies:
        moved = move_data_to_device(wrap(x), torch.device("meta"))
    assert copies.sources[0] is x
    assert copies.made[0] is tensor_in(moved)


@pytest.fixture
def device_is_behind():
    """Return a function that makes the device busy, so that no event is reached."""
    stand_in = getattr(ctypes.CDLL(None), "fake_not_ready", None)  # a simulated driver is set to lag

    def begin():
        torch.cuda._sleep(2 * 10**9)
        if stand_in is not None:
            stand_in(1)

    yield begin
    if stand_in is not None:
        stand_in(0)
    torch.cuda.synchronize()


@pytest.mark.gpu
@of_every_kind
def test_memory_of_a_batch_in_use_is_not_reused(device_is_behind, wrap, tensor_in):
    batches = [wrap(torch.zeros(2**20).pin_memory()) for _ in range(4)]  # pinning memory waits for the device
    iterator = iter(prefetch_to_device(batches, "cuda"))
    first = next(iterator)
    address = tensor_in(first).data_ptr()
    tensor_in(first).sum()  # so does loading a kernel
    device_is_behind()
    tensor_in(first).sum()  # a queued kernel, as the batch is dropped
    del first
    later = [next(iterator), next(iterator)]  # the third batch was fetched after the first one was freed
    assert address not in [tensor_in(batch).data_ptr() for batch in later]


@pytest.mark.gpu
def test_batches_without_record_stream_are_copied_correctly():
    batches = [torch.eye(3).to_sparse() * i for i in range(4)]
    with pytest.warns(ft.FastTrainWarning, match="not in pinned memory"):
        assert len(list(prefetch_to_device(batches, "cuda"))) == 4


@pytest.mark.gpu
@of_every_kind
def test_unpinned_batches_are_reported(wrap, tensor_in):
    with pytest.warns(ft.FastTrainWarning, match="not in pinned memory"):
        list(prefetch_to_device([wrap(torch.zeros(4))], "cuda"))
