"""Explain which techniques act, or would act, on a model: the summary that a fit begins with, on request."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
from torch import nn
from torch.optim import Optimizer

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.memory.fake_step import Factory, fake_model
from lightning_fasttrain.memory.predict_memory import Loss
from lightning_fasttrain.planner.why_not import TrainingSetup, find_setup
from lightning_fasttrain.proof.verification.short_run import quietly
from lightning_fasttrain.technique import Technique
from lightning_fasttrain.technique.declarations import PredictedStep
from lightning_fasttrain.technique.run_summary import Explanation, explain_model, explain_run, padding_of
from lightning_fasttrain.technique.technique import find_with_surgery


@check_arguments
def explain(
    module: nn.Module | Factory | L.Trainer,
    batch: object = None,
    techniques: Sequence[Technique] | None = None,
    *,
    trainer: L.Trainer | None = None,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    precision: str = "32-true",
) -> Explanation:
    """Explain what techniques act on in a model, and how large the run is.

    Every fit with techniques begins with this summary, and ends with one of steps, time, tokens/s and fall-backs. There
    the predicted peak is stated where a callback has predicted it (``Rehearsal``, ``AutoBatchSize``), since that runs
    ``training_step`` on a copy. Both are silent with ``Trainer(enable_model_summary=False)`` and
    ``Trainer(barebones=True)``, and if ``logging.getLogger("lightning_fasttrain")`` has a level above INFO.
    Loggers get the techniques as the hyper-parameter ``fasttrain/techniques``, unless
    ``Trainer(enable_autolog_hparams=False)``.

    Before a fit the techniques operate on a copy without memory, within one they are read from the model itself.

    Args:
        module: a model, or a function that builds it, left as it is; or a Trainer that has met its model.
        batch: one rank's batch, as the loader gives it: adds the global batch, its share of padding, and the predicted
            peak of a step.
        techniques: by default the Trainer's, and those that the module brings (``FastTrainMixin``).
        trainer: says on how many devices, by which strategy and in which precision.
        loss: (module, batch) → loss, for a module without ``training_step``.
        optimizer: parameters → optimizer, for a module without ``configure_optimizers``.
        precision: where there is no Trainer.

    Returns:
        Print it for at most twelve lines; its ``as_dict()`` is plain JSON, in bytes.

    Raises:
        TypeError, ValueError: what a fit would raise too: techniques that do not go together, or find nothing to take
            hold of; a Trainer that has no model yet.

    Example:
        >>> import lightning_fasttrain as ft
        >>> net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
        >>> found = ft.planner.explain(net, techniques=[ft.ActivationCheckpointing(), ft.MicroBatching(4)])
        >>> print(found)
        2 techniques
          ActivationCheckpointing  4 blocks of Sequential recomputed
          MicroBatching            each batch runs in 4 micro-batches
          Parameters               16,640 of 16,640 train (100.00%)
          Runs on                  ...
          Memory                   ... free
          Exactness                exact: the same training as without techniques

    Source:
        Ours.
    """
    setup = find_setup(module, techniques, trainer, precision)
    # In a fit the techniques are on the model already, and a copy would get them twice.
    if setup.trainer is not None and setup.is_fitting:
        found = explain_run(setup.trainer, setup.trainer.lightning_module, setup.techniques, batch)
    else:
        found = _explain_ahead(setup, batch)
    if batch is None:
        return found
    share = padding_of(setup.techniques)
    if share is not None:
        share.add(batch)
        found = replace(found, padding=str(share))
    try:
        with quietly():
            predicted = setup.predict(batch, loss, optimizer)
    except (TypeError, ValueError) as error:
        return replace(found, why_unpredicted=str(error).rstrip("."))
    return replace(found, predicted_bytes=predicted.peak_bytes)


def _explain_ahead(setup: TrainingSetup, batch: object) -> Explanation:
    planned = PredictedStep(setup.precision, setup.predicted_device == "cuda")
    with_surgery = find_with_surgery(setup.techniques, planned)
    strategy, ranks, accumulation = setup.as_trained
    with quietly(), fake_model(setup.module, with_surgery) as copy:
        return explain_model(
            copy,
            setup.techniques,
            batch,
            setup.device,
            precision=setup.precision,
            strategy=strategy,
            ranks=ranks,
            accumulation=max(planned.window, accumulation),  # by a technique or by the Trainer
        )
