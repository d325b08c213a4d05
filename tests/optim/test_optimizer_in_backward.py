"""OptimizerInBackward equals the plain optimizer bit for bit, and never holds all gradients."""

import copy
from concurrent.futures import ThreadPoolExecutor

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import lightning_fasttrain as ft
from lightning_fasttrain import OptimizerInBackward
from lightning_fasttrain.optim import optimize_in_backward_
from lightning_fasttrain.technique import Exactness
from tests.support.nets import (
    Gradients,
    ShallowLM,
    as_loader,
    fit,
    gradients,
    largest_difference,
    lm_batches,
    trainer,
    weights,
)

BATCHES = lm_batches(5)


def loop(optimizer_of, in_backward, net=None, steps=5, **clips):
    """Take ``steps`` steps by hand with a scheduler; return the net and its optimizer."""
    net = net or ShallowLM()
    optimizer = optimizer_of(net)
    scheduler = LambdaLR(optimizer, lambda step: 0.7**step)
    undo = optimize_in_backward_(optimizer, **clips) if in_backward else None
    for batch in BATCHES[:steps]:
        optimizer.zero_grad()
        net.loss(batch).backward()
        if not in_backward and clips:
            nn.utils.clip_grad_value_(net.parameters(), clips["clip_value"])
        optimizer.step()
        scheduler.step()
    if undo:
        undo()
    return net, optimizer


def states(optimizer):
    return {f"{i}.{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items() if v is not None}


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw, lr as a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "muon, for matrices": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_are_the_plain_optimizers_bit_for_bit(name):
    def make(net):
        return OPTIMIZERS[name](net.parameters())

    plain, plain_optimizer = loop(make, in_backward=False)
    ours, optimizer = loop(make, in_backward=True)
    assert largest_difference(weights(plain), weights(ours)) == 0
    assert largest_difference(states(plain_optimizer), states(optimizer)) == 0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(plain_optimizer.param_groups[0]["lr"])
    assert largest_difference(weights(ShallowLM()), weights(ours)) > 1e-3  # it trains


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": True}, {"capturable": True}])
def test_weights_are_the_plain_optimizers_on_a_gpu(settings):
    ends = []
    for in_backward in (False, True):
        net = ShallowLM().cuda()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, **settings)
        if in_backward:
            optimize_in_backward_(optimizer)
        for batch in BATCHES:
            optimizer.zero_grad()
            net.loss({key: value.cuda() for key, value in batch.items()}).backward()
            optimizer.step()
        ends.append(weights(net))
    assert largest_difference(*ends) <= 1e-6


def test_each_group_keeps_its_own_settings_and_clipping_by_value_is_the_plain_one():
    def two_groups(net):
        matrices = [p for p in net.parameters() if p.ndim > 1]
        others = [p for p in net.parameters() if p.ndim == 1]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.5}, {"params": others, "lr": 0.2}], lr=0.05)

    plain, _ = loop(two_groups, in_backward=False, clip_value=1e-3)
    ours, _ = loop(two_groups, in_backward=True, clip_value=1e-3)
    assert largest_difference(weights(plain), weights(ours)) == 0
    unclipped, _ = loop(two_groups, in_backward=True)
    assert largest_difference(weights(unclipped), weights(ours)) > 1e-4


def test_clip_norm_clips_each_parameter_by_its_own_norm():
    net = nn.Linear(3, 2)
    before = weights(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    optimize_in_backward_(optimizer, clip_norm=0.5)
    (3 * net.weight.sum() + 0.1 * net.bias.sum()).backward()
    assert torch.allclose(before["weight"] - net.weight, torch.full((2, 3), 0.5 / 6**0.5))  # norm 3·√6 became 0.5
    assert torch.allclose(before["bias"] - net.bias, torch.full((2,), 0.1))  # below the limit


def test_sparse_gradients():
    ends = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        net = nn.Embedding(9, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(net.parameters(), lr=0.1)
        if in_backward:
            optimize_in_backward_(optimizer)
        for ids in ([1, 2, 2], [0, 2, 8]):
            optimizer.zero_grad()
            net(torch.tensor(ids)).square().sum().backward()
            optimizer.step()
        ends.append(weights(net))
    assert largest_difference(*ends) == 0


def test_sparse_gradients_are_clipped_like_dense_ones():
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        net = nn.Embedding(9, 3, sparse=sparse)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimize_in_backward_(optimizer, clip_norm=0.5)
        for ids in ([1, 2, 2], [0, 2, 8]):
            optimizer.step()
            (0.1 * net(torch.tensor(ids)).square().sum() * len(ids) ** 2).backward()
        ends.append(weights(net))
    assert largest_difference(*ends) < 1e-6


def test_state_dicts_are_interchangeable():
    def make(net):
        return torch.optim.AdamW(net.parameters(), lr=0.01)

    for first, second in [(False, True), (True, False)]:
        net, optimizer = loop(make, first, steps=3)
        fresh = ShallowLM()
        fresh.load_state_dict(net.state_dict())
        loaded = make(fresh)
        undo = optimize_in_backward_(loaded) if second else None
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # after the hooks were set, as Lightning does
        for one, its_optimizer, is_ours in [(net, optimizer, False), (fresh, loaded, second)]:
            its_optimizer.zero_grad()
            one.loss(BATCHES[3]).backward()
            assert bool(gradients(one)) is not is_ours
            its_optimizer.step()
        assert largest_difference(weights(net), weights(fresh)) == 0
        if undo:
            undo()


def test_gradients_never_exist_all_at_once():
    added = {}
    for in_backward in (False, True):
        net = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(16)])
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        if in_backward:
            optimize_in_backward_(optimizer)
        x = torch.ones(1, 128)
        for _ in range(2):  # the first creates the optimizer's state
            loss = net(x).sum()
            with ft.profiling.PeakMemory("cpu", net, optimizer, loss) as peak:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        added[in_backward] = peak.added_bytes
    layer = 4 * 128 * 128
    assert added[False] >= 16 * layer
    assert added[True] < 2 * layer


def test_a_parameter_that_is_used_twice_is_updated_once():
    net = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    optimize_in_backward_(optimizer)
    before = net.weight.detach().clone()
    x = torch.ones(1, 3)
    expected = torch.autograd.grad(net(net(x)).sum(), net.weight)[0]
    net(net(x)).sum().backward()
    assert torch.equal(net.weight, before - expected)


def test_hooks_closures_and_schedulers_work_as_usual():
    """Step hooks fire once a step, a closure is evaluated once and its loss returned, a scheduler does not warn."""
    net, fired = nn.Linear(2, 2), []
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    undo = optimize_in_backward_(optimizer)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)

    def closure():
        loss = net(torch.ones(1, 2)).sum()
        loss.backward()
        fired.append("closure")
        return loss

    assert optimizer.step(closure).ndim == 0
    scheduler.step()  # warns if it was not preceded by a step
    undo()
    assert fired == ["before", "closure", "after"]
    assert optimizer.state[net.weight]["step"] == 1


def test_added_and_unfrozen_parameters_are_updated_and_frozen_ones_are_not():
    def run(in_backward):
        torch.manual_seed(0)
        net = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        net[0].requires_grad_(False)
        optimizer = torch.optim.Adam([*net[0].parameters(), *net[1].parameters()], lr=0.1)
        if in_backward:
            optimize_in_backward_(optimizer)
        left = []
        for step in range(5):
            if step == 1:
                net[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.5})
            if step == 4:
                net[1].requires_grad_(False)
            optimizer.zero_grad()
            net[2](net[1](net[0](torch.ones(1, 2)))).square().sum().backward()
            left.append([parameter.grad is not None for parameter in net.parameters()].count(True))
            optimizer.step()
            net[2].zero_grad()  # while it is not in the optimizer
        return weights(net), left

    (plain, _), (ours, left) = run(False), run(True)
    assert largest_difference(plain, ours) == 0
    assert left == [2, 4, 0, 0, 0]  # not in the optimizer yet; stepped by the plain step once; then in backward


def test_hooks_survive_a_change_of_dtype_and_device_of_the_parameters():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimize_in_backward_(optimizer)
    net.double()  # as .to(device) does, it changes the data of the same parameters
    net(torch.ones(1, 2).double()).sum().backward()
    assert not gradients(net)


def test_applying_twice_has_no_effect_and_a_copy_of_the_model_is_plain():
    net = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    undos = [optimize_in_backward_(optimizer) for _ in range(2)]
    twin, before = copy.deepcopy(net), net.weight.detach().clone()
    net(torch.ones(1, 2)).sum().backward()
    assert torch.equal(net.weight, before - 1)
    for undo in undos:
        undo()
    for one in (net, twin):
        one(torch.ones(1, 2)).sum().backward()
        assert list(gradients(one)) == ["weight"]
    assert not optimizer._optimizer_step_post_hooks


def test_a_second_backward_before_the_step_is_refused():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimize_in_backward_(optimizer)
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"a second gradient for .* \(2, 2\) .*cannot be summed.*optimizer.step\(\)"):
        net(torch.ones(1, 2))[..., 0].sum().backward(inputs=[net.weight])


def test_reentrant_checkpoints_that_share_a_parameter_are_refused_and_others_are_exact():
    def make(net):
        return torch.optim.SGD(net.parameters(), lr=0.1)

    plain, _ = loop(make, in_backward=False)
    with ft.apply(net := ShallowLM(), [ft.ActivationCheckpointing()]):
        loop(make, True, net)
    assert largest_difference(weights(plain), weights(net)) == 0
    layer = nn.Linear(2, 2)
    optimize_in_backward_(make(layer))
    x = torch.ones(1, 2, requires_grad=True)
    twice = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="a second gradient"):
        twice.sum().backward()


def test_an_error_in_backward_is_propagated():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimize_in_backward_(optimizer)
    hidden = net[0](torch.ones(1, 2))
    hidden.register_hook(lambda grad: (_ for _ in ()).throw(MemoryError("as planned")))
    before = weights(net)
    with pytest.raises(MemoryError, match="as planned"):
        net[1](hidden).sum().backward()
    assert torch.equal(net[0].weight, before["0.weight"])
    assert not torch.equal(net[1].weight, before["1.weight"])  # as documented
    assert [len(group["params"]) for group in optimizer.param_groups] == [4]


class CountingInItsGroup(torch.optim.SGD):
    """Keeps its step count where schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_unsupported_optimizers_are_refused():
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="LBFGS in backward: its step takes a closure"):
        optimize_in_backward_(torch.optim.LBFGS(parameters))
    with pytest.raises(TypeError, match="expected an Optimizer, got a Linear"):
        optimize_in_backward_(nn.Linear(1, 1))  # type: ignore[arg-type]
    for name in ("clip_norm", "clip_value"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            optimize_in_backward_(torch.optim.SGD(parameters, lr=0.1), **{name: 0})
    optimize_in_backward_(CountingInItsGroup(parameters, lr=0.1))
    with pytest.raises(RuntimeError, match="CountingInItsGroup changed its group's k .*once per parameter"):
        parameters[0].sum().backward()


def test_several_processes_are_refused():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ValueError, match="SGD in backward on 2 processes: .*averaged"):
            optimize_in_backward_(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    finally:
        dist.destroy_process_group()


def test_gradients_that_arrive_on_several_threads():
    """Gradients of a model on several devices do; on the CPU, each ``backward`` runs in its caller's thread."""
    net = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(100_000)) for _ in range(10)]) for _ in range(4)])
    optimizer = torch.optim.Adam([{"params": list(part)} for part in net], lr=0.1)
    optimize_in_backward_(optimizer)
    for _ in range(5):
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda part: torch.stack([p.sum() for p in part]).sum().backward(), net))
        optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {5}
    assert len(optimizer.state) == 40
    assert [len(group["params"]) for group in optimizer.param_groups] == [10] * 4


def test_an_optimizer_without_trainable_parameters_warns():
    with pytest.warns(ft.FastTrainWarning, match="no parameter of SGD requires a gradient"):
        optimize_in_backward_(torch.optim.SGD([torch.ones(1)], lr=0.1))


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler_in_a_loop_raises(fused):
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    optimize_in_backward_(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)
        scaler.update()


def test_an_optimizer_wrapped_by_fabric_is_supported():
    fabric = L.Fabric(accelerator="cpu", devices=1)
    net = fabric.setup_module(nn.Linear(2, 2))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    optimize_in_backward_(optimizer)
    before = weights(net)
    fabric.backward(net(torch.ones(1, 2)).sum())
    assert not gradients(net)
    assert largest_difference(before, weights(net)) > 0
    optimizer.step()


class Scheduled(ShallowLM):
    """Every way to return schedulers matters: here a dict with a scheduler that steps each step or each epoch."""

    interval = "step"

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class ByEpoch(Scheduled):
    interval = "epoch"


@pytest.mark.parametrize("net", [ShallowLM, Scheduled, ByEpoch])
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}])
def test_the_trainer_trains_identically(net, settings):
    runs = {}
    for techniques in ([], [OptimizerInBackward()], [OptimizerInBackward(), ft.EagerGradientRelease()]):
        torch.manual_seed(11)
        module, t = net(), trainer(techniques, max_epochs=2, **settings)
        t.fit(module, as_loader(BATCHES))
        assert t.global_step == 10
        runs[len(techniques)] = module
    assert largest_difference(weights(runs[0]), weights(runs[1])) == 0
    assert largest_difference(weights(runs[0]), weights(runs[2])) == 0
    assert runs[0].losses == runs[1].losses


@pytest.mark.filterwarnings("ignore:.*gradients have been used and freed")
def test_the_trainer_sees_no_gradients_and_all_is_undone():
    seen, module = Gradients(), ShallowLM()
    t = trainer([OptimizerInBackward(), seen])
    t.fit(module, as_loader(BATCHES))
    assert seen.seen == [{}] * 5
    module.loss(BATCHES[0]).backward()
    assert set(gradients(module)) == {name for name, _ in module.named_parameters()}

    class Broken(ShallowLM):
        def backward(self, loss):
            super().backward(loss)
            raise RuntimeError("as planned")

    broken = Broken()
    with pytest.raises(RuntimeError, match="as planned"):
        fit(broken, BATCHES, [OptimizerInBackward()])
    broken.loss(BATCHES[0]).backward()
    assert gradients(broken)


def test_the_trainers_clipping_by_value_is_kept():
    settings = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    plain = fit(ShallowLM(), BATCHES, **settings)
    ours = fit(ShallowLM(), BATCHES, [OptimizerInBackward()], **settings)
    assert largest_difference(weights(plain), weights(ours)) == 0
    assert largest_difference(weights(fit(ShallowLM(), BATCHES)), weights(ours)) > 1e-4
    fused = {**settings, "precision": "bf16-mixed"}
    reference = fit(ShallowLM(), BATCHES, **fused)
    ours = fit(ShallowLM(fused=True), BATCHES, [OptimizerInBackward(), ft.FusedClipping()], **fused)
    assert largest_difference(weights(reference), weights(ours)) <= 1e-5


def test_clip_norm_is_reported_as_changing_training():
    assert OptimizerInBackward().exactness is Exactness.EXACT
    assert OptimizerInBackward(clip_norm=1.0).exactness is Exactness.CHANGES_TRAINING
    ours = fit(ShallowLM(), BATCHES, [OptimizerInBackward(clip_norm=1e-3)])
    assert largest_difference(weights(fit(ShallowLM(), BATCHES)), weights(ours)) > 1e-4


def test_a_backbone_may_be_unfrozen_during_the_run():
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.backbone, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return self.head(self.backbone(batch)).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.head.parameters(), lr=0.05)

    batches = [torch.randn(3, 4) for _ in range(3)]
    ends = []
    for techniques in ([], [OptimizerInBackward()]):
        finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        ends.append(weights(fit(Net(), batches, [finetuning, *techniques], max_epochs=3)))
    assert largest_difference(*ends) == 0
    assert largest_difference(weights(Net()), ends[0]) > 1e-3


class Manual(ShallowLM):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_works_through_the_function():
    class ByHand(Manual):
        in_backward = True

        def on_fit_start(self):
            self.undo = optimize_in_backward_(self.optimizers()) if self.in_backward else lambda: None

        def on_fit_end(self):
            self.undo()

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            assert bool(gradients(self)) is not self.in_backward
            optimizer.step()

    class Plain(ByHand):
        in_backward = False

    ours = fit(ByHand(), BATCHES)
    assert largest_difference(weights(fit(Plain(), BATCHES)), weights(ours)) == 0
    ours.loss(BATCHES[0]).backward()
    assert gradients(ours)


class ClipsItself(ShallowLM):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 1.0, "value")


@pytest.mark.parametrize(
    ("net", "settings", "message"),
    [
        (Manual, {}, "automatic_optimization=False: .* Call optimize_in_backward_"),
        (ClipsItself, {}, "configure_gradient_clipping of ClipsItself: .*freed"),
        (ShallowLM, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2: .*cannot be accumulated"),
        (ShallowLM, {"gradient_clip_val": 0.5}, r"gradient_clip_val=0.5 by norm: .*clip_norm=0.5\)"),
        (ShallowLM, {"strategy": "ddp", "devices": 1}, "DDPStrategy: it owns the gradients"),
        (
            ShallowLM,
            {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]},
            "precision='16-mixed': its loss scaler .*bf16-mixed",
        ),
    ],
)
def test_settings_that_need_all_gradients_are_refused_at_setup(net, settings, message):
    with pytest.raises(ValueError, match=f"OptimizerInBackward with {message}"):
        trainer([OptimizerInBackward()], **settings).fit(net(), as_loader(BATCHES))


def test_accumulation_by_a_callback_is_refused_before_the_first_epoch():
    scheduler = GradientAccumulationScheduler({0: 1, 5: 2})
    with pytest.raises(ValueError, match="GradientAccumulationScheduler.*cannot be summed over batches"):
        fit(ShallowLM(), BATCHES, [scheduler, OptimizerInBackward()])


def test_a_callback_that_never_accumulates_changes_nothing():
    plain = fit(ShallowLM(), BATCHES)
    used = fit(ShallowLM(), BATCHES, [GradientAccumulationScheduler({0: 1}), OptimizerInBackward()])
    assert largest_difference(weights(plain), weights(used)) == 0


def test_a_clip_norm_of_zero_is_refused():
    with pytest.raises(ValueError, match="clip_norm=-1"):
        OptimizerInBackward(clip_norm=-1)


class HalvesGradients(ShallowLM):
    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Watches(L.Callback):
    def on_after_backward(self, trainer, pl_module):
        pass


@pytest.mark.parametrize(
    ("net", "callbacks", "named"),
    [
        (HalvesGradients, [], "on_before_optimizer_step of HalvesGradients"),
        (ShallowLM, [Watches()], "on_after_backward of Watches"),
    ],
)
def test_code_that_comes_too_late_for_the_gradients_is_warned_of(net, callbacks, named):
    with pytest.warns(ft.FastTrainWarning, match=f"{named}: gradients have been used and freed"):
        fit(net(), lm_batches(2), [OptimizerInBackward(), *callbacks])
