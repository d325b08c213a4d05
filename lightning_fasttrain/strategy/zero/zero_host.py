"""Common part of the Trainer's and Fabric's ZeRO strategies: options, choice of the stage, and the engine."""

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from lightning_fasttrain.core.checks import NonNegativeFloat, NotACallback, PositiveFloat, require
from lightning_fasttrain.core.device import GIB
from lightning_fasttrain.core.distributed import largest_over_ranks, rank_count, rank_here
from lightning_fasttrain.core.host.deepspeed import enter_deepspeed, import_deepspeed, without_needless_ops
from lightning_fasttrain.core.host.late_parameters import refuse_earlier_shards
from lightning_fasttrain.core.host.lightning import training_loader
from lightning_fasttrain.core.messages import explain, say
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.core.state.values import only, without
from lightning_fasttrain.memory.one_rank import RankStates
from lightning_fasttrain.strategy.fsdp2.sharding import Sharding
from lightning_fasttrain.strategy.memory_limits import (
    Fit,
    Limits,
    check_headroom,
    find_nearest,
    fits_table,
    name_leaner_ways,
    predict_fits,
)
from lightning_fasttrain.strategy.zero.zero_engine import (
    Engine,
    make_broadcastable_,
    refuse_half_on_cpu,
    refuse_replaced,
)
from lightning_fasttrain.strategy.zero.zero_states import (
    STAGES,
    Held,
    ZeROSizes,
    ZeROStage,
    held_by,
    refuse_unshardable,
    usual_sizes,
)
from lightning_fasttrain.technique import Technique

_NOT_PREDICTED = "ZeRO stage: activations count as activation_gib=%s, since %s"
_KNOWN = inspect.signature(DeepSpeedStrategy.__init__).parameters
# Settings of Lightning's strategy that a stage determines, so that they cannot be combined with stage=.
_PART_OF_STAGE = (
    "zero_optimization",
    "offload_optimizer",
    "offload_parameters",
    "offload_params_device",
    "offload_optimizer_device",
    "remote_device",
)
# Settings that Lightning's strategy uses itself, so that they take effect beside a config.
_BESIDE_CONFIG = (
    *("accelerator", "parallel_devices", "cluster_environment", "precision", "precision_plugin"),
    *("process_group_backend", "timeout", "logging_level", "load_full_weights", "exclude_frozen_parameters"),
    *("remote_device", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
)
_AS_JSON = 'Write a JSON object, such as {"zero_optimization": {"stage": 2}}, or pass the settings as a dict'


def without_defaults(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings that differ from Lightning's defaults, since LightningCLI passes all settings explicitly."""
    return {key: value for key, value in settings.items() if key not in _KNOWN or value != _KNOWN[key].default}


def check_stage(
    stage: int | str, config: str | Path | Mapping[str, object] | None, settings: Mapping[str, object]
) -> str:
    """Return ``stage`` as one of :data:`STAGES` or ``"auto"``, or refuse it.

    Raises:
        TypeError: a setting does not exist.
        ValueError: the stage does not exist, or conflicts with settings that a stage determines.
    """
    name = str(stage)
    if isinstance(stage, bool) or name not in (*STAGES, "auto"):
        words = []
        for word in STAGES:
            words.append(word if word.isdigit() else repr(word))
        way_out = f"Use stage='auto', or one of {', '.join(words)}"
        raise ValueError(explain(f"stage={stage!r}", "ZeRO has no such stage", way_out))
    unknown = list(without(settings, _KNOWN))
    if unknown:
        why = "neither it nor Lightning's DeepSpeedStrategy has such a setting"
        if unknown[0] in Sharding.__dataclass_fields__:
            why += ", FSDP2Strategy has"
        way_out = "Leave it out"
        if unknown[0] == "zero_stage":  # DeepSpeed's word
            way_out = f"Use stage={settings['zero_stage']!r}"
        raise TypeError(explain(f"ZeRO with {unknown[0]}={settings[unknown[0]]!r}", why, way_out))
    if config is not None:
        _check_beside_config(stage, settings)
        return name
    twice = [key for key in _PART_OF_STAGE if key in settings]
    if twice:
        what = f"stage={stage!r} with {twice[0]}={settings[twice[0]]!r}"
        why = "the stage determines the placement of gradients, optimizer state and parameters, offload included"
        raise ValueError(explain(what, why, "Leave it out, and choose a stage, such as stage='2+offload'"))
    return name


def _check_beside_config(stage: int | str, settings: Mapping[str, object]) -> None:
    if stage != "auto":
        why = "both set the stage"
        raise ValueError(explain(f"stage={stage!r} with a DeepSpeed config", why, "Leave one of the two out"))
    ignored = sorted(without(settings, _BESIDE_CONFIG))
    if ignored:
        why = "DeepSpeed's settings are read from the config, so this one would be ignored"
        raise ValueError(explain(f"a DeepSpeed config with {ignored[0]}=", why, "Write it into the config"))


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the DeepSpeed config in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it does not contain a JSON object.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(explain(f"config={str(path)!r}", "there is no such file", "Check the path"))
    try:
        config = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(explain(f"config={str(path)!r}", f"it is not valid JSON ({error})", _AS_JSON)) from None
    if not isinstance(config, dict):
        why = f"it contains a {type(config).__name__} instead of DeepSpeed's settings"
        raise ValueError(explain(f"config={str(path)!r}", why, _AS_JSON))
    return config


@dataclass
class ZeROOptions:
    """Options that decide the stage, validated; see :class:`~lightning_fasttrain.ZeROStrategy`.

    Example:
        >>> ZeROOptions("2+offload").arguments()
        {'stage': 2, 'offload_optimizer': True, 'offload_optimizer_device': 'cpu'}
    """

    stage: int | str
    memory_gib: float | None = None
    headroom: float = 0.1
    nvme_path: str | None = None
    activation_gib: float = 0.0
    config: str | Path | dict[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stage = check_stage(self.stage, self.config, self.settings)
        check_headroom(self.headroom)
        if isinstance(self.config, str | Path):
            self.config = read_config(self.config)
        named = self.config is not None or self.stage != "auto"
        if named and self.memory_gib is not None:
            other = f"stage={self.stage!r}"
            if self.config is not None:
                other = "a config"
            what = f"memory_gib={self.memory_gib} with {other}"
            why = "memory_gib is used by stage='auto' only"
            raise ValueError(explain(what, why, "Leave one of the two out"))

    @property
    def open(self) -> bool:
        """Whether the stage is still to be chosen."""
        return self.stage == "auto" and self.config is None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of Lightning's strategy; until a stage is chosen, those of stage 0."""
        if self.config is not None:
            return {"config": self.config}
        level, _, where = ("0" if self.open else str(self.stage)).partition("+")
        settings: dict[str, Any] = {"stage": int(level), "offload_optimizer": bool(where)}
        if not where:
            return settings
        device = "nvme" if where == "nvme" else "cpu"
        settings["offload_optimizer_device"] = device
        if level == "3":
            settings |= {"offload_parameters": True, "offload_params_device": device, "remote_device": device}
        if where == "nvme":
            if self.nvme_path is None:
                why = "there is no folder to offload to"
                raise ValueError(explain("stage='3+nvme' without nvme_path", why, "Give nvme_path="))
            settings["nvme_path"] = self.nvme_path
        return settings


def step_to_predict(trainer: L.Trainer, activation_gib: float) -> dict[str, Any]:
    """Return the batch and the techniques of a step for ``predict_strategies``; empty if no batch can be read."""
    loader = training_loader(trainer)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        say(_NOT_PREDICTED, activation_gib, "a batch of this loader cannot be read without consuming it")
        return {}
    # Techniques that change the model are applied already.
    techniques = [c for c in trainer.callbacks if isinstance(c, Technique) and c.surgery is None]
    before = random_state()
    try:
        return {"batch": read_batch(loader), "techniques": techniques}
    except Exception as error:
        # A user's dataset may do anything.
        say(_NOT_PREDICTED, activation_gib, f"a batch cannot be read: {error}")
        return {}
    finally:
        set_random_state(before)


def read_batch(loader: DataLoader) -> Any:
    """Read one batch from the loader's dataset directly, and collate it as the loader does.

    The loader's sampler and workers are not used, so their state does not change.
    """
    dataset: Any = loader.dataset  # map-style, as the caller has checked
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    size: Any = loader.batch_size or vars(loader.batch_sampler)["batch_size"]
    return loader.collate_fn([dataset[i % len(dataset)] for i in range(size)])


class ZeROHost(NotACallback):
    """Base of the Trainer's and Fabric's ZeRO strategies, which inherit it before Lightning's own class.

    For its arguments, see :class:`~lightning_fasttrain.ZeROStrategy`.
    """

    where_to_use: ClassVar[str] = "It is a strategy: use Trainer(strategy=ZeROStrategy('auto'))"
    reads_remote: ClassVar[bool] = True  # addresses, for which it copies a checkpoint once to each node
    _precision_name: str  # which the Trainer's and Fabric's strategies keep in different places

    def __init__(
        self,
        stage: int | str = "auto",
        *,
        memory_gib: PositiveFloat | None = None,
        headroom: float = 0.1,
        nvme_path: str | None = None,
        activation_gib: NonNegativeFloat = 0.0,
        trusted: bool = False,
        universal: bool = False,
        config: str | Path | dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        import_deepspeed()
        settings = without_defaults(settings)
        self.options = ZeROOptions(stage, memory_gib, headroom, nvme_path, activation_gib, config, settings)
        self.trusted, self.universal = trusted, universal
        super().__init__(**self.options.arguments(), **settings)
        # DeepSpeed's own default is to clip at 1.0.
        self._given_config.setdefault("gradient_clipping", 0.0)
        # The user's optimizer is the one that steps.
        self._given_config.setdefault("zero_force_ds_cpu_optimizer", False)
        self.engine: Engine | None = None
        self.inside_window = False
        self._leave: Undo = lambda: None

    @property
    def _given_config(self) -> dict[str, Any]:
        assert isinstance(self.config, dict)
        return self.config

    @property
    def stage(self) -> int:
        """The stage in use: 0 to 3."""
        return int(self._given_config.get("zero_optimization", {}).get("stage", 0))

    def predict_rank_states(self, model: nn.Module, optimizer: Optimizer, world: int, precision: str) -> RankStates:
        """Return the states of one of ``world`` ranks for :func:`~lightning_fasttrain.predict_memory`.

        Raises:
            ValueError: the stage is still to be chosen.
        """
        if self.options.open:
            why = "the stage decides what each rank holds"
            raise ValueError(explain("a prediction with stage='auto'", why, "Give a stage, such as ZeROStrategy(3)"))
        stage = str(self.options.stage) if self.options.config is None else str(self.stage)
        if stage != "0":
            refuse_unshardable(optimizer)
        sizes = self._configured_sizes(held_by(model, optimizer, world, precision))
        return ZeROStage(stage, sizes).predict_rank_states(model, optimizer, world, precision)

    def _configured_sizes(self, held: Held) -> ZeROSizes:
        config, usual = self._given_config.get("zero_optimization", {}), usual_sizes(held)
        # Keys of a config are in the order of the fields.
        sizes = ZeROSizes(*[int(config.get(key, value)) for key, value in usual.as_config().items()])
        # No more than all gradients are in a bucket.
        return replace(sizes, reduce_bucket=min(sizes.reduce_bucket, usual.reduce_bucket))

    # Process group, on a CPU too.

    def _configure_launcher(self) -> None:
        refuse_half_on_cpu(self._precision_name, self.root_device.type)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Join the process group; on a CPU as on a GPU, with gloo, and without compiling a kernel."""
        self._leave = enter_deepspeed(self.root_device.type)
        if self.root_device.type == "cuda":
            super().setup_environment()
        else:
            # The steps of Lightning's own setup, which refuses a CPU.
            self.accelerator.setup_device(self.root_device)
            reset_seed()
            self._set_world_ranks()
            with without_needless_ops():
                self._init_deepspeed_distributed()

    def teardown(self) -> None:
        """Clean up after the run; checkpoints can still be saved."""
        super().teardown()
        self._leave()

    # Stage.

    def _settle_stage(
        self, module: nn.Module, optimizer: Optimizer | None, read_step: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Choose the stage under ``"auto"``; refuse an optimizer that it does not support; fit the reduce bucket."""
        if self.options.open:
            assert optimizer is not None
            self._choose_stage(module, optimizer, read_step())
        if optimizer is not None:
            refuse_unfit_optimizer(optimizer, self.stage)
        fit_buckets(self._given_config, module, self.options.settings)

    def _limits(self) -> Limits:
        """Return the memory that the rank with the least of it may use."""
        options, device = self.options, self.root_device
        if options.nvme_path is not None and not Path(options.nvme_path).is_dir():
            raise ValueError(explain(f"nvme_path={options.nvme_path!r}", "there is no such folder", "Create it first"))
        host = require("psutil", extra="deepspeed").virtual_memory().available // (self.num_processes or 1)
        free = host if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        if options.memory_gib is not None:
            free = int(options.memory_gib * GIB)
        elif device.type == "cpu":
            # Host memory is the device's memory, so offload has no effect.
            host = 0
        # Negated, so that the maximum yields the minimum.
        free, host = largest_over_ranks([-free, -host])
        usable = 1 - options.headroom
        return Limits(int(-free * usable), int(-host * usable))

    def _choose_stage(self, module: nn.Module, optimizer: Optimizer, step: Mapping[str, Any]) -> None:
        """Choose the first stage that fits the least memory of all ranks, the same on all; rank zero prints the table.

        Args:
            module: the model, with adapters and quantised layers in place.
            optimizer: the user's optimizer.
            step: ``batch`` and ``techniques`` of the step to predict; if empty, ``activation_gib`` counts instead.

        Raises:
            ValueError: no stage fits; raised on all ranks, with the shortfall.
        """
        options = self.options
        limits = self._limits()
        unpredicted = replace(limits, activations=int(options.activation_gib * GIB))
        refuse_unshardable(optimizer)
        # float16 takes as many bytes as bfloat16.
        precision = self._precision_name
        if precision.startswith("16-"):
            precision = f"bf{precision}"
        sizes = usual_sizes(held_by(module, optimizer, rank_count(), precision))
        bucket = options.settings.get("reduce_bucket_size")
        if bucket is not None:
            sizes = ZeROSizes(reduce_bucket=bucket)
        stages = {stage: ZeROStage(stage, sizes) for stage in STAGES if options.nvme_path or stage != "3+nvme"}
        settings = {"optimizer": optimizer, "precision": precision, "world": rank_count()}
        predict = functools.partial(predict_fits, stages, module=module, device=self.root_device.type, **settings)
        fits: list[Fit] = []
        if step:
            try:
                fits = predict(limits, **step)
            except Exception as error:
                # A user's step may do anything.
                say(_NOT_PREDICTED, options.activation_gib, f"they cannot be predicted: {error}")
        if not fits:
            limits = unpredicted
            fits = predict(limits)
        fits = _agree(fits, limits)
        best = next((fit for fit in fits if fit.fits), None)
        if best is None:
            raise ValueError(_nothing_fits(fits, limits, precision))
        options.stage = best.name
        if rank_here() == 0:
            before = fits[fits.index(best) - 1] if best is not fits[0] else None
            fits_table("ZeRO, GiB on one rank", [_explain(best, before, limits)], fits, best.name).print()
        # Lightning builds the config, which has its own defaults.
        made = DeepSpeedStrategy(**options.arguments(), **options.settings).config
        assert made is not None
        given = only(options.settings, ["reduce_bucket_size", "sub_group_size"])
        # The sizes assumed in the prediction, and the user's before them.
        self._given_config["zero_optimization"] = {**made["zero_optimization"], **sizes.as_config(), **given}

    # Engine.

    def _make_engine(
        self,
        config: Mapping[str, object],
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
    ) -> Engine:
        refuse_earlier_shards(model, self)
        make_broadcastable_(model)
        # A CPU has no index, but DeepSpeed requires one.
        index = self.root_device.index
        if index is None:
            index = self.local_rank
        self.engine = Engine(config, model, optimizer, scheduler, index)
        return self.engine

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context for a batch or micro-batch after which the accumulation window continues."""
        self.inside_window = True
        if self.engine is None:
            yield
            return
        with self.engine.inside_window():
            yield

    def scale_gradients_(self, factor: Tensor | float) -> None:
        """Multiply the gradients of the coming optimizer step, before their norm is taken and clipped."""
        assert self.engine is not None
        self.engine.scale_gradients_(factor)

    def optimizer_step(self, *args: object, **kwargs: object) -> Any:
        """Run one optimizer step of the engine."""
        output = super().optimizer_step(*args, **kwargs)
        if self.engine is not None:
            self.engine.end_step()
        self.inside_window = False
        return output


def fit_buckets(config: dict[str, Any], model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Limit the reduce bucket to the size of the gradients, unless the user has set it."""
    zero = config.get("zero_optimization", {})
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
    if "reduce_bucket_size" in zero and "reduce_bucket_size" not in settings and trained:
        zero["reduce_bucket_size"] = min(zero["reduce_bucket_size"], trained)


def refuse_unfit_optimizer(optimizer: Optimizer, stage: int) -> None:
    """Refuse optimizers that ZeRO does not support: those that need a closure, or whole matrices.

    Raises:
        ValueError: the optimizer is not supported; says why, and what to use instead.
    """
    if isinstance(optimizer, LBFGS):
        why = "it evaluates a closure several times a step, which DeepSpeed does not do"
        raise ValueError(explain(f"{type(optimizer).__name__} under ZeRO", why, "Use AdamW, or Lightning's DDP"))
    if stage > 0:
        refuse_unshardable(optimizer)
        refuse_replaced(optimizer)


def _agree(fits: list[Fit], limits: Limits) -> list[Fit]:
    """Return the fits of the rank whose batch needs most, on all ranks."""
    most = largest_over_ranks([fit.device_bytes for fit in fits])
    agreed = []
    for fit, nbytes in zip(fits, map(int, most), strict=True):
        agreed.append(replace(fit, device_bytes=nbytes, short=max(0, nbytes - limits.usable)))
    return agreed


def _explain(best: Fit, before: Fit | None, limits: Limits) -> str:
    takes = limits.describe(best)
    if before is None:
        return f"Stage {best.name} fits, and sends least: {takes}."
    return f"Stage {best.name} is the first that fits: {takes}; stage {before.name} would be {before.over}."


def _nothing_fits(fits: list[Fit], limits: Limits, precision: str) -> str:
    nearest = find_nearest(fits)
    parameters, _, state = nearest.states
    if not nearest.short and fits[-1].name != "3+nvme" and limits.host is not None:
        way_out = "Give nvme_path=, a folder on a fast disk"
    # DeepSpeed's default buckets can be larger than a small model.
    elif nearest.memory.at_peak["temporaries"] > nearest.device_bytes // 2:
        way_out = "Use smaller buckets: reduce_bucket_size= in ZeROStrategy"
    else:
        leaner = ["AdamW8bit"] if state > parameters else []
        way_out = name_leaner_ways(leaner, precision, rank_count())
    return limits.explain_shortage(f"No stage fits, the nearest is {nearest.name}", nearest, "for each rank", way_out)
