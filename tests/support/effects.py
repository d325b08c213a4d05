"""What can be seen of each technique and not of a plain run: each function fails for a class that does nothing.

A function is given the technique's class, makes one as it likes, runs it, and asserts what must be seen.
"""

import gc
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import peft
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_fasttrain.core.messages import say_once
from lightning_fasttrain.loaders.even_epochs import EvenLoader
from lightning_fasttrain.micro_batching import TrimPadding
from tests.support.nets import TinyLM, as_loader, fit, heard, largest_difference, lm_batches, trainer, weights
from tests.support.padded_reader import LENGTHS, Reader, padded

BATCHES = lm_batches(5)
Kind = Callable[..., Any]


class Pictures(L.LightningModule):
    """A convolution over images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Probe(L.Callback):
    """Keeps what ``look(trainer, module)`` says whenever Lightning calls one hook."""

    def __init__(self, hook: str, look: Callable[[L.Trainer, Any], Any]) -> None:
        self.seen: list[Any] = []
        setattr(self, hook, lambda trainer, module, *_: self.seen.append(look(trainer, module)))


def probed(technique: Any, hook: str, look: Callable[[L.Trainer, Any], Any], net: Any = None) -> list[Any]:
    probe = Probe(hook, look)
    fit(net or TinyLM(), BATCHES, [technique, probe])
    assert probe.seen
    return probe.seen


def all_none(module: Any) -> bool:
    return all(parameter.grad is None for parameter in module.parameters())


def trained(module: Any) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


# data


def runs_micro_batches_of_similar_rows(kind: Kind) -> None:
    shapes, net = [], TinyLM()
    net.embed.register_forward_pre_hook(lambda module, inputs: shapes.append(inputs[0].shape))
    fit(net, BATCHES, [kind(3)])
    rows, length = BATCHES[0]["labels"].shape
    assert max(shape[0] for shape in shapes) == rows // 3
    shapes.clear()
    fit(net, BATCHES, [kind(3, trim_padding=TrimPadding(multiple_of=1))])
    assert min(shape[1] for shape in shapes) < length
    padded = rows * length * len(BATCHES)
    assert sum(shape.numel() for shape in shapes[-3 * len(BATCHES) :]) < 0.9 * padded


def blocks_run_no_padding(kind: Kind) -> None:
    tokens, net = [], Reader()
    net.blocks[0].up.register_forward_pre_hook(lambda module, inputs: tokens.append(inputs[0].shape[:2].numel()))
    fit(net, [padded()], [kind()])
    assert tokens[-1] == sum(LENGTHS)


def steps_once_for_two_batches(kind: Kind) -> None:
    t = trainer([kind(2)])
    t.fit(TinyLM(), as_loader(BATCHES))
    assert t.global_step == 3


def the_first_step_is_one_batch(kind: Kind) -> None:
    steps = probed(kind(full=2, over=1), "on_train_batch_end", lambda t, _: t.global_step)
    assert steps == [1, 1, 2, 2, 3]


def sequences_are_short_at_first(kind: Kind) -> None:
    lengths, net = [], TinyLM()
    net.embed.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    fit(net, BATCHES, [kind(2, 5, over=3, grid=1)])
    assert lengths == [2, 3, 4, 5, 5]


def images_are_small_at_first(kind: Kind) -> None:
    sides: list[int] = []

    class Looking(Pictures):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sides.append(batch[0].shape[-1])
            return super().training_step(batch, batch_idx)

    fit(Looking(), [(torch.rand(4, 3, 16, 16), torch.zeros(4, dtype=torch.long))] * 5, [kind(8, 16, over=3, grid=4)])
    assert sides[2:] == [8, 8, 12, 16, 16]  # after a trial of both sizes


def says_that_a_cpu_has_the_batches(kind: Kind) -> None:
    """There is nothing to copy; that it copies is shown where there is a GPU, in ``test_device_prefetch.py``."""
    say_once.cache_clear()
    with heard() as said:
        fit(TinyLM(), BATCHES, [kind()])
    assert any("batches are already on the CPU" in line for line in said)


# model


def runs_blocks_twice(kind: Kind) -> None:
    calls, net = [], TinyLM()
    net.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    fit(net, BATCHES, [kind()])
    assert len(calls) == 2 * len(BATCHES)


def tokens_come_in_tiles(kind: Kind) -> None:
    tokens, net = [], TinyLM()
    net.blocks[0].up.register_forward_hook(lambda layer, inputs, output: tokens.append(output.shape[:-1].numel()))
    fit(net, BATCHES[:1], [kind(16, mlps="blocks.*")])
    assert tokens[-4:] == [16, 14] * 2  # after those of the trial


def activations_wait_in_files(kind: Kind) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = probed(
            kind(min_mib=0, folder=folder), "on_before_backward", lambda *_: len(list(Path(folder).rglob("*")))
        )
    assert max(files) > 0


def graphs_are_made(kind: Kind) -> None:
    counted = torch._dynamo.utils.counters
    counted.clear()
    fit(TinyLM(), BATCHES, [kind(backend="aot_eager")])
    assert counted["stats"]["unique_graphs"] > 0


def products_are_rounded(kind: Kind) -> None:
    errors, net = [], TinyLM()

    def compare(layer: Any, inputs: Any, output: torch.Tensor) -> None:
        whole = torch.nn.functional.linear(inputs[0], layer.weight, layer.bias)
        errors.append(float(((output - whole).norm() / whole.norm()).detach()))

    net.blocks[0].up.register_forward_hook(compare)
    fit(net, BATCHES, [kind("int8", min_features=8)])
    assert len(errors) == len(BATCHES)
    assert all(0 < error < 0.02 for error in errors)


def cudnn_is_timed(kind: Kind) -> None:
    assert all(probed(kind(), "on_train_batch_end", lambda *_: torch.backends.cudnn.benchmark))


class Seeing(TinyLM):
    """With a convolution and an attention, over the tokens of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.see = torch.nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        seen = self.see(torch.stack([x, x], 1))
        attended = torch.nn.functional.scaled_dot_product_attention(seen, seen, seen)
        return super().forward(ids) + self.head(attended.sum(1))


def convolutions_are_channels_last(kind: Kind) -> None:
    layouts = probed(kind(), "on_train_batch_end", lambda _, net: net.see.weight.stride(), Seeing())
    assert set(layouts) == {(18, 1, 6, 2)}


def attention_is_measured(kind: Kind) -> None:
    technique = kind()
    fit(Seeing(), BATCHES, [technique])
    assert technique.choice is not None
    assert technique.choice.step_ms.keys() == {"flash", "math"}


# finetune


def weights_take_a_byte(kind: Kind) -> None:
    net = fit(TinyLM(), BATCHES, [kind("int8")])
    assert {block.up.weight.dtype for block in net.blocks} == {torch.int8}


def only_thin_matrices_train(kind: Kind) -> None:
    net = fit(TinyLM(), BATCHES, [kind(rank=2)])
    assert all("lora_" in name for name in trained(net))


def only_thin_matrices_beside_bytes_train(kind: Kind) -> None:
    net = fit(TinyLM(), BATCHES, [kind(rank=2, kind="int8")])
    assert all("lora_" in name for name in trained(net))
    assert net.blocks[0].up.base_layer.weight.dtype == torch.int8


def only_factors_train(kind: Kind) -> None:
    assert all("ia3_" in name for name in trained(fit(TinyLM(), BATCHES, [kind("up")])))


def only_rotations_train(kind: Kind) -> None:
    adapter = kind(peft.RoadConfig(group_size=4), "blocks.*.down")
    assert all("road_" in name for name in trained(fit(TinyLM(), BATCHES, [adapter])))


def the_lower_blocks_wait(kind: Kind) -> None:
    before = weights(TinyLM())
    after = weights(fit(TinyLM(), BATCHES, [kind(groups=["blocks.2", "blocks.1", "blocks.0"])]))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert "blocks.2.up.weight" in moved
    assert not any(name.startswith(("blocks.0", "blocks.1")) for name in moved)


def the_backbone_runs_once_for_each_sample(kind: Kind) -> None:
    rows, net = [], TinyLM()
    net.embed.requires_grad_(False)
    net.backbone = torch.nn.Sequential(net.embed)
    net.forward = lambda ids, kept=None: net.head(net.blocks[0](net.backbone(ids))[0])
    net.embed.register_forward_hook(lambda layer, inputs, output: rows.append(len(output)))
    fit(net, BATCHES, [kind("backbone")], max_epochs=3)
    assert sum(rows[3:]) == 6 * (len(BATCHES) - 1)  # after three runs of the first batch, which is examined


# architecture


def blocks_are_skipped(kind: Kind) -> None:
    calls, net = [], TinyLM()
    net.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    fit(net, BATCHES, [kind(1.0, mode="batch", blocks="blocks.0")])
    assert len(calls) == 1  # its trial


def some_tokens_skip_a_block(kind: Kind) -> None:
    tokens, net = [], TinyLM()
    net.blocks[0].up.register_forward_pre_hook(lambda module, inputs: tokens.append(inputs[0].shape[1]))
    fit(net, BATCHES, [kind(0.5, every=1, sampling="top_k", blocks="blocks.0")])
    length = BATCHES[0]["labels"].shape[1]
    assert tokens == [length, *[-(-length // 2)] * len(BATCHES)]  # the first one is the trial


def a_block_has_experts(kind: Kind) -> None:
    net = fit(TinyLM(), BATCHES, [kind(3, every=1, balance=0.0, blocks="blocks.1")])
    assert net.blocks[1].up.weight.ndim == 3
    assert not torch.equal(net.blocks[1].up.weight[0], net.blocks[1].up.weight[1])


# loss


def logits_are_never_made(kind: Kind) -> None:
    kinds, net = set(), TinyLM()
    net.register_forward_hook(lambda module, inputs, output: kinds.add(type(output)))
    fit(net, BATCHES, [kind("head")])
    assert kinds
    assert torch.Tensor not in kinds


def the_teacher_has_a_say(kind: Kind) -> None:
    t = trainer([kind(TinyLM(depth=2), head="head")])
    t.fit(TinyLM(), as_loader(BATCHES))
    assert "distillation/kl" in t.callback_metrics


# optim


def no_gradients_during_the_forward(kind: Kind) -> None:
    seen, net = [], TinyLM()
    net.embed.register_forward_hook(lambda *_: seen.append(all_none(net)))
    fit(net, BATCHES, [kind()])
    assert all(seen)


def a_fused_optimizer_is_clipped(kind: Kind) -> None:
    """Lightning refuses to."""
    t = trainer([kind()], gradient_clip_val=0.5, precision="bf16-mixed")
    t.fit(TinyLM(fused=True), as_loader(BATCHES))


def no_gradients_after_the_backward(kind: Kind) -> None:
    net = TinyLM()
    before = weights(net)
    assert all(probed(kind(), "on_after_backward", lambda _, module: all_none(module), net))
    assert largest_difference(before, weights(net)) > 0


# run


def products_are_set_to_tf32(kind: Kind) -> None:
    settings = probed(kind("tf32"), "on_train_batch_start", lambda *_: torch.backends.cuda.matmul.fp32_precision)
    assert set(settings) == {"tf32"}


def a_step_has_a_time(kind: Kind) -> None:
    meter = kind(warmup=1)
    fit(TinyLM(), BATCHES, [meter])
    assert meter.summary().get("step_ms", 0) > 0


def a_step_has_a_peak(kind: Kind) -> None:
    meter = kind()
    fit(TinyLM(), BATCHES, [meter])
    assert meter.peak_bytes is not None


def two_batches_show_noise(kind: Kind) -> None:
    noise = kind(every_n_steps=1)
    fit(TinyLM(), BATCHES, [noise], accumulate_grad_batches=2)
    assert noise.samples is not None
    assert noise.samples > 0


def a_step_has_a_picture(kind: Kind) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fit(TinyLM(), BATCHES, [kind(folder, first_step=0)])
        assert Path(folder, "memory_timeline.html").exists()


def a_damaged_checkpoint_is_not_loaded(kind: Kind) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "end.ckpt")
        net = fit(TinyLM(), BATCHES, [kind(), Probe("on_train_end", lambda t, _: t.save_checkpoint(path))])
        file, held = bytearray(path.read_bytes()), net.head.weight.detach().numpy().tobytes()
        file[file.index(held) + 3] ^= 1
        path.write_bytes(file)
        refused = False
        try:
            trainer([kind()]).validate(TinyLM(), as_loader(BATCHES), ckpt_path=path, verbose=False, weights_only=True)
        except Exception as error:
            refused = "damaged" in str(error) or "corrupt" in str(error)
    assert refused


def shuffled(seed: int) -> DataLoader:
    torch.manual_seed(seed)
    return DataLoader(as_loader(BATCHES).dataset, batch_size=None, shuffle=True)


def an_epoch_goes_on_where_it_was_cut(kind: Kind) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "half.ckpt")

        def save(t: L.Trainer, _: Any) -> None:
            if t.global_step == 2:
                t.save_checkpoint(path)

        whole, resumed = TinyLM(), TinyLM()
        trainer([kind(), Probe("on_train_batch_end", save)]).fit(whole, shuffled(seed=1))
        trainer([kind()]).fit(resumed, shuffled(seed=2), ckpt_path=path, weights_only=True)
    assert largest_difference(weights(whole), weights(resumed)) == 0


def a_run_that_is_told_to_go_saves_and_goes(kind: Kind) -> None:
    with tempfile.TemporaryDirectory() as folder:
        preemption, code = kind(folder), None
        try:
            fit(TinyLM(), BATCHES, [preemption, Probe("on_before_backward", lambda *_: preemption.request())])
        except SystemExit as error:
            code = error.code
        assert code == 143
        assert len(list(Path(folder).glob("preempted-*.ckpt"))) == 1


def a_thread_watches(kind: Kind) -> None:
    names = probed(kind(), "on_train_batch_start", lambda *_: [thread.name for thread in threading.enumerate()])
    assert all("fasttrain-hang-watch" in those for those in names)


def what_survives_is_frozen(kind: Kind) -> None:
    def collect_and_count(trainer: L.Trainer, *_: Any) -> int:
        if trainer.global_step <= 2:  # each looks through all that is imported
            gc.collect()
        return gc.get_freeze_count()

    gc.unfreeze()  # what the tests themselves have frozen
    try:
        counts = probed(kind(collections=2), "on_train_batch_end", collect_and_count)
        assert 0 < counts[0] <= counts[1]
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def a_step_with_nan_is_not_made(kind: Kind) -> None:
    assert_batch_three_is_skipped(kind(), float("nan"))


def a_step_with_a_spike_is_not_made(kind: Kind) -> None:
    assert_batch_three_is_skipped(kind(after=3), 1e3)


class _OneIsBroken(Dataset[Any]):
    """The samples of a batch, of which the second cannot be read."""

    def __len__(self) -> int:
        return len(BATCHES[0]["labels"])

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            raise RuntimeError("it is cut off")
        return {name: values[index] for name, values in BATCHES[0].items()}


def a_bad_sample_is_passed_over(kind: Kind) -> None:
    guard, t = kind(1), trainer()
    t.callbacks.append(guard)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        t.fit(TinyLM(), DataLoader(_OneIsBroken(), batch_size=4))
    assert guard.skipped == 1


def the_loader_agrees_with_others(kind: Kind) -> None:
    (loader,) = probed(kind(), "on_train_start", lambda t, module: t.train_dataloader)
    assert isinstance(loader, EvenLoader)


def no_unit_has_a_larger_gradient(kind: Kind) -> None:
    def worst(t: L.Trainer, module: Any) -> float:
        weight = module.blocks[0].up.weight
        return float((weight.grad.norm(dim=1) / weight.detach().norm(dim=1)).max())

    # a callback that is listed later sees what this one has left
    assert max(probed(kind(factor=1e-4), "on_before_optimizer_step", worst)) <= 1.001e-4


def no_weight_is_larger(kind: Kind) -> None:
    net = TinyLM()
    fit(net, BATCHES, [kind(0.01)])
    assert max(float(parameter.detach().abs().max()) for parameter in net.parameters()) <= 0.01 + 1e-9


def assert_batch_three_is_skipped(guard: Any, times: float) -> None:
    net = TinyLM()
    plain = net.training_step

    def training_step(batch: Any, batch_idx: int) -> torch.Tensor:
        return plain(batch, batch_idx) * (times if batch_idx == 3 else 1.0)

    net.training_step = training_step  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        fit(net, BATCHES, [guard])
    without = fit(TinyLM(), [*BATCHES[:3], *BATCHES[4:]])
    assert largest_difference(weights(without), weights(net)) == 0


# a stranger's


def validation_has_averaged_weights(kind: Kind) -> None:
    seen = []

    class Seen(TinyLM):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(weights(self)["head.weight"])

    net, ema = Seen(), kind(0.5)
    t = trainer([ema], num_sanity_val_steps=0)
    t.fit(net, as_loader(BATCHES), as_loader(BATCHES[:1]))
    assert not torch.equal(seen[0], net.head.weight)
    t.validate(net, as_loader(BATCHES[:1]), verbose=False)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[1], ema.average["embed.weight"])


def the_average_is_another(kind: Kind) -> None:
    average, net = kind(0.5), TinyLM()
    fit(net, BATCHES, [average])
    last = weights(net)["head.weight"]
    with average.in_use(net):
        assert not torch.equal(last, net.head.weight)
    assert torch.equal(last, net.head.weight)
