"""Biases before a BatchNorm are left out: the model stays the same function, in training, evaluation and files."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification

import lightning_fasttrain as ft
from tests.support.nets import as_loader, gradients, largest_difference, same, trainer, weights

NORM = {"momentum": 0.3}


class ConvNet(L.LightningModule):
    """Two biases that are removed, one before a ReLU that is not, and one of a linear layer."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm(4, **NORM), nn.ReLU())
        self.body, self.norm = nn.Conv2d(4, 4, 3, padding=1), norm(4, **NORM)
        self.free = nn.Conv2d(4, 4, 1)
        self.head = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Linear(6, 2))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()

    def forward(self, x):
        x = self.stem(x)
        x = x + F.relu(self.norm(self.body(x)))
        return self.head(F.relu(self.free(x)).mean(dim=(2, 3)))

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


DROPPED = ["stem.0", "body", "head.0"]
X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))
BATCHES = [X, X.flip(0) + 0.5, X * 2]


def folded(net):
    """A model with the same function whose biases before a norm are zero, by hand."""
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for layer, norm in ((twin.stem[0], twin.stem[1]), (twin.body, twin.norm), (twin.head[0], twin.head[1])):
            norm.running_mean -= layer.bias
            layer.bias.zero_()
    return twin


def test_outputs_are_the_same_in_training_and_evaluation():
    plain, net = ConvNet(), ConvNet()
    assert list(ft.architecture.drop_bias_before_norm_(net)) == DROPPED
    for batch in BATCHES:
        torch.testing.assert_close(net.train()(batch), plain.train()(batch), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(net.eval()(batch), plain.eval()(batch), rtol=1e-4, atol=1e-5)
    assert largest_difference(weights(folded(plain)), weights(net)) < 1e-6


def test_gradients_of_all_other_parameters_are_the_same():
    plain, net = ConvNet(), ConvNet()
    ft.architecture.drop_bias_before_norm_(net)
    plain(X).square().mean().backward()
    net(X).square().mean().backward()
    expected = gradients(plain)
    dropped = {f"{name}.bias": expected.pop(f"{name}.bias") for name in DROPPED}
    assert max(float(gradient.abs().max()) for gradient in dropped.values()) < 1e-4
    assert largest_difference(expected, gradients(net)) < 1e-5


def in_trainer(net, **settings):
    technique = ft.architecture.DropBiasBeforeNorm()
    t = trainer([technique], **settings)
    t.fit(net, as_loader(BATCHES))
    return net


def test_training_is_that_of_the_model_without_these_biases_in_every_host():
    class WithMixin(ft.FastTrainMixin, ConvNet):
        techniques = [ft.architecture.DropBiasBeforeNorm()]

    plain = folded(ConvNet())
    trainer().fit(plain, as_loader(BATCHES))
    net, mixed, bare = in_trainer(ConvNet()), WithMixin(), ConvNet()
    trainer().fit(mixed, as_loader(BATCHES))
    with ft.apply(bare, [ft.architecture.DropBiasBeforeNorm()]):
        optimizer = bare.configure_optimizers()
        for batch in BATCHES:
            optimizer.zero_grad()
            bare.training_step(batch, 0).backward()
            optimizer.step()
    assert same(weights(net), weights(mixed))
    assert same(weights(net), weights(bare))
    expected = weights(plain)
    for name in DROPPED:  # which rounding has moved
        assert expected[f"{name}.bias"].abs().max() < 1e-5
        assert weights(net)[f"{name}.bias"].count_nonzero() == 0
    assert largest_difference(expected, weights(net)) < 1e-4


def test_it_is_undone_after_the_run_and_the_keys_stay():
    net, plain = in_trainer(ConvNet()), ConvNet()
    assert list(net.state_dict()) == list(plain.state_dict())
    assert not any("forward" in vars(module) for module in net.modules())
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert not any(module._load_state_dict_post_hooks for module in net.modules())
    plain.load_state_dict(net.state_dict())
    torch.testing.assert_close(net.eval()(X), plain.eval()(X))


def test_checkpoints_of_both_kinds_are_resumed(tmp_path):
    plain = ConvNet()
    t = trainer()
    t.fit(plain, as_loader(BATCHES))
    t.save_checkpoint(tmp_path / "plain.ckpt")
    resumed = ConvNet()
    t = trainer([ft.architecture.DropBiasBeforeNorm()], max_epochs=2)
    t.fit(resumed, as_loader(BATCHES), ckpt_path=tmp_path / "plain.ckpt", weights_only=True)
    t.save_checkpoint(tmp_path / "without.ckpt")
    again = ConvNet()
    t = trainer(max_epochs=2)
    t.fit(again, as_loader(BATCHES), ckpt_path=tmp_path / "plain.ckpt", weights_only=True)
    torch.testing.assert_close(resumed.eval()(X), again.eval()(X), rtol=1e-3, atol=1e-4)
    whole = trainer(max_epochs=2)
    net = ConvNet()
    whole.fit(net, as_loader(BATCHES), ckpt_path=tmp_path / "without.ckpt", weights_only=True)
    assert same(weights(resumed), weights(net))


def test_a_checkpoint_from_before_is_loaded_into_the_model():
    plain, net = ConvNet(), ConvNet()
    ft.architecture.drop_bias_before_norm_(net)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.3)
    net.load_state_dict(plain.state_dict())
    copied = copy.deepcopy(net)
    copied.load_state_dict(plain.state_dict())
    for one in (net, copied):
        torch.testing.assert_close(one.eval()(X), plain.eval()(X), rtol=1e-4, atol=1e-5)


class OnValues(nn.Module):
    """A model that cannot be traced, around parts that can."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.twice = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.part(x) + self.norm(self.twice(x)) if x.sum() > 0 else self.part(x)


class ReadTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.frozen = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4).eval()
        self.other, self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.shared, self.last = nn.BatchNorm2d(4), nn.Conv2d(3, 4, 3)
        self.own = nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        z = self.norm(y) + y + self.frozen(self.other(x))
        return z + self.shared(self.one(x)) + self.shared(self.two(x)) + self.own(self.last(x))


def test_parts_of_a_model_that_cannot_be_traced_are_found():
    assert list(ft.architecture.drop_bias_before_norm_(OnValues())) == ["part.0"]


def test_a_bias_that_something_else_reads_is_left():
    net = ReadTwice()
    expected = net(X)
    assert list(ft.architecture.drop_bias_before_norm_(net)) == ["last"]
    torch.testing.assert_close(net(X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), "goes to a BatchNorm alone"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), "goes to a BatchNorm alone"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "goes to a BatchNorm alone"),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()), r"0 \(its norm is frozen"),
    ],
)
def test_a_model_without_such_biases_is_refused(net, why):
    with pytest.raises(ValueError, match=why):
        ft.architecture.drop_bias_before_norm_(net())


def test_a_linear_layer_on_sequences_before_a_norm_is_refused_at_its_call():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    ft.architecture.drop_bias_before_norm_(net)
    with pytest.raises(ValueError, match="another axis than the bias"):
        net(torch.rand(2, 6, 4))


def test_skip_twice_and_hugging_faces_resnet():
    net = ConvNet()
    assert list(ft.architecture.drop_bias_before_norm_(net, skip="stem")) == ["body", "head.0"]
    once = [vars(module).get("forward") for module in net.modules()]
    assert list(ft.architecture.drop_bias_before_norm_(net)) == ["body", "head.0"]
    assert [vars(module).get("forward") for module in net.modules()] == once
    sizes = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
    resnet = ResNetForImageClassification(ResNetConfig(**sizes))
    with pytest.raises(ValueError, match="goes to a BatchNorm alone"):  # its convolutions have no biases
        ft.architecture.drop_bias_before_norm_(resnet)


def test_blocks_can_be_recomputed_and_compiled_without_biases():
    torch._dynamo.reset()
    plain, net = ConvNet(), ConvNet()
    ft.apply(net, [ft.architecture.DropBiasBeforeNorm()])
    ft.checkpoint_activations_(net, blocks=["stem", "head"])
    ft.compile_blocks_(net, blocks=["stem", "head"], backend="aot_eager")
    for one in (plain, net):
        one(X).square().mean().backward()
    expected = gradients(plain)
    for name in DROPPED:
        del expected[f"{name}.bias"]
    assert largest_difference(expected, gradients(net)) < 1e-5
