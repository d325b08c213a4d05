"""Lightning's own callbacks that cannot be used under ZeRO, with the reason; techniques declare theirs themselves."""

from lightning.pytorch.callbacks import BackboneFinetuning, WeightAveraging

from lightning_fasttrain.technique import Conflict

CONFLICTS_OF_ZERO = (
    Conflict(
        BackboneFinetuning,
        "parameters that are unfrozen later are not in DeepSpeed's partitions, so they would never be updated",
        "Use DDP, or choose the trained parameters before the run",
    ),
    Conflict(
        WeightAveraging,
        "it reads whole parameters, and each rank holds a shard of them",
        "Use stage=2 or less",
        lambda zero, _: zero.zero_stage_3,
    ),
)
