"""Turn the MLPs of a dense model into sparse experts that start as copies of them."""

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import lightning as L
from torch import Tensor, nn

from lightning_fasttrain.architecture.auxiliary_loss import conflicts_of_losses, train_auxiliary_losses_
from lightning_fasttrain.architecture.expert_layers import ExpertLinear, ExpertRouter, RefuseBetween, Role
from lightning_fasttrain.architecture.residual_blocks import Mlp, choose_blocks, find_mlps
from lightning_fasttrain.core.checks import NonNegativeFloat, PositiveInt, check_arguments
from lightning_fasttrain.core.host.late_parameters import notices_late_parameters
from lightning_fasttrain.core.messages import explain, list_some, number_of
from lightning_fasttrain.core.modules.blocks import Blocks
from lightning_fasttrain.core.modules.select import CONV1D, Sharing, as_list, find_skipped, is_a, is_part_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep, why_no_blocks
from lightning_fasttrain.technique.technique import conflict_with_early_averages, refuse_average_before

_ADDED = "experts are added"


@check_arguments
@notices_late_parameters
def upcycle_(
    model: nn.Module,
    experts: PositiveInt = 8,
    *,
    top_k: PositiveInt = 2,
    every: PositiveInt = 2,
    balance: NonNegativeFloat = 0.01,
    z_loss: NonNegativeFloat = 0.0,
    blocks: Blocks | None = None,
    skip: Blocks = (),
) -> list[str]:
    """Turn the MLPs of every second block into sparse experts, in place, which start as copies of the dense one.

    A linear router chooses ``top_k`` experts for each token. Their outputs are summed with the router's probabilities,
    normalized to a sum of 1, so the output starts as that of the dense model, up to rounding, and a token takes
    ``top_k`` times the computation of the dense MLP. Tokens are sorted by expert, and each layer is one grouped
    product.

    Of each MLP, the linear layers are replaced, wherever the block calls them: one or two that widen the hidden states,
    and the one that narrows them. Between them only functions of single elements may lie. The router's losses reach the
    loss by :func:`add_auxiliary_gradient`, which :class:`Upcycling` calls by itself. Padding counts as tokens in them.

    Args:
        model: any module, with weights on any device.
        experts: number of experts of an MLP.
        top_k: experts of a token, at most ``experts``.
        every: interval between the changed blocks: 2 changes the second, the fourth and so on; 1 changes all.
        balance: weight of the load-balancing loss E · Σ f_i · P_i of each router; 0 leaves it out.
        z_loss: weight of the mean of logsumexp(logits)² of each router, such as 0.001.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.
        skip: blocks or MLPs to leave as they are.

    Returns:
        Names of the changed layers. Their weights have the experts as a new first axis, under the same names; routers
        are new submodules, ``router``, of the first layers. All stay in the model. If layers were changed before, their
        names, and nothing is done. Weights of the dense model are loaded before, or afterwards with
        :func:`load_dense_`.

    Raises:
        ValueError: no blocks were found, or no MLP in them; ``top_k`` is more than ``experts``; an MLP shares its
            weights with another layer; at the first call: something else than functions of single elements lies between
            the layers.
        TypeError: a layer of an MLP is quantized, or has an adapter.

    Example:
        >>> from lightning_fasttrain.bench import GPT, GPTConfig
        >>> net = GPT(GPTConfig(vocabulary=16, context=8, layers=2, heads=2, width=8))
        >>> upcycle_(net, 4)
        ['blocks.1.up', 'blocks.1.down']
        >>> net.blocks[1].up.weight.shape
        torch.Size([4, 32, 8])

    Source:
        Komatsuzaki et al. 2023, "Sparse Upcycling", https://arxiv.org/abs/2212.05055, with token-choice routing and
        normalized weights; the balance loss of Fedus et al. 2021, https://arxiv.org/abs/2101.03961, as Mixtral computes
        it for several experts, but summed over layers; the z-loss of Zoph et al. 2022,
        https://arxiv.org/abs/2202.08906.
    """
    already = [name for name, module in model.named_modules() if isinstance(module, ExpertLinear)]
    if already:
        return already
    if top_k > experts:
        why = f"a token cannot have more experts than there are ({experts})"
        raise ValueError(explain(f"top_k={top_k}", why, f"Use top_k={experts}, or more experts"))
    found = _find(model, every, blocks, skip)
    sharing = Sharing(model)
    for name, mlp in found:
        for layer in (*mlp.first, mlp.last):
            _refuse_layer(model, f"{name}.{layer}")
            _refuse_shared(sharing, model, name, layer)
    changed: list[str] = []
    for name, mlp in found:
        changed += _replace_(model, name, mlp, (experts, top_k, balance, z_loss))
    return changed


def _find(model: nn.Module, every: int, blocks: Blocks | None, skip: Blocks) -> list[tuple[str, Mlp]]:
    skipped = find_skipped(model, skip)
    chosen = list(choose_blocks(model, blocks).items())[every - 1 :: every]
    found: list[tuple[str, Mlp]] = []
    for name, block in chosen:
        if name not in skipped:
            found += [(name, mlp) for mlp in find_mlps(block) if f"{name}.{mlp.last}" not in skipped]
    if not found:
        looked = list_some(list(map(repr, dict(chosen)))) or f"every={every}"
        why = "no linear layer that widens the hidden states is followed by one that narrows them again"
        raise ValueError(explain(f"upcycle_ in the blocks {looked}", why, "Name other blocks with blocks=, or every=1"))
    return found


def _refuse_layer(model: nn.Module, name: str) -> None:
    layer = model.get_submodule(name)
    if type(layer) is not nn.Linear and not is_a(layer, CONV1D):
        why = "its weights cannot be copied into experts"
        raise TypeError(explain(f"'{name}' is a {type(layer).__name__}", why, "Call upcycle_ before it is changed"))
    above = name.rpartition(".")[0]
    around = model.get_submodule(above)
    # Such as the matrices of LitGPT's LoRALinear, whose product is added to the layer's output.
    beside = [key for key, parameter in around.named_parameters(recurse=False) if parameter.ndim > 1]
    if beside and len(list(around.children())) == 1:
        why = f"'{above}' ({type(around).__name__}) combines its output with weights of its own ({list_some(beside)})"
        raise TypeError(explain(f"'{name}'", f"{why}, as adapters do", "Call upcycle_ before they are added"))


def _refuse_shared(sharing: Sharing, model: nn.Module, block: str, layer: str) -> None:
    """Refuse a layer that another layer shares its weight with, or that another block holds too."""
    name = f"{block}.{layer}"
    own, inside = sharing.names[model.get_submodule(name)], sharing.names[model.get_submodule(block)]
    others: dict[str, None] = {}
    for key in itertools.chain.from_iterable(sharing.inside([model.get_submodule(name)])):
        if not (is_part_of(key, own) and is_part_of(key, inside)):
            others[repr(key.rpartition(".")[0])] = None
    if others:
        why = f"it shares its weight with {list_some(list(others))}"
        raise ValueError(explain(f"'{name}'", why, "Leave it out with skip="))


def _replace_(model: nn.Module, block: str, mlp: Mlp, settings: tuple[int, int, float, float]) -> list[str]:
    experts, top_k, balance, z_loss = settings
    names = [f"{block}.{layer}" for layer in (*mlp.first, mlp.last)]
    weight = model.get_submodule(names[0]).get_parameter("weight")
    made = {"device": weight.device, "dtype": weight.dtype}
    router = ExpertRouter(mlp.width, experts, top_k, balance, z_loss, **made)
    roles: dict[int, Role] = {0: "first", len(names) - 1: "last"}
    for place, name in enumerate(names):
        dense = model.get_submodule(name)
        model.set_submodule(name, ExpertLinear(dense, is_a(dense, CONV1D), router, roles.get(place, "inner")))
    _watch_between(model, block, mlp)
    return names


def _watch_between(model: nn.Module, block: str, mlp: Mlp) -> None:
    """Have modules with weights that are declared between the layers refuse the hidden states of experts."""
    last: Any = model.get_submodule(f"{block}.{mlp.last}")
    names = [name for name, _ in model.get_submodule(block).named_modules()]
    for name in names[names.index(mlp.first[0]) + 1 : names.index(mlp.last)]:
        module = model.get_submodule(f"{block}.{name}")
        has_weights = any(parameter.numel() > 1 for parameter in module.parameters())
        if has_weights and not isinstance(module, ExpertLinear) and not mlp.last.startswith(f"{name}."):
            module.register_forward_pre_hook(RefuseBetween(f"{block}.{name}", last))


@check_arguments
def load_dense_(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the ``state_dict`` of the dense model into one that :func:`upcycle_` has changed.

    Each expert gets a copy of the dense weights; routers keep theirs.

    Raises:
        ValueError: ``model`` has no experts.
        RuntimeError: the keys or shapes are not those of the dense model.

    Example:
        >>> net = nn.Sequential(*[nn.TransformerEncoderLayer(4, 2, dim_feedforward=8) for _ in range(2)])
        >>> dense = net.state_dict()
        >>> _ = upcycle_(net, 3)
        >>> load_dense_(net, dense)
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ExpertLinear)}
    if not layers:
        raise ValueError(explain(f"{type(model).__name__} has no experts", "none were added", "Call upcycle_ first"))
    own = model.state_dict()
    # A dense model has no routers, so they keep their weights.
    loaded = {name: value for name, value in own.items() if name.endswith(".router.weight")}
    loaded.update(state)
    for name, module in layers.items():
        for key in ("weight", "bias"):
            place = f"{name}.{key}"
            if place in loaded and module._parameters[key] is not None:
                loaded[place] = loaded[place].expand_as(own[place])
    model.load_state_dict(loaded)


class Upcycling(Technique):
    """Turn the MLPs of every second block into sparse experts; see :func:`upcycle_`.

    Acts right after ``configure_model``, before the optimizer exists and before a checkpoint is restored. Experts stay
    in the model after the run, as they are its weights, and a second run continues to train them. The gradient of the
    routers' losses is added to that of what ``training_step`` returns, whose value does not change.

    Args:
        experts, top_k, every, balance, z_loss, blocks, skip: as for :func:`upcycle_`.

    Raises:
        TypeError, ValueError: when the run begins, see :func:`upcycle_`; with losses, manual optimization.

    Example:
        >>> sparse = Upcycling(8, top_k=2)

    Source:
        Komatsuzaki et al. 2023, "Sparse Upcycling", https://arxiv.org/abs/2212.05055; see :func:`upcycle_`.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    surgery: ClassVar[Surgery | None] = Surgery.ADAPT
    effect: ClassVar[str] = "MLPs become sparse experts that start as copies, with the output of the dense model"
    when: ClassVar[str] = "a trained dense model is to become larger at little more computation, and memory is left"
    in_a_loop: ClassVar[str] = "architecture.upcycle_(model)"
    names_elsewhere: ClassVar[Mapping[str, str]] = {
        **{"num_experts": "experts=", "num_local_experts": "experts=", "num_experts_per_tok": "top_k="},
        "router_aux_loss_coef": "balance=",
    }

    def __init__(
        self,
        experts: PositiveInt = 8,
        *,
        top_k: PositiveInt = 2,
        every: PositiveInt = 2,
        balance: NonNegativeFloat = 0.01,
        z_loss: NonNegativeFloat = 0.0,
        blocks: Blocks | None = None,
        skip: Blocks = (),
    ) -> None:
        self.experts, self.top_k, self.every, self.balance, self.z_loss = experts, top_k, every, balance, z_loss
        self.blocks = blocks
        self.skip: Blocks = tuple(as_list(skip))

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        why = "experts are copies of plain linear layers, and all of them train"
        return (
            Conflict(Capability.ADAPTS_LAYERS, why, "Use one of them"),
            Conflict(Capability.TILES_MLPS, "routed experts are not tiled", "Use ActivationCheckpointing"),
            conflict_with_early_averages(_ADDED),
            *conflicts_of_losses("Use balance=0 and z_loss=0", lambda technique: technique.balance or technique.z_loss),
        )

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        return why_no_blocks(facts)

    def predict(self, step: PredictedStep) -> None:
        step.leave_out(self, "which expert computes a token is not known before, so this is a lower bound")

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        refuse_average_before(trainer, "Upcycling", _ADDED)
        if not (self.balance or self.z_loss):
            return None
        return train_auxiliary_losses_(trainer, pl_module, f"Upcycling(balance={self.balance})")

    def apply(self, model: nn.Module) -> None:
        losses = {"balance": self.balance, "z_loss": self.z_loss}
        places = {"every": self.every, "blocks": self.blocks, "skip": self.skip}
        upcycle_(model, self.experts, top_k=self.top_k, **losses, **places)

    def describe_effect(self, model: nn.Module) -> str:
        routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]
        if not routers:
            return ""
        return f"{number_of(len(routers), 'MLP')} of {self.experts} experts, {self.top_k} for each token"
