"""Check that a training step with techniques is the same as without them, on a user's own model."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_fasttrain.core.checks import PositiveInt, check_arguments
from lightning_fasttrain.core.host.lightning import list_callbacks
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.memory.predict_memory import Loss
from lightning_fasttrain.optim.named.build_optimizer import make_optimizer
from lightning_fasttrain.proof.verification.proof import FULL, Proof, take_batches, take_validation
from lightning_fasttrain.proof.verification.report import Verification
from lightning_fasttrain.proof.verification.short_run import Steps
from lightning_fasttrain.technique import Technique, check_together


@check_arguments
def verify(
    module: nn.Module | Callable[[], nn.Module],
    batch: object,
    techniques: Sequence[Technique] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    precision: str = FULL,
    steps: PositiveInt = 2,
    validation: object = None,
    full: bool = False,
    operators: bool = False,
    **settings: object,
) -> Verification:
    """Run the same steps with and without techniques, on copies of a model, and check that training is the same.

    The comparison covers the loss, each parameter's gradient in each step, the optimizer's updates, buffers, the loss
    of the batch in evaluation, and the results of validation and ``predict_step``; further, which weights are frozen,
    which modules are in training mode, random states, the entries of ``state_dict``, and hooks that are left behind.
    The limit is the rounding noise of the plain step on this model: how far it moves when each weight is moved to the
    next representable value, and when the rows of the batch are reversed. *Exact* techniques must stay within a small
    multiple of it, those with a *tolerance* within their bound, and for those that *change training* the change is
    reported; other techniques are compared with the step that these make. Low precision is verified in float32 too,
    where rounding hides nothing, and then by its distance from float32.

    If training differs, each technique is run alone, to name the guilty one; its steps are run once more with hooks on
    each module, to locate the first difference. If a technique draws different dropout masks, all steps are run
    without dropout, with a note.

    One copy of the model at a time is in memory besides the given one. For each tensor a checksum, 4,096 entries and
    512 random sums over all entries are kept: a difference that affects few entries of an update, and no gradient, may
    be missed without ``full=True``. If the plain step does not fit the device, as predicted or as found out, fewer
    rows are compared, with a note.

    Args:
        module: the module, which is not changed, or a function that builds it.
        batch: a batch of the loader; every second step uses the first half of its rows twice. Or a ``DataLoader``,
            whose first ``steps`` batches are used.
        techniques: as for the Trainer; by default those that the module brings (``FastTrainMixin``).
        loss: (module, batch) → loss, for a module without ``training_step``.
        optimizer: parameters → optimizer, for a module without ``configure_optimizers``.
        precision: as for the Trainer.
        steps: number of optimizer steps; errors from the third step on are found with ``steps=3``.
        validation: a batch for ``validation_step`` and ``predict_step``, or a loader of them; by default the training
            batch, if the module accepts it.
        full: whether all entries of all tensors are compared; they are kept in temporary files.
        operators: whether to locate the first operator that differs, not only the first module.
        settings: further Trainer settings for all runs, such as ``gradient_clip_val=1.0`` or ``accelerator="cpu"``.

    Returns:
        Rows, problems and notes; ``ok`` is the verdict, ``guilty`` lists techniques, ``begins`` is a module or weight.

    Raises:
        TypeError: no model, no loss or no optimizer was given, or the model cannot be copied.
        ValueError: the techniques conflict, or there are none; or not even one row fits into memory.
        Exception: any error of the plain step.

    Example:
        >>> import torch
        >>> import lightning_fasttrain as ft
        >>> batch = torch.randn(8, 4), torch.randn(8, 1)
        >>> verified = ft.verify(
        ...     lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 1)),
        ...     batch,
        ...     [ft.MicroBatching(2), ft.ActivationCheckpointing()],
        ...     loss=lambda net, batch: nn.functional.mse_loss(net(batch[0]), batch[1]),
        ...     optimizer=torch.optim.AdamW,
        ...     accelerator="cpu",
        ... )
        >>> verified.ok, verified.rows[0].verdict
        (True, 'the same')

    Source:
        Ours. Perturbing weights by one rounding to measure the effect of rounding is an old method of numerical
        analysis: Chaitin-Chatelin & Frayssé 1996, "Lectures on Finite Precision Computations".
    """
    plain = as_lightning_module(module, loss, optimizer)
    listed = _list_techniques(plain, techniques)
    batches, notes = take_batches(batch, steps)
    of = Steps(plain, batches, settings, validation=take_validation(validation, batches[0]))
    with TemporaryDirectory() if full else nullcontext() as folder:
        proof = Proof(
            of,
            listed,
            validation_given=validation is not None,
            batches_derived=not isinstance(batch, DataLoader),
            store=Path(folder) if folder else None,
            operators=operators,
        )
        proof.run(precision)
    problems, said = _drop_repeats(proof.problems), _drop_repeats([*notes, *proof.notes])
    return Verification(_name_of(plain), tuple(proof.rows), problems, said, proof.begins)


class _Supervised(L.LightningModule):
    """A LightningModule of any module with a loss and an optimizer."""

    def __init__(self, net: nn.Module, loss: Loss, optimizer: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        self.net, self.loss, self.make_optimizer = net, loss, optimizer

    def training_step(self, batch: object, batch_idx: int) -> Any:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.make_optimizer, self)


def as_lightning_module(
    module: nn.Module | Callable[[], nn.Module], loss: Loss | None, optimizer: Callable[[Any], Optimizer] | None
) -> L.LightningModule:
    """Return the module itself if it can train, or a wrapper with the loss and the optimizer.

    Raises:
        TypeError: not a module, or a module without loss or optimizer.
    """
    built = module() if callable(module) and not isinstance(module, nn.Module) else module
    if not isinstance(built, nn.Module):
        way_out = "Pass an nn.Module, or a function without arguments that returns one"
        raise TypeError(explain(f"module={module!r}", f"expected an nn.Module, got {type(built).__name__}", way_out))
    if isinstance(built, L.LightningModule) and loss is None and optimizer is None:
        return built
    if loss is None or optimizer is None:
        missing = "loss" if loss is None else "optimizer"
        why = "a step needs both, and only a LightningModule has its own"
        way_out = f"Pass {missing}= too: loss is a function of (module, batch), optimizer a function of the parameters"
        raise TypeError(explain(f"{type(built).__name__} without {missing}=", why, way_out))
    return _Supervised(built, loss, optimizer)


def _list_techniques(module: L.LightningModule, techniques: Sequence[Technique] | None) -> list[Technique]:
    if techniques is None:
        brought = list_callbacks(module.configure_callbacks)
        techniques = [callback for callback in brought if isinstance(callback, Technique)]
    if not techniques:
        why = "expected at least one technique to compare with the plain step"
        raise ValueError(explain("techniques=[]", why, "Pass some, for example [ft.MicroBatching(4)]"))
    return check_together(techniques)


def _name_of(module: L.LightningModule) -> str:
    return type(module.net).__name__ if isinstance(module, _Supervised) else type(module).__name__


def _drop_repeats(sentences: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentences))
