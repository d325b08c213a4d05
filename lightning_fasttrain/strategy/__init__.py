"""Sharding of parameters, gradients and optimizer state: FSDP2, ZeRO, and the choice among them.

From the bottom up: ``memory_limits``, ``tensor_parallel``, ``fsdp2``, ``consolidate``, ``zero``, ``traffic``,
``choose_strategy``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.strategy.choose_strategy import StrategyChoice, choose_strategy
    from lightning_fasttrain.strategy.consolidate import Consolidated, consolidate
    from lightning_fasttrain.strategy.fsdp2.fsdp2_strategy import FabricFSDP2Strategy, FSDP2Strategy
    from lightning_fasttrain.strategy.fsdp2.shard_blocks import check_sharded, precision_policy, shard_blocks_
    from lightning_fasttrain.strategy.fsdp2.sharded_checkpoint import (
        full_checkpoint,
        full_state_dict,
        load_sharded_,
        save_sharded,
    )
    from lightning_fasttrain.strategy.tensor_parallel.plan import plan_tensor_parallel
    from lightning_fasttrain.strategy.traffic import Traffic, predict_traffic
    from lightning_fasttrain.strategy.zero.zero_states import STAGES, ZeROSizes
    from lightning_fasttrain.strategy.zero.zero_strategy import FabricZeROStrategy, ZeROStrategy

__all__ = [
    "STAGES",
    "Consolidated",
    "FSDP2Strategy",
    "FabricFSDP2Strategy",
    "FabricZeROStrategy",
    "StrategyChoice",
    "Traffic",
    "ZeROSizes",
    "ZeROStrategy",
    "check_sharded",
    "choose_strategy",
    "consolidate",
    "full_checkpoint",
    "full_state_dict",
    "load_sharded_",
    "plan_tensor_parallel",
    "precision_policy",
    "predict_traffic",
    "save_sharded",
    "shard_blocks_",
]
