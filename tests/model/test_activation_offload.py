"""Saved tensors offloaded to disk or host memory are restored bit for bit, and free device memory in between."""

import copy
import gc
import math
import os
import resource
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import lightning_fasttrain as ft
from lightning_fasttrain import ActivationOffload
from lightning_fasttrain.core.messages import say_once
from lightning_fasttrain.core.modules.wrapped_forward import replaced_forward
from lightning_fasttrain.model import offload_activations
from lightning_fasttrain.profiling import PeakMemory
from tests.support.nets import ShallowLM, as_loader, fit, gradients, lm_batches, same, trainer, weights
from tests.support.ranks import Ranks


class Attention(nn.Module):
    """Attention whose q, k and v are views of one storage, two not contiguous; masks and indices are saved too."""

    def __init__(self, dim=16):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("scale", torch.rand(dim))

    def forward(self, x):
        q, k, v = self.qkv(x * self.scale).chunk(3, dim=-1)
        later = torch.ones(x.size(-2), x.size(-2), dtype=torch.bool, device=x.device).triu(1)
        table = (q @ k.transpose(-2, -1)).masked_fill(later, -9.0)
        return x + torch.relu_(self.out(nn.functional.dropout(table.softmax(-1), 0.3) @ v))


MAKE = {
    "attention": Attention,
    "transformer": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True),
    "batchnorm": lambda: nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
    "rrelu": lambda: nn.Sequential(nn.Linear(16, 16), nn.RReLU(0.1, 0.9), nn.Dropout(0.3)),
    "lstm": lambda: Sequence(nn.LSTM(16, 16, batch_first=True)),
}


class Sequence(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def stack(kind, depth=3):
    return nn.Sequential(*[MAKE[kind]() for _ in range(depth)])


def step(net, x, context=None):
    """Return the loss, gradients and buffers of one step whose forward runs in ``context``."""
    net.zero_grad()
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    with context or nullcontext():
        loss = net(x).float().pow(2).mean()
    loss.backward()
    return {"loss": loss.detach(), "x": x.grad, **gradients(net), **{n: b.clone() for n, b in net.named_buffers()}}


def files(folder):
    return [Path(where) / name for where, _, names in os.walk(folder) for name in names]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MAKE)
def test_bitwise_equal_as_a_context_manager_and_on_blocks(kind, dtype, tmp_path):
    plain = stack(kind).to(dtype)
    ours = copy.deepcopy(plain)
    x = torch.randn(4, 6, 16, dtype=dtype)
    for _ in range(2):
        expected = step(plain, x)
        assert same(expected, step(ours, x, offload_activations(ours, 0, folder=tmp_path)))
    with ft.apply(ours, [ActivationOffload(0, folder=tmp_path)]):
        expected = step(plain, x)
        assert same(expected, step(ours, x))


class Gates(nn.Module):
    """As in a recurrent layer: chunks of one product, each overwritten by its own function."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x):
        gate, value = self.linear(x).unsafe_chunk(2, dim=-1)
        gate = gate.sigmoid_()
        return x + gate * value.tanh_()


@pytest.mark.parametrize("make", [Gates, lambda: stack("lstm").double()], ids=["gates", "lstm in float64"])
def test_chunks_overwritten_one_by_one_are_saved_with_original_values(make, tmp_path):
    torch.manual_seed(0)
    plain = make()
    ours, x = copy.deepcopy(plain), torch.randn(4, 6, 16).to(next(plain.parameters()).dtype)
    assert same(step(plain, x), step(ours, x, offload_activations(ours, 0, folder=tmp_path)))


def test_only_the_bytes_of_a_chunk_are_moved_and_its_layout_is_restored(tmp_path):
    whole = torch.randn(6, 8)
    with torch.no_grad():
        part = torch.empty(0).set_(whole.untyped_storage(), 2, (5, 6, 3), (0, 8, 1))
    offload = offload_activations(nn.Linear(1, 1), 0, folder=tmp_path)
    with offload:
        weight = torch.ones(5, 6, 3, requires_grad=True)
        product = weight * part
        expected = part.clone()
        whole.zero_()
    assert [file.stat().st_size for file in files(tmp_path)] == [6 * 3 * 4]
    saved = product.grad_fn._saved_other
    assert (saved.size(), saved.stride()) == (part.size(), part.stride())
    product.sum().backward()
    assert torch.equal(weight.grad, expected)


def autocast_step(net, x, context=None, cached=True):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        return step(net, x, context)


# Hand-computed bytes moved for 8 samples. Plain: each block's input in bf16, and relu's output, which the next
# product saves too. Checkpointed: the input of each block, which is float32 for the first alone.
TRAVELS = {"plain": 2 * (8 * 16 + 8 * 32) * 2, "checkpointed": 8 * 16 * 4 + 8 * 16 * 2}


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("how", TRAVELS)
def test_only_activations_are_moved_under_autocast(how, cached, tmp_path):
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)])
    ours, x = copy.deepcopy(plain), torch.randn(8, 16)
    if how == "checkpointed":
        ft.apply(ours, [ft.ActivationCheckpointing(blocks=["0", "1"])])
    ft.apply(ours, [ActivationOffload(0, folder=tmp_path, blocks=["0", "1"])])
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        loss = ours(x.clone().requires_grad_())
        assert sum(file.stat().st_size for file in files(tmp_path)) == TRAVELS[how]
    del loss
    assert same(autocast_step(plain, x, cached=cached), autocast_step(ours, x, cached=cached))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
def test_every_dtype_is_restored_with_shape_stride_and_offset(dtype, tmp_path):
    bits = torch.randint(0, 256, (6, 5, 2 * torch.empty(0, dtype=dtype).element_size()), dtype=torch.uint8)
    whole = (bits % 2 if dtype is torch.bool else bits).view(dtype)  # arbitrary bits, including NaNs
    views = [whole, whole[1:4, ::2], whole.transpose(0, 2), whole[:, :1].expand(6, 3, 2)]
    with offload_activations(nn.Module(), 0, folder=tmp_path):
        kept = Keep.apply(torch.zeros((), requires_grad=True), *views)
    assert len(files(tmp_path)) == 1  # one storage, written once
    back = kept.grad_fn.saved_tensors
    for view, other in zip(views, back, strict=True):
        assert other is not view
        assert (other.dtype, other.shape, other.stride()) == (view.dtype, view.shape, view.stride())
        assert other.storage_offset() == view.storage_offset()
        assert torch.equal(other.contiguous().view(torch.uint8), view.contiguous().view(torch.uint8))
    assert len({other.untyped_storage().data_ptr() for other in back}) == 1  # and read once


class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *tensors):
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *[None for _ in ctx.saved_tensors]


def test_parameters_buffers_their_views_and_small_tensors_are_not_moved(tmp_path):
    net = stack("attention")
    kept = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers())}
    seen = {}  # address → bytes of everything else that autograd saves, recorded by hooks that move nothing
    held = []

    def look(tensor):
        held.append(tensor.untyped_storage())
        if held[-1].data_ptr() not in kept:
            seen[held[-1].data_ptr()] = held[-1].nbytes()
        return tensor.detach()

    x = torch.randn(8, 16, 16)
    with saved_tensors_hooks(look, lambda tensor: tensor):
        net(x)
    for min_mib in (0, 0.01):
        with offload_activations(net, min_mib, folder=tmp_path):
            loss = net(x).sum()
        expected = [nbytes for nbytes in seen.values() if nbytes >= min_mib * 2**20]
        assert sorted(file.stat().st_size for file in files(tmp_path)) == sorted(expected)
        assert 0 < len(expected) <= len(seen)
        del loss


def test_a_parameter_outside_of_the_model_is_not_moved(tmp_path):
    weight, x = nn.Parameter(torch.randn(4, 5)), torch.randn(3, 5)
    with offload_activations(nn.Module(), 0, folder=tmp_path):
        loss = nn.functional.linear(x.requires_grad_(), weight).sum()  # saves x and weight.T
    assert [file.stat().st_size for file in files(tmp_path)] == [x.nbytes]
    loss.backward()


def test_each_version_of_a_storage_is_kept(tmp_path):
    x, zero = torch.ones(5), torch.zeros((), requires_grad=True)
    with offload_activations(nn.Module(), 0, folder=tmp_path):
        unused = Keep.apply(zero, x)
        x.add_(1)
        kept = Keep.apply(zero, x)
    assert torch.equal(kept.grad_fn.saved_tensors[0], x)
    with pytest.raises(RuntimeError, match="expected a saved tensor at version 0, got version 1"):
        unused.backward()


def test_unmoved_tensors_are_freed_with_the_graph(tmp_path):
    with offload_activations(nn.Module(), folder=tmp_path):
        y = torch.exp(torch.ones(5, requires_grad=True))
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired()


def test_tensors_without_a_plain_storage_are_not_moved(tmp_path):
    class Tagged(torch.Tensor):
        pass

    sparse = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (3, 3), check_invariants=True)
    others = [torch.ones(3).as_subclass(Tagged), sparse, torch.ones(3, dtype=torch.complex64).conj()]
    with offload_activations(nn.Module(), 0, folder=tmp_path):
        kept = Keep.apply(torch.zeros((), requires_grad=True), *others)
    assert files(tmp_path) == []
    assert kept.grad_fn.saved_tensors[1].is_sparse


def test_the_graph_can_be_used_twice_and_differentiated_again(tmp_path):
    x = torch.randn(5, requires_grad=True)
    with offload_activations(nn.Module(), 0, folder=tmp_path):
        y = (torch.exp(x) * x.sin()).sum()
    first, again = [torch.autograd.grad(y, x, create_graph=True)[0] for _ in range(2)]
    assert torch.equal(first, again)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, 2 * x.exp() * x.cos(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("min_mib", [0, 1], ids=["moved", "left"])
@pytest.mark.parametrize("ours", [True, False])
def test_a_change_in_place_is_an_error_as_in_torch(ours, min_mib, tmp_path):
    x = torch.randn(5, requires_grad=True)
    context = offload_activations(nn.Module(), min_mib, folder=tmp_path) if ours else nullcontext()
    with context:
        y = torch.exp(x)
        loss = y.sum()
    y.detach()[1:3].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_files_are_private_and_removed_after_use(tmp_path):
    net, x = stack("transformer"), torch.randn(4, 6, 16)
    with offload_activations(net, 0, folder=tmp_path):
        loss = net(x).sum()
    (private,) = tmp_path.iterdir()
    assert private.stat().st_mode & 0o777 == 0o700
    before = len(files(private))
    torch.autograd.grad(loss, list(net[2].parameters()), retain_graph=True)
    assert 0 < len(files(private)) < before  # files that were read are removed, the others still exist
    del loss
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_no_files_are_left_if_the_backward_never_runs(tmp_path):
    class Fails(ShallowLM):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            assert files(tmp_path)
            raise ValueError(f"after the forward: {loss}")

    module = Fails()
    with pytest.raises(ValueError, match="after the forward"):
        trainer([ActivationOffload(0, folder=tmp_path)]).fit(module, as_loader(lm_batches(2)))
    assert list(tmp_path.iterdir()) == []
    assert all("forward" not in vars(block) for block in module.blocks)


def test_files_of_a_forward_without_backward_are_removed_with_its_graph(tmp_path):
    net = stack("transformer")
    with ft.apply(net, [ActivationOffload(0, folder=tmp_path)]):
        y = net(torch.randn(4, 6, 16))
        assert files(tmp_path)
        del y
        assert files(tmp_path) == []


def test_validation_writes_no_files_and_training_leaves_none(tmp_path):
    class Watch(ShallowLM):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            assert files(tmp_path) == []

    batches = lm_batches(3)
    plain, ours = fit(ShallowLM(dropout=0.3), batches), Watch(dropout=0.3)
    torch.manual_seed(11)
    trainer([ActivationOffload(0, folder=tmp_path)]).fit(ours, as_loader(batches), as_loader(batches))
    assert same(weights(plain), weights(ours))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported(tmp_path):
    x = torch.ones(2**16, requires_grad=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, limits[1]))  # no file may be longer: the write fails midway
    try:
        with pytest.raises(OSError, match=r"0\.2 MiB of activations could not be written .*: File too large") as error:
            with offload_activations(nn.Module(), 0, folder=tmp_path):
                torch.exp(x)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == [], error  # at once, while the traceback still holds everything


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: os.truncate(file, 8), "expected 20 bytes, got 8"),
        (lambda file: os.truncate(file, 99), "expected 20 bytes, got 21"),
        (lambda file: file.unlink(), "No such file"),
    ],
)
def test_a_damaged_file_is_reported(damage, told, tmp_path):
    with offload_activations(nn.Module(), 0, folder=tmp_path):
        loss = torch.exp(torch.ones(5, requires_grad=True)).sum()
    (file,) = files(tmp_path)
    damage(file)
    with pytest.raises(OSError, match=told):
        loss.backward()


def test_the_peak_falls_to_about_one_block(tmp_path):
    depth, rows, dim = 8, 512, 64
    net = nn.Sequential(
        *[nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(depth)]
    )
    x = torch.randn(rows, dim)
    saved = 4 * rows * (dim + 4 * dim + 4 * dim)  # per block: its input, and the inputs of GELU and of the second layer
    with PeakMemory("cpu", net, x) as plain:
        net(x).sum().backward()
    with ft.apply(net, [ActivationOffload(0, folder=tmp_path)]):
        with PeakMemory("cpu", net, x) as ours:
            net(x).sum().backward()
    assert plain.added_bytes > (depth - 1) * saved
    assert ours.added_bytes < 2.5 * saved  # one block's bytes, and its gradients


def test_inputs_of_checkpointed_blocks_are_moved(tmp_path):
    net, x = stack("transformer", depth=4), torch.randn(4, 6, 16)
    expected = step(net, x)
    with ft.apply(net, [ActivationOffload(0, folder=tmp_path), ft.ActivationCheckpointing()]):
        assert same(expected, step(net, x))
        loss = net(x).sum()
        assert [file.stat().st_size for file in files(tmp_path)] == 4 * [x.nbytes]
        loss.backward()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_tensors_saved_by_compiled_blocks_are_moved(checkpointed, tmp_path):
    torch._dynamo.reset()
    net, x = stack("attention"), torch.randn(4, 6, 16)
    techniques = [ft.CompileBlocks(backend="aot_eager"), *[ft.ActivationCheckpointing()] * checkpointed]
    with ft.apply(net, techniques):
        expected = step(net, x)
    with ft.apply(net, [ActivationOffload(0, folder=tmp_path), *techniques]):
        loss = net(x).sum()
        assert len(files(tmp_path)) >= len(net)
        loss.backward()
        assert same(expected, step(net, x))


def messages(caplog):
    return [record.message for record in caplog.records]


def test_a_larger_compiled_graph_gives_a_note(tmp_path, caplog):
    torch._dynamo.reset()
    say_once.cache_clear()
    net, x = stack("attention"), torch.randn(4, 6, 16)
    with ft.apply(net, [ActivationOffload(0, folder=tmp_path)]), caplog.at_level("INFO", "lightning_fasttrain"):
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        loss = compiled(x).sum()
        assert files(tmp_path) == []
        loss.backward()
    assert [m for m in messages(caplog) if "a compiled graph keeps its saved tensors" in m]


def test_no_effect_on_the_cpu_without_a_folder_is_logged_once(caplog):
    say_once.cache_clear()
    net, x = stack("transformer"), torch.randn(4, 6, 16)
    with caplog.at_level("INFO", "lightning_fasttrain"):
        with offload_activations(net, 0):
            kept = Keep.apply(torch.zeros((), requires_grad=True), x)
        with ft.apply(net, [ActivationOffload(0)]):
            step(net, x)
    assert kept.grad_fn.saved_tensors[0].data_ptr() == x.data_ptr()
    assert [m.count("does nothing on the cpu, which is host memory already") for m in messages(caplog)] == [1]


def test_no_large_enough_tensor_is_logged(tmp_path, caplog):
    say_once.cache_clear()
    net, x = stack("transformer"), torch.randn(4, 64, 16)
    with caplog.at_level("INFO", "lightning_fasttrain"), ft.apply(net, [ActivationOffload(folder=tmp_path)]):
        step(net, x)
        told = messages(caplog)  # after the first step rather than at the end
    assert told == ["activation offload: nothing was moved: the largest saved tensor has 0.125 MiB, below min_mib=1.0"]
    assert list(tmp_path.iterdir()) == []


def test_undone_in_any_order(tmp_path):
    net, x = stack("transformer"), torch.randn(4, 6, 16)
    expected = step(net, x)
    offload, checkpointing = ActivationOffload(0, folder=tmp_path).apply(net), ft.ActivationCheckpointing().apply(net)
    second = ActivationOffload(0, folder=tmp_path).apply(net)
    second()
    assert same(expected, step(net, x))
    offload()
    assert same(expected, step(net, x))
    checkpointing()
    assert all("forward" not in vars(block) for block in net)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_of_the_model_works_independently(tmp_path):
    net, x = stack("transformer"), torch.randn(4, 6, 16)
    expected = step(net, x)
    undo = ActivationOffload(0, folder=tmp_path).apply(net)
    other = copy.deepcopy(net)
    undo()
    assert same(expected, step(other, x))
    other(x)
    assert replaced_forward(other[0]).offload is replaced_forward(other[1]).offload
    del other
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"min_mib": -1}, ValueError, "min_mib=-1"),
        ({"min_mib": math.nan}, ValueError, "min_mib=nan"),
        ({"in_flight_mib": "1 GiB"}, TypeError, "in_flight_mib='1 GiB'"),
        ({"folder": "/no/such/folder"}, ValueError, "the folder does not exist"),
    ],
)
def test_invalid_offload_arguments_are_refused(settings, error, told):
    with pytest.raises(error, match=told):
        ActivationOffload(**settings)
    with pytest.raises(error, match=told):
        offload_activations(nn.Module(), **settings)


def test_cuda_graphs_and_offload_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"CompileBlocks \+ ActivationOffload: CUDA graphs keep"):
        ft.apply(stack("transformer"), [ActivationOffload(), ft.CompileBlocks("reduce-overhead")])


# --- on a GPU ---


def large(depth=12, dim=256):
    net = nn.Sequential(*[Attention(dim) for _ in range(depth)])  # no fused attention: its backward is not bitwise
    return net.cuda(), torch.randn(32, 256, dim, device="cuda")  # activations outweigh the gradients of weights


@pytest.mark.gpu
@pytest.mark.parametrize("beside", [[], [ft.ActivationCheckpointing()]], ids=["alone", "checkpointed"])
@pytest.mark.parametrize("in_flight_mib", [0, 30, 1024])
def test_gpu_bitwise_equal_with_a_lower_peak(in_flight_mib, beside):
    net, x = large()
    with ft.apply(net, beside):
        for _ in range(2):
            expected = step(net, x)
        with PeakMemory("cuda") as plain:
            step(net, x)
    with ft.apply(net, [ActivationOffload(in_flight_mib=in_flight_mib), *beside]):
        for _ in range(5):  # memory freed too early would be overwritten by now
            assert same(expected, step(net, x))
        with PeakMemory("cuda") as ours:
            step(net, x)
    if in_flight_mib == 0:  # with more, all activations of this small model may be in flight at once
        assert plain.added_bytes - ours.added_bytes > (len(net) / 2 * x.nbytes if beside else plain.added_bytes / 3)


@pytest.mark.gpu
def test_gpu_the_host_never_waits():
    net, x = large()
    with ft.apply(net, [ActivationOffload(in_flight_mib=30)]):
        step(net, x)
        torch.cuda.synchronize()
        x = x.requires_grad_()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchronizing"):
                x.sum().item()
            net(x).pow(2).mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_the_next_step_is_correct_after_a_failed_backward():
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("on purpose")

    net, x = large()
    expected = step(net, x)
    with ft.apply(net, [ActivationOffload(in_flight_mib=30)]):
        for _ in range(3):
            with pytest.raises(ValueError, match="on purpose"):
                net[3:](Fail.apply(net[:3](x))).sum().backward()
            assert same(expected, step(net, x))


@pytest.mark.gpu
def test_gpu_spills_to_disk_too(tmp_path):
    net, x = large(depth=2)
    assert same(step(net, x), step(net, x, offload_activations(net, folder=tmp_path)))
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_the_gpu_example_reports_a_missing_gpu(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "gpu" / "offload_overlap.py"
    codes, _, errors = Ranks(str(script), log=tmp_path / "log", count=None).end()
    assert codes == [1]
    assert errors.startswith("no CUDA device: nothing to measure")
