"""Train PyTorch Lightning models faster and in less memory, with proof that it is the same training."""

from lightning_fasttrain._checks import refuse_compromised_hosts

refuse_compromised_hosts()  # before anything imports lightning

from lightning_fasttrain._messages import FastTrainWarning  # noqa: E402
from lightning_fasttrain._surgery import find_blocks  # noqa: E402
from lightning_fasttrain._technique import CONFLICTS, Exactness, Surgery, Technique, apply  # noqa: E402
from lightning_fasttrain.mixin import FastTrainMixin  # noqa: E402
