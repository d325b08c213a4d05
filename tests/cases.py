"""One row for each technique. The promises of ``test_contracts.py`` are held over all rows."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import peft
import torch

import lightning_fasttrain as ft
from examples.your_own_technique import WeightAverage
from lightning_fasttrain import Technique
from lightning_fasttrain.technique import check_together
from tests.support import by_hand, effects
from tests.support.nets import TinyLM, as_loader, concatenate, lm_loss

FOLDER = tempfile.mkdtemp()  # of this process: several may run tests at once


def _remove(folder: str, owner: int) -> None:
    """Not by a fork of this process, which calls it as well when it ends."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


atexit.register(_remove, FOLDER, os.getpid())


@dataclass
class Loop:
    """A training loop by hand, as a user of Fabric, or of nothing at all, writes it; techniques take their places.

    Attributes:
        around: (number of an optimizer step, the batches of a step → a context that it runs in).
        before_epoch: epoch → what is done before it.
        after_backward, after_step, at_end: what is done then.
    """

    model: TinyLM
    batches: Iterable[Any]
    step: Callable[[Any], Any]
    optimizer: Any
    stack: ExitStack
    fabric: Any = None
    wrapped: Any = None
    parts: int = 1
    trim: Any = None
    window: int = 1
    windows: Iterable[list[Any]] | None = None
    around: list[tuple[int, Callable[[Any], Any]]] = field(default_factory=list)
    before_epoch: list[Callable[[int], Any]] = field(default_factory=list)
    after_backward: list[Callable[[], Any]] = field(default_factory=list)
    after_step: list[Callable[[], Any]] = field(default_factory=list)
    at_end: list[Callable[[], Any]] = field(default_factory=list)

    def run(self, epochs: int) -> None:
        batches, number = list(self.batches), 0
        for epoch in range(epochs):
            for act in self.before_epoch:
                act(epoch)
            equal = (batches[first : first + self.window] for first in range(0, len(batches), self.window))
            for held in self.windows or equal:
                with ExitStack() as around:
                    for _ in (around.enter_context(make(held)) for when, make in self.around if when == number):
                        pass
                    self.one_step(held)
                number += 1
        for act in self.at_end:
            act()

    def one_step(self, held: list[Any]) -> None:
        backward, no_sync = torch.Tensor.backward, ExitStack
        if self.fabric is not None:
            backward, no_sync = self.fabric.backward, lambda: self.fabric.no_backward_sync(self.wrapped)
        self.optimizer.zero_grad()
        if self.window > 1 or self.windows is not None:
            how = {"backward": backward, "no_sync": no_sync, "trim_padding": self.trim}
            ft.accumulate_window(self.step, held, self.parts, **how)
        elif self.parts > 1:
            how = {"backward": backward, "no_sync": no_sync, "trim_padding": self.trim}
            ft.accumulate_gradients(self.step, held[0], self.parts, **how)
        else:
            backward(self.step(held[0]))
        for act in self.after_backward:
            act()
        self.optimizer.step()
        for act in self.after_step:
            act()


def applied(technique: Any, loop: Loop) -> None:
    """``apply(model, techniques)`` has done it, for all at once and in order."""
    assert type(technique).apply is not Technique.apply


def splits(technique: Any, loop: Loop) -> None:
    loop.parts, loop.trim = technique.n, technique.trimming.how


def takes_windows(technique: Any, loop: Loop) -> None:
    loop.window = technique.factor_at(0)


def takes_global_batches(technique: Any, loop: Loop) -> None:
    loop.windows = _Windows(ft.loaders.global_batches(as_loader(list(loop.batches)), technique.samples))


class _Windows:
    """The windows of a loader, anew in each epoch."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return self.loader.windows()


def takes_growing_windows(technique: Any, loop: Loop) -> None:
    """The same windows as those of the Trainer, all at once: as many batches for each."""
    loop.windows = ft.loaders.grow_windows(list(loop.batches), ft.loaders.Growth(1, 2, over=1))


def takes_growing_sequences(technique: Any, loop: Loop) -> None:
    growth = ft.loaders.Growth(2, 5, over=3, grid=1)
    loop.batches = list(ft.loaders.grow_sequences(loop.batches, growth, window=loop.window))


def shrink_sequences(batch: Any, scale: float) -> Any:
    """Sequences instead of images."""
    return ft.loaders.cut_sequences(batch, round(5 * scale))


def takes_growing_images(technique: Any, loop: Loop) -> None:
    growth = ft.loaders.Growth(2, 5, over=3, grid=1)
    loop.batches = list(ft.loaders.grow_images(loop.batches, growth, window=loop.window, resize=technique.resize))


def prefetches(technique: Any, loop: Loop) -> None:
    loop.batches = ft.loaders.prefetch_to_device(loop.batches, "cpu")


def unfreezes(technique: Any, loop: Loop) -> None:
    unfreezing = ft.finetune.Unfreezing(loop.model, technique.groups)
    loop.before_epoch.append(lambda epoch: unfreezing.unfreeze_to(epoch + 1))


def distils(technique: Any, loop: Loop) -> None:
    loop.step = technique.distil(loop.step)


def releases(technique: Any, loop: Loop) -> None:
    loop.after_step.append(lambda: ft.optim.release_gradients_(loop.model.parameters()))


def clips(technique: Any, loop: Loop) -> None:
    if loop.fabric is not None:
        loop.after_backward.append(lambda: loop.fabric.clip_gradients(loop.wrapped, loop.optimizer, max_norm=0.5))
        return
    loop.step = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)(loop.step)
    loop.after_backward.append(lambda: torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5))


def steps_in_backward(technique: Any, loop: Loop) -> None:
    loop.stack.callback(ft.optim.optimize_in_backward_(loop.optimizer, clip_value=0.02))


def times(technique: Any, loop: Loop) -> None:
    timer = ft.profiling.StepTimer("cpu", warmup=0)
    loop.after_step.append(timer.end_step)
    loop.at_end.append(lambda: positive(timer.summary()["step_ms"]))


def measures_noise(technique: Any, loop: Loop) -> None:
    noise = ft.profiling.NoiseScale(loop.model)
    loop.step = noise.watch(loop.step)
    loop.around.append((1, lambda held: noise.measure()))


def meters(technique: Any, loop: Loop) -> None:
    peak = ft.profiling.PeakMemory("cpu", loop.model, loop.optimizer)
    loop.around.append((1, lambda held: peak))
    loop.at_end.append(lambda: positive(peak.peak_bytes))


def records(technique: Any, loop: Loop) -> None:
    made = []
    loop.around.append(
        (0, lambda held: made.append(ft.profiling.MemoryRecording(loop.model, loop.optimizer, held)) or made[0])
    )
    loop.at_end.append(lambda: positive(made[0].record.peak_bytes))


def saves_whole(technique: Any, loop: Loop) -> None:
    def save_and_load() -> None:
        path = f"{FOLDER}/loop.ckpt"
        ft.checkpoint.AtomicCheckpointIO().save_checkpoint({"model": loop.model.state_dict()}, path)
        found = ft.checkpoint.AtomicCheckpointIO().load_checkpoint(path)
        positive(torch.equal(found["model"]["head.weight"], loop.model.head.weight))

    loop.at_end.append(save_and_load)


def can_resume(technique: Any, loop: Loop) -> None:
    loader = loop.batches = ft.checkpoint.resumable(loop.batches)
    loop.at_end.append(lambda: positive(len(ft.checkpoint.random_state()) and len(loader.state_dict())))


def listens(technique: Any, loop: Loop) -> None:
    flag = loop.stack.enter_context(ft.guards.PreemptionFlag())
    loop.after_step.append(lambda: positive(not flag.should_stop()))


def freezes_survivors(technique: Any, loop: Loop) -> None:
    loop.stack.callback(ft.guards.freeze_survivors(technique.collections))


def is_watched(technique: Any, loop: Loop) -> None:
    watch = loop.stack.enter_context(ft.guards.ProgressWatch(timeout_s=60))
    loop.after_step.append(lambda: watch.beat("next batch"))


def skips_the_unfinite(technique: Any, loop: Loop) -> None:
    loop.stack.callback(technique.steps.guard_(loop.optimizer, loop.model))


def skips_spikes(technique: Any, loop: Loop) -> None:
    loop.stack.callback(technique.steps.guard_(loop.optimizer))


def ends_evenly(technique: Any, loop: Loop) -> None:
    loop.batches = ft.loaders.even_epochs(loop.batches)


def guards_samples(technique: Any, loop: Loop) -> None:
    loop.batches = ft.loaders.guard_samples(loop.batches, technique.skip_bad_samples)


def clips_units(technique: Any, loop: Loop) -> None:
    tables = set(loop.model.embed.parameters())
    clipped = [parameter for parameter in loop.model.parameters() if parameter not in tables]
    loop.after_backward.append(lambda: ft.optim.clip_adaptively_(clipped, technique.factor, technique.eps))


def clips_weights(technique: Any, loop: Loop) -> None:
    loop.after_step.append(lambda: ft.optim.clip_weights_(loop.model.parameters(), technique.limit))


def averages(technique: Any, loop: Loop) -> None:
    loop.after_step.append(lambda: technique.update(loop.model))


def positive(found: Any) -> None:
    assert found > 0


@dataclass(frozen=True)
class Case:
    """How a technique is made for the tests, how it takes part in a loop, and what it is compared with.

    Attributes:
        make: a fresh technique.
        loop: takes its place in a :class:`Loop`.
        shows: asserts what can be seen of the class, and not of a plain run.
        tolerance: for the weights after training, relative; 0.0 means bitwise.
        settings: Trainer settings that it needs to show itself.
        optimizer: settings of the optimizer, likewise.
        regroup: batches of the plain run that it must equal, where it changes which batches make a step.
        by_hand: where it changes training, a plain callback by which the plain run does the same, written out.
        finds_layers: whether it changes anything about TinyLM, where it operates on a model.
        batches: of an epoch; three tell an optimizer's first step from its later ones.
    """

    make: Callable[[], Technique]
    loop: Callable[[Any, Loop], None]
    shows: Callable[[Callable[..., Any]], None]
    tolerance: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    regroup: Callable[[Sequence[Any]], list[Any]] = list
    by_hand: Callable[[], L.Callback] | None = None
    finds_layers: bool = True
    batches: int = 3

    @property
    def name(self) -> str:
        return type(self.make()).__name__


def pairs_of(batches: Sequence[Any]) -> list[Any]:
    return [concatenate(batches[i : i + 2]) for i in range(0, len(batches), 2)]


def one_then_pairs_of(batches: Sequence[Any]) -> list[Any]:
    return [batches[0], *pairs_of(batches[1:])]


def cut_by_hand(batches: Sequence[Any]) -> list[Any]:
    lengths = [2, 3, 4, *[5] * len(batches)]
    cut = []
    for batch, length in zip(batches, lengths, strict=False):
        cut.append({name: tensor[:, :length] for name, tensor in batch.items()})
    return cut


CASES = [
    # data
    Case(
        lambda: ft.MicroBatching(3, trim_padding=ft.micro_batching.TrimPadding(multiple_of=3)),
        splits,
        effects.runs_micro_batches_of_similar_rows,
        tolerance=1e-5,
    ),
    Case(
        lambda: ft.TokenWeightedAccumulation(2),
        takes_windows,
        effects.steps_once_for_two_batches,
        tolerance=1e-5,
        regroup=pairs_of,
        batches=5,
    ),
    Case(
        lambda: ft.loaders.GlobalBatch(2),
        takes_global_batches,
        effects.steps_once_for_two_batches,
        tolerance=1e-5,
        regroup=pairs_of,
        batches=5,
    ),
    Case(
        lambda: ft.loaders.BatchSizeWarmup(full=2, over=1),
        takes_growing_windows,
        effects.the_first_step_is_one_batch,
        tolerance=1e-5,
        regroup=one_then_pairs_of,
        batches=5,
    ),
    Case(
        lambda: ft.loaders.SequenceLengthWarmup(2, 5, over=3, grid=1),
        takes_growing_sequences,
        effects.sequences_are_short_at_first,
        regroup=cut_by_hand,
        batches=5,
    ),
    Case(
        lambda: ft.loaders.ProgressiveResizing(2, 5, over=3, grid=1, resize=shrink_sequences),
        takes_growing_images,
        effects.images_are_small_at_first,
        regroup=cut_by_hand,
        batches=5,
    ),
    Case(lambda: ft.loaders.EvenEpochs(), ends_evenly, effects.the_loader_agrees_with_others),
    Case(lambda: ft.loaders.SampleGuard(), guards_samples, effects.a_bad_sample_is_passed_over),
    Case(lambda: ft.DevicePrefetch(), prefetches, effects.says_that_a_cpu_has_the_batches),
    # model
    Case(lambda: ft.ActivationCheckpointing(), applied, effects.runs_blocks_twice),
    Case(lambda: ft.model.TiledMLP(2, mlps="blocks.*"), applied, effects.tokens_come_in_tiles, tolerance=1e-5),
    Case(lambda: ft.ActivationOffload(min_mib=0, folder=FOLDER), applied, effects.activations_wait_in_files),
    Case(lambda: ft.CompileBlocks(backend="aot_eager"), applied, effects.graphs_are_made, tolerance=1e-5),
    # after CompileBlocks, which it cannot join
    Case(lambda: ft.micro_batching.PaddingFree(), applied, effects.blocks_run_no_padding, tolerance=1e-5),
    # finetune
    Case(
        lambda: ft.finetune.QuantizedBase("int8"), applied, effects.weights_take_a_byte, by_hand=by_hand.QuantizedBase
    ),
    Case(lambda: ft.LoRA(rank=2), applied, effects.only_thin_matrices_train, by_hand=by_hand.LoRA),
    Case(
        lambda: ft.QLoRA(rank=2, kind="int8"),
        applied,
        effects.only_thin_matrices_beside_bytes_train,
        by_hand=by_hand.QLoRA,
    ),
    Case(lambda: ft.finetune.IA3("up"), applied, effects.only_factors_train, by_hand=by_hand.IA3),
    Case(
        lambda: ft.finetune.Adapter(peft.RoadConfig(group_size=4), "blocks.*.down"),
        applied,
        effects.only_rotations_train,
        by_hand=by_hand.RoAd,
    ),
    Case(
        lambda: ft.finetune.GradualUnfreezing(groups=["*"]), unfreezes, effects.the_lower_blocks_wait
    ),  # one group of everything is plain training
    Case(
        lambda: ft.finetune.FrozenCache("embed"),
        applied,
        effects.the_backbone_runs_once_for_each_sample,
        optimizer={"frozen": True},
        by_hand=by_hand.FrozenEmbedding,
    ),
    # architecture
    Case(
        lambda: ft.architecture.StochasticDepth(1.0, mode="batch", blocks="blocks.0"),
        applied,
        effects.blocks_are_skipped,
        by_hand=by_hand.StochasticDepth,
    ),  # with a rate of 1 without chance
    Case(
        lambda: ft.architecture.MixtureOfDepths(0.5, every=1, sampling="top_k", blocks="blocks.0"),
        applied,
        effects.some_tokens_skip_a_block,
        tolerance=1e-5,
        by_hand=by_hand.MixtureOfDepths,
    ),
    Case(
        lambda: ft.architecture.Upcycling(3, every=1, balance=0.0, blocks="blocks.1"),
        applied,
        effects.a_block_has_experts,
        tolerance=1e-5,
        # Experts start equal: the router's first gradient is zero up to rounding, which AdamW would divide by itself.
        optimizer={"eps": 1e-3},
        by_hand=by_hand.Upcycling,
    ),
    # loss
    Case(lambda: ft.FusedLossHead("head"), applied, effects.logits_are_never_made, tolerance=1e-5),
    Case(
        lambda: ft.loss.Distillation(TinyLM(depth=2), alpha=0.0, head="head"), distils, effects.the_teacher_has_a_say
    ),  # with α = 0 the plain training
    # optim
    Case(lambda: ft.EagerGradientRelease(), releases, effects.no_gradients_during_the_forward),
    Case(
        lambda: ft.optim.AdaptiveClipping(),
        clips_units,
        effects.no_unit_has_a_larger_gradient,
        tolerance=1e-5,
        by_hand=by_hand.AdaptiveClipping,
    ),
    Case(
        lambda: ft.optim.WeightClipping(1.5),
        clips_weights,
        effects.no_weight_is_larger,
        by_hand=by_hand.WeightClipping,
    ),
    Case(lambda: ft.optim.WeightEMA(0.5), averages, effects.validation_has_averaged_weights),
    Case(
        lambda: ft.FusedClipping(),
        clips,
        effects.a_fused_optimizer_is_clipped,
        tolerance=1e-5,
        settings={"gradient_clip_val": 0.5, "precision": "bf16-mixed"},
        optimizer={"fused": True},
    ),
    Case(
        lambda: ft.OptimizerInBackward(),
        steps_in_backward,
        effects.no_gradients_after_the_backward,
        settings={"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    ),
    # run
    Case(
        lambda: ft.model.MatmulPrecision("tf32"), applied, effects.products_are_set_to_tf32
    ),  # on a CPU it changes nothing, and says so
    Case(lambda: ft.model.CudnnBenchmark(), applied, effects.cudnn_is_timed),  # likewise
    # TinyLM has neither convolutions nor attention, and both say so.
    Case(lambda: ft.model.ChannelsLast(), applied, effects.convolutions_are_channels_last, finds_layers=False),
    Case(lambda: ft.model.AttentionBackend(), applied, effects.attention_is_measured),
    Case(lambda: ft.StepMeter(), times, effects.a_step_has_a_time),
    Case(lambda: ft.MemoryMeter(), meters, effects.a_step_has_a_peak),
    Case(lambda: ft.profiling.GradientNoiseScale(every_n_steps=1), measures_noise, effects.two_batches_show_noise),
    # The steps before the one that MemoryMeter measures, as torch runs one profiler at a time.
    Case(lambda: ft.profiling.MemoryTimeline(f"{FOLDER}/memory", first_step=0), records, effects.a_step_has_a_picture),
    Case(lambda: ft.AtomicCheckpoints(), saves_whole, effects.a_damaged_checkpoint_is_not_loaded),
    Case(lambda: ft.ExactResume(), can_resume, effects.an_epoch_goes_on_where_it_was_cut),
    Case(lambda: ft.Preemption(), listens, effects.a_run_that_is_told_to_go_saves_and_goes),
    Case(lambda: ft.guards.GarbageCollection(), freezes_survivors, effects.what_survives_is_frozen),
    Case(lambda: ft.guards.HangWatch(), is_watched, effects.a_thread_watches),
    Case(lambda: ft.FiniteGuard(), skips_the_unfinite, effects.a_step_with_nan_is_not_made),
    Case(lambda: ft.guards.SpikeGuard(), skips_spikes, effects.a_step_with_a_spike_is_not_made),
    # model: late, so that QuantizedBase, which leaves it nothing to multiply, is the one that is used with all others
    Case(
        lambda: ft.model.LowPrecisionProducts("int8", min_features=8),
        applied,
        effects.products_are_rounded,
        tolerance=1.5e-2,
    ),
    # a stranger's
    Case(lambda: WeightAverage(0.5), averages, effects.the_average_is_another),
]
BY_NAME = {case.name: case for case in CASES}


def refused(cases: Iterable[Case]) -> str:
    """What these techniques have against one another; empty if nothing."""
    try:
        check_together([case.make() for case in cases])
    except ValueError as error:
        return str(error)
    return ""


TOGETHER: list[Case] = []  # all that can be used at once: who is refused beside an earlier one is left out
for case in CASES:
    if not refused([*TOGETHER, case]):
        TOGETHER.append(case)


def by_hand_of(cases: Iterable[Case]) -> list[L.Callback]:
    """What a plain run needs in order to do the same as these techniques, in the order of surgery."""
    by_hand = [case for case in cases if case.by_hand is not None]
    return [case.by_hand() for case in sorted(by_hand, key=lambda case: case.make().surgery or 0)]


def in_a_loop(
    model: TinyLM, batches: Sequence[Any], techniques: Sequence[Technique], *, epochs: int = 1, fabric: Any = None
) -> TinyLM:
    """The same training by hand, each technique by the functions that its row names."""
    with ExitStack() as stack:
        stack.enter_context(ft.apply(model, [t for t in techniques if type(t).apply is not Technique.apply]))
        step, optimizer, wrapped = model.loss, model.configure_optimizers(), None
        if fabric is not None:
            wrapped, optimizer = fabric.setup_module(model), fabric.setup_optimizers(optimizer)
            step = lambda batch: lm_loss(wrapped(batch["input_ids"]), batch)  # noqa: E731
        loop = Loop(model, as_loader(batches), step, optimizer, stack, fabric, wrapped)
        for technique in techniques:
            BY_NAME[type(technique).__name__].loop(technique, loop)
        loop.run(epochs)
    return model
