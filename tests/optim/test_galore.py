"""GaLore against the paper's algorithm, PyTorch's AdamW, and its predicted memory."""

import copy
import functools
import io
import logging

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import lightning_fasttrain as ft
from lightning_fasttrain.optim import GaLoreAdamW, galore_groups, galore_state_bytes
from lightning_fasttrain.optim.galore import _leading_subspace
from tests.support.nets import (
    TinyLM,
    as_loader,
    fit,
    gradients,
    largest_difference,
    lm_batches,
    names_in,
    take_steps,
    trainer,
    weights,
)
from tests.support.ranks import run_ranks

BATCHES = lm_batches(5)


class GaLoreLM(TinyLM):
    """The tiny language model; the settings of its groups can be changed."""

    groups = {"rank": 2, "update_every": 2}

    def configure_optimizers(self):
        return GaLoreAdamW(galore_groups(self, **self.groups), **self.settings)


class SketchedLM(GaLoreLM):
    groups = {"rank": 2, "update_every": 2, "subspace": "sketched"}


def random_gradients(count, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(count)]


def run(parameter, steps, groups=None, optimizer=None, **settings):
    """Take ``steps`` steps on one parameter."""
    optimizer = optimizer or GaLoreAdamW(groups or [{"params": [parameter], "rank": 2}], **settings)
    for gradient in steps:
        parameter.grad = gradient.clone()
        optimizer.step()
    return optimizer


loop = functools.partial(take_steps, batches=BATCHES)


def state_bytes(optimizer):
    return sum(v.numel() * v.element_size() for state in optimizer.state.values() for v in state.values())


def projections(optimizer):
    return [state["projection"].clone() for state in optimizer.state.values() if "projection" in state]


# The arithmetic


def algorithm_of_the_paper(weight, steps, rank, every, lr, scale, decay, beta1=0.9, beta2=0.999, eps=1e-8):
    """Run algorithm 2 of the paper for a wide matrix, with Adam written out entry by entry."""
    first = second = torch.zeros(rank, weight.shape[1], dtype=weight.dtype)
    basis = torch.zeros(weight.shape[0], rank, dtype=weight.dtype)
    for t, gradient in enumerate(steps):
        if t % every == 0:
            found = torch.linalg.svd(gradient).U[:, :rank]
            turned = [new if new @ old >= 0 else -new for new, old in zip(found.T, basis.T, strict=True)]
            basis = torch.stack(turned, dim=1)
        low = basis.T @ gradient
        first = beta1 * first + (1 - beta1) * low
        second = beta2 * second + (1 - beta2) * low**2
        corrected = first / (1 - beta1 ** (t + 1))
        normed = corrected / ((second / (1 - beta2 ** (t + 1))).sqrt() + eps)
        weight = weight - lr * decay * weight - lr * scale * basis @ normed
    return weight


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5)])
@pytest.mark.parametrize("foreach", [False, True])
def test_equals_the_algorithm_of_the_paper(shape, foreach):
    steps, start = random_gradients(8, *shape), torch.ones(*shape, dtype=torch.float64)
    parameter = nn.Parameter(start.clone())
    groups = [{"params": [parameter], "rank": 2, "update_every": 3, "scale": 0.3}]
    run(parameter, steps, groups, lr=0.1, weight_decay=0.2, foreach=foreach)
    if shape[0] >= shape[1]:
        expected = algorithm_of_the_paper(start.T, [g.T for g in steps], 2, 3, 0.1, 0.3, 0.2).T
    else:
        expected = algorithm_of_the_paper(start, steps, 2, 3, 0.1, 0.3, 0.2)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-9, atol=1e-9)


def test_full_rank_in_the_matrix_coordinates_equals_adamw():
    """The singular vectors of a diagonal gradient are the axes, so that projecting changes nothing."""
    steps = [torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64) * c) for c in (1.0, -2.0, 0.3, 5.0)]
    ours, theirs = (nn.Parameter(torch.ones(3, 3, dtype=torch.float64)) for _ in range(2))
    run(ours, steps, [{"params": [ours], "rank": 3, "scale": 1.0, "update_every": 2}], lr=0.1)
    run(theirs, steps, optimizer=torch.optim.AdamW([theirs], lr=0.1))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_first_update_has_a_known_size():
    """Adam's first update is ±lr in each of the rank · n coordinates, and the columns of P have length one."""
    parameter = nn.Parameter(torch.zeros(6, 9))
    run(parameter, random_gradients(1, 6, 9, dtype=torch.float32), lr=0.1)
    assert parameter.detach().norm().item() == pytest.approx(0.1 * 0.25 * (2 * 9) ** 0.5, rel=1e-4)
    assert torch.linalg.matrix_rank(parameter.detach()) == 2


def test_the_subspace_is_refreshed_on_schedule():
    parameter, seen = nn.Parameter(torch.zeros(4, 7)), [torch.zeros(())]
    optimizer = GaLoreAdamW([{"params": [parameter], "rank": 2, "update_every": 3}])
    for gradient in random_gradients(8, 4, 7, dtype=torch.float32):
        run(parameter, [gradient], optimizer=optimizer)
        seen += projections(optimizer)
    assert [i for i in range(8) if not torch.equal(seen[i], seen[i + 1])] == [0, 3, 6]


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
@pytest.mark.parametrize("shape", [(40, 90), (90, 40)])
def test_subspaces_capture_as_much_as_the_optimal_one(shape, scale):
    short = min(shape)
    spectrum = torch.arange(1, short + 1).float() ** -0.7
    u, v = (torch.linalg.qr(torch.randn(size, short)).Q for size in shape)
    gradient = (u * spectrum) @ v.T
    for how, least in (("exact", 0.99999), ("sketched", 0.98)):
        basis = _leading_subspace(gradient * scale, 8, how, seed=0)
        assert basis.shape == (short, 8)
        torch.testing.assert_close(basis.T @ basis, torch.eye(8), rtol=0, atol=1e-5)
        strongest = (v if shape[0] > short else u)[:, 0]
        assert abs(strongest @ basis[:, 0]) > 0.999
        kept = (gradient @ basis if shape[0] > short else basis.T @ gradient).square().sum()
        assert least < kept / spectrum[:8].square().sum() < 1.00001


def ill_conditioned(shape, smallest):
    """Return a matrix with singular values from one down to ``smallest``, in equal ratios."""
    short, generator = min(shape), torch.Generator().manual_seed(4)
    u, v = (torch.linalg.qr(torch.randn(n, short, generator=generator, dtype=torch.float64)).Q for n in shape)
    return (u * torch.logspace(0, smallest, short, dtype=torch.float64)) @ v.T


def gradient_of_a_deep_net():
    torch.manual_seed(0)
    net = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(48, 48), nn.Tanh())], nn.Linear(48, 48))
    net(torch.randn(256, 48)).square().mean().backward()
    return net[0].weight.grad


@pytest.mark.parametrize(
    "gradient",
    [ill_conditioned((60, 100), -10), ill_conditioned((100, 60), -10), gradient_of_a_deep_net()],
    ids=["wide", "tall", "of a net"],
)
def test_the_exact_subspace_is_that_of_a_float64_svd_vector_by_vector(gradient):
    rank = 32  # the last singular value of the first two is 5e-6 of the largest
    basis = _leading_subspace(gradient.float(), rank, "exact", seed=0).double()
    u, values, vt = np.linalg.svd(gradient.float().double().numpy(), full_matrices=False)
    expected = torch.from_numpy(vt.T if gradient.shape[0] >= gradient.shape[1] else u)[:, :rank]
    assert values[rank - 1] < 0.05 * values[0]
    assert float(torch.linalg.svdvals(expected.T @ basis).min()) > 0.99999
    apart = torch.from_numpy(values[:rank] / values[1 : rank + 1]) > 1.01
    apart[1:] &= apart[:-1].clone()
    assert apart.sum() > rank / 2
    assert float((expected * basis).sum(0).abs()[apart].min()) > 0.999


def test_a_sketch_is_reproducible_and_keeps_the_random_state():
    gradient, before = torch.randn(40, 90), torch.get_rng_state()
    bases = [_leading_subspace(gradient, 8, "sketched", seed) for seed in (3, 3, 4)]
    assert torch.equal(bases[0], bases[1])
    assert not torch.equal(bases[0], bases[2])
    assert torch.equal(before, torch.get_rng_state())


def test_groups_without_a_rank_are_pytorchs_adamw_bit_for_bit():
    nets = TinyLM(), TinyLM()
    rest = {"lr": 0.02, "weight_decay": 0.3, "betas": (0.8, 0.9)}
    spare = nn.Parameter(torch.ones(3, 3))
    ours = GaLoreAdamW([{"params": nets[0].parameters()}, {"params": [spare], "rank": 1}], **rest)
    loop(nets[0], ours)
    loop(nets[1], torch.optim.AdamW(nets[1].parameters(), **rest))
    assert largest_difference(weights(nets[1]), weights(nets[0])) == 0


def test_the_loss_decreases():
    torch.manual_seed(0)
    net, target = nn.Linear(24, 16, bias=False), torch.randn(16, 4) @ torch.randn(4, 24) / 5
    optimizer = GaLoreAdamW([{"params": [net.weight], "rank": 4, "update_every": 20, "scale": 1.0}], lr=0.02)
    losses = []
    for x in torch.randn(400, 32, 24):
        optimizer.zero_grad()
        loss = (net(x) - x @ target.T).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 50


# Memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rank", [1, 3])
def test_predicted_state_is_the_measured_one(dtype, rank):
    net = TinyLM().to(dtype)
    optimizer = GaLoreAdamW(groups := galore_groups(net, rank=rank), lr=0.01)
    predicted = galore_state_bytes(groups)
    loop(net, optimizer)
    assert state_bytes(optimizer) == predicted == galore_state_bytes(optimizer.param_groups)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {dtype}


def test_adamws_state_is_larger_by_the_formula():
    net, size = TinyLM(), torch.float32.itemsize
    adamw = torch.optim.AdamW(net.parameters())
    optimizer = GaLoreAdamW(galore_groups(net, rank=2))
    for each in (adamw, optimizer):
        loop(net, each)
    matrices = [p for block in net.blocks for p in (block.up.weight, block.down.weight)]  # 16 × 8 and 8 × 16
    saved = len(matrices) * size * (2 * 8 * 16 - 2 * (8 + 2 * 16))
    assert state_bytes(adamw) - state_bytes(optimizer) == saved
    assert state_bytes(adamw) == galore_state_bytes([{"params": list(net.parameters())}])


def test_the_memory_prediction_includes_its_state():
    net = GaLoreLM()
    report = ft.predict_memory(net, BATCHES[0], device="cpu")
    predicted = galore_state_bytes(galore_groups(net, rank=2))
    assert report.at_peak["optimizer state"] == predicted


def test_state_bytes_of_a_meta_model_are_predicted():
    with torch.device("meta"):
        net = nn.Sequential(*[nn.TransformerEncoderLayer(4096, 32, 16384) for _ in range(32)])
    galore = galore_state_bytes(galore_groups(net, rank=128))
    assert galore < 0.06 * galore_state_bytes([{"params": list(net.parameters())}])


# Resuming


@pytest.mark.parametrize("kind", [GaLoreLM, SketchedLM])
def test_saved_and_loaded_it_continues_bit_for_bit(kind):
    whole, half = kind(), kind()
    loop(whole, whole.configure_optimizers(), batches=BATCHES * 2)
    optimizer = half.configure_optimizers()
    loop(half, optimizer, batches=BATCHES)  # an odd number of steps: between two refreshes
    file = io.BytesIO()
    torch.save({"net": half.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    fresh = kind()
    fresh.load_state_dict(saved["net"])
    optimizer = fresh.configure_optimizers()
    optimizer.load_state_dict(saved["optimizer"])
    loop(fresh, optimizer, batches=BATCHES)
    assert largest_difference(weights(whole), weights(fresh)) == 0


def test_resumed_in_the_trainer_bit_for_bit(tmp_path):
    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    whole = fit(GaLoreLM(), BATCHES, [Save()], max_epochs=2)
    resumed = GaLoreLM()
    trainer(max_epochs=2).fit(resumed, as_loader(BATCHES), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert largest_difference(weights(whole), weights(resumed)) == 0


def test_a_copy_of_model_and_optimizer_trains_independently():
    net = GaLoreLM()
    optimizer = net.configure_optimizers()
    loop(net, optimizer)
    other, other_optimizer = copy.deepcopy((net, optimizer))
    before = weights(net)
    loop(other, other_optimizer)
    assert largest_difference(before, weights(net)) == 0
    loop(net, optimizer)
    assert largest_difference(weights(net), weights(other)) == 0


def test_the_state_of_another_optimizer_is_refused():
    net = GaLoreLM()
    adamw = torch.optim.AdamW([{"params": g["params"]} for g in galore_groups(net, rank=2)])
    loop(net, adamw)
    with pytest.raises(ValueError, match="a state without ranks .*another optimizer.*fresh optimizer"):
        net.configure_optimizers().load_state_dict(adamw.state_dict())


# Hosts and other techniques


def test_trainer_fabric_and_bare_loop_agree_bit_for_bit():
    bare = GaLoreLM()
    loop(bare, bare.configure_optimizers())
    fabric, net = L.Fabric(accelerator="cpu", devices=1), GaLoreLM()
    wrapped = fabric.setup_module(net)
    wrapped.mark_forward_method("loss")
    optimizer = fabric.setup_optimizers(net.configure_optimizers())
    for batch in BATCHES:
        optimizer.zero_grad()
        fabric.backward(wrapped.loss(batch))
        optimizer.step()
    assert largest_difference(weights(bare), weights(net)) == 0
    assert largest_difference(weights(bare), weights(fit(GaLoreLM(), BATCHES))) == 0
    assert largest_difference(weights(bare), weights(fit(TinyLM(), BATCHES))) > 1e-3  # AdamW's weights differ


def test_in_backward_it_is_the_same_bit_for_bit():
    plain, net = GaLoreLM(), GaLoreLM()
    loop(plain, plain.configure_optimizers())
    optimizer = net.configure_optimizers()
    ft.optim.optimize_in_backward_(optimizer)
    for batch in BATCHES:
        net.loss(batch).backward()
        assert not gradients(net)
        optimizer.step()
    assert largest_difference(weights(plain), weights(net)) == 0
    in_trainer = fit(GaLoreLM(), BATCHES, [ft.OptimizerInBackward()])
    assert largest_difference(weights(plain), weights(in_trainer)) == 0


def test_micro_batches_and_clipping_change_nothing_but_rounding():
    settings = {"gradient_clip_val": 0.1}
    plain = fit(GaLoreLM(), BATCHES, **settings)
    split = fit(GaLoreLM(), BATCHES, [ft.MicroBatching(3)], **settings)
    assert largest_difference(weights(plain), weights(split)) < 1e-3  # Adam amplifies tiny gradients
    assert largest_difference(weights(plain), weights(fit(GaLoreLM(), BATCHES))) > 1e-3


def test_under_mixed_precision_the_state_and_the_projection_stay_in_float32():
    module = GaLoreLM()
    t = trainer(precision="bf16-mixed")
    t.fit(module, as_loader(BATCHES))
    assert {v.dtype for s in t.optimizers[0].state.values() for v in s.values()} == {torch.float32}
    steps, ends = random_gradients(3, 4, 7, dtype=torch.float32), []
    for autocast in (False, True):
        parameter = nn.Parameter(torch.ones(4, 7))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            run(parameter, steps)
        ends.append(parameter.detach())
    assert torch.equal(*ends)


def test_in_true_bfloat16_it_is_close_to_float32():
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        parameter = nn.Parameter(torch.zeros(6, 9, dtype=dtype))
        run(parameter, [g.to(dtype) for g in random_gradients(3, 6, 9, dtype=torch.bfloat16)], lr=0.1)
        ends.append({"weight": parameter.detach().float()})
    assert largest_difference(*ends) < 0.03


def test_schedulers_drive_each_group_independently():
    net = GaLoreLM()
    optimizer = net.configure_optimizers()
    scheduler = LambdaLR(optimizer, [lambda step: 0.0, lambda step: 0.5**step])
    before = weights(net)
    loop(net, optimizer, batches=BATCHES[:1])
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.005]
    assert torch.equal(before["blocks.0.up.weight"], net.blocks[0].up.weight)
    assert not torch.equal(before["blocks.0.up.bias"], net.blocks[0].up.bias)


def test_a_closure_is_called_with_gradients_on():
    parameter = nn.Parameter(torch.ones(3, 4))
    optimizer = GaLoreAdamW([{"params": [parameter], "rank": 1}])

    def closure():
        (loss := parameter.sum()).backward()
        return loss

    assert optimizer.step(closure).item() == 12
    assert (parameter < 1).all()


def test_parameters_unfrozen_later_start_with_their_own_subspace():
    net = GaLoreLM()
    frozen = net.blocks[0].up.weight.requires_grad_(False)
    groups = galore_groups(net, **net.groups)
    optimizer = GaLoreAdamW(groups, lr=0.01)
    loop(net, optimizer, batches=BATCHES[:3])
    assert frozen not in optimizer.state
    assert state_bytes(optimizer) == galore_state_bytes(groups)
    frozen.requires_grad_(True)
    loop(net, optimizer, batches=BATCHES[:1])
    assert optimizer.state[frozen]["step"] == 1
    assert state_bytes(optimizer) == galore_state_bytes(groups)


TWO_PROCESSES = """
import os, time
import lightning as L, torch, torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from tests.support.nets import TinyLM, as_loader, concatenate, largest_difference, lm_batches, trainer, weights
from lightning_fasttrain.optim import GaLoreAdamW, galore_groups

class Net(TinyLM):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)
    def loss(self, batch):  # a mean over all rows, so that DDP's average is the whole batch's
        return self(batch["input_ids"]).square().mean()
    def configure_optimizers(self):
        return GaLoreAdamW(galore_groups(self, rank=2, update_every=2, subspace=SUBSPACE), lr=0.01)

for SUBSPACE in ("exact", "sketched"):
    mine, both = [lm_batches(5, seed=s) for s in (1, 2)], Net()
    optimizer = both.configure_optimizers()
    for batches in zip(*mine):
        optimizer.zero_grad()
        both.loss(concatenate(batches)).backward()
        optimizer.step()
    module = Net()
    t = trainer(devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
    t.fit(module, as_loader(mine[t.global_rank]))
    assert largest_difference(weights(both), weights(module)) < 1e-4
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    first = flat.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(first, flat)
    print("agreed", flush=True)
time.sleep(1)
os._exit(0)  # without destructors: gloo's threads may abort a process that has done all its work
"""


def test_two_processes_keep_the_same_weights(tmp_path):
    (tmp_path / "script.py").write_text(TWO_PROCESSES)
    said = run_ranks(str(tmp_path / "script.py"), log=tmp_path / "log", timeout_s=200)
    assert said.count("agreed") == 4


# Which parameters


def test_matrices_of_blocks_are_projected_and_parameters_listed_once():
    net = TinyLM()
    names = names_in(net, galore_groups(net, rank=2))
    assert names["galore"] == [f"blocks.{i}.{layer}.weight" for i in range(3) for layer in ("up", "down")]
    assert sorted(names["galore"] + names["plain"]) == sorted(name for name, _ in net.named_parameters())


def test_llamas_embeddings_norms_and_head_are_not_projected():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    net = transformers.LlamaForCausalLM(config)
    names = names_in(net, galore_groups(net, rank=4))
    assert len(names["galore"]) == 2 * 7
    assert {name.split(".")[-2] for name in names["plain"]} == {
        *("embed_tokens", "input_layernorm", "post_attention_layernorm", "norm", "lm_head")
    }


def test_only_named_and_unfrozen_modules_are_projected():
    net = TinyLM()
    net.blocks[0].up.weight.requires_grad_(False)
    names = names_in(net, galore_groups(net, rank=2, blocks="blocks.*.up", frozen=False))
    assert names["galore"] == ["blocks.1.up.weight", "blocks.2.up.weight"]
    assert "blocks.0.up.weight" not in names["plain"]


def test_an_embedding_within_a_block_is_not_projected():
    net = nn.ModuleList([nn.ModuleDict({"bias": nn.Embedding(32, 8), "up": nn.Linear(8, 16)}) for _ in range(2)])
    assert names_in(net, galore_groups(net, rank=2))["galore"] == ["0.up.weight", "1.up.weight"]


def test_matrices_too_small_for_the_rank_are_excluded_and_logged(caplog):
    net = nn.ModuleList([nn.ModuleList([nn.Linear(8, 40), nn.Linear(3, 3)]) for _ in range(2)])
    with caplog.at_level(logging.INFO, "lightning_fasttrain"):
        names = names_in(net, galore_groups(net, rank=2))
    assert names["galore"] == ["0.0.weight", "1.0.weight"]
    assert "rank=2 saves nothing for 2 of the matrices: 0.1.weight 3 × 3" in caplog.text


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank=0: it counts things"),
        ({"update_every": 0}, "update_every=0: it counts things"),
        ({"scale": 0}, "scale=0: projected weights would not be updated"),
        ({"subspace": "svd"}, "subspace='svd': not a known choice"),
        ({"rank": 1000}, r"rank=1000\) on TinyLM: .*any of its 6 matrices.*up.weight 16 × 8.*smaller rank"),
        ({"blocks": "LayerNorm"}, "none of its 3 blocks has a matrix to project.*blocks="),
        ({"blocks": "Conv2d"}, "matches nothing"),
    ],
)
def test_invalid_groups_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        galore_groups(TinyLM(), **{"rank": 2, **settings})


def one(shape=(3, 4), **group):
    return [{"params": [nn.Parameter(torch.ones(*shape))], "rank": 2, **group}]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (one(rank=None), "1 groups of which none has a rank: .*plain AdamW"),
        (one(rank=4), r"parameter 0 .*\(3, 4\): rank=4 is above its smaller side.*galore_groups"),
        (one(rank=0), "rank=0"),
        (one((3,)), r"a Parameter of shape \(3,\): only a matrix"),
        (one((3, 4, 5)), "only a matrix"),
        ([{"params": [("w", nn.Parameter(torch.ones(3, 4) * 1j))], "rank": 2}], "parameter w .*only real matrices"),
        (one(lr=-1.0), "lr=-1.0: it must be at least 0"),
        (one(betas=(0.9, 1.0)), r"betas=\(0.9, 1.0\): it must be from 0"),
        (one(weight_decay=-1.0), "weight_decay=-1.0"),
        (one(eps=-1.0), "eps=-1.0"),
    ],
)
def test_the_optimizer_refuses_invalid_groups(groups, message):
    with pytest.raises(ValueError, match=message):
        GaLoreAdamW(groups)


def test_a_group_that_is_refused_is_not_added():
    optimizer = GaLoreAdamW(one())
    with pytest.raises(ValueError, match="rank=9"):
        optimizer.add_param_group(one(rank=9)[0])
    assert len(optimizer.param_groups) == 1


def test_sharded_matrices_are_refused():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        matrix = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(ValueError, match="a DTensor of shape .*quantized or sharded.*train with DDP"):
            GaLoreAdamW([{"params": [nn.Parameter(matrix).detach().requires_grad_()], "rank": 2}])
    finally:
        dist.destroy_process_group()


def test_matrices_flattened_later_are_refused_in_the_step():
    optimizer = GaLoreAdamW(one())
    flat = torch.ones(12)
    flat.grad = torch.ones(12)
    optimizer.param_groups[0]["params"] = [flat]
    with pytest.raises(RuntimeError, match=r"shape \(12,\): the strategy has flattened it"):
        optimizer.step()


def test_sparse_and_non_finite_gradients_are_refused():
    embedding = nn.Embedding(5, 4, sparse=True)
    optimizer = GaLoreAdamW([{"params": [embedding.weight], "rank": 2}])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"a sparse gradient of shape \(5, 4\).*sparse=False"):
        optimizer.step()
    parameter = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match=r"shape \(3, 4\) has no singular vectors: it is not finite"):
        run(parameter, [torch.full((3, 4), torch.nan)])
    assert torch.equal(parameter, torch.ones(3, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("foreach", [None, False])
def test_on_cuda_it_is_equal_and_synchronizes_at_refreshes_only(foreach):
    steps, ends = random_gradients(6, 40, 70), []
    for device in ("cpu", "cuda"):
        parameter = nn.Parameter(torch.ones(40, 70, dtype=torch.float64, device=device))
        groups = [{"params": [parameter], "rank": 4, "update_every": 5}]
        on_device = [gradient.to(device) for gradient in steps]
        optimizer = run(parameter, on_device[:1], groups, foreach=foreach)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(parameter, on_device[1:5], optimizer=optimizer)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        run(parameter, on_device[5:], optimizer=optimizer)
        ends.append(parameter.detach().cpu())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)
