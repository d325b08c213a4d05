"""What a Trainer can be told, each with a nanoGPT; nothing here knows of lightning_fasttrain."""

import functools

import lightning as L
from foreign_modules import NanoGPT, SeveralLoaders, SizedStream, Stream, loader, shuffled
from torch.utils.data import TensorDataset


def nano(make_loader=shuffled, module=NanoGPT, callbacks=lambda: [], tune=None, **settings):
    """Return one setting of the Trainer for the nanoGPT."""
    return {"module": module, "loader": make_loader, "callbacks": callbacks, "tune": tune, "settings": settings}


def combined(mode):
    def make_loader(data):
        parts = {"a": shuffled(data), "b": loader(TensorDataset(*(tensor[:10] for tensor in data.tensors)))}
        return L.pytorch.utilities.CombinedLoader(parts, mode)

    return make_loader


EARLY = L.pytorch.callbacks.EarlyStopping
SAVES = functools.partial(L.pytorch.callbacks.ModelCheckpoint, save_top_k=1)
SETTINGS = {
    "clipping by norm": nano(gradient_clip_val=0.1),
    "clipping by value": nano(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "accumulate_grad_batches": nano(accumulate_grad_batches=4),
    "EarlyStopping": nano(callbacks=lambda: [EARLY("val_loss", patience=0, min_delta=10.0)], max_epochs=4),
    "StochasticWeightAveraging": nano(
        callbacks=lambda: [L.pytorch.callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1, annealing_epochs=1)],
        max_epochs=3,
    ),
    "every_n_train_steps": nano(callbacks=lambda: [SAVES(every_n_train_steps=2)], enable_checkpointing=True),
    "overfit_batches": nano(overfit_batches=2),
    "fast_dev_run": nano(fast_dev_run=2),
    "limit_train_batches": nano(limit_train_batches=0.5, limit_val_batches=1),
    "val_check_interval": nano(val_check_interval=2),
    "max_steps": nano(max_steps=5, max_epochs=-1),
    "loggers": nano(logger="csv", log_every_n_steps=1),
    "CombinedLoader, min_size": nano(combined("min_size"), SeveralLoaders),
    "CombinedLoader, max_size_cycle": nano(combined("max_size_cycle"), SeveralLoaders),
    "iterable dataset": nano(lambda data: loader(Stream(data))),
    "iterable dataset with a length": nano(lambda data: loader(SizedStream(data))),
    "last batch smaller": nano(lambda data: loader(TensorDataset(*(tensor[:22] for tensor in data.tensors)))),
    "several validation loaders": nano(limit_val_batches=2, num_sanity_val_steps=1),
    "bf16-mixed": nano(precision="bf16-mixed"),
    "lr_find": nano(tune="lr"),
    "detect_anomaly, deterministic": nano(detect_anomaly=True, deterministic=True),
    "inference_mode off, no validation": nano(inference_mode=False, limit_val_batches=0),
}
