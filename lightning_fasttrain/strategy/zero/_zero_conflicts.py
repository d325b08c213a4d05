"""Which of Lightning's own callbacks cannot be used under ZeRO, and why. Techniques say so themselves."""

from lightning.pytorch.callbacks import BackboneFinetuning, WeightAveraging

from lightning_fasttrain.technique import Conflict

CONFLICTS_OF_ZERO = (
    Conflict(
        BackboneFinetuning,
        "parameters that thaw later are not in DeepSpeed's partitions, so they would never be updated",
        "Use DDP, or choose what trains before the run",
    ),
    Conflict(
        WeightAveraging,
        "it reads whole parameters, and each rank holds a piece of them",
        "Use stage=2 or less",
        lambda zero, _: zero.zero_stage_3,
    ),
)
