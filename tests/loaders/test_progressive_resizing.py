"""Images grow over a run, on a ViT and on ConvNets; models that accept one size alone are refused by name."""

from typing import Any

import lightning as L
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import lightning_fasttrain as ft
from lightning_fasttrain.loaders import Growth, ProgressiveResizing, check_image_sizes, grow_images, resize_images
from tests.support.nets import as_loader, largest_difference, trainer, weights

FULL = 32


def pictures(count, size=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(size, 3, FULL, FULL, generator=g), torch.randint(5, (size,), generator=g)) for _ in range(count)
    ]


class Classifier(L.LightningModule):
    """Any network over images; it remembers the sizes that it was given."""

    def __init__(self, net):
        super().__init__()
        self.net, self.sides = net, []

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.seen = batch[0].shape[-1]

    def on_train_batch_start(self, batch, batch_idx):
        self.sides.append(batch[0].shape[-1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def convnet(dropout=0.2):
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(8, 5)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), *head)


class HuggingFaceViT(nn.Module):
    def __init__(self, **call):
        super().__init__()
        small: dict[str, Any] = {
            "num_labels": 5,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
        }
        config = transformers.ViTConfig(image_size=FULL, patch_size=8, **small)
        self.vit, self.call = transformers.ViTForImageClassification(config), call

    def forward(self, images):
        return self.vit(images, **self.call).logits


class SlicedViT(nn.Module):
    """It takes the first position embeddings for a smaller grid, which fails nowhere."""

    def __init__(self):
        super().__init__()
        self.patches, self.pos_embed = nn.Conv2d(3, 8, 8, stride=8), nn.Parameter(torch.randn(1, 16, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).mT
        return self.head(torch.tanh(tokens + self.pos_embed[:, : tokens.shape[1]]).mean(1))


class InterpolatingViT(SlicedViT):
    """As timm's with ``dynamic_img_size=True``."""

    def forward(self, images):
        tokens = self.patches(images)
        grid = self.pos_embed.mT.unflatten(-1, (4, 4))
        grid = F.interpolate(grid, tokens.shape[-2:], mode="bilinear")
        return self.head(torch.tanh(tokens + grid).flatten(2).mean(-1))


MODELS = {
    "convnet": (convnet, 4),
    "transformers' ViT": (lambda: HuggingFaceViT(interpolate_pos_encoding=True), 8),
    "interpolating ViT": (InterpolatingViT, 8),
}


@pytest.mark.parametrize("name", MODELS)
def test_images_grow_on_a_vit_and_a_convnet_and_validation_is_in_full(name):
    make, grid = MODELS[name]
    module = Classifier(make())
    resizing = ProgressiveResizing(16, FULL, over="50%", grid=grid)
    trainer([resizing], max_epochs=2).fit(module, as_loader(pictures(4)), as_loader(pictures(1)))
    expected = {4: [16, 20, 24, 28], 8: [16, 16, 24, 24]}[grid]
    assert module.sides == [*expected, FULL, FULL, FULL, FULL]
    assert module.seen == FULL
    assert resizing.growth.samples == 32


def test_the_steps_are_those_of_a_loop_written_out():
    module, by_hand = Classifier(convnet(dropout=0)), Classifier(convnet(dropout=0))
    trainer([ProgressiveResizing(16, FULL, over=3, grid=8)]).fit(module, as_loader(pictures(4)))
    optimizer = by_hand.configure_optimizers()
    for (images, labels), side in zip(pictures(4), [16, 16, 24, FULL], strict=True):
        optimizer.zero_grad()
        F.cross_entropy(by_hand(F.adaptive_avg_pool2d(images, side)), labels).backward()
        optimizer.step()
    assert largest_difference(weights(module), weights(by_hand)) <= 1e-6
    assert largest_difference(weights(module), weights(Classifier(convnet()))) > 1e-3


def test_the_trial_leaves_no_trace():
    """Dropout draws the same, and BatchNorm has the same statistics, with the trial and without it."""
    modules = []
    for skip in (False, True):
        module, resizing = Classifier(convnet()), ProgressiveResizing(16, FULL, over=3, grid=8)
        torch.manual_seed(3)
        t = trainer([resizing])
        if skip:
            resizing.on_train_batch_start = lambda *_: None
        t.fit(module, as_loader(pictures(4)))
        modules.append(module)
    assert largest_difference(*map(weights, modules)) == 0
    for one, other in zip(*(module.buffers() for module in modules), strict=True):
        assert torch.equal(one, other)


def flat():
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * 30 * 30, 5))


@pytest.mark.parametrize(
    ("make", "grid", "message"),
    [
        (flat, 8, r"images of 16 pixels: the step fails in 'net\.2' with RuntimeError.*AdaptiveAvgPool2d"),
        (HuggingFaceViT, 8, r"fails in 'net\.vit\.vit\.embeddings.*interpolate_pos_encoding=True"),
        (SlicedViT, 8, r"first rows of 'net\.pos_embed' are taken for a smaller grid.*Interpolate"),
        (InterpolatingViT, 4, r"images of 20 pixels: 'net\.patches' reads patches of 8 pixels.*that 8 divides"),
    ],
)
def test_a_model_of_one_size_is_refused_by_name_before_the_first_step(make, grid, message):
    module = Classifier(make())
    before = weights(module)
    with pytest.raises(ValueError, match=message):
        trainer([ProgressiveResizing(16, FULL, grid=grid)]).fit(module, as_loader(pictures(4)))
    assert largest_difference(before, weights(module)) == 0
    with pytest.raises(ValueError, match=message):
        check_image_sizes(lambda batch: module.training_step(batch, 0), pictures(1)[0], Growth(16, FULL, 10, grid=grid))


def test_a_loop_checks_the_sizes_and_grows():
    net = convnet()
    growth = Growth(16, FULL, over=3, grid=8)
    step = lambda batch: F.cross_entropy(net(batch[0]), batch[1])  # noqa: E731
    assert check_image_sizes(step, pictures(1)[0], growth) == [16, 24]
    sides = [batch[0].shape[-1] for batch in grow_images(pictures(4), growth)]
    assert sides == [16, 16, 24, FULL]


class Segmenter(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["image"]), batch["mask"], ignore_index=255)

    def on_train_batch_start(self, batch, batch_idx):
        self.sides.append((batch["image"].shape[-1], batch["mask"].shape[-1]))


def test_labels_that_are_images_are_resized_on_request_alone():
    batches = [{"image": x, "mask": torch.randint(5, (4, FULL, FULL))} for x, _ in pictures(2)]
    module = Segmenter(nn.Conv2d(3, 5, 1))
    trainer([ProgressiveResizing(16, FULL, over=1, targets=True)]).fit(module, as_loader(batches))
    assert module.sides == [(16, 16), (FULL, FULL)]
    with pytest.raises(ValueError, match="the step fails with .*targets=True"):
        trainer([ProgressiveResizing(16, FULL, over=1)]).fit(module, as_loader(batches))


def test_areas_are_averaged_and_labels_are_picked():
    images = torch.arange(64.0).reshape(1, 1, 8, 8)
    batch = [images, images[:, 0].long(), torch.zeros(1, 8, 8)]
    small = resize_images(batch, 0.5, targets=True)
    assert torch.equal(small[0], images.unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2)))
    assert torch.equal(small[1], batch[1][:, 1::2, 1::2])
    assert small[2] is batch[2]  # scores, perhaps
    assert resize_images(batch, 0.5)[1] is batch[1]
    assert resize_images(batch, 1.0) is batch


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_dtype_and_memory_format_are_kept(memory_format):
    for dtype in (torch.uint8, torch.bfloat16, torch.float64):
        images = (255 * torch.rand(2, 3, 8, 12)).to(dtype).to(memory_format=memory_format)
        small = resize_images(images, 0.5, grid=2)
        assert (small.dtype, small.shape) == (dtype, (2, 3, 4, 6))
        assert small.is_contiguous(memory_format=memory_format)


def test_sides_are_multiples_of_the_grid():
    images = torch.rand(1, 3, 48, 80)
    assert [resize_images(images, scale, 16).shape[2:] for scale in (0.5, 0.1, 0.9)] == [(32, 48), (16, 16), (48, 80)]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: ProgressiveResizing(20, FULL), ValueError, "start=20 with grid=16.*Use start=16"),
        (lambda: ProgressiveResizing(64, FULL), ValueError, "the size must grow"),
        (lambda: ProgressiveResizing(16, FULL, over="soon"), ValueError, "over='soon'"),
        (lambda: ProgressiveResizing(16, FULL, **{"finetune_fraction": 0.2}), TypeError, "over='80%'"),
        (lambda: resize_images({"ids": torch.zeros(2, 3)}, 0.5), ValueError, "Give resize="),
        (lambda: resize_images(torch.rand(1, 3, 8, 8), 0.0), ValueError, "scale=0.0"),
    ],
)
def test_wrong_sizes_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_a_resumed_run_continues_with_its_size(tmp_path):
    class Save(L.Callback):
        def on_train_batch_end(self, t, module, outputs, batch, batch_idx):
            if t.global_step == 2:
                t.save_checkpoint(tmp_path / "half.ckpt")

    whole, resumed = Classifier(convnet()), Classifier(convnet())
    trainer([ProgressiveResizing(16, FULL, over="75%", grid=4), ft.ExactResume(), Save()]).fit(
        whole, as_loader(pictures(8))
    )
    torch.manual_seed(5)
    again = trainer([ProgressiveResizing(16, FULL, over="75%", grid=4), ft.ExactResume()])
    again.fit(resumed, as_loader(pictures(8)), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert whole.sides == [16, 16, 20, 24, 24, 28, FULL, FULL]
    assert resumed.sides == whole.sides[2:]
    assert largest_difference(weights(whole), weights(resumed)) == 0
