"""A forward that runs on one tile of tokens after the other, and again, tile by tile, in the backward."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.core.modules.parameters import move_values
from lightning_fasttrain.core.modules.recomputation import (
    RecomputedForward,
    refuse_second_derivative,
    refuse_transforms,
)
from lightning_fasttrain.core.modules.select import layers_of
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.core.state.step_state import StepState
from lightning_fasttrain.core.state.surroundings import Surroundings

_TOKENS = 8  # two sequences of four
_KEPT = [2, 5]  # one of each, between others: attention may be causal


def can_run(module: nn.Module) -> bool:
    """Whether the weights of ``module`` have values here; those on the meta device, fake and sharded ones have none."""
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
    """Numbers of inputs of the layers in ``module``, each once; GPT-2's layers call it ``nx``."""
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
    drawn: list[_Draws] = []

    def leaves(tokens: Tensor) -> list[Any]:
        given = tokens.clone()
        with keep_random_state(), _Draws() as draws:  # the same masks of dropout for both
            outputs = tree_leaves(run(given))
            draws.note_generators()
        drawn.append(draws)
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
    if not drawn[0].are_for_tokens(3, drawn[1], _TOKENS):
        return "it draws random numbers for all tokens together, which each tile would draw anew"
    axes = min(len(lead), 2 + len(outer))
    reasons = [_compare(*outputs, axes=axes) for outputs in zip(whole, others, still, alone, strict=True)]
    return next(filter(None, reasons), "")


class _Draws(TorchDispatchMode):
    """Records how many random numbers each operator draws, and whether Python or NumPy do."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        self._before = _read_generators()
        self.outside_torch = False

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            tensors = filter(torch.is_tensor, tree_leaves(result))
            self.counts.append(max(map(Tensor.numel, tensors)))
        return result

    def note_generators(self) -> None:
        """Compare the generators of Python and NumPy with those at the beginning."""
        self.outside_torch = _read_generators() != self._before

    def are_for_tokens(self, tokens: int, other: "_Draws", others: int) -> bool:
        """Whether this run on ``tokens`` tokens and another one on ``others`` drew as many numbers for each token."""
        if self.outside_torch or other.outside_torch:
            return False
        if len(self.counts) != len(other.counts):
            return False
        return all(mine * others == theirs * tokens for mine, theirs in zip(self.counts, other.counts, strict=True))


def _read_generators() -> tuple[Any, ...]:
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
    whole, others, still, alone = (output.flatten(0, axes - 1).double() for output in outputs)
    # Bitwise, since sizes are the same and a row of a product depends on no other row.
    if not torch.equal(whole[_KEPT], others[_KEPT]):
        return "the output of a token depends on other tokens"
    if (still[2:5] - alone).abs().amax() > close * still.abs().amax():
        return "the output of a token depends on its position, or on the number of tokens"
    return ""


@contextmanager
def _without_trace(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Set a mode, and let moved values stand for trained parameters; afterwards everything is as before."""
    places = find_trainable(module)
    with _disable_current_modes(), torch.enable_grad():  # a checkpoint around it would count the trial's operators
        state = StepState([module])
        try:
            with state.watch(), in_place_of(places, move_values(places)):
                module.train(training)
                yield
        finally:
            state.restore()


# The modules and keys under which each parameter is registered: several for a tied one.
Places = dict[nn.Parameter, list[tuple[nn.Module, str]]]


def find_trainable(module: nn.Module) -> Places:
    """List the parameters of ``module`` that require a gradient, each once, with the places that hold them.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> both = nn.Sequential(layer, layer)
        >>> list(map(len, find_trainable(both).values()))
        [1, 1]
    """
    found: Places = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad:
                found.setdefault(parameter, []).append((owner, key))
    return found


@contextmanager
def in_place_of(places: Places, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let ``tensors`` stand for the parameters of ``places``: no hook of a parameter sees what is computed with them.

    Example:
        >>> import torch
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> with in_place_of(find_trainable(layer), [torch.tensor([[3.0]])]):
        ...     layer(torch.ones(1)).item()
        3.0
    """
    for holders, tensor in zip(places.values(), tensors, strict=True):
        for owner, key in holders:
            owner.__dict__["_parameters"][key] = tensor  # nn.Module's own way refuses what is not a Parameter
    try:
        yield
    finally:
        for parameter, holders in places.items():
            for owner, key in holders:
                owner.__dict__["_parameters"][key] = parameter


_WAY_OUT = "Leave this module out with mlps="
_SMALLEST = 1024  # tokens of a tile, unless the input is wider: smaller products are slow


def explain_mixing(name: str, module: nn.Module, reason: str) -> str:
    return explain(f"tile_mlps_: '{name}' ({type(module).__name__})", reason, _WAY_OUT)


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
        self.is_checked = is_checked
        self.others = 0  # number of further tensors that it was tried with
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
        places = find_trainable(self.module)
        call = _Call(self, size, run, places)
        outputs = _Tiled.apply(x, call, *places)
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
        known = self.is_checked and len(others) <= self.others
        if known or not can_run(self.module):
            return
        reason = why_tokens_mix(self.module, run, like=x)
        if reason is None:
            reason = "it does not run on other numbers of tokens with the same further arguments"
        if reason:
            raise ValueError(explain_mixing(self.name, self.module, reason))
        self.is_checked, self.others = True, len(others)

    def _traced(self, x: Tensor, size: int, run: Callable[[Tensor], object]) -> Any:
        """Return the same as a graph that the compiler can trace; it sums gradients in the parameters' dtype."""
        tiles = list(_cut(x, size))
        if torch.is_grad_enabled():
            pieces = [tree_flatten(checkpoint(run, tile, use_reentrant=False)) for tile in tiles]
        else:
            pieces = [tree_flatten(run(tile)) for tile in tiles]
        outputs, structures = zip(*pieces, strict=True)
        leaves = zip(*outputs, strict=True)
        axis = x.dim() - 2
        joined = [torch.cat(parts, axis).reshape(*x.shape[:-1], *parts[0].shape[axis + 1 :]) for parts in leaves]
        return tree_unflatten(joined, structures[0])


def _cut(x: Tensor, size: int) -> Iterator[Tensor]:
    """Yield tiles [1, …, size, D] of an input [B, …, T, D]."""
    rows = x.reshape(-1, x.shape[-1])
    for start in range(0, len(rows), size):
        yield rows[start : start + size].reshape(*(1,) * (x.dim() - 2), -1, x.shape[-1])


class _Call:
    """One call of a module: what forward and backward have in common.

    Attributes:
        structure: of the module's output; None until it has run.
    """

    def __init__(self, wrapper: TiledForward, size: int, function: Callable[[Tensor], object], places: Places) -> None:
        self.wrapper, self.size, self.function, self.places = wrapper, size, function, places
        self.structure: TreeSpec | None = None
        self._autocast = [(device, _autocast_settings(device)) for device in ("cpu", "cuda")]
        self._again: AbstractContextManager[Any] = nullcontext()
        self._around = Surroundings([])

    def run(self, tile: Tensor) -> list[Tensor]:
        leaves, self.structure = tree_flatten(self.function(tile))
        return leaves

    @contextmanager
    def first_time(self, x: Tensor) -> Iterator[None]:
        """Context of the forward, which notes what is around it for the backward."""
        forward, self._again = self.wrapper.contexts(nullcontext(), nullcontext())
        self._around = Surroundings([x])
        with forward, self._autocasting():
            yield
        self._around.look()

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Context of the recomputation: tiles come in the same order, so each draws what it drew in the forward."""
        with self._around.restored(), self._again, self._autocasting(), torch.enable_grad():
            yield

    @contextmanager
    def _autocasting(self) -> Iterator[None]:
        """Autocast of the call, without its cache: a weight that is cast without gradients would be used with them."""
        with ExitStack() as stack:
            for device, (enabled, dtype) in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield


def _autocast_settings(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


class _Tiled(torch.autograd.Function):
    """All tiles of one call. Parameters are inputs, so that each gets one gradient, as from a single product."""

    @staticmethod
    def forward(ctx: object, x: Tensor, call: _Call, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parameters)
        outputs: list[Tensor] = []
        start = 0
        # Copies that need no gradient, so that autocast keeps none of them.
        copies = list(map(Tensor.detach, parameters))
        with call.first_time(x), in_place_of(call.places, copies):
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
        sums = [_Float32Sum() for _ in parameters]
        of_x = rows_of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            rows_of_x = of_x.view(-1, x.shape[-1])
        flat: dict[int, Tensor] = {}
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                flat[number] = gradient.flatten(0, x.dim() - 2)
        leaves = [parameter.detach().requires_grad_() for parameter in parameters]
        for leaf, total in zip(leaves, sums, strict=True):
            leaf.register_post_accumulate_grad_hook(total.take)
        start = 0
        with call.recomputing(), in_place_of(call.places, leaves):
            for tile in _cut(x, call.size):
                tile = tile.detach().requires_grad_(of_x is not None)
                part = slice(start, start + tile.shape[-2])
                start = part.stop
                _walk_back(call.run(tile), {number: whole[part] for number, whole in flat.items()})
                if rows_of_x is not None:
                    rows_of_x[part] = 0 if tile.grad is None else tile.grad.flatten(0, -2)
        totals = [total.rounded_to(parameter.dtype) for total, parameter in zip(sums, parameters, strict=True)]
        return of_x, None, *totals


def _walk_back(outputs: Sequence[Tensor], gradients: Mapping[int, Tensor]) -> None:
    """Run the backward of a tile from those of its outputs that have a gradient, by their numbers."""
    chosen: list[Tensor] = []
    given: list[Tensor] = []
    for number, gradient in gradients.items():
        if outputs[number].requires_grad:
            chosen.append(outputs[number])
            given.append(gradient.reshape(outputs[number].shape))
    if chosen:
        torch.autograd.backward(chosen, given)


class _Float32Sum:
    """The sum of a parameter's gradients over the tiles, in float32 at least."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def take(self, leaf: Tensor) -> None:
        """Add the gradient of a leaf as soon as it arrives, and free it."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if self.total is None:
            self.total = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        else:
            self.total += gradient

    def rounded_to(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.total is None else self.total.to(dtype)
