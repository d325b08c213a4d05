"""Decides where parameters live: ZeRO with its stage chosen, FSDP2, and the choice between them."""

from lightning_fasttrain.strategy._held import ZeROSizes
from lightning_fasttrain.strategy.choose_stage import StageChoice, choose_stage
from lightning_fasttrain.strategy.choose_strategy import StrategyChoice, choose_strategy
from lightning_fasttrain.strategy.consolidate import Consolidated, consolidate
from lightning_fasttrain.strategy.fsdp2 import FSDP2Strategy
from lightning_fasttrain.strategy.fsdp2_fabric import FabricFSDP2Strategy
from lightning_fasttrain.strategy.model_states import STAGES, ModelStates, predict_model_states
from lightning_fasttrain.strategy.shard_blocks import check_sharded, precision_policy, shard_blocks_
from lightning_fasttrain.strategy.sharded_checkpoint import (
    full_checkpoint,
    full_state_dict,
    load_sharded_,
    save_sharded,
)
from lightning_fasttrain.strategy.traffic import Traffic, predict_traffic
from lightning_fasttrain.strategy.zero import ZeROStrategy
from lightning_fasttrain.strategy.zero_fabric import FabricZeROStrategy
