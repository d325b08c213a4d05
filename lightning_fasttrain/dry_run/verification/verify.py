"""Whether a training step with techniques is the step without them, on a user's own model."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_fasttrain.core.checks import positive_int
from lightning_fasttrain.core.messages import explain
from lightning_fasttrain.dry_run.verification.batches import take_batches, take_validation
from lightning_fasttrain.dry_run.verification.proof import FULL, Proof
from lightning_fasttrain.dry_run.verification.report import Verification
from lightning_fasttrain.dry_run.verification.short_run import Steps
from lightning_fasttrain.optim.named.build_optimizer import make_optimizer
from lightning_fasttrain.technique import Technique, check_together

Loss = Callable[[Any, Any], Any]


def verify(
    module: nn.Module | Callable[[], nn.Module],
    batch: Any,
    techniques: Sequence[Technique] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    precision: str = FULL,
    steps: int = 2,
    validation: Any = None,
    full: bool = False,
    operators: bool = False,
    **settings: Any,
) -> Verification:
    """Run the same steps without and with techniques, on copies of a model, and say whether it is the same training.

    Compared are the loss, each parameter's gradient in each step, what the optimizer adds to each weight, buffers, the
    loss of the batch in evaluation, and what a validation and ``predict_step`` give; and beside these numbers which
    weights are frozen, which modules train, random numbers, the entries of ``state_dict``, and hooks that are left
    behind. The yardstick is the rounding of the plain step itself on this model: how far it moves when each weight is
    moved to the next number, and when the batch's rows are turned round. Techniques that are *exact* must stay within a
    small multiple of that, those with a *tolerance* within their bound, and of those that *change training* the change
    is reported; what is used beside them is held to the step that they make. In low precision float32 is verified too,
    where rounding hides nothing, and then the precision itself, by its distance from float32.

    If the whole is another training each technique is run alone, so that the guilty one is named; and its steps are run
    once more with hooks on each module, to tell where it begins. Where a technique
    draws other masks of dropout, all steps are run without dropout, and a note says so.

    One model at a time is in memory beside the given one. Of each tensor a checksum is kept, 4,096 entries, and 512
    random sums in which all entries take part: a difference that touches few entries of an update alone, and no
    gradient, may be missed, unless ``full=True``. Where the plain step does not fit the device, as predicted or as
    found out, fewer rows are compared, and a note says so.

    Args:
        module: left as it is, or a function that builds it.
        batch: as the loader gives it; every second step takes the first half of its rows twice. Or a ``DataLoader``,
            whose first ``steps`` batches are used.
        techniques: as for the Trainer; by default those that the module brings (``FastTrainMixin``).
        loss: (module, batch) → loss, for a module without ``training_step``.
        optimizer: parameters → optimizer, for a module without ``configure_optimizers``.
        precision: as for the Trainer.
        steps: optimizer steps; what goes wrong from the third step on is found with ``steps=3``.
        validation: a batch for ``validation_step`` and ``predict_step``, or a loader of them; by default the training
            batch, if the module takes it.
        full: whether all entries of all tensors are compared; they are kept in files meanwhile.
        operators: whether it is told in which operator another training begins, and not in which module alone.
        settings: more of the Trainer's, for all runs, such as ``gradient_clip_val=1.0`` or ``accelerator="cpu"``.

    Returns:
        Rows, problems and notes; its ``ok`` is the verdict, its ``guilty`` names techniques, its ``begins`` a module.

    Raises:
        TypeError: no model, no loss or no optimizer, or a model that cannot be copied.
        ValueError: techniques that do not go together, or none; or not one row fits into memory.
        Exception: whatever the plain step raises.

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
        Ours. Perturbing weights by one rounding to learn what rounding does is an old method of numerical analysis:
        Chaitin-Chatelin & Frayssé 1996, "Lectures on Finite Precision Computations".
    """
    positive_int("steps", steps)
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
            store=None if folder is None else Path(folder),
            operators=operators,
        )
        proof.run(precision)
    problems, said = _drop_repeats(proof.problems), _drop_repeats([*notes, *proof.notes])
    return Verification(_name_of(plain), tuple(proof.rows), problems, said, proof.begins)


class _Supervised(L.LightningModule):
    """Any module with a loss and an optimizer, as a LightningModule."""

    def __init__(self, net: nn.Module, loss: Loss, optimizer: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        self.net, self.loss, self.make_optimizer = net, loss, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.make_optimizer, self)


def as_lightning_module(
    module: nn.Module | Callable[[], nn.Module], loss: Loss | None, optimizer: Callable[[Any], Optimizer] | None
) -> L.LightningModule:
    """The module itself if it is one that can train, or one around it.

    Raises:
        TypeError: no module, or no loss or optimizer for one that has none.
    """
    built = module if isinstance(module, nn.Module) else module()
    if not isinstance(built, nn.Module):
        way_out = "Give an nn.Module, or a function without arguments that returns one"
        raise TypeError(explain(f"module={module!r}, which gives {type(built).__name__}", "a model is needed", way_out))
    if isinstance(built, L.LightningModule) and loss is None and optimizer is None:
        return built
    if loss is None or optimizer is None:
        missing = "loss" if loss is None else "optimizer"
        why = "a step needs both, and only a LightningModule brings its own"
        way_out = f"Give {missing}= too: loss is a function of (module, batch), optimizer one of the parameters"
        raise TypeError(explain(f"{type(built).__name__} without {missing}=", why, way_out))
    return _Supervised(built, loss, optimizer)


def _list_techniques(module: L.LightningModule, techniques: Sequence[Technique] | None) -> list[Technique]:
    if techniques is None:
        brought: Any = module.configure_callbacks()
        listed = brought if isinstance(brought, Sequence) else [brought]
        techniques = [callback for callback in listed if isinstance(callback, Technique)]
    if not techniques:
        why = "there is nothing to compare the plain step with"
        raise ValueError(explain("techniques=[]", why, "Give some: [ft.MicroBatching(4)]"))
    return check_together(techniques)


def _name_of(module: L.LightningModule) -> str:
    return type(module.net).__name__ if isinstance(module, _Supervised) else type(module).__name__


def _drop_repeats(sentences: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentences))
