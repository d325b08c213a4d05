"""Find out, by running a module on a few tokens, whether each token's output depends on that token alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_fasttrain.core.distributed import is_sharded
from lightning_fasttrain.core.modules.recomputation import RecomputedForward
from lightning_fasttrain.core.modules.select import layers_of
from lightning_fasttrain.core.state.rng import keep_random_state
from lightning_fasttrain.model.tiling.own_parameters import find_trainable, in_place_of

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
    is run alone: in neither case may the output of a token change.

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

    def leaves(tokens: Tensor) -> list[Any]:
        given = tokens.clone()
        with keep_random_state():  # the same masks of dropout for both
            outputs = tree_leaves(run(given))
        written.append(not torch.equal(given, tokens))
        return outputs

    try:
        with _without_trace(module, training=True) as (changed, stored):
            whole, others = leaves(first.reshape(shape)), leaves(mixed.reshape(shape))
        with _without_trace(module, training=False):
            still, alone = leaves(first.reshape(shape)), leaves(tile)
    except Exception:  # it needs other arguments, or another width
        return None
    if any(written):
        return "it writes into its input in place"
    if stored:
        return f"its forward keeps a tensor as '{stored[0]}', which would be that of the last tile"
    if changed:
        return f"its forward changes the buffer '{changed[0]}', which every tile would do"
    if same_width and not (len(whole) == 1 and _is_as_wide(whole[0], width)):
        return "it does not return one vector as wide as its input for each token"
    axes = min(len(lead), 2 + len(outer))
    reasons = [_compare(*outputs, axes=axes) for outputs in zip(whole, others, still, alone, strict=True)]
    return next(filter(None, reasons), "")


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
def _without_trace(module: nn.Module, *, training: bool) -> Iterator[tuple[list[str], list[str]]]:
    """Set a mode, and let no parameter require a gradient; afterwards everything is as before.

    Yields:
        The names of the buffers that have changed, and of attributes with another tensor, once the block has ended.
    """
    modes = {part: part.training for part in module.modules()}
    before, changed = dict(module.named_buffers()), []
    attributes, stored = _tensor_attributes(module), []
    places = find_trainable(module)
    module.train(training)
    try:
        with (
            _disable_current_modes(),  # a checkpoint around it would count the trial's operators
            torch.enable_grad(),
            RecomputedForward(module).leaving_no_trace(),  # the module has copies of its buffers
            in_place_of(places, list(map(Tensor.detach, places))),
        ):
            yield changed, stored
            now = _tensor_attributes(module)
            stored += [name for name, tensor in now.items() if attributes.get(name) is not tensor]
            for name, buffer in module.named_buffers():
                if not torch.allclose(buffer, before[name], rtol=0, atol=0, equal_nan=True):
                    changed.append(name)
    finally:
        for part, mode in modes.items():
            part.training = mode


def _tensor_attributes(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors among the attributes of all modules inside, which are no parameters or buffers."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if isinstance(value, Tensor):
                found[f"{prefix}.{key}".lstrip(".")] = value
    return found
