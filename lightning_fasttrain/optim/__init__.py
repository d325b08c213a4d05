"""Changes gradients, updates, optimizer state, and the rates of a run.

Parameter groups are made here too.

From the bottom up: ``eager_gradient_release``, ``fused_clipping``, ``galore``, ``optimizer_in_backward``,
``parameter_groups``, ``galore_groups``, ``schedule``.
"""

from lightning_fasttrain.optim.eager_gradient_release import EagerGradientRelease, release_gradients_
from lightning_fasttrain.optim.fused_clipping import FusedClipping, allow_fused_clipping_
from lightning_fasttrain.optim.galore import GaLoreAdamW
from lightning_fasttrain.optim.galore_groups import galore_groups, galore_state_bytes
from lightning_fasttrain.optim.optimizer_in_backward import OptimizerInBackward, optimize_in_backward_
from lightning_fasttrain.optim.parameter_groups import layer_decay_groups, lora_plus_groups
from lightning_fasttrain.optim.schedule.build_schedule import Schedule, build_schedule
