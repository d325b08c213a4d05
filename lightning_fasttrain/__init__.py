"""Train PyTorch Lightning models faster and in less memory, with proof that it is the same training.

A technique wraps a module's forward, the step or the data loader, and returns its undo. With ``ft`` for this package:

    Trainer            L.Trainer(callbacks=[ft.MicroBatching(8), ft.CompileBlocks()])
    LightningModule    class Net(ft.FastTrainMixin, L.LightningModule): techniques = [ft.MicroBatching(8)]
    Fabric, own loop   ft.apply(model, [...]) before the optimizer, and functions such as ft.accumulate_gradients
    which to use       ft.Auto(20) as a callback (within 20 GiB), ft.make_plan, ft.Doctor, ft.predict_memory
    is it the same?    ft.verify(model, batch, [...]) compares steps with and without techniques
    save and resume    ft.AtomicCheckpoints() and ft.ExactResume() as callbacks
    all of them        fasttrain techniques in a shell; help(ft.MicroBatching) for one
    more names         ft.finetune, ft.optim, ft.loss, ft.model, ft.loaders, ft.guards, ft.checkpoint, ft.strategy
"""

from lightning_fasttrain.core.checks import refuse_compromised_hosts

refuse_compromised_hosts()  # before anything imports lightning

# The public names are in __init__.pyi. A subpackage is imported when one of its names is first used.
from lightning_fasttrain.core.package import PUBLIC as __all__  # noqa: E402
from lightning_fasttrain.core.package import find_public as __getattr__  # noqa: E402
from lightning_fasttrain.core.package import list_names as __dir__  # noqa: E402
