"""Estimate a training before it runs, by published formulas, counted FLOPs and measured steps.

From the bottom up: ``scaling_laws``, ``flops``, ``memory_estimate``, ``estimate_training``.
"""

from typing import TYPE_CHECKING

from lightning_fasttrain.core.package import import_names_when_used

import_names_when_used(__name__)
if TYPE_CHECKING:
    from lightning_fasttrain.estimate.estimate_training import TrainingEstimate, estimate_training
    from lightning_fasttrain.estimate.flops import (
        StepFlops,
        count_parameters_by_part,
        count_step_flops,
        kaplan_forward_flops,
        kaplan_parameters,
        megatron_flops,
        megatron_parameters,
        palm_flops_per_token,
        six_n_flops,
    )
    from lightning_fasttrain.estimate.memory_estimate import activation_bytes_per_layer, input_and_output_bytes
    from lightning_fasttrain.estimate.scaling_laws import (
        CHINCHILLA,
        REPLICATION,
        ScalingLaw,
        cost_of_batch_size,
        critical_batch_tokens,
        expected_loss,
        kaplan_allocation,
        kaplan_loss,
        kaplan_loss_of_compute,
        optimal_allocation,
        optimal_tokens,
        outside_of_range,
        parameters_for_loss,
    )
    from lightning_fasttrain.step_time.accelerators import (
        ACCELERATORS,
        Accelerator,
        energy_kwh,
        find_accelerator,
        model_flops_utilization,
        pf_days,
        read_devices,
        training_hours,
    )

__all__ = [
    "ACCELERATORS",
    "CHINCHILLA",
    "REPLICATION",
    "Accelerator",
    "ScalingLaw",
    "StepFlops",
    "TrainingEstimate",
    "activation_bytes_per_layer",
    "cost_of_batch_size",
    "count_parameters_by_part",
    "count_step_flops",
    "critical_batch_tokens",
    "energy_kwh",
    "estimate_training",
    "expected_loss",
    "find_accelerator",
    "input_and_output_bytes",
    "kaplan_allocation",
    "kaplan_forward_flops",
    "kaplan_loss",
    "kaplan_loss_of_compute",
    "kaplan_parameters",
    "megatron_flops",
    "megatron_parameters",
    "model_flops_utilization",
    "optimal_allocation",
    "optimal_tokens",
    "outside_of_range",
    "palm_flops_per_token",
    "parameters_for_loss",
    "pf_days",
    "read_devices",
    "six_n_flops",
    "training_hours",
]
