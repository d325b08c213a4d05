"""Low-rank adapters, and their relatives among PEFT's, as techniques."""

import copy
import itertools
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import one_of, positive_int
from lightning_fasttrain.core.files.guarded_loading import guard_loading
from lightning_fasttrain.core.host.lightning import replicates
from lightning_fasttrain.core.messages import explain, list_some, note_once, number_of, warn
from lightning_fasttrain.core.modules.heads import is_a
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.core.state.rng import random_state, set_random_state
from lightning_fasttrain.finetune.adapters.adapter_checkpoints import checkpoint_what_trains_
from lightning_fasttrain.finetune.adapters.add_adapter import adapter_parameters, add_adapter_
from lightning_fasttrain.finetune.adapters.initializations import Batches
from lightning_fasttrain.finetune.selection._float32_adapters import let_round_
from lightning_fasttrain.finetune.selection.targets import ALL_LINEAR, Targets, require_peft
from lightning_fasttrain.technique import Conflict, Exactness, Setting, Surgery, Technique


class Adapter(Technique):
    """Train a small adapter of any of PEFT's kinds beside the frozen model.

    Acts right after ``configure_model``, so that Lightning restores, optimises and synchronises what was added. The
    adapter stays in the model after the run, and a second run goes on with it. It is in float32 beside a model in any
    precision, also with ``precision="bf16-true"``, but for DeepSpeed, which has copies in float32 of its own.

    Args:
        config: one of PEFT's, as for :func:`~lightning_fasttrain.finetune.add_adapter_`; so are the following.
        targets: which layers.
        train: names of further modules that train whole.
        name: of this adapter, among several.
        batches: for starts that come out of data.
        checkpoint: ``"adapter"``: Lightning's checkpoints hold what trains, and refuse to be resumed on another base,
            on one device, under DDP, FSDP2Strategy and ZeROStrategy; ``"full"``: they hold the whole model.

    Raises:
        TypeError, ValueError: as :func:`~lightning_fasttrain.finetune.add_adapter_`, when the run begins.
        ModuleNotFoundError: PEFT is not installed.

    Example:
        >>> import peft
        >>> sparse = Adapter(peft.ShiraConfig(r=8), targets=["q_proj", "v_proj"])

    Source:
        See :func:`~lightning_fasttrain.finetune.add_adapter_`.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    surgery: ClassVar[Surgery | None] = Surgery.ADAPT
    effect: ClassVar[str] = "trains a small adapter of any of PEFT's kinds beside the frozen model"
    when: ClassVar[str] = "one of PEFT's other kinds suits the task better than LoRA"
    in_a_loop: ClassVar[str] = "finetune.add_adapter_(model, peft_config)"
    predicted: ClassVar[bool] = True

    _resumed: dict[str, Any] | None = None
    _alone = False
    _looked = False
    _rounds = False  # DeepSpeed wants one dtype, and updates copies of its own in float32

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "adapters of two techniques have no common file, and would each freeze the other"
        early = "it copies the model before the adapter is there"
        return (
            Conflict(Adapter, why, "Use one of them; for several tasks call add_adapter_ once for each name"),
            Conflict(StochasticWeightAveraging, early, "Use WeightAveraging"),
        )

    def __init__(
        self,
        config: Any,
        targets: Targets | None = None,
        *,
        train: Iterable[str] = (),
        name: str = "default",
        batches: Batches | None = None,
        checkpoint: str = "adapter",
    ) -> None:
        self.config = config
        self.batches = batches
        self.targets = targets
        self.train = [train] if isinstance(train, str) else list(train)
        self.name = name
        self.checkpoint = one_of("checkpoint", checkpoint, ("adapter", "full"))

    def apply(self, model: nn.Module) -> None:
        self._add(model, self.config, self.targets)

    def took_hold(self, model: nn.Module) -> str:
        layers = sum(is_a(module, "BaseTunerLayer") for module in model.modules())
        rank = getattr(self.config, "r", None)  # (IA)³ and others have none
        what = f"rank {rank} beside" if isinstance(rank, int) else "beside"
        return f"{what} {number_of(layers, 'layer')}" if layers else ""

    def _add(self, model: nn.Module, config: Any, targets: Targets | None) -> None:
        add_adapter_(model, config, targets, train=self.train, name=self.name, batches=self.batches)
        if self._rounds:
            let_round_(model)

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        _refuse_average_before(trainer, type(self).__name__)
        self._resumed = None
        self._rounds = isinstance(trainer.strategy, DeepSpeedStrategy)
        self._looked = False
        self._alone = trainer.world_size == 1
        undo = ExitStack()
        undo.callback(guard_loading(trainer.strategy))
        if self.checkpoint == "full":
            return undo.close
        chooses = hasattr(trainer.strategy, "names_to_load")  # one of the suite's own
        if not replicates(trainer.strategy) and not chooses:
            strategy = type(trainer.strategy).__name__
            note_once(f"{type(self).__name__}: checkpoints hold the whole model, since {strategy} writes its own")
            return undo.close
        undo.callback(checkpoint_what_trains_(trainer.strategy, pl_module))
        return undo.close

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the first at which the optimizer exists; its state is restored later, without what is frozen."""
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                trains = [parameter.requires_grad for parameter in group["params"]]
                for key in {"params", "param_names"} & group.keys():  # names are there if it was given some
                    group[key] = list(itertools.compress(group[key], trains))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hook: the loader has begun its epoch by now, for which it drew; in mid-epoch that was before the save."""
        ended = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch  # saved with the last batch of an epoch
        if self._resumed is not None and trainer.fit_loop.restarted_mid_epoch and not ended:
            set_random_state(self._resumed)
        self._resumed = None

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Hook: the first at which the gradients of a step exist; looks at those of the first step."""
        if not self._looked:
            self._looked = True
            _warn_of_what_got_no_gradient(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The random state, which the adapter's dropout draws from; one for each process is not Lightning's way."""
        return {"random": random_state()} if self._alone else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning restores callbacks before it begins to iterate over the data."""
        self._resumed = state_dict.get("random")
        if self._resumed is not None:
            set_random_state(self._resumed)


def _refuse_average_before(trainer: L.Trainer, name: str) -> None:
    """The first technique prepares the model for all, and what is listed after it calls ``configure_model`` itself."""
    for callback in trainer.callbacks:
        if isinstance(callback, Technique):
            return
        if isinstance(callback, WeightAveraging):
            why = "it copies the model before the adapter is there"
            raise ValueError(explain(f"{type(callback).__name__} before {name}", why, f"List it after {name}"))


class LoRA(Adapter):
    """Train a product of two thin matrices beside each frozen layer: W·x + alpha/rank · B·A·x.

    With ranks of 8 to 64 about a hundredth of the parameters train, so gradients and optimizer states all but vanish,
    and what is saved is megabytes. B starts at zero, so training starts at the model as it is, bit for bit.

    Args:
        rank: r, of A [r, in] and B [out, r].
        alpha: numerator of the scale.
        targets: which layers, as for :func:`~lightning_fasttrain.finetune.find_targets`; heads are left out of
            "all-linear".
        variant: ``"lora"``; ``"rslora"``, scaled by alpha/√rank; ``"dora"``, direction and magnitude apart, slower;
            ``"pissa"``, begins with the largest singular vectors of W instead of zero, and needs W in full precision.
            LoRA+ is a matter of learning rates: :func:`~lightning_fasttrain.optim.lora_plus_groups`.
        dropout: of the adapter's input, as a share.
        train: names of further modules that train whole and are saved with it, such as a new head.
        name: of this adapter, among several.
        checkpoint: ``"adapter"`` or ``"full"``, as for :class:`Adapter`.

    Raises:
        TypeError, ValueError: ``rank`` is no whole number of at least 1, ``alpha`` not above 0, ``dropout`` outside
            [0, 1), ``variant`` unknown; else as :class:`Adapter`.

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

    effect: ClassVar[str] = "trains two thin matrices beside each frozen layer; rsLoRA, DoRA, PiSSA too"
    when: ClassVar[str] = (
        "you fine-tune, and gradients and optimizer states do not fit; not for training from the beginning"
    )
    in_a_loop: ClassVar[str] = "apply(model, [LoRA(...)])"
    worth_trying: ClassVar[tuple[Setting, ...]] = (Setting("adapter", "lora", {"rank": 16}, cost=0.8),)
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        **{"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets"},
        **{"modules_to_save": "train", "use_rslora": "variant", "use_dora": "variant", "init_lora_weights": "variant"},
    }

    def __init__(
        self,
        rank: int = 16,
        alpha: float = 32,
        targets: Targets = ALL_LINEAR,
        *,
        variant: str = "lora",
        dropout: float = 0.0,
        train: Iterable[str] = (),
        name: str = "default",
        checkpoint: str = "adapter",
    ) -> None:
        positive_int("rank", rank)
        one_of("variant", variant, ("lora", "rslora", "dora", "pissa"))
        if not alpha > 0:
            why = "it scales what is learnt, and 0 would undo it"
            raise ValueError(explain(f"alpha={alpha}", why, "Use 2·rank, say"))
        if not 0 <= dropout < 1:
            why = "it is the share of the input that is dropped"
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
        targets: which layers. The paper's are keys, values and the second feed-forward layer, which is what None takes
            in Hugging Face's models; in others it takes "all-linear".
        feedforward: which of them are scaled at their input.
        train, name, checkpoint: as for :class:`Adapter`.

    Raises:
        ValueError: ``feedforward`` names a layer that is not among the targets; else as :class:`Adapter`.

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
        feedforward: Iterable[str] = (),
        *,
        train: Iterable[str] = (),
        name: str = "default",
        checkpoint: str = "adapter",
    ) -> None:
        config = require_peft().IA3Config()
        config.feedforward_modules = [feedforward] if isinstance(feedforward, str) else list(feedforward)
        super().__init__(config, targets, train=train, name=name, checkpoint=checkpoint)

    def apply(self, model: nn.Module) -> None:
        config, targets = self.config, self.targets
        if targets is None:
            config, targets = _papers_own(model, config)
        self._add(model, config, targets)


def _warn_of_what_got_no_gradient(model: nn.Module) -> None:
    """A model may compute with a layer's weight without calling the layer, as some fused kernels do."""
    brought = adapter_parameters(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and name in brought}
    missing = [name for name, parameter in trained.items() if parameter.grad is None]
    freed = all(parameter.grad is None for parameter in model.parameters())  # as they came
    if missing and not freed:
        why = "the forward passes their layers by: unused, experts without a token, or a kernel that reads the weight"
        warn(explain(f"{list_some(missing)} got no gradient in the first step", why, "Leave those out of targets="))


def _papers_own(model: nn.Module, config: Any) -> tuple[Any, Targets]:
    """What PEFT lists for the kind of Hugging Face model inside; else all linear layers."""
    from peft.utils import constants

    for module in model.modules():
        kind: Any = getattr(getattr(module, "config", None), "model_type", None)
        targets = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.get(kind)
        if targets is not None:
            config = copy.deepcopy(config)  # the technique keeps its own, for the next model
            config.feedforward_modules = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[kind]
            return config, targets
    return config, ALL_LINEAR
