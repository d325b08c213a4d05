"""Create an optimizer by name, with the usual parameter groups."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import (
    NonNegativeFloat,
    NotACallback,
    PositiveFloat,
    check_arguments,
    one_of,
    require,
)
from lightning_fasttrain.core.checks.annotations import find_problem
from lightning_fasttrain.core.checks.arguments import show
from lightning_fasttrain.core.host.lightning import has_same_gradients
from lightning_fasttrain.core.messages import explain, first_line
from lightning_fasttrain.optim.closure_optimizer import Groups
from lightning_fasttrain.optim.galore import block_matrices, galore_groups
from lightning_fasttrain.optim.named.host_optimizer import HostOptimizer
from lightning_fasttrain.optim.named.low_precision_updates import LowPrecisionUpdates
from lightning_fasttrain.optim.named.optimizer_state import save_as_plain_tensors_
from lightning_fasttrain.optim.parameter_groups import decay_groups, layer_decay_groups, lora_plus_groups


@dataclass(frozen=True)
class Known:
    """One optimizer that is available by name.

    Args:
        places: dotted paths of the class; the first one whose package is installed is used.
        extra: this package's extra that installs the first path; "" if the class is torch's or ours.
        lr: default learning rate.
        weight_decay: default weight decay; 0 for optimizers that add it to the gradient, where its effect differs.
        marks: ``"muon"`` or ``"galore"``: matrices of blocks are in separate groups.
        fuses: whether it supports ``fused=`` on CUDA.
        refuses: maps ``"offload"`` or ``"updates"`` to the reason why it is not supported.
    """

    places: tuple[str, ...]
    extra: str = ""
    lr: float = 1e-3
    weight_decay: float = 0.01
    marks: str = ""
    fuses: bool = False
    refuses: Mapping[str, str] = field(default_factory=dict)

    def find_class(self) -> Any:
        """Import and return the class.

        Raises:
            ModuleNotFoundError: no package that provides it is installed; names the extra.
        """
        missing = []
        for place in self.places:
            module, _, name = place.rpartition(".")
            try:
                return getattr(require(module, self.extra), name)
            except ModuleNotFoundError as error:
                missing.append(error)
        raise missing[0]  # the first one's, whose extra this package defines


_PAGED = {"offload": "its state moves to host memory by itself when the device is full"}
_OWN_AVERAGE = {
    "offload": "it swaps the weights for their average in place",
    "updates": "it keeps counters for a whole group of parameters",
}
_OURS = "lightning_fasttrain.optim"

KNOWN: dict[str, Known] = {
    "sgd": Known(("torch.optim.SGD",), weight_decay=0.0, fuses=True),
    "adagrad": Known(("torch.optim.Adagrad",), lr=1e-2, weight_decay=0.0),
    "rmsprop": Known(("torch.optim.RMSprop",), weight_decay=0.0),
    "adam": Known(("torch.optim.Adam",), weight_decay=0.0, fuses=True),
    "adamw": Known(("torch.optim.AdamW",), fuses=True),
    "adafactor": Known(("torch.optim.Adafactor",), lr=1e-2),
    "lion": Known((f"{_OURS}.named.lion.Lion",), lr=1e-4),
    "muon": Known((f"{_OURS}.named.muon.MuonAdamW",), marks="muon", fuses=True),
    "galore": Known((f"{_OURS}.galore.GaLoreAdamW",), marks="galore"),
    "adamw8bit": Known(("bitsandbytes.optim.AdamW8bit", "torchao.optim.AdamW8bit"), extra="finetune"),
    "adamw4bit": Known(("torchao.optim.AdamW4bit",), extra="ao"),
    "lion8bit": Known(("bitsandbytes.optim.Lion8bit",), extra="finetune", lr=1e-4),
    "paged-adamw": Known(("bitsandbytes.optim.PagedAdamW",), extra="finetune", refuses=_PAGED),
    "paged-adamw8bit": Known(("bitsandbytes.optim.PagedAdamW8bit",), extra="finetune", refuses=_PAGED),
    "paged-lion8bit": Known(("bitsandbytes.optim.PagedLion8bit",), extra="finetune", lr=1e-4, refuses=_PAGED),
    "schedule-free": Known(("schedulefree.AdamWScheduleFree",), extra="schedule-free", refuses=_OWN_AVERAGE),
}


def find_known(name: str) -> Known:
    """Look up an optimizer by name; case, spaces, dashes and underscores do not matter.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.

    Example:
        >>> find_known("AdamW_8bit").places[0]
        'bitsandbytes.optim.AdamW8bit'
    """
    if not is_known(name):
        why = "unknown optimizer name"
        raise ValueError(explain(f"optimizer {name!r}", why, f"Use one of {', '.join(KNOWN)}"))
    return _NORMALIZED[_normalize(name)]


def is_known(name: str) -> bool:
    """Whether :func:`find_known` knows the name."""
    return _normalize(name) in _NORMALIZED


def _normalize(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


_NORMALIZED = {_normalize(name): known for name, known in KNOWN.items()}


def refuse_settings(name: str, kind: type[Optimizer], settings: Mapping[str, object]) -> None:
    """Refuse settings that the class does not have, and values of another kind than the default.

    Raises:
        TypeError: names these settings, and the allowed ones.
        ValueError: another number of values than the default has, such as one beta.
    """
    parameters = inspect.signature(kind).parameters
    allowed = [key for key in parameters if key not in ("params", "lr", "weight_decay")]
    unknown = [key for key in settings if key not in allowed]
    if unknown:
        what = f"{', '.join(unknown)} for {name!r}"
        raise TypeError(explain(what, f"{kind.__name__} has no such setting", f"It has {', '.join(allowed)}"))
    for key, value in settings.items():
        default = parameters[key].default
        problem = find_problem(_annotation_of(default), value)
        if problem is not None and value != default:
            way_out = problem.way_out or f"Leave it out for the default, {default}"
            raise problem.kind(explain(f"{key}={show(value)} for {name!r}", problem.why, way_out))


def _annotation_of(default: object) -> Any:
    """Return the annotation of a setting as its default shows it; ``Any`` if that does not say enough."""
    if isinstance(default, tuple) and default:
        return tuple[tuple(map(_annotation_of, default))]  # pyright: ignore[reportInvalidTypeForm]
    if isinstance(default, int | float) and not isinstance(default, bool):
        return float | Tensor
    return Any


_OF_GALORE = ("rank", "update_every", "scale", "subspace", "blocks")


@check_arguments(
    model="Pass the model itself: names of parameters decide on their weight decay; or use groups=",
    learning_rate="Use lr=",
)
def build_optimizer(
    model: nn.Module,
    name: str = "adamw",
    *,
    lr: NonNegativeFloat | Tensor | None = None,
    weight_decay: NonNegativeFloat | None = None,
    groups: Groups | None = None,
    layer_decay: PositiveFloat | None = None,
    lora_plus: PositiveFloat | None = None,
    offload: str | None = None,
    updates: str | None = None,
    **settings: Any,
) -> Optimizer:
    """Create the optimizer of this name for ``model``, with weight decay on the parameters that should have it.

    The names: ``sgd``, ``adagrad``, ``rmsprop``, ``adam``, ``adamw``, ``adafactor``, ``lion``; ``muon`` (PyTorch's for
    the matrices of the blocks, AdamW for the rest, in one optimizer); ``galore``; ``adamw8bit``, ``adamw4bit`` and
    ``lion8bit``, with quantized state; ``paged-adamw``, ``paged-adamw8bit`` and ``paged-lion8bit``, whose state moves
    to host memory when a GPU is full, except after a checkpoint was loaded, which bitsandbytes keeps on the GPU;
    ``schedule-free``, which evaluates at an average of the weights: add
    ``optim.ScheduleFreeEvaluation()`` to the Trainer, or call its ``eval()`` and ``train()`` yourself.

    Norms, biases and embeddings have no weight decay (:func:`decay_groups`), a tied weight is listed once, frozen ones
    are excluded. On CUDA, SGD, Adam and AdamW are fused, and clipping still works.

    Args:
        model: any module; under FSDP2 after it was sharded, with adapters after they were added.
        name: case and separators do not matter: ``"adamw_8bit"`` is ``"adamw8bit"``.
        lr: learning rate; the default depends on the optimizer: 1e-3, for Lion 1e-4, for Adagrad and Adafactor 1e-2.
        weight_decay: by default 0.01 where it is decoupled from the gradient, and 0 where it is not.
        groups: your own parameter groups, instead of those above.
        layer_decay: ratio of the learning rates of a layer and the one above, see
            :func:`~lightning_fasttrain.optim.layer_decay_groups`.
        lora_plus: ratio of the learning rates of LoRA's B and A, see
            :func:`~lightning_fasttrain.optim.lora_plus_groups`.
        offload: ``"cpu"`` for state and step in host memory, see :class:`~lightning_fasttrain.optim.HostOptimizer`.
        updates: ``"kahan"`` or ``"stochastic"`` for training in pure bfloat16 without losing small updates, see
            :class:`~lightning_fasttrain.optim.LowPrecisionUpdates`.
        settings: arguments of the optimizer itself, such as ``betas``, ``momentum``, ``fused``; for GaLore ``rank``,
            ``update_every``, ``scale``, ``subspace``; for it and Muon ``blocks``, the modules whose matrices are
            selected.

    Returns:
        An ``Optimizer``, for Lightning, Fabric and bare loops.

    Raises:
        ValueError: an unknown name (the message lists the known ones), settings that exclude each other or that the
            optimizer does not support, or no trainable parameters.
        TypeError: no model, an ``lr`` that is not a number, or a setting that the optimizer does not have.
        ModuleNotFoundError: the package that provides it is not installed; the message says what to install.

    Example:
        >>> net = nn.Sequential(nn.Embedding(9, 8), *[nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)])
        >>> optimizer = build_optimizer(net, "muon", lr=1e-3, weight_decay=0.1)
        >>> [(group["name"], len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [('decay/muon', 8, 0.1), ('no_decay', 17, 0.0)]

    Source:
        See the source of each optimizer; the groups are those of :func:`decay_groups`.
    """
    known = find_known(name)
    _refuse_company(name, known, groups, layer_decay=layer_decay, lora_plus=lora_plus, offload=offload, updates=updates)
    rate = known.lr if lr is None else lr
    decay = known.weight_decay if weight_decay is None else weight_decay
    kind = known.find_class()
    made = groups or _make_groups(model, rate, decay, layer_decay, lora_plus)
    own = dict(settings)
    if known.marks == "muon":
        matrices: set[Tensor] = set(block_matrices(model, own.pop("blocks", None)).values())
        made = _mark(made, matrices, {"muon": True}, "muon")
        if offload is None and has_same_gradients(model):
            own.setdefault("divide", True)
    elif known.marks == "galore":
        given = {key: own.pop(key) for key in _OF_GALORE if key in own}
        # Only its selection of matrices and its settings; weight decay comes from the groups above.
        projected = galore_groups(model, frozen=False, **given)[0]
        made = _mark(made, set(projected.pop("params")), {**projected}, "galore")
    refuse_settings(name, kind, own)
    _refuse_apple(name, kind, made)
    if known.fuses and offload is None and _is_on_cuda(made):
        own.setdefault("fused", True)  # unless the user chose otherwise

    def make(parameters: Groups) -> Optimizer:
        try:
            optimizer = kind(parameters, lr=rate, weight_decay=decay, **own)
        except ValueError as error:
            if kind.__module__.startswith("lightning_fasttrain"):
                raise
            why = f"{kind.__name__} reports: {first_line(error).rstrip('.')}"
            raise ValueError(explain(f"the settings of {name!r}", why, "Change this setting")) from error
        # On the innermost optimizer: wrappers define their own ``state_dict``.
        if kind.__module__.startswith("torchao"):
            save_as_plain_tensors_(optimizer)
        return optimizer if updates is None else LowPrecisionUpdates(optimizer, updates)

    optimizer = make(made) if offload is None else HostOptimizer(made, make)
    # Fused ones take over unscaling from the loss scaler, which makes Lightning refuse to clip.
    optimizer._step_supports_amp_scaling = False
    # Schedule-free optimizers refuse to step before train().
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


@check_arguments
@dataclass(frozen=True)
class NamedOptimizer(NotACallback):
    """A recipe for :func:`build_optimizer`, for a YAML file, a module's argument, or the mixin's ``optimizer``.

    Call it with a model to build the optimizer. Where this package accepts a function that creates an optimizer from
    parameters (:func:`~lightning_fasttrain.predict_memory`, :func:`~lightning_fasttrain.choose_strategy`), it accepts
    this, too.

    Args:
        name: the optimizer's name.
        lr: as for :func:`build_optimizer`, like the other arguments.
        weight_decay: weight decay of the parameters that have it.
        layer_decay: ratio of the learning rates of neighbouring layers.
        lora_plus: ratio of the learning rates of LoRA's B and A.
        offload: ``"cpu"`` or None.
        updates: ``"kahan"``, ``"stochastic"`` or None.
        settings: arguments of the optimizer itself.

    Raises:
        ValueError: an unknown name; the message lists the known ones.

    Example:
        >>> NamedOptimizer("sgd", lr=0.1, settings={"momentum": 0.9})(nn.Linear(4, 2)).defaults["momentum"]
        0.9
    """

    where_to_use: ClassVar[str] = (
        "Return it, called with self, from configure_optimizers; or set optimizer= in a module with the mixin"
    )
    name: str = "adamw"
    lr: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat | None = None
    layer_decay: PositiveFloat | None = None
    lora_plus: PositiveFloat | None = None
    offload: str | None = None
    updates: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        find_known(self.name)

    def __call__(self, model: nn.Module) -> Optimizer:
        """Build the optimizer for ``model``."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        name, settings = own.pop("name"), own.pop("settings")
        return build_optimizer(model, name, **own, **settings)


def make_optimizer(make: Callable[[Any], Optimizer], model: nn.Module) -> Optimizer:
    """Call ``make`` with the model if it is a recipe, which needs names, and otherwise with its parameters."""
    if isinstance(make, NamedOptimizer):
        return make(model)
    return make(model.parameters())


def _refuse_company(name: str, known: Known, groups: Groups | None, **asked: object) -> None:
    if asked["offload"] is not None:
        one_of("offload", asked["offload"], ("cpu",))
    ways = {"layer_decay": asked["layer_decay"], "lora_plus": asked["lora_plus"], "groups": groups}
    grouped = [key for key, value in ways.items() if value is not None]
    if len(grouped) > 1:
        raise ValueError(explain(" and ".join(grouped), "each creates all parameter groups", "Use one of them"))
    for key, why in known.refuses.items():
        if asked.get(key) is not None:
            raise ValueError(explain(f"{key}={asked[key]!r} with {name!r}", why, f"Remove {key}, or use 'adamw'"))


def _refuse_apple(name: str, kind: type[Optimizer], groups: Groups) -> None:
    if kind.__module__.startswith("bitsandbytes") and any(p.device.type == "mps" for p in _parameters_in(groups)):
        why = "bitsandbytes has no kernels for its step on Apple's GPUs"
        raise ValueError(explain(f"{name!r} on mps", why, "Use 'lion', 'adafactor' or 'adamw'"))


def _make_groups(
    model: nn.Module, lr: float | Tensor, weight_decay: float, layer_decay: float | None, lora_plus: float | None
) -> Groups:
    if layer_decay is not None:
        return layer_decay_groups(model, lr, layer_decay, weight_decay, frozen=False)
    if lora_plus is not None:
        return lora_plus_groups(model, lr, lora_plus, weight_decay)
    return decay_groups(model, weight_decay)


def _mark(groups: Groups, chosen: set[Tensor], marks: Mapping[str, object], label: str) -> Groups:
    """Split each group into the chosen parameters, with their marks, and the others."""
    parted: Groups = []
    for group in groups:
        name = group.get("name", "")
        members = list(group["params"])
        special = [parameter for parameter in members if parameter in chosen]
        others = [parameter for parameter in members if parameter not in chosen]
        if special:
            parted.append({**group, **marks, "params": special, "name": f"{name}/{label}".removeprefix("/")})
        if others:
            parted.append({**group, "params": others})
    return parted


def _is_on_cuda(groups: Groups) -> bool:
    return all(p.is_cuda and p.is_floating_point() for p in _parameters_in(groups))  # otherwise ``fused`` fails


def _parameters_in(groups: Groups) -> Iterator[Tensor]:
    return chain.from_iterable(map(itemgetter("params"), groups))
