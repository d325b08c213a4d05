"""Run MLPs on one tile of tokens after the other, so that their hidden values never exist for all tokens at once."""

import re
from collections.abc import Iterator
from typing import ClassVar

from torch import nn

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.messages import explain, list_some
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
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
from lightning_fasttrain.model.tiled_forward import TiledForward, can_run, explain_mixing, why_tokens_mix
from lightning_fasttrain.technique import Capability, Surgery, Technique
from lightning_fasttrain.technique.declarations import Facts, why_no_blocks

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
        return dict.fromkeys(already, _do_nothing)
    found = _named_mlps(model, mlps) if mlps is not None else _find_mlps(model)
    return {name: TiledForward(module, name, tokens, checked).install() for name, (module, checked) in found.items()}


def _do_nothing() -> None:
    pass


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
    search = _Search()
    found: Found = {}
    for name, module in _parts_of_blocks(model):
        if not is_part_of(name, found) and (tried := search.is_mlp(name, module)) is not None:
            found[name] = (module, tried)
    if not found:
        why = f"candidates are {list_kinds(model)}"
        if search.reasons:
            tried = [f"{kind}: {reason}" for kind, reason in search.reasons.items()]
            why = f"tried are {list_some(tried)}"
        way_out = "Make the MLP a module of its own, or name modules whose tokens are independent with mlps="
        raise ValueError(explain(f"no MLPs in the blocks of {type(model).__name__}", why, way_out))
    return found


def _parts_of_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield blocks and the modules inside them, from the outside to the inside."""
    blocks = find_blocks(model)
    for name, module in model.named_modules():
        if is_part_of(name, blocks) and not is_inside(name, _routed(model)):
            yield name, module


def _routed(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if name and _ROUTED.search(type(module).__name__)]


class _Search:
    """Search for MLPs; a module is tried once for all that have the same class and shapes.

    Attributes:
        reasons: class of modules that are none → why.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._known: dict[object, str | None] = {}

    def is_mlp(self, name: str, module: nn.Module) -> bool | None:
        """Return whether the module was tried; None if it is not an MLP."""
        linear = list(filter(is_linear, layers_of(module).values()))
        if len(linear) < 2 or any(_ROUTED.search(type(part).__name__) for part in module.modules()):
            return None
        reason = self._try(module)
        if reason:
            self.reasons[type(module).__name__] = reason
            return None
        looks_like_one = _NAMED.search(type(module).__name__) or _NAMED.search(name.rpartition(".")[2])
        if reason is None and not looks_like_one:
            return None
        return reason is not None

    def _try(self, module: nn.Module) -> str | None:
        if not can_run(module):
            return None
        parts = tuple((type(part), part.extra_repr()) for part in module.modules())
        if parts not in self._known:
            self._known[parts] = why_tokens_mix(module, same_width=True)
        return self._known[parts]


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
