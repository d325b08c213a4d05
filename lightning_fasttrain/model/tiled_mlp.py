"""Run MLPs on one tile of tokens after the other, so that their hidden values never exist for all tokens at once."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.parameters import move_values, trained_parameters
from lightning_fasttrain.core.modules.recomputation import (
    RecomputedForward,
    refuse_second_derivative,
    refuse_transforms,
)
from lightning_fasttrain.core.modules.select import (
    as_list,
    is_inside,
    is_linear,
    is_part_of,
    keep_outermost,
    layers_of,
    list_kinds,
    select,
)
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    count_wrapped,
    list_wrapped,
    undo_all,
    wrappers_in,
)
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.core.state.step_state import StepState
from lightning_fasttrain.core.state.surroundings import Surroundings
from lightning_fasttrain.core.state.values import to_float64
from lightning_fasttrain.technique import Capability, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, why_no_blocks

_SMALLEST = 1024  # tokens of a tile, unless the input is wider: smaller products are slow

# Where a module cannot be tried before the run, its name decides, and the first call tries it.
_NAMED = re.compile(r"mlp|feed_?forward|ffn|ff$|dense_?relu", re.IGNORECASE)
# A router's logits may enter the loss beside the output, and get no gradient from a tile.
_ROUTED = re.compile(r"moe|expert|router|mixture|switch", re.IGNORECASE)


@check_arguments
def tile_mlps_(model: nn.Module, tokens: PositiveInt | None = None, mlps: Blocks | None = None) -> dict[str, Undo]:
    """Run the MLPs of the model's blocks on tiles of tokens, in place, in the forward and again in the backward.

    An MLP needs memory for T·F hidden values, T tokens and F hidden features, several times over. In tiles only
    ``tokens`` of the T exist at a time, at the cost of one more forward of the MLP; what is kept is its input. Each
    parameter gets one gradient, summed over the tiles in float32, so that hooks of DDP, FSDP2 and optimizers that act
    in the backward see it once. Dropout draws other masks than in the plain step, and in the recomputation those of the
    forward. Frozen weights, adapters inside, autocast and compiled blocks are supported; in a compiled block gradients
    are summed in the dtype of the parameters.

    MLPs are the parts of blocks with at least two linear layers that return one vector as wide as their input for
    each token, and in which tokens are independent: a trial on random tokens decides. Hooks inside an MLP see tiles.

    Args:
        model: any module.
        tokens: number of tokens in a tile, over all sequences of a batch; by default the width of the input, and at
            least 1,024. Inputs with no more tokens run as before.
        mlps: what to take instead: a class, a class name, or a pattern of qualified names, as for
            :func:`~lightning_fasttrain.model.find_blocks`; any modules whose tokens are independent.

    Returns:
        Qualified name of each module in tiles → how to undo it. If some were in tiles before, their names, and nothing
        is done.

    Raises:
        TypeError: ``tokens`` is not an integer.
        ValueError: no MLP was found; or the tokens of a named module depend on one another. A module that cannot be
            tried here, because its weights have no values yet, is tried at its first call.

    Example:
        >>> mlp = lambda: nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        >>> net = nn.Sequential(mlp(), mlp())
        >>> list(tile_mlps_(net, tokens=2))
        ['0', '1']

    Source:
        TiledMLP of Arctic Long Sequence Training, Bekman et al. 2025, https://arxiv.org/abs/2506.13996; also Liger's
        ``LigerTiledGEGLUMLP``, https://github.com/linkedin/Liger-Kernel. Both accumulate each tile's gradient in
        the parameters while the backward runs; here autograd receives one sum.
    """
    already = list_wrapped(model, TiledForward)
    if already:
        return dict.fromkeys(already, lambda: None)
    found = _named_mlps(model, mlps) if mlps is not None else _find_mlps(model)
    return {name: TiledForward(module, name, tokens, checked).install() for name, (module, checked) in found.items()}


Found = dict[str, tuple[nn.Module, bool]]  # qualified name → module, and whether it was tried


def _named_mlps(model: nn.Module, mlps: Blocks) -> Found:
    chosen = keep_outermost(select(model, as_list(mlps), dict(model.named_modules()), "mlps"))
    found: Found = {}
    for name, module in chosen.items():
        reason = why_tokens_mix(module) if can_run(module) else None
        if reason:
            raise ValueError(explain_mixing(name, module, reason))
        found[name] = (module, reason is not None)
    return found


def _find_mlps(model: nn.Module) -> Found:
    found: Found = {}
    reasons: dict[str, str] = {}  # class of modules that are no MLPs → why
    known: dict[object, str | None] = {}  # modules of the same classes and shapes are tried once
    for name, module in _parts_of_blocks(model):
        if is_part_of(name, found) or not _may_be_mlp(module):
            continue
        parts = tuple((type(part), part.extra_repr()) for part in module.modules())
        if parts not in known and can_run(module):
            known[parts] = why_tokens_mix(module, same_width=True)
        reason = known.get(parts)
        if reason:
            reasons[type(module).__name__] = reason
        elif reason == "" or _NAMED.search(type(module).__name__) or _NAMED.search(name.rpartition(".")[2]):
            found[name] = (module, reason is not None)
    if not found:
        why = f"candidates are {list_kinds(model)}"
        if reasons:
            tried = [f"{kind}: {reason}" for kind, reason in reasons.items()]
            why = f"tried are {list_some(tried)}"
        way_out = "Make the MLP a module of its own, or name modules whose tokens are independent with mlps="
        raise ValueError(explain(f"no MLPs in the blocks of {type(model).__name__}", why, way_out))
    return found


def _parts_of_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield blocks and the modules inside them, from the outside to the inside, but no experts."""
    blocks = find_blocks(model)
    routed = [name for name, module in model.named_modules() if name and _ROUTED.search(type(module).__name__)]
    for name, module in model.named_modules():
        if is_part_of(name, blocks) and not is_inside(name, routed):
            yield name, module


def _may_be_mlp(module: nn.Module) -> bool:
    linear = list(filter(is_linear, layers_of(module).values()))
    return len(linear) >= 2 and not any(_ROUTED.search(type(part).__name__) for part in module.modules())


_TOKENS = 8  # two sequences of four
_KEPT = [2, 5]  # one of each, between others: attention may be causal


def can_run(module: nn.Module) -> bool:
    """Return whether the weights of ``module`` have values here; meta, fake and sharded tensors have none."""
    tensors = [*module.parameters(), *module.buffers()]
    return not (any(t.is_meta for t in tensors) or is_sharded(module)) and detect_fake_mode(tensors) is None


def why_tokens_mix(
    module: nn.Module,
    run: Callable[[Tensor], object] | None = None,
    *,
    like: Tensor | None = None,
    same_width: bool = False,
) -> str | None:
    """Return why ``module`` cannot run on tiles of tokens; "" if it can, and None if it could not be run at all.

    The module runs on two sequences of four random tokens, without a trace. Other tokens are then changed, and a tile
    is run alone: in neither case may the output of a token change. Trained parameters are moved a little before, so
    that a mixing of tokens that is initialized to zero, as by a gate, shows. Random numbers must be drawn for each
    token, as by dropout.

    Args:
        module: the module.
        run: tokens → its output; by default it is called with the tokens alone.
        like: an input, for its width, dtype, device and number of axes; None to try the widths of its layers.
        same_width: whether the only output must be one tensor as wide as the input.

    Example:
        >>> why_tokens_mix(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
        ''
        >>> why_tokens_mix(nn.Sequential(nn.Linear(4, 8), nn.Softmax(dim=1)))
        'the output of a token depends on other tokens'
    """
    run = run or module
    if like is not None:
        return _try_width(module, run, like, same_width)
    parameter = next(module.parameters(), torch.empty(0))
    dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
    reason: str | None = None
    for width in _widths(module):
        one = torch.empty(1, 1, width, dtype=dtype, device=parameter.device)
        found = _try_width(module, run, one, same_width)
        if found == "":
            return found
        reason = reason or found
    return reason


def _widths(module: nn.Module) -> list[int]:
    """List the input widths of the layers in ``module``, each once; GPT-2's layers call it ``nx``."""
    widths: dict[int, None] = {}
    for layer in (module, *layers_of(module).values()):
        width = getattr(layer, "in_features", getattr(layer, "nx", None))
        if isinstance(width, int):
            widths[width] = None
    return list(widths)


def _try_width(module: nn.Module, run: Callable[[Tensor], object], like: Tensor, same_width: bool) -> str | None:
    generator = torch.Generator().manual_seed(0)
    width, lead = like.shape[-1], like.shape[:-1]
    first, second = (torch.randn(_TOKENS, width, generator=generator).to(like) for _ in range(2))
    mixed = second.index_copy(0, torch.tensor(_KEPT, device=second.device), first[_KEPT])
    outer = (1,) * max(len(lead) - 2, 0)
    shape = (_TOKENS, width) if len(lead) == 1 else (*outer, 2, _TOKENS // 2, width)
    tile = first[2:5].reshape(*(1,) * (len(lead) - 1), 3, width)

    written: list[bool] = []
    drawn: list[list[float]] = []

    def leaves(tokens: Tensor) -> list[Any]:
        given, before = tokens.clone(), _read_host_generators()
        with keep_random_state(), _Draws() as draws:  # the same masks of dropout for both
            outputs = tree_leaves(run(given))
            if _read_host_generators() != before:
                draws.counts.append(1)  # Python and NumPy draw for all tokens at once
        drawn.append([count / tokens.shape[:-1].numel() for count in draws.counts])
        written.append(not torch.equal(given, tokens))
        return outputs

    try:
        with _without_trace(module, training=True):
            leaves(tile)  # a quantized layer, for example, sets some attributes once
            state = StepState([module])
            with state.watch():
                whole, others = leaves(first.reshape(shape)), leaves(mixed.reshape(shape))
            changed = state.changed()
        with _without_trace(module, training=False):
            still, alone = leaves(first.reshape(shape)), leaves(tile)
    except Exception:  # it needs other arguments, or another width
        return None
    if any(written):
        return "it writes into its input in place"
    if changed:
        return f"its forward changes '{changed[0]}', which every tile would do"
    if same_width and not (len(whole) == 1 and _is_as_wide(whole[0], width)):
        return "it does not return one vector as wide as its input for each token"
    if drawn[0] != drawn[1]:
        return "it draws random numbers for all tokens together, which each tile would draw anew"
    axes = min(len(lead), 2 + len(outer))
    reasons = [_compare(*outputs, axes=axes) for outputs in zip(whole, others, still, alone, strict=True)]
    return next(filter(None, reasons), "")


class _Draws(TorchDispatchMode):
    """Records how many random numbers each operator draws."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            tensors = filter(torch.is_tensor, tree_leaves(result))
            self.counts.append(max(map(Tensor.numel, tensors)))
        return result


def _read_host_generators() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2]


def _is_as_wide(output: object, width: int) -> bool:
    return isinstance(output, Tensor) and output.dim() > 1 and output.shape[-1] == width


def _compare(whole: Any, others: Any, still: Any, alone: Any, *, axes: int) -> str:
    outputs = (whole, others, still, alone)
    tensors = all(isinstance(output, Tensor) for output in outputs)
    if not tensors or [output.shape[:axes].numel() for output in outputs] != [_TOKENS, _TOKENS, _TOKENS, 3]:
        return "it does not return one row for each token"
    if whole.requires_grad:
        return "it uses a tensor that requires a gradient and is neither its parameter nor its first argument"
    # Products of other sizes round differently, at most as much as in TF32.
    close = 1e-3 if still.dtype in (torch.float32, torch.float64) else 0.02
    whole, others, still, alone = (to_float64(output.flatten(0, axes - 1)) for output in outputs)
    # Bitwise, since sizes are the same and a row of a product depends on no other row.
    if not torch.equal(whole[_KEPT], others[_KEPT]):
        return "the output of a token depends on other tokens"
    if (still[2:5] - alone).abs().amax() > close * still.abs().amax():
        return "the output of a token depends on its position, or on the number of tokens"
    return ""


@contextmanager
def _without_trace(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Set a mode, and let moved values stand for trained parameters; on exit everything is restored."""
    moved = move_values(trained_parameters(module))
    with _disable_current_modes(), torch.enable_grad():  # a checkpoint around it would count the trial's operators
        state = StepState([module])
        try:
            with state.watch(), in_place_of_parameters(module, moved):
                module.train(training)
                yield
        finally:
            state.restore()


def in_place_of_parameters(module: nn.Module, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Let ``tensors`` stand for the trained parameters of ``module``: no hook of a parameter sees what is computed.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> with in_place_of_parameters(nn.Sequential(layer, layer), [torch.tensor([[3.0]])]):
        ...     layer(torch.ones(1)).item()
        3.0
    """
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return _reparametrize_module(module, dict(zip(names, tensors, strict=True)), tie_weights=True)


def explain_mixing(name: str, module: nn.Module, reason: str) -> str:
    return explain(f"tile_mlps_: '{name}' ({type(module).__name__})", reason, "Leave this module out with mlps=")


class TiledForward(RecomputedForward):
    """A forward that runs on tiles of tokens.

    Args:
        module: the outputs of its tokens are independent of one another.
        name: its qualified name, for messages.
        tokens: of a tile; None for the width of the input, and at least 1,024.
        is_checked: whether a trial has shown that tokens are independent; otherwise the first call makes one.

    Attributes:
        most: largest number of tokens of a call.
    """

    def __init__(self, module: nn.Module, name: str, tokens: int | None, is_checked: bool) -> None:
        super().__init__(module)
        self.name = name
        self.tokens = tokens
        self.most_others = 0 if is_checked else -1  # further tensors that it was tried with; -1 if it was not tried
        self.most = 0

    def __call__(self, *args: object, **kwargs: object) -> Any:
        leading = ""  # the name of the first argument, if it has one
        if not args:
            leading = next(iter(kwargs), "")
        x = (*args, kwargs.get(leading))[0]
        if not isinstance(x, Tensor) or x.dim() < 2:
            return self.inner(*args, **kwargs)

        def run(tile: Tensor) -> Any:
            if leading:
                return self.inner(**{**kwargs, leading: tile})
            return self.inner(tile, *args[1:], **kwargs)

        rows, size = x.shape[:-1].numel(), self.tokens or max(x.shape[-1], _SMALLEST)
        if torch.compiler.is_compiling():
            if rows > size:
                return self._traced(x, size, run)
            return run(x)
        others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf is not x]
        self._check(x, others, run)
        self.most = max(self.most, rows)
        if rows <= size:
            return run(x)
        self.ran = True
        around, (forward, again) = Surroundings([x]), self.contexts(nullcontext(), nullcontext())
        call = _Call(self.module, size, run, around, again)
        with forward:
            outputs = _Tiled.apply(x, call, *trained_parameters(self.module))
        around.look()
        assert call.structure is not None
        return tree_unflatten(list(outputs), call.structure)

    def _check(self, x: Tensor, others: Sequence[Tensor], run: Callable[[Tensor], object]) -> None:
        if any(tensor.requires_grad for tensor in others) and torch.is_grad_enabled():
            why = "an argument beside the first one requires a gradient, which tiles do not compute"
            raise ValueError(explain_mixing(self.name, self.module, why))
        refuse_transforms("tile_mlps_", "Undo it for this", x)
        if any(hasattr(parameter, "ds_id") for parameter in self.module.parameters()):
            why = "DeepSpeed's stage 3 gathers parameters by hooks, which tiles in the backward do not call"
            raise ValueError(explain(f"tile_mlps_: '{self.name}'", why, "Use stage 1 or 2, or FSDP2Strategy"))
        # Arguments beside the first one may hold values for each token of the whole.
        if len(others) <= self.most_others or not can_run(self.module):
            return
        reason = why_tokens_mix(self.module, run, like=x)
        if reason is None:
            reason = "it does not run on other numbers of tokens with the same further arguments"
        if reason:
            raise ValueError(explain_mixing(self.name, self.module, reason))
        self.most_others = len(others)

    def _traced(self, x: Tensor, size: int, run: Callable[[Tensor], object]) -> Any:
        """Compute the same in a graph that the compiler can trace; it sums gradients in the parameters' dtype."""
        results = [tree_flatten(checkpoint(run, tile, use_reentrant=False)) for tile in _cut(x, size)]
        outputs, structures = zip(*results, strict=True)
        leaves = zip(*outputs, strict=True)
        axis = x.dim() - 2
        joined = [torch.cat(parts, axis).reshape(*x.shape[:-1], *parts[0].shape[axis + 1 :]) for parts in leaves]
        return tree_unflatten(joined, structures[0])


def _cut(x: Tensor, size: int) -> Iterator[Tensor]:
    """Yield tiles [1, …, size, D] of an input [B, …, T, D]."""
    rows = x.reshape(-1, x.shape[-1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size].reshape(*(1,) * (x.dim() - 2), -1, x.shape[-1])


@dataclass
class _Call:
    """State that the forward and the backward of one call share.

    Attributes:
        around, again: entered for the recomputation: tiles come in the same order, so each draws what it drew before.
        structure: of the module's output; None until it has run.
    """

    module: nn.Module
    size: int
    function: Callable[[Tensor], object]
    around: Surroundings
    again: AbstractContextManager[Any]
    structure: TreeSpec | None = None

    def run(self, tile: Tensor) -> list[Tensor]:
        leaves, self.structure = tree_flatten(self.function(tile))
        return leaves


class _Tiled(torch.autograd.Function):
    """Autograd function of all tiles of one call; parameters are inputs, so that each gets one gradient."""

    @staticmethod
    def forward(ctx: object, x: Tensor, call: _Call, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parameters)
        outputs: list[Tensor] = []
        start = 0
        # Copies that need no gradient, so that autocast keeps none of them.
        copies = list(map(Tensor.detach, parameters))
        with in_place_of_parameters(call.module, copies):
            for tile in _cut(x, call.size):
                parts = [part.flatten(0, x.dim() - 2) for part in call.run(tile)]
                # In their final shape: views as outputs would lose hooks when they are changed in place.
                outputs = outputs or [part.new_empty(*x.shape[:-1], *part.shape[1:]) for part in parts]
                for output, part in zip(outputs, parts, strict=True):
                    output.flatten(0, x.dim() - 2)[start : start + len(part)] = part
                start += len(parts[0])
        ctx.mark_non_differentiable(*[output for output in outputs if not output.is_floating_point()])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a module in tiles", "Undo tile_mlps_ for this")
        call: _Call = ctx.call
        x, *parameters = ctx.saved_tensors
        of_x = rows_of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            rows_of_x = of_x.view(-1, x.shape[-1])
        flat: dict[int, Tensor] = {}
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                flat[number] = gradient.flatten(0, x.dim() - 2)
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        for leaf in leaves:
            leaf.grad_dtype = torch.promote_types(leaf.dtype, torch.float32)
        start = 0
        with (
            call.around.restored(),
            call.again,
            _without_autocast_cache(),
            torch.enable_grad(),
            in_place_of_parameters(call.module, leaves),
        ):
            for tile in _cut(x, call.size):
                tile = tile.detach().requires_grad_(of_x is not None)
                part = slice(start, start + tile.shape[-2])
                start = part.stop
                outputs = call.run(tile)
                chosen = [number for number in flat if outputs[number].requires_grad]
                heads = [outputs[number] for number in chosen]
                given = [flat[number][part].reshape(outputs[number].shape) for number in chosen]
                if heads:
                    torch.autograd.backward(heads, given)
                if rows_of_x is not None:
                    rows_of_x[part] = 0 if tile.grad is None else tile.grad.flatten(0, -2)
        totals: list[Tensor | None] = []
        for leaf in leaves:
            totals.append(None if leaf.grad is None else leaf.grad.to(leaf.dtype))
        return of_x, None, *totals


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Let autocast keep no weights: each tile's backward frees the graph of their casts."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class TiledMLP(Technique):
    """Run MLPs on one tile of tokens after the other; see :func:`tile_mlps_`.

    Acts right after ``configure_model`` and after adapters are added, before blocks are recomputed or compiled; undone
    at teardown. Beside :class:`~lightning_fasttrain.ActivationCheckpointing` it lowers the peak of the one block that
    is recomputed, which long sequences fill with hidden values of its MLP.

    Args:
        tokens: as for the function.
        mlps: as for the function.

    Raises:
        TypeError: ``tokens`` is not an integer.
        ValueError: in ``fit``: no MLP was found, or the tokens of a named module depend on one another.

    Example:
        >>> import lightning_fasttrain as ft
        >>> techniques = [ft.model.TiledMLP(tokens=4096), ft.ActivationCheckpointing()]

    Source:
        See :func:`tile_mlps_`.
    """

    keeps_draws: ClassVar[bool] = False
    surgery: ClassVar[Surgery | None] = Surgery.ARCHITECTURE
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.TILES_MLPS})
    effect: ClassVar[str] = "MLPs run on tiles of tokens, and again in the backward: few hidden values exist at a time"
    when: ClassVar[str] = "sequences are long, or batches have many tokens, and MLPs set the peak; not for short ones"
    in_a_loop: ClassVar[str] = "model.tile_mlps_(model)"
    predicted: ClassVar[bool] = True

    def __init__(self, tokens: PositiveInt | None = None, mlps: Blocks | None = None) -> None:
        self.tokens = tokens
        self.mlps = mlps

    def apply(self, model: nn.Module) -> Undo:
        return undo_all(tile_mlps_(model, self.tokens, self.mlps).values())

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        return why_no_blocks(facts)

    def describe_effect(self, model: nn.Module) -> str:
        return count_wrapped(model, TiledForward, "MLP")

    def why_idle(self, model: nn.Module) -> tuple[str, str] | None:
        wrappers = list(wrappers_in(model, TiledForward))
        if not wrappers or any(wrapper.ran for wrapper in wrappers):
            return None
        most = max(wrapper.most for wrapper in wrappers)
        why = f"no call had more tokens than one tile (at most {most:,})"
        return why, "Remove TiledMLP or set fewer tokens=, unless later batches are longer"
