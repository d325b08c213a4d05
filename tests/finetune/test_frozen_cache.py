"""Outputs of a frozen part are computed once for each sample, and training is the same."""

import copy
import warnings
import weakref

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import ViTConfig, ViTModel

import lightning_fasttrain as ft
from lightning_fasttrain.finetune import FrozenCache, cache_frozen_
from tests.support.nets import fit, gradients, same, trainer, weights
from tests.support.ranks import Ranks


class Images(Dataset):
    """Twelve images with labels; ``noise`` augments them anew at each visit."""

    def __init__(self, noise=0.0):
        self.noise = noise
        self.images = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.images[index] + self.noise * torch.randn(3, 8, 8), index % 3


RUNS = weakref.WeakKeyDictionary()  # beside the module: a step that changes its own attributes is not split


class Probe(L.LightningModule):
    """Linear probing: a frozen ConvNet, whose BatchNorm stays in eval mode, and a head that trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        RUNS[self] = 0
        layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        self.backbone, self.head = nn.Sequential(*layers), nn.Linear(32, 3)
        ft.finetune.freeze_(self.backbone)
        self.backbone[0].register_forward_hook(self.count)
        self.losses = []

    def count(self, layer, inputs, output):
        RUNS[self] = self.runs + len(output)

    @property
    def runs(self):
        return RUNS.get(self, 0)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=0.01)


class Latents(Probe):
    """Latent diffusion: a frozen encoder, noise on its latents, and a denoiser that trains."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 1))
        self.backbone.requires_grad_(False)
        self.backbone[0].register_forward_hook(self.count)
        self.head = nn.Conv2d(4, 4, 1)

    def training_step(self, batch, batch_idx):
        latents = self.backbone(batch[0])
        noise, level = torch.randn_like(latents), torch.rand(len(latents), 1, 1, 1)
        loss = F.mse_loss(self.head((1 - level) * latents + level * noise), noise)
        self.losses.append(loss.item())
        return loss


def train(net, callbacks=(), epochs=3, noise=0.0, ckpt_path=None, **settings):
    torch.manual_seed(5)
    loader = DataLoader(Images(noise), batch_size=4, **settings)
    t = trainer(callbacks, max_epochs=epochs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(num_workers|multi-threaded).*")
        t.fit(net, loader, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return net, t


@pytest.mark.parametrize("kind", [Probe, Latents])
@pytest.mark.parametrize("in_files", [False, True])
def test_losses_and_weights_are_bitwise_those_of_the_plain_run(kind, in_files, tmp_path):
    plain, _ = train(kind())
    cache = FrozenCache("backbone", tmp_path if in_files else None)
    ours, _ = train(kind(), [cache])
    assert ours.losses == plain.losses
    assert same(weights(plain), weights(ours))
    assert plain.runs == 36
    assert ours.runs == 4 + 3 + 12  # the first batch is examined: again, and without its last row
    assert cache.outcome(ours) == "24 outputs of 'backbone' were read, 12 computed"
    assert len(list(tmp_path.rglob("*.safetensors"))) == int(in_files)


def test_workers_and_shuffled_batches_read_the_same_rows():
    plain, _ = train(Probe(), shuffle=True, num_workers=2, persistent_workers=True)
    ours, _ = train(Probe(), [FrozenCache("backbone")], shuffle=True, num_workers=2, persistent_workers=True)
    torch.testing.assert_close(ours.losses, plain.losses)
    assert ours.runs == 4 + 3 + 12


def test_a_resumed_run_reads_what_the_first_one_wrote(tmp_path):
    plain, _ = train(Probe(), epochs=2)
    _, t = train(Probe(), [FrozenCache("backbone", tmp_path / "rows")], epochs=1)
    t.save_checkpoint(tmp_path / "half.ckpt")
    ours, _ = train(Probe(), [FrozenCache("backbone", tmp_path / "rows")], epochs=2, ckpt_path=tmp_path / "half.ckpt")
    assert same(weights(plain), weights(ours))
    assert ours.runs == 4 + 4 + 3  # the first batch alone


def test_two_processes_share_a_folder(tmp_path):
    ranks = Ranks("tests.finetune.frozen_cache_ranks", tmp_path, log=tmp_path / "log", of_this_process=True)
    said = ranks.wait()
    assert said.splitlines() == ["3 read, 3 computed, True"] * 2
    assert not [path for path in (tmp_path / "rows").rglob("*") if path.name.startswith(".")]


def test_rows_that_are_missing_are_computed_together_and_gradients_agree():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    net[0].requires_grad_(False)
    plain, x = copy.deepcopy(net), torch.randn(5, 4).double()
    cached = cache_frozen_(net, "0")
    net(x[[0, 3]])
    net(x[:4]).square().sum().backward()
    assert (cached.hits, cached.misses) == (2, 2 + 2)
    plain(x[:4]).square().sum().backward()
    torch.testing.assert_close(gradients(net), gradients(plain), rtol=1e-12, atol=0)


def test_a_change_of_weights_input_dtype_or_autocast_is_another_sample():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    cached, x = cache_frozen_(net, "0"), torch.randn(3, 4)

    def misses_of(call):
        before = cached.misses
        call()
        return cached.misses - before

    assert misses_of(lambda: net(x)) == 3
    assert misses_of(lambda: net(x.clone())) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert misses_of(lambda: net(x)) == 3
    assert misses_of(lambda: net(-x)) == 3  # the highest bit of every word
    with torch.no_grad():
        net[0].weight[0, 0] += 1e-6
    assert misses_of(lambda: net(x)) == 3
    net[0].weight.data[0, 0] += 1e-6
    cached.flush()  # as at the end of an epoch
    assert misses_of(lambda: net(x)) == 3
    torch.testing.assert_close(net(x), net[1](F.linear(x, net[0].weight, net[0].bias)))


def test_outputs_of_any_structure_and_layout_come_back_as_they_were():
    class Part(nn.Module):
        def forward(self, x, scale=2.0, *, mask=None):
            return {"a": x * scale, "b": (x[:, 0], None), "c": x.view(-1, 2, 2).bfloat16().mT}

    net, x = nn.ModuleDict({"part": Part()}), torch.randn(3, 4)
    expected = net["part"](x, mask=torch.ones(3))
    cached = cache_frozen_(net, "part")
    for _ in range(2):
        found = net["part"](x, mask=torch.ones(3))
    assert (cached.hits, cached.misses) == (3, 3)
    assert torch.equal(found["a"], expected["a"])
    assert torch.equal(found["b"][0], expected["b"][0])
    assert found["b"][1] is None
    assert torch.equal(found["c"], expected["c"])
    assert (found["c"].dtype, found["c"].stride()) == (torch.bfloat16, expected["c"].stride())
    net["part"](x, 3.0)
    assert cached.misses == 6
    cached.undo()
    assert "forward" not in vars(net["part"])


def test_a_hugging_face_backbone_returns_its_own_output():
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8)
    config.patch_size = 4
    net = nn.ModuleDict({"backbone": ViTModel(config).eval().requires_grad_(False)})
    images = torch.randn(2, 3, 8, 8)
    expected = net["backbone"](images)
    cached = cache_frozen_(net, "backbone")
    for _ in range(2):
        found = net["backbone"](pixel_values=images)
    assert type(found) is type(expected)
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    assert cached.hits == 2


class Mixes(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Odd(nn.Module):
    def forward(self, x):
        return x, x.sum()


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (nn.Dropout(0.5), r"draws random numbers: dropout in training mode.*Call \.eval\(\)"),
        (nn.Sequential(nn.BatchNorm1d(4, affine=False)), r"BatchNorm normalizes by the batch in training mode \(0\)"),
        (Mixes(), "depends on the other samples of its batch"),
        (Odd(), "returns a Tensor that has no row for each sample"),
    ],
)
def test_a_part_that_does_not_repeat_itself_is_refused_at_its_first_call(part, why):
    net = nn.ModuleDict({"part": part})
    cache_frozen_(net, "part")
    state = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=rf"FrozenCache of 'part' \({type(part).__name__}\): .*{why}"):
        net["part"](torch.randn(6, 4))
    assert all(torch.equal(state[name], value) or "running" in name or "num" in name for name, value in state.items())


def test_a_part_that_trains_is_refused_at_once_and_when_it_is_unfrozen():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"FrozenCache of '0' \(Linear\): 2 of its parameters train \(weight, bias\)"):
        cache_frozen_(net, "0")
    net[1].requires_grad_(False)
    cache_frozen_(net, "1")
    with pytest.raises(ValueError, match="FrozenCache of '1' .*an input requires a gradient"):
        net(torch.randn(2, 4))
    with torch.no_grad():
        net(torch.randn(2, 4))
    net[1].requires_grad_(True)
    with pytest.raises(ValueError, match="FrozenCache of '1' .*2 of its parameters train"):
        net[1](torch.randn(2, 4))


def test_unfreezing_beside_it_and_an_unknown_part_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"FrozenCache \+ GradualUnfreezing: it unfreezes the part"):
        train(Probe(), [FrozenCache("backbone"), ft.finetune.GradualUnfreezing(groups=["*"])])
    with pytest.raises(ValueError, match="part='backbonne' in Probe: no such module. Similar names are 'backbone'"):
        train(Probe(), [FrozenCache("backbonne")])
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="folder="):
        train(Probe(), [FrozenCache("backbone", tmp_path / "file")])


def test_augmented_inputs_are_computed_and_warned_of():
    plain, _ = train(Probe(), noise=0.1)
    with pytest.warns(ft.FastTrainWarning, match="none of the 12 inputs of this epoch had been seen before"):
        ours, _ = train(Probe(), [FrozenCache("backbone")], noise=0.1)
    assert ours.losses == plain.losses
    assert same(weights(plain), weights(ours))


def test_a_damaged_file_is_named_and_not_used(tmp_path):
    plain, _ = train(Probe(), epochs=1)
    train(Probe(), [FrozenCache("backbone", tmp_path)], epochs=1)
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.warns(ft.FastTrainWarning, match=f"{file.name} is damaged and not used"):
        ours, _ = train(Probe(), [FrozenCache("backbone", tmp_path)], epochs=1)
    assert same(weights(plain), weights(ours))


def test_rows_of_another_model_under_the_same_fingerprint_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_fasttrain.finetune.frozen_cache.hash_module", lambda module: b"same")
    train(Probe(), [FrozenCache("backbone", tmp_path)], epochs=1)
    other = Probe()
    nn.init.ones_(other.backbone[0].weight)
    plain, _ = train(copy.deepcopy(other), epochs=1)
    with pytest.warns(ft.FastTrainWarning, match="are not those of 'backbone'; not used"):
        ours, _ = train(other, [FrozenCache("backbone", tmp_path)], epochs=1)
    assert same(weights(plain), weights(ours))


def test_micro_batches_and_copies_read_the_same_rows():
    cache, net = FrozenCache("backbone"), Probe()
    train(net, [cache, ft.MicroBatching(2), ft.profiling.StepMeter()])
    plain, _ = train(Probe(), [ft.MicroBatching(2)])
    torch.testing.assert_close(weights(net), weights(plain))
    with ft.apply(net, [cache]):
        net.backbone(Images().images)
        twin = copy.deepcopy(net)
        runs = twin.runs
        twin.backbone(Images().images)
        assert twin.runs == runs


def test_rows_of_a_validation_are_read_in_training_and_the_other_way_round():
    class Validated(Probe):
        def validation_step(self, batch, batch_idx):
            self.head(self.backbone(batch[0]))

    net, cache = Validated(), FrozenCache("backbone")
    net.backbone.eval()
    loader = DataLoader(Images(), batch_size=4)
    trainer([cache], max_epochs=2).fit(net, loader, loader)  # validation runs in inference mode, and before training
    assert net.runs == 4 + 3 + 12


def test_a_block_that_is_recomputed_selectively_may_hold_the_part():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.part, self.out = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

        def forward(self, x, ids):
            return torch.tanh(self.out(self.part(ids) + x))

    plain, x, ids = nn.ModuleList([Block(), Block()]), torch.randn(3, 4), torch.randn(3, 4)
    ours = copy.deepcopy(plain)
    ft.checkpoint_activations_(ours, ft.model.SelectiveOps())
    for name in ("0.part", "1.part"):
        cache_frozen_(ours, name)
    for net in (plain, ours):
        net[1](net[0](x, ids), ids).square().sum().backward()
    assert same(gradients(plain), gradients(ours))


def test_a_part_that_is_never_called_is_warned_of():
    net = Probe()
    net.unused = nn.Identity()
    with pytest.warns(ft.FastTrainWarning, match="'unused' was not called"):
        fit(net, [(torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))], [FrozenCache("unused")])
