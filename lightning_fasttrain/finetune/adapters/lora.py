"""LoRA and QLoRA: trained low-rank adapters beside frozen weights, which QLoRA stores in 4 bits."""

import copy
import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.checkpoint.newest_checkpoint import guard_loading
from lightning_fasttrain.core.checks import PositiveInt, one_of
from lightning_fasttrain.core.host.late_parameters import refuse_late_optimizers
from lightning_fasttrain.core.host.lightning import replicates
from lightning_fasttrain.core.messages import explain, list_some, note_once, number_of, warn
from lightning_fasttrain.core.modules.select import Blocks, as_list, find_tuners
from lightning_fasttrain.core.modules.wrapped_forward import Undo, undo_all
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.finetune.adapters.adapter_checkpoints import checkpoint_adapters_
from lightning_fasttrain.finetune.adapters.add_adapter import adapter_parameters, add_adapter_
from lightning_fasttrain.finetune.adapters.initializations import Batches
from lightning_fasttrain.finetune.quantized.quantized_base import ALL_OR_SKIP, NONE_LEFT, QuantizedBase
from lightning_fasttrain.finetune.selection.base_fingerprint import list_trainable, names_in
from lightning_fasttrain.finetune.selection.float32_adapters import let_round_
from lightning_fasttrain.finetune.selection.targets import ALL_LINEAR, Targets, find_layers, require_peft
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Setting, Surgery, Technique
from lightning_fasttrain.technique.declarations import PredictedStep
from lightning_fasttrain.technique.technique import conflict_with_early_averages, refuse_average_before

if TYPE_CHECKING:
    from peft import PeftConfig

_ADDED = "the adapter is added"


class Adapter(Technique):
    """Train a small adapter of any of PEFT's kinds beside the frozen model.

    The adapter is added right after ``configure_model``, so that Lightning restores, optimises and synchronises it. It
    stays in the model after the run, and a second run continues training it. It is in float32 beside a model in any
    precision, also with ``precision="bf16-true"``, except under DeepSpeed, which keeps its own float32 copies.

    Args:
        config: a PEFT configuration, as for :func:`~lightning_fasttrain.finetune.add_adapter_`.
        targets: the layers to adapt, as for :func:`~lightning_fasttrain.finetune.add_adapter_`.
        train: names of further modules that are trained in full.
        name: name of this adapter, among several.
        batches: batches for data-dependent initializations.
        checkpoint: ``"adapter"``: Lightning's checkpoints hold only the trained state, and refuse to be resumed on
            another base model, on one device, under DDP, FSDP2Strategy and ZeROStrategy; ``"full"``: they hold the
            complete model. ``load_from_checkpoint`` loads both into a module with
            :class:`~lightning_fasttrain.FastTrainMixin` that names this technique, and raises an error for another
            class: see :func:`~lightning_fasttrain.finetune.load_trained_state_`.

    Raises:
        TypeError, ValueError: when the run begins; see :func:`~lightning_fasttrain.finetune.add_adapter_`.
        ModuleNotFoundError: PEFT is not installed.

    Example:
        >>> import peft
        >>> sparse = Adapter(peft.ShiraConfig(r=8), targets=["q_proj", "v_proj"])

    Source:
        See :func:`~lightning_fasttrain.finetune.add_adapter_`.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTS_LAYERS})
    surgery: ClassVar[Surgery | None] = Surgery.ADAPT
    effect: ClassVar[str] = "trains a small adapter of any of PEFT's kinds beside the frozen model"
    when: ClassVar[str] = "one of PEFT's other kinds suits the task better than LoRA"
    in_a_loop: ClassVar[str] = "finetune.add_adapter_(model, peft_config)"
    predicted: ClassVar[bool] = True

    _resumed: dict[str, Any] | None = None
    _alone = False
    _looked = False
    # DeepSpeed needs one dtype, and updates its own float32 copies.
    _rounds = False

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "adapters of two techniques cannot share a file, and each would freeze the other"
        return (
            Conflict(Adapter, why, "Use one of them; for several tasks call add_adapter_ once per name"),
            conflict_with_early_averages(_ADDED),
        )

    def __init__(
        self,
        config: Any,
        targets: Targets | None = None,
        *,
        train: str | Iterable[str] = (),
        name: str = "default",
        batches: Batches | None = None,
        checkpoint: str = "adapter",
    ) -> None:
        self.config = config
        self.batches = batches
        self.targets = targets
        self.train = as_list(train)
        self.name = name
        self.checkpoint = one_of("checkpoint", checkpoint, ("adapter", "full"))

    def apply(self, model: nn.Module) -> None:
        self._add(model, self.config, self.targets)

    def describe_effect(self, model: nn.Module) -> str:
        layers = len(find_tuners(model))
        if not layers:
            return ""
        beside = f"beside {number_of(layers, 'layer')}"
        rank = getattr(self.config, "r", None)
        if isinstance(rank, int):
            return f"rank {rank} {beside}"
        return beside  # (IA)³ and others have no rank

    def _add(self, model: nn.Module, config: "PeftConfig", targets: Targets | None) -> None:
        add_adapter_(model, config, targets, train=self.train, name=self.name, batches=self.batches)
        if self._rounds:
            let_round_(model)

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo:
        refuse_average_before(trainer, type(self).__name__, _ADDED)
        self._resumed = None
        self._rounds = isinstance(trainer.strategy, DeepSpeedStrategy)
        self._looked = False
        self._alone = trainer.world_size == 1
        undos = [guard_loading(trainer.strategy)]
        what_trains = self.checkpoint == "adapter"
        if replicates(trainer.strategy) or hasattr(trainer.strategy, "names_to_load"):  # one of this package's
            undos.append(checkpoint_adapters_(trainer, pl_module, what_trains))
        elif what_trains:
            name, strategy = type(self).__name__, type(trainer.strategy).__name__
            note_once(f"{name}: checkpoints hold the complete model, since {strategy} writes its own format")
        return undo_all(undos)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove frozen parameters from the optimizer, before its state is restored."""
        refuse_late_optimizers(pl_module, trainer.optimizers)  # while the frozen ones show whose optimizer it is
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                trains = [parameter.requires_grad for parameter in group["params"]]
                # Names exist if the optimizer was given named parameters.
                for key in {"params", "param_names"} & group.keys():
                    group[key] = list(itertools.compress(group[key], trains))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the random state when resuming mid-epoch, since the loader has drawn from it at the epoch start."""
        # The checkpoint was saved after the last batch of an epoch.
        ended = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if self._resumed is not None and trainer.fit_loop.restarted_mid_epoch and not ended:
            set_random_state(self._resumed)
        self._resumed = None

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Warn about adapter parameters without a gradient in the first step."""
        if not self._looked:
            self._looked = True
            _warn_of_what_got_no_gradient(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the random state that the adapter's dropout uses; empty in distributed runs: ranks differ in it."""
        if not self._alone:
            return {}
        return {"random": random_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the random state; Lightning calls this before it iterates over the data."""
        self._resumed = state_dict.get("random")
        if self._resumed is not None:
            set_random_state(self._resumed)


class LoRA(Adapter):
    """Train a product of two low-rank matrices beside each frozen layer: W·x + alpha/rank · B·A·x.

    With ranks of 8 to 64 about 1% of the parameters train, so gradients and optimizer states become negligible,
    and checkpoints take megabytes. B starts at zero, so training starts from the unchanged model, bit for bit.

    Args:
        rank: rank r of A [r, in] and B [out, r].
        alpha: numerator of the scale.
        targets: the layers to adapt, as for :func:`~lightning_fasttrain.finetune.find_targets`; "all-linear" excludes
            heads.
        variant: ``"lora"``; ``"rslora"``, scaled by alpha/√rank; ``"dora"``, which separates direction and magnitude
            and is slower; ``"pissa"``, which is initialized with the largest singular vectors of W instead of zero,
            and needs W in full precision. LoRA+ sets learning rates:
            :func:`~lightning_fasttrain.optim.lora_plus_groups`.
        dropout: dropout probability of the adapter's input.
        train: names of further modules that are trained in full and saved with the adapter, such as a new head.
        name: name of this adapter, among several.
        checkpoint: ``"adapter"`` or ``"full"``, as for :class:`Adapter`.

    Raises:
        TypeError, ValueError: ``rank`` is not a positive integer, ``alpha`` is not above 0, ``dropout`` is outside
            [0, 1), ``variant`` is unknown; else see :class:`Adapter`.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> _ = LoRA(rank=2).apply(net)
        >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        ['0.lora_A.default.weight', '0.lora_B.default.weight']

    Source:
        Hu et al. 2021, https://arxiv.org/abs/2106.09685; rsLoRA: Kalajdzievski 2023, https://arxiv.org/abs/2312.03732;
        DoRA: Liu et al. 2024, https://arxiv.org/abs/2402.09353; PiSSA: Meng et al. 2024,
        https://arxiv.org/abs/2404.02948. All as PEFT implements them.
    """

    effect: ClassVar[str] = "trains two low-rank matrices beside each frozen layer; rsLoRA, DoRA, PiSSA too"
    when: ClassVar[str] = (
        "you fine-tune, and gradients and optimizer states do not fit; not for training from the beginning"
    )
    in_a_loop: ClassVar[str] = "apply(model, [LoRA(...)])"
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("adapter", "lora", {"rank": 16}, cost=0.8),)
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        **{"r": "rank=", "lora_alpha": "alpha=", "lora_dropout": "dropout=", "target_modules": "targets="},
        **{"modules_to_save": "train=", "use_rslora": "variant='rslora'", "use_dora": "variant='dora'"},
        "init_lora_weights": "variant=",
        "task_type": "no task type: the model stays what it is, and is not wrapped",
        "bias": "no bias=: the biases of the base stay frozen",
    }

    def __init__(
        self,
        rank: PositiveInt = 16,
        alpha: float = 32,
        targets: Targets = ALL_LINEAR,
        *,
        variant: str = "lora",
        dropout: float = 0.0,
        train: str | Iterable[str] = (),
        name: str = "default",
        checkpoint: str = "adapter",
    ) -> None:
        one_of("variant", variant, ("lora", "rslora", "dora", "pissa"))
        if not alpha > 0:
            why = "alpha scales the adapter's output and must be above 0"
            raise ValueError(explain(f"alpha={alpha}", why, "Use for example 2·rank"))
        if not 0 <= dropout < 1:
            why = "dropout is a probability below 1"
            raise ValueError(explain(f"dropout={dropout}", why, "Use 0 ≤ dropout < 1"))
        config = require_peft().LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=dropout,
            use_rslora=variant == "rslora",
            use_dora=variant == "dora",
            init_lora_weights="pissa" if variant == "pissa" else True,
        )
        super().__init__(config, targets, train=train, name=name, checkpoint=checkpoint)


class IA3(Adapter):
    """Train one factor for each output of each frozen layer, and for each input of the feed-forward ones: (IA)³.

    Hundreds of times fewer parameters than LoRA; all factors start at one, so training starts at the model as it is.

    Args:
        targets: the layers to adapt. None uses the paper's layers (keys, values and the second feed-forward layer) in
            Hugging Face models, and "all-linear" in other models.
        feedforward: names of the targets that are scaled at their input.
        train, name, checkpoint: as for :class:`Adapter`.

    Raises:
        ValueError: ``feedforward`` names a layer that is not among the targets; else see :class:`Adapter`.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        >>> _ = IA3("0").apply(net)
        >>> [tuple(parameter.shape) for parameter in net.parameters() if parameter.requires_grad]
        [(3, 1)]

    Source:
        Liu et al. 2022, https://arxiv.org/abs/2205.05638, as PEFT implements it.
    """

    effect: ClassVar[str] = "trains one factor for each output of each frozen layer"
    when: ClassVar[str] = "LoRA's adapters are still too large: hundreds of times fewer parameters, for small tasks"
    in_a_loop: ClassVar[str] = "apply(model, [finetune.IA3(...)])"

    def __init__(
        self,
        targets: Targets | None = None,
        feedforward: str | Iterable[str] = (),
        *,
        train: str | Iterable[str] = (),
        name: str = "default",
        checkpoint: str = "adapter",
    ) -> None:
        config = require_peft().IA3Config()
        config.feedforward_modules = as_list(feedforward)
        super().__init__(config, targets, train=train, name=name, checkpoint=checkpoint)

    def apply(self, model: nn.Module) -> None:
        config, targets = self.config, self.targets
        if targets is None:
            config, targets = _papers_own(model, config)
        self._add(model, config, targets)


def _warn_of_what_got_no_gradient(model: nn.Module) -> None:
    """Warn about adapter parameters without a gradient, whose layers are unused or bypassed by a fused kernel."""

    trained = names_in(list_trainable(model), adapter_parameters(model))
    missing = [name for name in trained if model.get_parameter(name).grad is None]
    # Without any gradient, they were freed as they were computed.
    freed = all(parameter.grad is None for parameter in model.parameters())
    if missing and not freed:
        why = "their layers were not called: they are unused, experts without tokens, or read by a fused kernel"
        warn(explain(f"{list_some(missing)} got no gradient in the first step", why, "Remove them from targets="))


def _papers_own(model: nn.Module, config: "PeftConfig") -> tuple[Any, Targets]:
    """Return PEFT's default (IA)³ targets for the Hugging Face model inside; else all linear layers."""
    from peft.utils import constants

    for module in model.modules():
        kind: Any = getattr(getattr(module, "config", None), "model_type", None)
        targets = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.get(kind)
        if targets is not None:
            # The technique keeps its own configuration for the next model.
            config = copy.deepcopy(config)
            scaled = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[kind]
            config.feedforward_modules = _present(model, scaled)
            return config, _present(model, targets)
    return config, ALL_LINEAR


def _present(model: nn.Module, targets: list[str]) -> list[str]:
    """Return the targets that are layers of the model; Mixtral's experts, for example, have become parameters."""
    lines = "".join(f".{name}\n" for name, _ in model.named_modules())
    return [target for target in targets if f".{target}\n" in lines]


class QLoRA(LoRA):
    """Quantise the model's linear layers, freeze everything, and train low-rank matrices beside them.

    Equivalent to :class:`~lightning_fasttrain.finetune.QuantizedBase` and :class:`~lightning_fasttrain.LoRA` together,
    bit for bit; fully trained modules are not quantised. The weights, gradients and AdamW states of 8 billion
    parameters take 120 GiB in float32, without activations; QLoRA reduces them to 5 GiB. Activations then dominate the
    memory: add :class:`~lightning_fasttrain.ActivationCheckpointing`, and for language models
    :class:`~lightning_fasttrain.FusedLossHead`.

    Args:
        rank: as for :class:`~lightning_fasttrain.LoRA`; so are alpha, targets, variant, dropout, train, name and
            checkpoint. ``variant="pissa"`` is refused, since it needs weights in full precision.
        kind: ``"nf4"``, ``"fp4"`` or ``"int8"``, as for :class:`~lightning_fasttrain.finetune.QuantizedBase`; so are
            the remaining arguments.

    Raises:
        TypeError, ValueError: see :class:`~lightning_fasttrain.finetune.QuantizedBase` and
            :class:`~lightning_fasttrain.LoRA`.

    Example:
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
        >>> _ = QLoRA(rank=4).apply(net)
        >>> net[0].base_layer.weight.dtype, net[0].lora_A["default"].weight.dtype, net[1].weight.dtype
        (torch.uint8, torch.float32, torch.float32)

    Source:
        Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
    """

    surgery: ClassVar[Surgery | None] = Surgery.QUANTIZE
    effect: ClassVar[str] = "LoRA on frozen weights in 4 bits"
    when: ClassVar[str] = "you fine-tune, and even the frozen weights do not fit in 16 bits; slower than LoRA"
    in_a_loop: ClassVar[str] = "apply(model, [QLoRA(...)])"
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("adapter", "qlora", {"rank": 16}, cost=0.9),)
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        **LoRA.names_elsewhere,
        **{"bnb_4bit_quant_type": "kind=", "bnb_4bit_use_double_quant": "double_quant="},
        **{"bnb_4bit_compute_dtype": "compute_dtype=", "quantization_config": "kind= and compute_dtype="},
    }

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        way_out = "Use QLoRA alone, or QuantizedBase and the adapter of your choice"
        return (
            Conflict(QuantizedBase, "QLoRA is QuantizedBase and LoRA already", way_out),
            Conflict(Capability.REPLACES_PRODUCTS, NONE_LEFT, ALL_OR_SKIP, lambda qlora, _: not qlora.base.skip),
            *super().conflicts(),
        )

    def __init__(
        self,
        rank: int = 16,
        alpha: float = 32,
        targets: Targets = ALL_LINEAR,
        *,
        kind: str = "nf4",
        double_quant: bool = True,
        compute_dtype: torch.dtype | str = "auto",
        skip: Blocks = (),
        variant: str = "lora",
        dropout: float = 0.0,
        train: str | Iterable[str] = (),
        name: str = "default",
        checkpoint: str = "adapter",
    ) -> None:
        if variant == "pissa":
            why = "this initialization decomposes each weight, and quantised weights are packed"
            way_out = "Use variant='lora', or LoRA(variant='pissa') without quantisation"
            raise ValueError(explain("QLoRA(variant='pissa')", why, way_out))
        super().__init__(
            rank, alpha, targets, variant=variant, dropout=dropout, train=train, name=name, checkpoint=checkpoint
        )
        self.base = QuantizedBase(kind, double_quant=double_quant, compute_dtype=compute_dtype, skip=skip)

    def predict(self, step: PredictedStep) -> "QLoRA":
        predicted = copy.copy(self)
        predicted.base = self.base.predict(step)
        return predicted

    def apply(self, model: nn.Module) -> None:
        # A copy, so that a second model gets the configured skip.
        base, skip = copy.copy(self.base), self.base.skip
        if self.train:  # fully trained modules cannot be packed
            base.skip = [*as_list(skip), *find_layers(model, self.train, "train")]
        base.apply(model)
        self.base.report = base.report
        super().apply(model)

    def describe_effect(self, model: nn.Module) -> str:
        beside = super().describe_effect(model)
        if not beside:
            return ""
        return f"{beside}; {self.base.describe_effect(model)}"
