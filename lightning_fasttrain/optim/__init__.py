"""Techniques that change gradients, updates, optimizer state and learning rates.

Parameter groups are created here, too; optimizers selected by name are in ``named``.

From the bottom up: ``clipping``, ``closure_optimizer``, ``eager_gradient_release``, ``optimizer_in_backward``,
``parameter_groups``, ``weight_ema``, ``galore``, ``named``, ``schedule_shapes``, ``build_schedule``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.optim.build_schedule import Schedule, build_schedule
    from lightning_fasttrain.optim.clipping import (
        AdaptiveClipping,
        FusedClipping,
        WeightClipping,
        allow_fused_clipping_,
        clip_adaptively_,
        clip_weights_,
    )
    from lightning_fasttrain.optim.eager_gradient_release import EagerGradientRelease, release_gradients_
    from lightning_fasttrain.optim.galore import GaLoreAdamW, galore_groups, galore_state_bytes
    from lightning_fasttrain.optim.named.build_optimizer import NamedOptimizer, build_optimizer
    from lightning_fasttrain.optim.named.host_optimizer import HostOptimizer
    from lightning_fasttrain.optim.named.lion import Lion
    from lightning_fasttrain.optim.named.low_precision_updates import LowPrecisionUpdates
    from lightning_fasttrain.optim.named.muon import MuonAdamW
    from lightning_fasttrain.optim.named.optimizer_state import hand_over_state_, optimizer_state_bytes
    from lightning_fasttrain.optim.named.schedule_free_evaluation import ScheduleFreeEvaluation
    from lightning_fasttrain.optim.optimizer_in_backward import OptimizerInBackward, optimize_in_backward_
    from lightning_fasttrain.optim.parameter_groups import decay_groups, layer_decay_groups, lora_plus_groups
    from lightning_fasttrain.optim.weight_ema import WeightEMA, averaged_state_dict

__all__ = [
    "AdaptiveClipping",
    "EagerGradientRelease",
    "FusedClipping",
    "GaLoreAdamW",
    "HostOptimizer",
    "Lion",
    "LowPrecisionUpdates",
    "MuonAdamW",
    "NamedOptimizer",
    "OptimizerInBackward",
    "Schedule",
    "ScheduleFreeEvaluation",
    "WeightClipping",
    "WeightEMA",
    "allow_fused_clipping_",
    "averaged_state_dict",
    "build_optimizer",
    "build_schedule",
    "clip_adaptively_",
    "clip_weights_",
    "decay_groups",
    "galore_groups",
    "galore_state_bytes",
    "hand_over_state_",
    "layer_decay_groups",
    "lora_plus_groups",
    "optimize_in_backward_",
    "optimizer_state_bytes",
    "release_gradients_",
]
