"""Route a part of the tokens through every second block, and the others around it."""

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lightning_fasttrain.architecture.auxiliary_loss import (
    ForwardWithLoss,
    conflicts_of_losses,
    train_auxiliary_losses_,
)
from lightning_fasttrain.architecture.residual_blocks import (
    ResidualForm,
    choose_blocks,
    find_hidden,
    find_residual_form,
    first_output,
    replace_output,
)
from lightning_fasttrain.core.checks import PositiveInt, PositiveShare, check_arguments
from lightning_fasttrain.core.device import is_out_of_memory
from lightning_fasttrain.core.host.late_parameters import notices_late_parameters
from lightning_fasttrain.core.messages import describe_error, explain, note_once
from lightning_fasttrain.core.modules.blocks import Blocks, disable_cache_
from lightning_fasttrain.core.modules.select import as_list, class_if_imported
from lightning_fasttrain.core.modules.wrapped_forward import Undo, count_wrapped, list_wrapped, why_none_ran
from lightning_fasttrain.technique import Capability, Conflict, Exactness, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep, why_no_blocks
from lightning_fasttrain.technique.technique import conflict_with_early_averages, refuse_average_before

Sampling = Literal["predictor", "top_k"]
_ADDED = "routers are added"
ROUTER, PREDICTOR = "token_router", "token_predictor"  # names of the modules that a block gets


class RoutedForward(ForwardWithLoss):
    """A residual block's forward for the tokens with the highest scores; the others keep their hidden states."""

    def __init__(self, module: nn.Module, name: str, capacity: float, sampling: Sampling) -> None:
        super().__init__(module)
        self.name, self.capacity, self.sampling = name, capacity, sampling
        self.form: ResidualForm | None = None
        self._runs_on_some = False  # whether it has done so

    def __call__(self, *args: object, **kwargs: object) -> Any:
        self.ran = True
        _, x = find_hidden(args, kwargs)
        weight = self.module.get_submodule(ROUTER).get_parameter("weight")
        _refuse_other_shapes(self.name, x, weight.shape[1])
        if self.form is None and self.module.training and not torch.compiler.is_compiling():
            self.form = self._try(args, kwargs)
        # (B, T); a matrix product may round a token's score differently in each micro-batch, and so choose others.
        scores = (x * weight[0]).sum(dim=-1)
        by_predictor = self.sampling == "predictor"
        if self.module.training or not by_predictor:
            index, kept = self._choose(scores), None
        else:
            index, kept = self._predict(x)
        taken, named = take_tokens(self.module, args, kwargs, index, x.shape[1])
        chosen = gather_tokens(x, index)
        output = self._run_on_some_tokens(taken, named)
        # (B, k, D), by the score of each token, so that the router has a gradient.
        update = (first_output(output) - chosen) * gather_tokens(scores, index).unsqueeze(-1)
        if kept is not None:
            update = update * kept.unsqueeze(-1)
        routed = x.to(update.dtype).scatter_add(1, index.unsqueeze(-1).expand_as(update), update)
        if self.module.training and by_predictor and torch.is_grad_enabled():
            routed = self.pending.add(self._predictor_loss(x, index), routed)
        return replace_output(output, routed)

    def _run_on_some_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            output = self.inner(*args, **kwargs)
        except RuntimeError as error:
            if self._runs_on_some or is_out_of_memory(error):
                raise
            what = f"MixtureOfDepths: block '{self.name}'"
            why = f"it fails on a part of the tokens: {describe_error(error)}"
            way_out = (
                "Leave it out with skip=, or have it take sizes, such as that of a table of biases, from its input"
            )
            raise ValueError(explain(what, why, way_out)) from error
        self._runs_on_some = True
        return output

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the places (B, k) of the highest scores (B, T), in the order of the sequence."""
        count = max(1, math.ceil(self.capacity * scores.shape[1]))
        # Stable, so that equal scores are chosen in the same order in each micro-batch.
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
        return best.sort(dim=1).values

    def _predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each token by the predictor, from itself alone: places (B, k), and which of them count.

        Rows with fewer tokens are filled with the last place. Under a causal mask no earlier token sees it.
        """
        wanted = self.module.get_submodule(PREDICTOR)(x).squeeze(-1) > 0
        last = x.shape[1] - 1
        places = torch.arange(last + 1, device=x.device).expand_as(wanted).masked_fill(~wanted, last + 1)
        count = max(1, int(wanted.sum(dim=1).max()))
        index = places.sort(dim=1).values[:, :count]
        return index.clamp(max=last), index <= last

    def _predictor_loss(self, x: Tensor, index: Tensor) -> Tensor:
        logits = self.module.get_submodule(PREDICTOR)(x.detach()).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits).scatter(1, index, 1.0))

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ResidualForm:
        form = find_residual_form(self.module, self.name, "MixtureOfDepths", args, kwargs)
        if form.rectified:
            what = f"MixtureOfDepths: block '{self.name}'"
            why = "it applies relu after adding its input, so its update has no weight of its own"
            raise ValueError(explain(what, why, "Leave it out with skip="))
        return form


def _refuse_other_shapes(name: str, x: Tensor, width: int) -> None:
    if x.ndim != 3 or x.shape[-1] != width:
        what = f"MixtureOfDepths: block '{name}' gets hidden states of shape {tuple(x.shape)}"
        why = f"expected (batch, tokens, {width}), as the norms of the block have it"
        raise ValueError(explain(what, why, "Leave it out with skip="))


@check_arguments
@notices_late_parameters
def mixture_of_depths_(
    model: nn.Module,
    capacity: PositiveShare = 0.125,
    *,
    every: PositiveInt = 2,
    sampling: Sampling = "predictor",
    blocks: Blocks | None = None,
    skip: Blocks = (),
) -> list[str]:
    """Route ``capacity`` of the tokens through every second block, in place; the others go around it.

    Each routed block gets a linear router, which scores every token: r = w·x. The ``ceil(capacity · T)`` tokens of a
    sequence with the highest scores become x + r · f(x), where f sees only them; the others stay as they are. Masks,
    rotary embeddings and position ids are gathered along the tokens. A block is then computed on 12.5% of the tokens,
    and its attention on 1.6% of the pairs.

    Which scores are highest depends on later tokens. Evaluation of a causal model therefore asks a small predictor,
    which learns from each token alone whether it is chosen; its loss does not reach the model. In a loop of your own,
    add its gradient with :func:`add_auxiliary_gradient`.

    Args:
        model: any module whose blocks are residual, with inputs (B, T, D). The key-value cache of Hugging Face models
            is disabled; text is generated with ``use_cache=False``.
        capacity: share of the tokens that a routed block computes.
        every: interval between routed blocks: 2 routes the second, the fourth and so on; 1 routes all.
        sampling: choice of tokens in evaluation: ``"predictor"`` for causal models; ``"top_k"``, as in training, for
            models that see the whole input, such as encoders. It has no predictor.
        blocks: the modules that are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.
        skip: blocks to leave out.

    Returns:
        Qualified names of the routed blocks. Their routers and predictors are new submodules, ``token_router`` and
        ``token_predictor``, which stay in the model. To load trained weights, call this function first. If blocks were
        routed before, their names, and nothing is done.

    Raises:
        ValueError: no blocks were found, or fewer than ``every``; a block is a ``Sequential``, of
            which the router would become a layer; at the first call: a block is not residual, or an argument has tokens
            and no batch axis.

    Example:
        >>> from lightning_fasttrain.bench import GPT, GPTConfig
        >>> net = GPT(GPTConfig(vocabulary=16, context=8, layers=4, heads=2, width=8))
        >>> mixture_of_depths_(net, 0.25)
        ['blocks.1', 'blocks.3']

    Source:
        Raposo et al. 2024, "Mixture-of-Depths", https://arxiv.org/abs/2404.02258: equation 1, and the second method of
        section 3.5. The router starts at a standard deviation of 0.02, which the paper does not state.
    """
    already = list_wrapped(model, RoutedForward)
    if already:
        return already
    found = choose_blocks(model, blocks, skip)
    chosen = list(found)[every - 1 :: every]
    if not chosen:
        raise ValueError(explain(f"every={every} with {len(found)} blocks", "no block would be routed", "Use every=1"))
    for name in chosen:
        _refuse_sequential(name, found[name])
    for name in chosen:
        _add_router_(found[name], sampling)
        RoutedForward(found[name], name, capacity, sampling).install()
    if disable_cache_(model):
        note_once("mixture_of_depths_: use_cache=False in the model's config, since routed blocks skip tokens")
    return chosen


def _refuse_sequential(name: str, block: nn.Module) -> None:
    if type(block).forward in (nn.Sequential.forward, nn.Module.forward):
        why = "the router would become one of its layers"
        raise ValueError(explain(f"block '{name}' is a {type(block).__name__}", why, "Wrap it in a module of your own"))


def _add_router_(block: nn.Module, sampling: Sampling) -> None:
    like = next(filter(torch.is_floating_point, block.parameters()))
    width = _width_of(block)
    made = {"device": like.device, "dtype": like.dtype}
    router = nn.Linear(width, 1, bias=False, **made)
    nn.init.normal_(router.weight, std=0.02)
    block.add_module(ROUTER, router)
    if sampling == "predictor":
        hidden = max(1, width // 4)
        layers = nn.Linear(width, hidden, **made), nn.SiLU(), nn.Linear(hidden, 1, **made)
        block.add_module(PREDICTOR, nn.Sequential(*layers))


def _width_of(block: nn.Module) -> int:
    """Return the number of features of a block's hidden states: those of its first norm, or of its first layer."""
    norms: list[Any] = [
        m for m in block.modules() if type(m).__name__.endswith("Norm") and getattr(m, "weight", None) is not None
    ]
    if norms:
        return int(norms[0].weight.shape[-1])
    layers = [module for module in block.modules() if isinstance(module, nn.Linear)]
    if not layers:
        why = "it has neither a norm nor a linear layer, so the width of its input is unknown"
        raise ValueError(explain(f"a router for a {type(block).__name__}", why, "Leave it out with skip="))
    return layers[0].in_features


class MixtureOfDepths(Technique):
    """Route a part of the tokens through every second block; see :func:`mixture_of_depths_`.

    Acts right after ``configure_model``, before the optimizer exists. Routers stay in the model after the run, as they
    are part of it, and a second run continues to train them. The gradient of the predictors' losses is added to that of
    what ``training_step`` returns, whose value does not change.

    Args:
        capacity, every, sampling, blocks, skip: as for :func:`mixture_of_depths_`.

    Raises:
        ValueError: when the run begins, see :func:`mixture_of_depths_`; with predictors, manual optimization.

    Example:
        >>> routed = MixtureOfDepths(0.125)
        >>> encoder = MixtureOfDepths(0.5, sampling="top_k")

    Source:
        Raposo et al. 2024, "Mixture-of-Depths", https://arxiv.org/abs/2404.02258.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    surgery: ClassVar[Surgery | None] = Surgery.ROUTE
    effect: ClassVar[str] = "every second block computes an eighth of the tokens, which a router chooses"
    when: ClassVar[str] = (
        "you train a deep transformer on long sequences from the beginning; not where it generates much"
    )
    in_a_loop: ClassVar[str] = "architecture.mixture_of_depths_(model)"
    predicted: ClassVar[bool] = True

    def __init__(
        self,
        capacity: PositiveShare = 0.125,
        *,
        every: PositiveInt = 2,
        sampling: Sampling = "predictor",
        blocks: Blocks | None = None,
        skip: Blocks = (),
    ) -> None:
        self.capacity, self.every, self.blocks = capacity, every, blocks
        self.sampling: Sampling = sampling
        self.skip: Blocks = tuple(as_list(skip))

    @classmethod
    def conflicts(cls) -> tuple[Conflict, ...]:
        padding = "the number of routed tokens is a share of the length, which padding is a part of"
        untrimmed = "Use MicroBatching(n, trim_padding=False), without PaddingFree"
        return (
            conflict_with_early_averages(_ADDED),
            Conflict(Capability.TRIMS_PADDING, padding, untrimmed),
            *conflicts_of_losses("Use sampling='top_k'", lambda technique: technique.sampling == "predictor"),
        )

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        return why_no_blocks(facts)

    def predict(self, step: PredictedStep) -> "MixtureOfDepths":
        return self

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        refuse_average_before(trainer, "MixtureOfDepths", _ADDED)
        if self.sampling != "predictor":
            return None
        return train_auxiliary_losses_(trainer, pl_module, "MixtureOfDepths(sampling='predictor')")

    def apply(self, model: nn.Module) -> None:
        mixture_of_depths_(
            model, self.capacity, every=self.every, sampling=self.sampling, blocks=self.blocks, skip=self.skip
        )

    def describe_effect(self, model: nn.Module) -> str:
        blocks = count_wrapped(model, RoutedForward)
        return blocks and f"{blocks} compute {self.capacity:.1%} of the tokens"

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        return why_none_ran(model, RoutedForward)


_OTHER_SEQUENCE = re.compile("encoder|memory|cross|context")  # in names of arguments that are of another sequence


def gather_tokens(tensor: Tensor, index: Tensor, axis: int = 1) -> Tensor:
    """Return the entries of ``tensor`` (B or 1, ...) at ``index`` (B, k) along an axis.

    Example:
        >>> import torch
        >>> gather_tokens(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 2], [1, 2]]))
        tensor([[5, 7],
                [6, 7]])
    """
    batch, count = index.shape
    shape = [batch] + [1] * (tensor.ndim - 1)
    shape[axis] = count
    wanted = [batch, *tensor.shape[1:]]
    expanded = tensor.expand(wanted)
    wanted[axis] = count
    return expanded.gather(axis, index.view(shape).expand(wanted))


def take_tokens(
    module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], index: Tensor, length: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block for the tokens at ``index`` (B, k) of a sequence of ``length`` tokens.

    Tensors have the batch, or 1, as their first axis. Of those with 4 axes, such as masks (B, H, T, T), and of boolean
    ones each axis of ``length`` is a token axis; of others the first one is. Arguments whose names say that they belong
    to another sequence, such as "encoder_hidden_states", are passed on as they are.

    Raises:
        ValueError: an argument has tokens, but no batch axis, so each sample cannot have its own; a key-value cache.
    """
    names = dict(enumerate(list(inspect.signature(type(module).forward).parameters)[1:]))
    taken = []
    for place, value in enumerate(args):
        taken.append(_take(names.get(place, f"argument {place}"), value, index, length))
    return tuple(taken), {name: _take(name, value, index, length) for name, value in kwargs.items()}


def _take(name: str, value: object, index: Tensor, length: int) -> Any:
    if _OTHER_SEQUENCE.search(name):
        return value
    is_block_mask = isinstance(value, class_if_imported("torch.nn.attention.flex_attention", "BlockMask"))
    if hasattr(value, "get_seq_length") or is_block_mask:
        why = f"a {type(value).__name__} holds all tokens, of which a routed block gets a part"
        raise ValueError(explain(f"MixtureOfDepths with {name}", why, "Call the model without it: use_cache=False"))
    return tree_map(lambda leaf: _take_from(name, leaf, index, length), value)


def _take_from(name: str, leaf: object, index: Tensor, length: int) -> Any:
    if not isinstance(leaf, Tensor) or leaf.ndim == 0:
        return leaf
    batch = index.shape[0]
    if leaf.shape[0] not in (1, batch):
        if length not in leaf.shape:
            return leaf
        what = f"MixtureOfDepths: {name} of shape {tuple(leaf.shape)}"
        why = "it has no batch axis, while each sample chooses its own tokens"
        raise ValueError(explain(what, why, "Give it a first axis of size 1"))
    axes = [axis for axis in range(1, leaf.ndim) if leaf.shape[axis] == length]
    if leaf.ndim == 4:
        axes = [axis for axis in axes if axis > 1] or axes
    elif leaf.is_floating_point():
        axes = axes[:1]
    for axis in axes:
        leaf = gather_tokens(leaf, index, axis)
    return leaf
