"""Train PyTorch Lightning models faster and in less memory, with proof that it is the same training."""

from lightning_fasttrain.core.checks import refuse_compromised_hosts

refuse_compromised_hosts()  # before anything imports lightning

# The public names are in __init__.pyi. A subpackage is imported when one of its names is first used.
from lightning_fasttrain.core.package import PUBLIC as __all__  # noqa: E402
from lightning_fasttrain.core.package import find_public as __getattr__  # noqa: E402
from lightning_fasttrain.core.package import list_names as __dir__  # noqa: E402
