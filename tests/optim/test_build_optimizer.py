"""Every named optimizer: creation, training in every host, resuming, and the size of its state."""

import copy
import io
import sys

import lightning as L
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import lightning_fasttrain as ft
from lightning_fasttrain.bench.gpt import GPTConfig, GPTModule
from lightning_fasttrain.optim import HostOptimizer, hand_over_state_, layer_decay_groups, optimizer_state_bytes
from lightning_fasttrain.optim.named.build_optimizer import KNOWN
from lightning_fasttrain.optim.named.optimizer_state import tensors_in
from lightning_fasttrain.strategy.choose_strategy import optimizer_named
from lightning_fasttrain.strategy.zero.zero_states import predict_model_states, refuse_unshardable
from tests.support.nets import TinyLM, as_loader, fit, largest_difference, take_steps, trainer, weights

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

CONFIG = GPTConfig(vocabulary=17, context=16, layers=2, heads=2, width=64)  # matrices large enough for 8 bits
SETTINGS = {"galore": {"rank": 2, "update_every": 2}}


@pytest.fixture(autouse=True)
def _nothing_is_compiled():
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, which takes a minute on a CPU
        yield


class NamedLM(ft.FastTrainMixin, GPTModule):
    """The small reference GPT with a named optimizer."""

    def __init__(self, name="adamw", **more):
        torch.manual_seed(7)
        super().__init__(CONFIG)
        self.optimizer = ft.optim.NamedOptimizer(name, lr=0.01, settings=SETTINGS.get(name, {}), **more)


def tokens(count):
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(17, (4, 9), generator=generator) for _ in range(count)]
    return [(ids[:, :-1], ids[:, 1:]) for ids in drawn]


BATCHES = tokens(3)


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def held_bytes(optimizer):
    """Return the bytes of all tensors in the state, counting shared ones once."""
    optimizer = optimizer.inner if isinstance(optimizer, HostOptimizer) else optimizer
    return sum({id(t): t.nbytes for state in optimizer.state.values() for t in tensors_in(state)}.values())


# Each name, in each host


@pytest.mark.parametrize("name", KNOWN)
def test_trainer_mixin_and_loop_train_identically_and_resume_bit_for_bit(name, tmp_path):
    bare = NamedLM(name)
    optimizer = bare.optimizer(bare)
    before = weights(bare)
    take_steps(bare, optimizer, batches=BATCHES)
    state = saved(optimizer), weights(bare)
    take_steps(bare, optimizer, batches=BATCHES)
    assert largest_difference(before, weights(bare)) > 1e-3
    resumed = NamedLM(name)
    resumed.load_state_dict(state[1])
    optimizer = resumed.optimizer(resumed)
    optimizer.load_state_dict(state[0])
    take_steps(resumed, optimizer, batches=BATCHES)
    assert largest_difference(weights(bare), weights(resumed)) == 0

    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    in_trainer = fit(NamedLM(name), BATCHES, [Save()], max_epochs=2)
    assert largest_difference(weights(bare), weights(in_trainer)) == 0
    again = NamedLM(name)
    trainer(max_epochs=2).fit(again, as_loader(BATCHES), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert largest_difference(weights(bare), weights(again)) == 0


@pytest.mark.parametrize("name", KNOWN)
def test_its_state_has_the_predicted_size(name):
    net = NamedLM(name)
    optimizer = net.optimizer(net)
    predicted = optimizer_state_bytes(optimizer)
    assert not held_bytes(optimizer) or name in ("adagrad", "galore")
    take_steps(net, optimizer, batches=BATCHES[:1])
    assert held_bytes(optimizer) == predicted > 0 or name == "sgd"
    report = ft.predict_memory(NamedLM(name), BATCHES[0], device="cpu")
    assert report.at_peak.get("optimizer state", 0) == predicted


# State in other precision

FAMILY = ("adamw8bit", "adamw4bit", "paged-adamw", "paged-adamw8bit")
ROUNDED = {"adamw8bit": 0.02, "paged-adamw8bit": 0.02, "adamw4bit": 0.2, "paged-adamw": 0.0, "lion8bit": 0.02}


@pytest.mark.parametrize("name", [*FAMILY, "lion8bit"])
def test_state_transfers_to_the_plain_optimizer_and_back(name):
    plain = "lion" if "lion" in name else "adamw"
    net = NamedLM(name)
    optimizer = net.optimizer(net)
    take_steps(net, optimizer, batches=BATCHES)
    full = ft.build_optimizer(net, plain)
    count = len(list(net.parameters()))
    assert hand_over_state_(optimizer, full) == count
    again = ft.build_optimizer(net, name)
    assert hand_over_state_(full, again) == count
    third = ft.build_optimizer(net, plain)
    hand_over_state_(again, third)
    for parameter in net.parameters():
        if plain == "adamw":
            assert full.state[parameter]["step"] == third.state[parameter]["step"] == len(BATCHES)
        assert full.state[parameter]["exp_avg"].count_nonzero() > 0
        one, other = ({"": each.state[parameter]["exp_avg"]} for each in (full, third))
        assert largest_difference(one, other) <= ROUNDED[name]
    take_steps(net, again, batches=BATCHES)  # the loaded optimizer continues


def test_eight_bit_moments_follow_those_of_the_plain_optimizer():
    nets = NamedLM("adamw"), NamedLM("adamw8bit")
    full, low = (net.optimizer(net) for net in nets)
    for net, optimizer in zip(nets, (full, low), strict=True):
        take_steps(net, optimizer, batches=BATCHES)
    read = ft.build_optimizer(nets[1], "adamw")
    hand_over_state_(low, read)
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        pair = {"": full.state[one]["exp_avg"]}, {"": read.state[other]["exp_avg"]}
        assert largest_difference(*pair) < 0.1


def test_a_state_of_another_family_is_refused():
    net = NamedLM()
    adamw, lion, sgd = (ft.build_optimizer(net, name) for name in ("adamw", "lion", "sgd"))
    with pytest.raises(ValueError, match="AdamW → Lion.*taken no step"):
        hand_over_state_(adamw, lion)
    take_steps(net, adamw, batches=BATCHES[:1])
    with pytest.raises(ValueError, match="one keeps a mean of squares, the other does not"):
        hand_over_state_(adamw, lion)
    other = NamedLM()
    with pytest.raises(ValueError, match="28 parameters of the first are unknown"):
        hand_over_state_(adamw, ft.build_optimizer(other))
    momentum = ft.build_optimizer(net, "sgd", momentum=0.9)
    take_steps(net, momentum, batches=BATCHES[:1])
    with pytest.raises(ValueError, match="it holds momentum_buffer, which the other does not support"):
        hand_over_state_(momentum, adamw)


# Arguments and refusals


def rates(optimizer, key="lr"):
    return {group["name"]: group[key] for group in optimizer.param_groups}


def test_groups_are_those_of_the_requested_function():
    net = NamedLM()
    assert rates(ft.build_optimizer(net, weight_decay=0.3), "weight_decay") == {"decay": 0.3, "no_decay": 0.0}
    layered = ft.build_optimizer(net, "muon", lr=0.1, layer_decay=0.5)
    expected = {group["name"]: group["lr"] for group in layer_decay_groups(net, 0.1, 0.5)}
    assert {name.removesuffix("/muon"): rate for name, rate in rates(layered).items()} == expected
    own = [{"params": list(net.parameters()), "name": "mine"}]
    assert list(rates(ft.build_optimizer(net, "lion", groups=own))) == ["mine"]
    galore = ft.build_optimizer(net, "galore", rank=3, blocks="gpt.blocks.0")
    assert rates(galore, "rank") == {"decay/galore": 3, "decay": None, "no_decay": None}
    assert [len(group["params"]) for group in galore.param_groups[:2]] == [4, 4]


def test_lora_plus_sets_rates_and_excludes_frozen_parameters():
    net = NamedLM()
    ft.apply(net, [ft.LoRA(rank=2)])
    optimizer = ft.build_optimizer(net, lr=0.1, lora_plus=8)
    assert rates(optimizer) == {"A": 0.1, "B": 0.8}
    trained = [p for p in net.parameters() if p.requires_grad]
    assert sum(len(group["params"]) for group in ft.build_optimizer(net).param_groups) == len(trained)


def test_names_ignore_separators_and_settings_reach_the_optimizer():
    net = NamedLM()
    for name in ("adamw8bit", "AdamW_8bit", "adamw-8-bit"):
        assert type(ft.build_optimizer(net, name)).__name__ == "AdamW8bit"
    assert ft.build_optimizer(net, "sgd", momentum=0.7).defaults["momentum"] == 0.7
    assert ft.build_optimizer(net, "lion").defaults["lr"] == 1e-4
    assert ft.build_optimizer(net, "sgd").param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        ({"name": "adamw9"}, ValueError, "'adamw9'.*Use one of sgd, adagrad.*schedule-free"),
        ({"momentum": 0.9}, TypeError, "momentum for 'adamw': AdamW has no such setting. It has betas, eps"),
        ({"rank": 2}, TypeError, "rank for 'adamw'"),
        ({"offload": "disk"}, ValueError, "offload='disk'"),
        ({"updates": "kahn"}, ValueError, "updates='kahn'"),
        ({"updates": "kahan"}, ValueError, "parameters of torch.float32: only bfloat16.*bf16-true"),
        (
            {"layer_decay": 0.9, "lora_plus": 2},
            ValueError,
            "layer_decay and lora_plus: each creates all parameter groups",
        ),
        ({"layer_decay": 0.9, "groups": [{}]}, ValueError, "layer_decay and groups"),
        ({"name": "paged-adamw", "offload": "cpu"}, ValueError, "offload='cpu' with 'paged-adamw'.*by itself"),
        ({"name": "schedule-free", "updates": "kahan"}, ValueError, "updates='kahan' with 'schedule-free'"),
        ({"weight_decay": -1}, ValueError, "weight_decay=-1"),
        ({"name": "muon", "blocks": "Conv2d"}, ValueError, "matches nothing"),
    ],
)
def test_invalid_requests_are_refused(asked, kind, message):
    with pytest.raises(kind, match=message):
        ft.build_optimizer(NamedLM(), **asked)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("adamw4bit", "torchao", "ao"), ("schedule-free", "schedulefree", "schedule-free")],
)
def test_a_missing_package_is_named_with_its_extra(name, package, extra, monkeypatch):
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'lightning-fasttrain\[{extra}\]'"):
        ft.build_optimizer(NamedLM(), name)


def test_a_recipe_refuses_an_unknown_name_without_a_model():
    with pytest.raises(ValueError, match="Use one of"):
        ft.optim.NamedOptimizer("adamw9")


# Company


@pytest.mark.parametrize("name", ["sgd", "adafactor", "lion", "muon", "adamw8bit"])
def test_optimizing_in_backward_is_the_same_bit_for_bit(name):
    plain, net = NamedLM(name), NamedLM(name)
    take_steps(plain, plain.optimizer(plain), batches=BATCHES)
    fit(net, BATCHES, [ft.OptimizerInBackward()])
    assert largest_difference(weights(plain), weights(net)) == 0


@pytest.mark.parametrize(
    "more", [{"name": "muon"}, {"offload": "cpu"}, {"name": "adamw", "updates": "kahan"}, {"name": "adamw4bit"}]
)
def test_a_copy_of_model_and_optimizer_trains_independently(more):
    net = NamedLM(**more).to(torch.bfloat16 if "updates" in more else torch.float32)
    optimizer = net.optimizer(net)
    take_steps(net, optimizer, batches=BATCHES)
    other, copied = copy.deepcopy((net, optimizer))
    before = weights(net)
    take_steps(other, copied, batches=BATCHES)
    assert largest_difference(before, weights(net)) == 0
    take_steps(net, optimizer, batches=BATCHES)
    assert largest_difference(weights(net), weights(other)) == 0


def test_schedules_and_clipping_reach_every_group_of_muon():
    net = NamedLM("muon")
    optimizer = net.optimizer(net)
    schedule = LambdaLR(optimizer, lambda step: 0.0)
    before = weights(net)
    take_steps(net, optimizer, batches=BATCHES[:1])
    assert largest_difference(before, weights(net)) == 0
    schedule.step()
    clipped = fit(NamedLM("muon"), BATCHES, gradient_clip_val=1e-3)
    assert largest_difference(weights(fit(NamedLM("muon"), BATCHES)), weights(clipped)) > 0


def test_a_fused_optimizer_can_be_clipped_in_mixed_precision():
    ends = []
    for limit in (None, 1e-3):  # Lightning refuses to clip for one created by hand
        net = NamedLM("adamw")
        net.optimizer = ft.optim.NamedOptimizer("adamw", settings={"fused": True, "eps": 1e-2})
        ends.append(weights(fit(net, BATCHES, gradient_clip_val=limit, precision="bf16-mixed")))
    assert largest_difference(*ends) > 1e-4


@pytest.mark.parametrize("name", ["muon", "galore", "adafactor"])
def test_zero_is_refused_for_optimizers_of_matrices(name):
    net = NamedLM(name)
    with pytest.raises(ValueError, match="with ZeRO.*flat shards"):
        refuse_unshardable(net.optimizer(net))


def test_zero_is_refused_for_an_optimizer_in_host_memory():
    net = NamedLM("adamw", offload="cpu")
    with pytest.raises(ValueError, match="HostOptimizer with ZeRO: its copy of the weights"):
        refuse_unshardable(net.optimizer(net))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lion", "adamw8bit", "lion8bit"])
def test_zero_accepts_elementwise_optimizers(name):
    net = NamedLM(name)
    refuse_unshardable(net.optimizer(net))


def test_the_planner_and_the_shard_command_know_the_names():
    net = NamedLM()
    bytes_of = {}
    for name in ("muon", "lion", "adamw8bit", "adamw"):
        (states,) = predict_model_states(net, optimizer_named(name), world_size=1, stages=("0",))
        bytes_of[name] = states.optimizer
        assert states.optimizer == optimizer_state_bytes(ft.build_optimizer(net, name))
    assert bytes_of["adamw8bit"] < bytes_of["lion"] < bytes_of["muon"] < bytes_of["adamw"]
    given = ft.optim.NamedOptimizer("muon")
    report = ft.predict_memory(net, BATCHES[0], optimizer=given, device="cpu")
    assert report.at_peak["optimizer state"] == bytes_of["muon"]


def test_verification_accepts_a_named_optimizer():
    net = NamedLM().gpt
    loss = lambda net, batch: torch.nn.functional.cross_entropy(net(batch[0]).flatten(0, 1), batch[1].flatten())  # noqa: E731
    proof = ft.verify(
        net, BATCHES[0], [ft.ActivationCheckpointing()], loss=loss, optimizer=ft.optim.NamedOptimizer("adamw")
    )
    assert proof.ok


def test_a_module_without_an_optimizer_is_an_error():
    class Bare(ft.FastTrainMixin, L.LightningModule):
        def training_step(self, batch):
            return None

    with pytest.raises(ValueError, match="Bare names no optimizer and has no configure_optimizers.*NamedOptimizer"):
        Bare().configure_optimizers()


def test_a_module_with_its_own_configure_optimizers_keeps_it():
    class Own(ft.FastTrainMixin, TinyLM):
        pass

    assert type(Own().configure_optimizers()) is torch.optim.AdamW
