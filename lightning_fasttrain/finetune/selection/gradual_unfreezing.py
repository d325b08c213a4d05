"""Gradual unfreezing: the top of a model trains first, then one group more at a time, from the top down."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar, Literal

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn

from lightning_fasttrain.core.checks import PositiveInt, check_arguments, positive_int
from lightning_fasttrain.core.host.lightning import replicates, wrap_again
from lightning_fasttrain.core.messages import explain, note_once, say, warn
from lightning_fasttrain.core.modules.blocks import Blocks, find_blocks
from lightning_fasttrain.core.modules.heads import heads_beside, warn_of_blocks_beyond
from lightning_fasttrain.core.modules.parameters import parameters_of
from lightning_fasttrain.core.modules.select import Named, as_list, is_part_of
from lightning_fasttrain.core.modules.wrapped_forward import Undo
from lightning_fasttrain.finetune.selection.freezing import (
    Chosen,
    StaysInEval,
    choose,
    freeze_parameter_,
    keep_in_eval_,
    keeps_statistics,
    map_to_parents,
    show_unfrozen_,
)
from lightning_fasttrain.technique import Exactness, Technique
from lightning_fasttrain.technique.declarations import Facts, PredictedStep

Groups = Sequence[Named | Sequence[Named]]


@check_arguments
class Unfreezing:
    """Groups of a model's parameters, from the top down, of which the first k train.

    Give the optimizer all parameters at the start: frozen ones have no gradient, so it does not update them, and
    creates their state when they are unfrozen. Parameters that were frozen before stay frozen. A normalisation with
    running statistics is in eval mode until its group is unfrozen, then in the mode of the module that contains it. A
    tied parameter belongs to the topmost group that uses it: if the head is tied to the embedding, the backward pass
    runs through the complete model from the start. Under DDP, wrap the model again after each change.

    Args:
        model: any module. Nothing is frozen before the first ``unfreeze_to``.
        groups: modules and parameters of each group, from the top down, named as for
            :func:`~lightning_fasttrain.finetune.freeze_except_`: ``[["head", "norm"], "blocks.2", "blocks.1"]``. All
            parameters that no group names form the last one. By default: the heads
            (:func:`~lightning_fasttrain.finetune.find_heads`) and the modules after the blocks; each block with the
            modules between it and the next; the modules before the blocks.
        blocks: which modules are blocks, as for :func:`~lightning_fasttrain.model.find_blocks`.

    Raises:
        TypeError: a group is neither a pattern or class nor a list of them.
        ValueError: a pattern matches nothing; a group has no parameter that can be unfrozen; no blocks were
            found; ``groups`` and ``blocks`` are both given; no parameter of the model requires a gradient.

    Example:
        >>> net = nn.Sequential(nn.Embedding(9, 4), *[nn.TransformerEncoderLayer(4, 1) for _ in range(2)])
        >>> unfreezing = Unfreezing(net)
        >>> len(unfreezing.groups), len(unfreezing.unfreeze_to(1))  # freezes the lower block and "0.weight"
        (3, 13)
        >>> unfreezing.unfreeze_to(3)[-1]
        '0.weight'

    Source:
        Howard & Ruder 2018, "Universal Language Model Fine-tuning for Text Classification",
        https://arxiv.org/abs/1801.06146, section 3.3.
    """

    def __init__(self, model: nn.Module, groups: Groups | None = None, blocks: Blocks | None = None) -> None:
        check_groups(groups, blocks)
        if groups is None:
            self._groups = _each_once(_by_block(model, blocks), named=0)
        else:
            self._groups = _each_once(_by_name(model, groups), named=len(groups))
        if not self._groups:
            why = "no parameter requires a gradient, so no group can be unfrozen"
            raise ValueError(explain(f"Unfreezing({type(model).__name__})", why, "Call unfreeze_(model) first"))
        self._modules = list(model.modules())
        self._holder = map_to_parents(model)
        self._in_eval: dict[nn.Module, StaysInEval] = {}
        self.unfrozen = len(self._groups)

    @property
    def groups(self) -> list[list[str]]:
        """Names of the parameters of each group, from the top down."""
        return [list(group.parameters) for group in self._groups]

    def unfreeze_to(self, k: int) -> list[str]:
        """Let the first ``k`` groups train and freeze the others; beyond the last group, all train.

        Returns:
            Names of the parameters that this call froze or unfroze.

        Raises:
            TypeError, ValueError: ``k`` is not an integer of at least 1.
        """
        before, self.unfrozen = self.unfrozen, min(positive_int("k", k), len(self._groups))
        # One of the two slices is empty: a call either freezes or unfreezes groups.
        for group in self._groups[self.unfrozen : before]:
            self._freeze(group)
        for group in self._groups[before : self.unfrozen]:
            self._unfreeze(group)
        show_unfrozen_(self._modules)
        return list(chain(*self.groups[min(before, self.unfrozen) : max(before, self.unfrozen)]))

    def _freeze(self, group: Chosen) -> None:
        for parameter in group.parameters.values():
            freeze_parameter_(parameter)
        for norm in group.norms:
            # A norm in eval mode inside a module in training mode was put there by the user, and stays so.
            if norm.training == self._holder.get(norm, norm).training and (stays := keep_in_eval_(norm)):
                self._in_eval[norm] = stays

    def _unfreeze(self, group: Chosen) -> None:
        for parameter in group.parameters.values():
            parameter.requires_grad_(True)
        for norm in group.norms:
            if stays := self._in_eval.pop(norm, None):
                stays.remove(self._holder.get(norm))

    def undo(self) -> None:
        """Unfreeze all parameters that required a gradient at the start."""
        self.unfreeze_to(len(self._groups))

    def state_dict(self) -> dict[str, Any]:
        # Earlier versions had another name for the first entry.
        return {"unfrozen": self.unfrozen, "groups": self.groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Unfreeze as many groups as were unfrozen when the state was saved.

        Raises:
            ValueError: the state was saved with other groups.
        """
        if state["groups"] != self.groups:
            what = f"a state of {len(state['groups'])} groups for the {len(self._groups)} of this model"
            why = "its groups consist of other parameters, so its number of unfrozen groups does not apply"
            way_out = "Pass the same groups= or blocks= as when it was saved, or call unfreeze_to(k)"
            raise ValueError(explain(what, why, way_out))
        # Besides the groups, a state has one number, whose key differs in earlier versions.
        (k,) = (value for key, value in state.items() if key != "groups")
        self.unfreeze_to(k)


def check_groups(groups: Groups | None, blocks: Blocks | None) -> None:
    if groups is None:
        return
    if blocks is not None:
        raise ValueError(explain(f"{groups=} and {blocks=}", "both define the groups", "Give one of them"))
    if isinstance(groups, str | type) or not isinstance(groups, Sequence):
        raise TypeError(explain(f"{groups=}", "expected a list, from the top down", "Use groups=[['head'], ...]"))
    if not groups or not all(isinstance(group, str | type) or group for group in groups):
        raise ValueError(explain(f"{groups=}", "a group is empty", "Name the modules of each group"))


def _by_name(model: nn.Module, groups: Groups) -> list[Chosen]:
    chosen: list[Chosen] = []
    for group in groups:
        chosen.append(choose(model, *as_list(group)))
    # The class selects the complete model; parameters of earlier groups are left out later.
    return [*chosen, choose(model, type(model))]


def _by_block(model: nn.Module, blocks: Blocks | None) -> list[Chosen]:
    names = list(find_blocks(model, blocks))
    if blocks is not None:
        warn_of_blocks_beyond(model, names, [], f"Unfreezing(blocks={blocks!r})")
    heads = heads_beside(model, names)
    floors = [Chosen() for _ in range(len(names) + 2)]  # the stem, each block, the head
    reached = 0
    for name, module in model.named_modules():
        inside = next((i for i, block in enumerate(names, 1) if is_part_of(name, [block])), None)
        reached = inside or reached
        # Outside of blocks: with the preceding block, or after the last block with the head.
        floor = floors[inside or (reached if reached < len(names) else reached + 1)]
        if is_part_of(name, heads):
            floor = floors[-1]
        floor.parameters.update(module.named_parameters(prefix=name, recurse=False))
        if keeps_statistics(module):
            floor.norms.append(module)
    return floors[::-1]  # from the top down


def _each_once(groups: Iterable[Chosen], named: int) -> list[Chosen]:
    """Keep each trainable parameter and each normalisation only in its first group; drop empty groups.

    Raises:
        ValueError: one of the first ``named`` groups is empty.
    """
    kept: list[Chosen] = []
    name_of: dict[nn.Parameter, str] = {}
    seen: set[nn.Module] = set()
    # Normalisations of dropped groups join the next group.
    waiting: list[nn.Module] = []
    for i, group in enumerate(groups):
        own: dict[str, nn.Parameter] = {}
        for name, parameter in group.parameters.items():
            if parameter.requires_grad and parameter not in name_of:
                name_of[parameter] = name
                own[name] = parameter
            elif name_of.get(parameter, name) != name:
                note_once(f"Unfreezing: {name} is unfrozen as {name_of[parameter]}, to which it is tied")
        waiting += [norm for norm in dict.fromkeys(group.norms) if norm not in seen]
        seen.update(waiting)
        if own:
            kept.append(Chosen(own, waiting))
            waiting = []
        elif i < named:
            why = f"its {len(group.parameters)} parameters are frozen already, or in an earlier group"
            raise ValueError(explain(f"group {i} of {named}", why, "Leave the group out"))
    if kept:
        kept[-1].norms.extend(waiting)  # no group follows
    return kept


class GradualUnfreezing(Technique):
    """Train the top of the model first, and unfreeze one more group every epoch or every N steps, from the top down.

    While the lower groups are frozen, the backward pass ends above them and the optimizer holds no state for them.
    Acts from ``on_train_start``, when the optimizer, DDP and a checkpoint have seen all parameters, and then on
    ``on_train_epoch_start`` or ``on_train_batch_start``. The number of groups that train depends only on the epoch or
    the step, so a resumed run has the same groups unfrozen. Under DDP the model is wrapped again at each change, since
    the wrapper averages only gradients of parameters that trained when it was created: a communication hook must be
    given to the strategy (``DDPStrategy(ddp_comm_hook=...)``). After the run, all parameters that required a gradient
    before it do so again.

    Args:
        every: ``"epoch"``, or a number of optimizer steps, as ``trainer.global_step`` counts them.
        groups: as for :class:`~lightning_fasttrain.finetune.Unfreezing`.
        blocks: as for :class:`~lightning_fasttrain.finetune.Unfreezing`.

    Raises:
        TypeError, ValueError: ``every`` is neither; ``groups`` is not a list of groups; in ``fit``: the strategy shards
            parameters, or :class:`~lightning_fasttrain.finetune.Unfreezing` raises one.

    Example:
        >>> slowly, by_name = GradualUnfreezing(every=500), GradualUnfreezing(groups=["head", "blocks.2", "blocks.1"])

    Source:
        See :class:`~lightning_fasttrain.finetune.Unfreezing`.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    effect: ClassVar[str] = "the top trains first; the rest is unfrozen group by group, each epoch or every N steps"
    when: ClassVar[str] = (
        "a pretrained model forgets if all of it trains from the first step; saves memory only until all groups train"
    )
    in_a_loop: ClassVar[str] = "finetune.Unfreezing(model).unfreeze_to(epoch + 1)"
    predicted: ClassVar[bool] = True

    _unfreezing: Unfreezing | None = None

    def __init__(
        self,
        every: PositiveInt | Literal["epoch"] = "epoch",
        *,
        groups: Groups | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self.every = every
        check_groups(groups, blocks)
        self.groups = groups
        self.blocks = blocks

    @classmethod
    def why_not(cls, facts: Facts) -> str | None:
        if facts.blocks == 0:
            return "no repeated blocks were found: name the groups with groups="
        return None

    def predict(self, step: PredictedStep) -> None:
        step.leave_out(self, "all groups train, as they do in the end, so this is an upper bound")

    def attach(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Undo | None:
        if trainer.state.fn != "fit":
            return None
        _refuse_sharded(trainer.strategy)
        return self._undo_unfreezing

    def describe_effect(self, model: nn.Module) -> str:
        held = self._unfreezing
        if held is None:
            return ""
        return f"{held.unfrozen} of {len(held.groups)} groups train"

    def _undo_unfreezing(self) -> None:
        unfreezing, self._unfreezing = self._unfreezing, None
        if unfreezing is not None:
            unfreezing.undo()

    def __getstate__(self) -> dict[str, Any]:  # a copy gets the schedule but not the model
        return {**super().__getstate__(), "_unfreezing": None}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Create the groups: the first hook at which all parameters and the optimizers exist. Nothing is frozen yet."""
        unfreezing = self._unfreezing = Unfreezing(pl_module, self.groups, self.blocks)
        held = set(chain(*map(parameters_of, trainer.optimizers)))
        missing = [name for name in chain(*unfreezing.groups) if pl_module.get_parameter(name) not in held]
        if missing:
            what = f"GradualUnfreezing: {len(missing)} parameters such as {missing[0]} are in no optimizer"
            why = "they would not train when they are unfrozen"
            warn(explain(what, why, "Give the optimizer all parameters, or freeze these before the run"))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Freeze all groups that do not train yet: the first hook after the epoch and the step are restored."""
        self._follow(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Unfreeze the next group if groups are unfrozen by epoch."""
        self._follow(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Unfreeze the next group if groups are unfrozen by step."""
        if self.every != "epoch":
            self._follow(trainer)

    def _follow(self, trainer: L.Trainer) -> None:
        unfreezing = self._unfreezing
        assert unfreezing is not None  # created in on_fit_start
        k = 1 + (trainer.current_epoch if isinstance(self.every, str) else trainer.global_step // self.every)
        if min(k, len(unfreezing.groups)) == unfreezing.unfrozen:
            return
        unfreezing.unfreeze_to(k)
        say("GradualUnfreezing: %d of %d groups train", unfreezing.unfrozen, len(unfreezing.groups))
        if isinstance(trainer.strategy, DDPStrategy):
            wrap_again(trainer.strategy)


def _refuse_sharded(strategy: Strategy) -> None:
    if not replicates(strategy):
        why = "the strategy shards the parameters, and fixes which of them train, before training starts"
        way_out = "Use one device or DDP, or fit once for each group with freeze_except_"
        raise ValueError(explain(f"GradualUnfreezing with {type(strategy).__name__}", why, way_out))
