"""Every technique keeps every promise: the rows are in ``cases.py``."""

import copy
import cProfile
import gc
import inspect
import itertools
import re
from contextlib import suppress
from dataclasses import replace
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch._subclasses import FakeTensor
from torch.nn.attention import _cur_sdpa_kernel_backends
from torch.utils._pytree import tree_flatten

import lightning_fasttrain as ft
from lightning_fasttrain.architecture.mixture_of_depths import RoutedForward
from lightning_fasttrain.finetune.adapters.adapter_checkpoints import AdapterCheckpoints
from lightning_fasttrain.finetune.selection.float32_adapters import StaysInFloat32
from lightning_fasttrain.loaders.growth_schedule import KeepsGrowth
from lightning_fasttrain.planner.candidates import known_techniques
from lightning_fasttrain.technique import Exactness
from tests.cases import BY_NAME, CASES, TOGETHER, Case, by_hand_of, in_a_loop, refused
from tests.support.covering import cover_pairs
from tests.support.nets import Block, LazyLM, TinyLM, as_loader, largest_difference, lm_batches, trainer, weights

each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BATCHES = lm_batches(5)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def batches_for(*cases):
    return BATCHES[: max(case.batches for case in cases)]


class FailedStep(Exception):
    pass


class FailsLate(TinyLM):
    """Its second step fails."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 1:
            raise FailedStep
        return super().training_step(batch, batch_idx)


def train(case: Case, techniques=None, *, net=TinyLM, batches=None, dropout=0.0, epochs=1, **settings):
    torch.manual_seed(11)
    module = net(dropout=dropout, **case.optimizer)
    t = trainer([case.make()] if techniques is None else techniques, max_epochs=epochs, **{**case.settings, **settings})
    with suppress(FailedStep):
        t.fit(module, as_loader(batches_for(case) if batches is None else batches))
    return module, t


def of_both(*cases):
    """Settings of the optimizer that the plain run has too; a fused one needs the technique to clip."""
    given = [name_and_value for case in cases for name_and_value in case.optimizer.items()]
    return {name: value for name, value in given if name == "eps"}


def plain(case: Case, epochs=1, callbacks=()):
    """The run without the technique."""
    row, batches = replace(case, optimizer=of_both(case)), case.regroup(batches_for(case))
    return train(row, [*by_hand_of([case]), *callbacks], batches=batches, epochs=epochs)[0]


TRAINED = {}  # weights, by row: the rows live as long as the tests


def trained(case):
    """The weights after a run with the technique, which several promises are about."""
    if id(case) not in TRAINED:
        TRAINED[id(case)] = weights(train(case)[0])
    return TRAINED[id(case)]


def parts(module):
    """Keys, and types of the modules."""
    return list(module.state_dict()), [type(m) for m in module.modules()]


def same(one, other):
    """Whether two states are equal bit for bit."""
    (leaves, shape), (others, other_shape) = tree_flatten(one), tree_flatten(other)
    return shape == other_shape and all(np.array_equal(a, b) for a, b in zip(leaves, others, strict=True))


@pytest.mark.quick
def test_every_technique_has_a_row():
    public = {technique.__name__ for technique in known_techniques()}
    # Held to the promises in test_prompts.py and test_drop_bias_before_norm.py.
    need_another_model = {"PromptTuning", "PrefixTuning", "DropBiasBeforeNorm"}
    assert public - need_another_model == set(BY_NAME) - {"WeightAverage"}  # of examples/


@pytest.mark.quick
@each
def test_shows_its_effect(case):
    case.shows(type(case.make()))


def hollow(kind):
    """The same class, with its hooks and ``apply`` emptied."""
    acts = [name for name in dir(kind) if name in ("apply", "attach") or name.startswith("on_")]
    return type(kind.__name__, (kind,), {name: lambda self, *_: None for name in acts})


@pytest.mark.quick
@each
def test_a_class_that_does_nothing_breaks_a_promise(case):
    broken = (AssertionError, MisconfigurationException, RuntimeError, ft.FastTrainWarning)
    with pytest.raises(broken):
        case.shows(hollow(type(case.make())))


@pytest.mark.quick
@each
def test_keeps_to_its_exactness_class(case):
    assert case.make().exactness in Exactness
    assert largest_difference(reference_for([case]), trained(case)) <= case.tolerance
    assert case.make().exactness is Exactness.TOLERANCE or case.tolerance <= 1e-5


@pytest.mark.quick
def test_negative_control_another_seed_of_weights_differs():
    other = TinyLM()
    with torch.no_grad():
        other.head.weight.add_(1e-3)
    trainer().fit(other, as_loader(batches_for(BY_NAME["DevicePrefetch"])))
    assert largest_difference(weights(plain(BY_NAME["DevicePrefetch"])), weights(other)) > 1e-4


@pytest.mark.quick
@each
def test_keys_dtype_device_and_types_are_kept(case):
    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            self.parts = parts(pl_module)

    expected, watch = Watch(), Watch()
    before = plain(case, callbacks=[expected]) if case.by_hand else TinyLM()
    module, _ = train(case, [case.make(), watch])
    assert watch.parts == parts(module) == (expected.parts if case.by_hand else parts(before))
    for a, b in zip(before.parameters(), module.parameters(), strict=True):
        assert (a.dtype, a.device, a.shape, a.requires_grad) == (b.dtype, b.device, b.shape, b.requires_grad)


@pytest.mark.quick
@each
def test_same_weights_in_trainer_mixin_fabric_and_bare_loop(case):
    class WithMixin(ft.FastTrainMixin, TinyLM):
        def configure_techniques(self):
            return [case.make()]

    expected = trained(case)
    assert largest_difference(expected, weights(train(case, [], net=WithMixin)[0])) == 0
    assert largest_difference(expected, weights(train(case, net=LazyLM)[0])) == 0
    torch.manual_seed(11)
    bare = in_a_loop(TinyLM(**case.optimizer), batches_for(case), [case.make()])
    assert largest_difference(expected, weights(bare)) <= 1e-5
    torch.manual_seed(11)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=case.settings.get("precision", "32-true"))
    looped = in_a_loop(TinyLM(**case.optimizer), batches_for(case), [case.make()], fabric=fabric)
    assert largest_difference(expected, weights(looped)) <= 1e-5


@pytest.mark.quick
@each
def test_resumed_equals_uninterrupted_bit_for_bit(case, tmp_path):
    class Save(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    uninterrupted, cut = case.make(), case.make()
    whole, _ = train(case, [uninterrupted, Save()], epochs=2)
    resumed = TinyLM(**case.optimizer)
    t = trainer([cut], max_epochs=2, **case.settings)
    t.fit(resumed, as_loader(batches_for(case)), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert largest_difference(weights(whole), weights(resumed)) == 0
    assert same(cut.state_dict(), uninterrupted.state_dict())


@pytest.mark.quick
@each
def test_a_checkpoint_resumes_without_and_with_the_technique(case, tmp_path):
    if case.optimizer or case.regroup is not list or case.by_hand:
        pytest.skip("the model, the optimizer, or what makes a step, is another one without it")
    _, t = train(case)
    t.save_checkpoint(tmp_path / "with.ckpt")
    ends = []
    for techniques in ([], [case.make()]):
        module = TinyLM()
        u = trainer(techniques, max_epochs=2, **case.settings)
        u.fit(module, as_loader(batches_for(case)), ckpt_path=tmp_path / "with.ckpt", weights_only=True)
        ends.append(weights(module))
    assert largest_difference(*ends) <= max(case.tolerance, 0.0)


ADD_PARAMETERS = (ft.finetune.Adapter, ft.architecture.MixtureOfDepths, ft.architecture.Upcycling)
AVERAGES = {
    "EMA": lambda: EMAWeightAveraging(decay=0.5),
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=1, annealing_epochs=1),
}


# A technique that operates on the model has a configure_model of its own, for which Lightning warns of sharding.
@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:.*a model that overrides the configure_model callback.*")
@pytest.mark.parametrize("average", AVERAGES)
@each
def test_lightnings_averages_of_weights_are_those_of_the_plain_run(case, average):
    averaging = AVERAGES[average]
    if average == "SWA" and isinstance(case.make(), ADD_PARAMETERS):
        with pytest.raises(ValueError, match="StochasticWeightAveraging: it copies the model before"):
            train(case, [case.make(), averaging()])
        return
    if average == "EMA" and isinstance(case.make(), ft.optim.WeightEMA):
        with pytest.raises(ValueError, match="both swap the weights for an average"):
            train(case, [case.make(), averaging()])
        return
    grows = isinstance(case.make(), KeepsGrowth)  # in the first epoch only, and a plain run would do so in each
    if grows and average == "SWA":
        pytest.skip("it averages over epochs")
    epochs = 1 if grows else 2
    key = average, case.regroup, case.batches, str(case.settings), *map(type, by_hand_of([case]))
    if key not in PLAIN_RUNS:
        PLAIN_RUNS[key] = weights(plain(case, epochs=epochs, callbacks=[averaging()]))
    averaged, _ = train(case, [case.make(), averaging()], epochs=epochs)
    assert largest_difference(PLAIN_RUNS[key], weights(averaged)) <= case.tolerance


@pytest.mark.quick
def test_an_average_that_would_copy_the_model_without_its_adapter_is_refused():
    with pytest.raises(ValueError, match="EMAWeightAveraging before LoRA: it copies the model before the adapter"):
        train(BY_NAME["DevicePrefetch"], [AVERAGES["EMA"](), ft.LoRA(rank=2)])


@pytest.mark.quick
def test_averages_are_not_the_last_weights():
    last = weights(train(BY_NAME["DevicePrefetch"], epochs=2)[0])
    for averaging in (*AVERAGES.values(), WeightAveraging):
        assert largest_difference(last, weights(train(BY_NAME["DevicePrefetch"], [averaging()], epochs=2)[0])) > 1e-4


def surgery_on(net):
    return [(id(module), type(module), id(vars(module).get("forward"))) for module in net.modules()]


@pytest.mark.quick
@each
def test_applied_twice_is_once_and_a_second_fit_is_as_the_first(case):
    technique = case.make()
    first, t = train(case, [technique])
    again, _ = train(case, [technique])
    assert largest_difference(weights(first), weights(again)) == 0
    if technique.surgery is not None and case.finds_layers:
        net = TinyLM(**case.optimizer)
        before = surgery_on(net)
        with ft.apply(net, [case.make()]):
            once = surgery_on(net)
            assert once != before
            with ft.apply(net, [case.make()]):
                assert surgery_on(net) == once
            assert surgery_on(net) == once


PLAIN_PLACES = {}  # what is patched after a run without the technique, by what is not plain about it


def global_switches():
    backends = torch.backends
    attention = [str(backend) for backend in _cur_sdpa_kernel_backends(with_priority=True)]
    precisions = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
    return precisions, backends.cudnn.benchmark, attention, len(gc.callbacks)


def check_put_back(case, net=TinyLM):
    def stays(value):  # adapters and routers stay in the model after the run
        return isinstance(getattr(value, "__self__", value), StaysInFloat32 | RoutedForward | AdapterCheckpoints)

    def patched(t, module):
        places = [module, *module.modules(), t.strategy, t.precision_plugin, t.fit_loop, t.fit_loop.epoch_loop]
        places.append(t.fit_loop.epoch_loop.automatic_optimization)
        names = [
            {k for k, v in vars(place).items() if callable(v) and hasattr(type(place), k) and not stays(v)}
            for place in places
        ]
        return names, type(t.profiler), t.accumulate_grad_batches

    switches = global_switches()
    module, t = train(case, net=net)
    assert t.state.finished == (net is TinyLM)
    key = case.batches, str(case.settings), *map(type, by_hand_of([case]))
    if key not in PLAIN_PLACES:
        bare, u = train(replace(case, optimizer=of_both(case)), by_hand_of([case]))
        PLAIN_PLACES[key] = patched(u, bare)
    assert patched(t, module) == PLAIN_PLACES[key]
    assert switches == global_switches()


@pytest.mark.quick
@each
def test_everything_is_put_back_after_the_run(case):
    check_put_back(case)


@pytest.mark.quick
@each
def test_everything_is_put_back_after_a_run_that_fails(case):
    check_put_back(case, FailsLate)


class WastefulBlock(Block):
    """Drops a result that its backward would have needed."""

    def forward(self, x, **settings):
        self.norm(x).tanh()
        return super().forward(x, **settings)


class Wasteful(TinyLM):
    def __init__(self, **settings):
        super().__init__(**settings)
        for block in self.blocks:
            block.__class__ = WastefulBlock


def count_tensors():
    gc.collect()
    kinds = map(type, gc.get_objects())
    return sum(issubclass(kind, torch.Tensor) and kind is not FakeTensor for kind in kinds)


class CountTensors(L.Callback):
    """Counts before each of the last five batches of eight: a look at all objects takes long."""

    def __init__(self, counts):
        self.counts = counts

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.losses.clear()
        if batch_idx >= 3:
            self.counts.append(count_tensors())


@each
def test_tensors_do_not_accumulate_and_none_stays_after_the_run(case):
    left = []
    for _ in range(2):  # of the first run torch keeps a few
        counts = []
        # A callback that somebody has keeps the model: Lightning gives it the model's log.
        train(case, [case.make(), CountTensors(counts)], net=Wasteful, batches=lm_batches(8))
        gc.collect()  # what was compiled is garbage once the model is
        left.append(count_tensors())
    assert case.name == "FrozenCache" or counts[-1] <= max(counts[:-1])
    assert left[1] <= left[0]


@pytest.mark.quick
@each
def test_listed_twice_is_refused(case):
    lightnings_own = "more than one stateful callback"  # which it says of callbacks with a state, even earlier
    with pytest.raises((ValueError, RuntimeError), match=f"{case.name} is listed twice|{lightnings_own}"):
        train(case, [case.make(), case.make()])


@pytest.mark.quick
@each
def test_survives_copying_and_validates(case):
    technique = copy.deepcopy(case.make())
    module, t = train(case, [technique])
    t.validate(module, as_loader(BATCHES), verbose=False)
    assert float(t.callback_metrics["val_loss"]) > 0


@pytest.mark.quick
@each
def test_documented_with_example_and_source_and_one_line_for_the_table(case):
    doc = inspect.getdoc(type(case.make()))
    assert ">>>" in doc
    assert "Source:" in doc
    assert case.make().effect
    assert case.make().in_a_loop


PLAIN_RUNS = {}  # weights, by what is not plain about the run: nothing for most combinations


def reference_for(cases, net=TinyLM):
    """Weights of the plain run that a combination must equal: regrouped if one regroups, in bf16 if one needs it."""
    settings, by_hand, batches = {}, by_hand_of(cases), batches_for(*cases)
    count = len(batches)
    for case in cases:
        batches, settings = case.regroup(batches), {**settings, **case.settings}
    row = replace(CASES[0], settings=settings, optimizer=of_both(*cases))
    key = net, count, tuple(case.regroup for case in cases), str(row.settings), str(row.optimizer), *map(type, by_hand)
    if key not in PLAIN_RUNS:
        PLAIN_RUNS[key] = weights(train(row, by_hand, net=net, batches=batches)[0])
    return PLAIN_RUNS[key]


POLICIES = [
    replace(BY_NAME["ActivationCheckpointing"], make=lambda: ft.ActivationCheckpointing(ft.model.SelectiveOps())),
    replace(
        BY_NAME["ActivationCheckpointing"],
        make=lambda: ft.ActivationCheckpointing(ft.MemoryBudget(1.0)),
        batches=5,  # it acts in the third step
    ),
]
JOINED = [*CASES, *POLICIES]


def names_of(cases):
    return "+".join(name_of(case) for case in cases)


def name_of(case):
    if case in POLICIES:
        return f"{case.name}({type(case.make().policy).__name__})"
    return case.name


def together(cases):
    """One row with the settings of all."""
    settings, optimizer = {}, {}
    for case in cases:
        settings |= case.settings
        optimizer |= case.optimizer
    return replace(cases[0], settings=settings, optimizer=optimizer, batches=max(case.batches for case in cases))


def tolerance_of(cases):
    """Under bf16 autocast the parts of a batch round on their own; in float32 only the order of sums differs."""
    if together(cases).settings.get("precision"):
        return 2e-2
    return max(1e-5, *(case.tolerance for case in cases))


def cases_at(numbers):
    return [JOINED[number] for number in numbers]


TOLERANCES = [tolerance_of([case]) for case in JOINED]


def would_show(group, pair):
    """A group that may round more than the pair alone would hide what is wrong with the pair."""
    return max(TOLERANCES[number] for number in group) == max(TOLERANCES[number] for number in pair)


PAIRS = {pair: refused(cases_at(pair)) for pair in itertools.combinations(range(len(JOINED)), 2)}
REFUSED = [cases_at(pair) for pair, reason in PAIRS.items() if reason and "listed twice" not in reason]
SLOW = {CASES.index(BY_NAME[name]) for name in ("CompileBlocks", "TiledMLP")}


def fits(group):
    """Whether none is refused beside another, and it compiles for seconds: tiles are compiled for each shape."""
    slow = len(group) > 2 and SLOW.issubset(group)
    return not slow and not any(PAIRS[pair] for pair in itertools.combinations(group, 2))


# Every pair is in a group of up to sixteen, which is one run for its 120 pairs.
GROUPS = [cases_at(group) for group in cover_pairs(len(JOINED), fits, would_show, size=16, costly=SLOW)]


@pytest.mark.parametrize("pair", REFUSED, ids=names_of)
def test_techniques_that_cannot_be_joined_are_refused(pair):
    with pytest.raises(ValueError, match=re.escape(refused(pair))):
        train(together(pair), [case.make() for case in pair])


def test_every_pair_that_is_not_refused_is_in_a_group_as_strict_as_the_pair():
    possible = {names_of(pair) for pair in itertools.combinations(JOINED, 2) if not refused(pair)}
    met = set()
    for group in GROUPS:
        for pair in itertools.combinations(group, 2):
            if tolerance_of(group) == tolerance_of(pair):
                met.add(names_of(pair))
    assert met == possible


@pytest.mark.filterwarnings("ignore:.*recompilations")  # micro-batches of several sizes
@pytest.mark.parametrize("group", GROUPS, ids=names_of)
def test_techniques_together_train_as_the_plain_run(group):
    check_group(group)


def check_group(group):
    """What fails names the pairs of the group that fail without the others."""
    try:
        check_together(group)
    except Exception as error:
        failing = [names_of(pair) for pair in itertools.combinations(group, 2) if fails(pair)]
        error.add_note(f"{names_of(group)}; of its pairs fail alone: {', '.join(failing) or 'none'}")
        raise


def trace_only(cases):
    """The same techniques; blocks are compiled into graphs that run as they are traced, in half of the time."""
    traced = replace(BY_NAME["CompileBlocks"], make=lambda: ft.CompileBlocks(backend="eager"))
    return [traced if case is BY_NAME["CompileBlocks"] else case for case in cases]


class TwoBlocks(TinyLM):
    """Each block is compiled apart beside all others: the first has an input without gradient, and each has a name."""

    def __init__(self, **settings):
        super().__init__(depth=2, **settings)


def check_together(cases):
    net = TwoBlocks if BY_NAME["CompileBlocks"] in cases else TinyLM
    # Activations that wait in files are what the backward keeps, which is another one after the graphs are lowered.
    made = cases if BY_NAME["ActivationOffload"] in cases else trace_only(cases)
    module, _ = train(together(cases), [case.make() for case in made], net=net)
    assert largest_difference(reference_for(cases, net=net), weights(module)) <= tolerance_of(cases)


def fails(cases):
    try:
        check_together(cases)
    except Exception:
        return True
    return False


def test_negative_control_a_group_that_fails_names_its_pairs():
    unlike_plain_training = replace(BY_NAME["LoRA"], by_hand=None)
    group = [BY_NAME["EvenEpochs"], unlike_plain_training, BY_NAME["HangWatch"]]
    with pytest.raises(AssertionError) as found:
        check_group(group)
    assert found.value.__notes__ == [
        "EvenEpochs+LoRA+HangWatch; of its pairs fail alone: EvenEpochs+LoRA, LoRA+HangWatch"
    ]


# Sequences grow as well.
@pytest.mark.filterwarnings("ignore:.*[78] recompilations")
@pytest.mark.filterwarnings("ignore:.*recompilations")  # trimmed to rows and lengths of 1, which are special shapes
def test_all_at_once_in_half_precision_and_turned_round_in_float32():
    optimizer = {"fused": True, **of_both(*TOGETHER)}
    fused = replace(CASES[0], optimizer=optimizer, settings=BY_NAME["FusedClipping"].settings, batches=5)
    module, t = train(fused, [case.make() for case in trace_only(TOGETHER)], net=TwoBlocks)
    assert t.global_step == 3
    assert largest_difference(reference_for(TOGETHER, net=TwoBlocks), weights(module)) <= 2e-2
    in_float32 = replace(fused, settings={"gradient_clip_val": 0.5})
    turned_round = [case for case in reversed(TOGETHER) if case.name != "TiledMLP"]  # whose tiles compile for long
    module, _ = train(in_float32, [case.make() for case in turned_round], net=TwoBlocks)
    clipped = replace(CASES[0], settings=in_float32.settings)
    expected = reference_for([c for c in TOGETHER if c.name != "FusedClipping"] + [clipped], net=TwoBlocks)
    assert largest_difference(expected, weights(module)) <= 1e-5


def test_all_at_once_in_a_loop():
    joined = [case for case in TOGETHER if case.name not in ("FusedClipping", "CompileBlocks")]  # compiled above
    torch.manual_seed(11)
    bare = in_a_loop(TwoBlocks(**of_both(*joined)), BATCHES, [case.make() for case in joined])
    assert largest_difference(reference_for(joined, net=TwoBlocks), weights(bare)) <= 1e-5


def train_together(depth):
    """Without those who make very many calls: PEFT, the compiler, and a look at all memory."""
    many = ft.finetune.Adapter | ft.CompileBlocks | ft.profiling.MemoryTimeline
    counted = [case for case in TOGETHER if not isinstance(case.make(), many)]
    train(replace(CASES[0], batches=2), [case.make() for case in counted], net=partial(TinyLM, depth=depth))


def train_within_a_budget(depth):
    train(POLICIES[1], net=partial(TinyLM, depth=depth))


def predict_step(depth, **settings):
    ft.predict_memory(partial(TinyLM, depth=depth), BATCHES[0], **settings)


def predict_rank(depth):
    predict_step(depth, strategy=ft.FSDP2Strategy(), world=4)


@pytest.mark.parametrize(
    ("run", "depths"),
    [
        (train_together, (3, 4, 5)),  # with as many trials of the step each
        (train_within_a_budget, (3, 4, 5)),
        (predict_step, (4, 8, 12)),
        (predict_rank, (3, 4, 5)),
    ],
    ids=["techniques together", "a memory budget", "a prediction", "a prediction of a rank"],
)
def test_what_they_cost_grows_no_faster_than_the_model(run, depths):
    """Counted in calls of functions; ``examples/growth.py`` has all others, and times."""

    def calls(depth):
        counted = cProfile.Profile()
        gc.collect()
        gc.disable()  # what it frees calls functions, too, at moments of its own
        try:
            counted.runcall(run, depth)
        finally:
            gc.enable()
        return sum(entry.callcount for entry in counted.getstats())

    for depth in depths:  # what is looked up once for each; other tests may have done so for one of them
        run(depth)
    few, more, most = map(calls, depths)
    assert most - more <= 1.003 * (more - few)


each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda case: type(case.make().policy).__name__)


@each_policy
@pytest.mark.parametrize(
    "promise",
    [
        test_keeps_to_its_exactness_class,
        test_keys_dtype_device_and_types_are_kept,
        test_same_weights_in_trainer_mixin_fabric_and_bare_loop,
        test_resumed_equals_uninterrupted_bit_for_bit,
        test_a_checkpoint_resumes_without_and_with_the_technique,
        test_applied_twice_is_once_and_a_second_fit_is_as_the_first,
        test_everything_is_put_back_after_the_run,
        test_survives_copying_and_validates,
    ],
)
def test_policies_of_checkpointing_keep_the_promises(promise, policy, tmp_path):
    promise(policy, **({"tmp_path": tmp_path} if "tmp_path" in inspect.signature(promise).parameters else {}))
