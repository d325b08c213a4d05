"""Refuse models that the coming run could not train."""

from typing import Any

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_fasttrain.core.messages import explain

_WITHOUT_DTENSORS = (DDPStrategy, DeepSpeedStrategy, FabricDDPStrategy, FabricDeepSpeedStrategy)


def refuse_all_frozen(model: nn.Module) -> None:
    """Refuse a model none of whose parameters requires a gradient.

    Raises:
        ValueError: it has parameters, and all are frozen.
    """
    parameters = list(model.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        why = "no parameter requires a gradient, so nothing would be trained"
        way_out = "Unfreeze what you want to train: parameter.requires_grad_(True)"
        raise ValueError(explain(f"{type(model).__name__} has {len(parameters)} parameters", why, way_out))


def refuse_earlier_shards(model: nn.Module, strategy: Any = None) -> None:
    """Refuse a model that an earlier run has left sharded in a form that this run cannot use.

    Args:
        model: before this run shards it.
        strategy: that of this run; None for FSDP2.

    Raises:
        ValueError: ZeRO stage 3 has sharded it and the strategy has another stage or is another one; or FSDP2 has,
            and the strategy is DDP or ZeRO.
    """
    name = "FSDP2Strategy" if strategy is None else type(strategy).__name__
    # Parameters that DeepSpeed has kept whole, since they are small, have hooks of its engine.
    if not getattr(strategy, "zero_stage_3", False) and any(hasattr(p, "ds_id") for p in model.parameters()):
        _refuse_shards("ZeRO stage 3", "ZeROStrategy(stage=3)", name)
    if isinstance(strategy, _WITHOUT_DTENSORS) and any(isinstance(part, FSDPModule) for part in model.modules()):
        _refuse_shards("FSDP2", "FSDP2Strategy()", name)


def _refuse_shards(by: str, usable: str, strategy: str) -> None:
    what = f"{strategy} with a model that is sharded by {by}"
    why = "an earlier run has left it so, and this one cannot use such shards"
    way_out = (
        f"Use {usable} here too, or save a checkpoint in the earlier run, convert it with strategy.consolidate, and "
        f"load it into a new module"
    )
    raise ValueError(explain(what, why, way_out))
