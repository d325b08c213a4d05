"""Evaluation at the average, training at the gradient point, and checkpoints that resume."""

import lightning as L
import pytest
import schedulefree
import torch

import lightning_fasttrain as ft
from lightning_fasttrain.optim import ScheduleFreeEvaluation
from tests.support.nets import TinyLM, as_loader, largest_difference, lm_batches, sgd, trainer, weights

BATCHES = lm_batches(6)


class Averages(TinyLM):
    def configure_optimizers(self):
        return ft.build_optimizer(self, "schedule-free", lr=0.05, weight_decay=0.0)


def fit(callbacks=(), epochs=2, path=None):
    net = Averages()
    t = trainer(callbacks, max_epochs=epochs)
    t.fit(net, as_loader(BATCHES[:5]), as_loader(BATCHES[5:]), ckpt_path=path, weights_only=True if path else None)
    return net, t


class At(L.Callback):
    """Records the weights in the last batches of training and of validation."""

    def on_train_batch_end(self, trainer, pl_module, *batch):
        self.trained = weights(pl_module)

    def on_validation_batch_end(self, trainer, pl_module, *batch):
        self.validated = weights(pl_module)


def test_validation_uses_the_average_and_training_the_gradient_point():
    plain, seen = At(), At()
    net, _ = fit([plain])
    averaged, _ = fit([ScheduleFreeEvaluation(), seen])
    assert largest_difference(plain.trained, seen.trained) <= 1e-5
    assert largest_difference(plain.trained, plain.validated) == 0  # what it is for
    assert largest_difference(seen.trained, seen.validated) > 1e-2
    assert largest_difference(seen.validated, weights(averaged)) <= 1e-5
    assert not torch.equal(net.head.weight, averaged.head.weight)


def test_the_average_is_the_mean_of_the_iterates():
    class Follow(At):
        def __init__(self):
            self.stepped = []

        def on_train_batch_end(self, trainer, pl_module, *batch):
            self.stepped.append(trainer.optimizers[0].state[pl_module.head.weight]["z"].double().clone())

    follow = Follow()
    net, _ = fit([ScheduleFreeEvaluation(), follow], epochs=1)
    mean = torch.stack(follow.stepped).mean(dim=0)
    assert (net.head.weight - mean).abs().max() <= 1e-6 * mean.abs().max()


def test_checkpoints_saved_during_and_after_training_resume(tmp_path):
    class Saves(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    through, _ = fit([Saves(), ScheduleFreeEvaluation()], epochs=2)
    resumed, _ = fit([ScheduleFreeEvaluation()], epochs=2, path=tmp_path / "0.ckpt")
    assert largest_difference(weights(through), weights(resumed)) == 0
    _, t = fit([ScheduleFreeEvaluation()], epochs=1)
    t.save_checkpoint(tmp_path / "end.ckpt")
    again, _ = fit([ScheduleFreeEvaluation()], epochs=2, path=tmp_path / "end.ckpt")
    assert largest_difference(weights(through), weights(again)) <= 1e-5


def test_another_optimizer_is_refused():
    with pytest.raises(ValueError, match="ScheduleFreeEvaluation with SGD: its weights are not an average"):
        trainer([ScheduleFreeEvaluation()]).fit(TinyLM(optimizer=sgd), as_loader(BATCHES))


class Watches(L.Callback):
    """Records the weights before and after each validation, and whether they differed meanwhile."""

    def __init__(self, meddle=False):
        self.meddle, self.gaps, self.moved = meddle, [], []

    def on_train_epoch_end(self, trainer, pl_module):  # after the validation
        self.gaps.append(largest_difference(self.before, weights(pl_module)))

    def on_train_batch_end(self, trainer, pl_module, *batch):
        self.before = weights(pl_module)

    def on_validation_batch_end(self, trainer, pl_module, *batch):
        self.moved.append(largest_difference(getattr(self, "before", weights(pl_module)), weights(pl_module)))
        if self.meddle:
            with torch.no_grad():
                pl_module.head.weight.mul_(1.5)


def test_validation_restores_the_weights_bit_for_bit():
    watches = Watches()
    fit([watches, ScheduleFreeEvaluation()], epochs=3)
    assert watches.gaps == [0.0] * 3
    assert min(watches.moved[1:]) > 1e-3  # the first is the sanity check, before any step


def test_weights_written_during_validation_are_kept():
    watches = Watches(meddle=True)
    fit([watches, ScheduleFreeEvaluation()], epochs=1)
    assert watches.gaps[0] > 1e-2


class Scored(Averages):
    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("score", loss)
        return loss

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.loss(batch)


def test_an_evaluation_with_a_checkpoint_has_the_weights_that_were_scored(tmp_path):
    saves = L.pytorch.callbacks.ModelCheckpoint(tmp_path, monitor="score", mode="max")
    training = trainer([ScheduleFreeEvaluation(), saves], max_epochs=3, enable_checkpointing=True)
    training.fit(Scored(), as_loader(BATCHES[:5]), as_loader(BATCHES[5:]))
    score, path = saves.best_model_score.item(), saves.best_model_path
    settings = {"dataloaders": as_loader(BATCHES[5:]), "ckpt_path": path, "weights_only": True}
    assert training.test(**settings)[0]["score"] == score
    fresh, module = trainer([ScheduleFreeEvaluation()]), Scored()
    assert fresh.validate(module, **settings)[0]["score"] == score
    assert fresh.predict(module, **settings)[0].item() == pytest.approx(score, rel=1e-6)
    assert trainer().validate(Scored(), **settings)[0]["score"] == score  # the file holds them
    assert "on_load_checkpoint" not in vars(module)


class Momentum(Scored):
    """Two optimizers, of which one is schedule-free and reads its momentum elsewhere; one weight is frozen."""

    def configure_optimizers(self):
        self.embed.weight.requires_grad_(False)
        first, *rest = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": rest[:2], "lr": 0.03}, {"params": rest[2:]}]
        self.both = schedulefree.SGDScheduleFree(groups, lr=0.05, momentum=0.8), torch.optim.SGD([first], lr=0.01)
        self.automatic_optimization = False
        return self.both

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("kind", [Scored, Momentum])
def test_a_file_alone_gives_the_weights_that_were_scored(kind, weights_only, tmp_path):
    class Saves(At):
        def on_train_start(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "first.ckpt", weights_only)

        def on_train_epoch_end(self, trainer, pl_module):
            before = weights(pl_module)
            trainer.save_checkpoint(tmp_path / "saved.ckpt", weights_only)
            assert largest_difference(before, weights(pl_module)) == 0

    saves = Saves()
    training = trainer([ScheduleFreeEvaluation(), saves], max_epochs=2)
    module = kind()
    training.fit(module, as_loader(BATCHES[:5]), as_loader(BATCHES[5:]))
    loaded = kind.load_from_checkpoint(tmp_path / "saved.ckpt", weights_only=True)
    assert largest_difference(weights(loaded), saves.validated) == 0
    assert largest_difference(saves.validated, saves.trained) > 1e-3
    assert "save_checkpoint" not in vars(training)


@pytest.mark.parametrize("kind", [Scored, Momentum])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end"])
def test_a_run_resumes_bit_for_bit_from_a_file_that_holds_the_average(hook, kind, tmp_path):
    def save(callback, trainer, *args):
        if not trainer.sanity_checking and not path.exists():
            trainer.save_checkpoint(path)

    path = tmp_path / "saved.ckpt"
    found = []
    for callbacks, start in (([type("Saves", (L.Callback,), {hook: save})()], None), ([], path)):
        training = trainer([ScheduleFreeEvaluation(), ft.ExactResume(), *callbacks], max_epochs=3)
        training.fit(kind(), as_loader(BATCHES[:5]), as_loader(BATCHES[5:]), ckpt_path=start)
        found.append(weights(training.lightning_module))
    assert largest_difference(*found) == 0


def test_a_save_after_the_fit_leaves_the_average_in_place(tmp_path):
    net, training = fit([ScheduleFreeEvaluation()])
    before = weights(net)
    training.save_checkpoint(tmp_path / "end.ckpt")
    assert largest_difference(before, weights(net)) == 0
    assert largest_difference(before, torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]) == 0
