"""Freeze a module, thaw it again, or freeze all of a model but what is named."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.blocks import is_wanted, list_kinds
from lightning_fasttrain.core.modules.wrapped_forward import Undo

Named = str | type[nn.Module]


def freeze_(module: nn.Module) -> Undo:
    """Let no parameter of ``module`` train, and keep its running statistics as they are, in place.

    Parameters require no gradient any more and lose the one that they have, so that no optimizer moves them, not by
    weight decay either. Normalisations with running statistics (BatchNorm) go to eval and stay there when
    ``model.train()`` is called. Dropout is left alone. Freezing twice is the same as once.

    Args:
        module: any module.

    Returns:
        How to undo it: what required a gradient does again, and each normalisation is in the mode it was in.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> undo = freeze_(net)
        >>> net.train()[1].training, net[0].weight.requires_grad
        (False, False)
        >>> undo()
        >>> net[1].training, net[0].weight.requires_grad
        (True, True)

    Source:
        What the inference mode of Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167, is for a fixed network.
    """
    trained = [parameter for parameter in module.parameters() if freeze_parameter_(parameter)]
    in_eval = [stays for norm in module.modules() if keeps_statistics(norm) and (stays := keep_in_eval_(norm))]

    def undo() -> None:
        for parameter in trained:
            parameter.requires_grad_(True)
        for stays in in_eval:
            stays.remove(stays.was_training)

    return undo


def show_thawed_(modules: Iterable[nn.Module]) -> None:
    """Put all parameters where they are. Before torch 2.13 compiled code looks again only into what was written to.

    Source:
        PyTorch issue 139476 and pull request 177158.
    """
    for module in modules:
        for name, parameter in module._parameters.items():
            module._parameters[name] = None
            module._parameters[name] = parameter


def freeze_parameter_(parameter: nn.Parameter) -> bool:
    """Freeze one parameter, and return whether it trained."""
    trained = parameter.requires_grad
    parameter.requires_grad_(False)
    parameter.grad = None  # an optimizer would still use it
    return trained


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module is a normalisation whose forward changes it."""
    return isinstance(module, _NormBase) and module.track_running_stats


class StaysInEval:
    """Replaces a module's ``train``, and does nothing.

    Like :class:`~lightning_fasttrain.core.modules.wrapped_forward.WrappedForward` it holds the module, so that a copy
    has its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.previous = module.__dict__.get("train")
        self.was_training = module.training

    def __call__(self, mode: bool = True) -> nn.Module:
        return self.module

    def remove(self, training: bool) -> None:
        if self.module.__dict__.get("train") is not self:  # taken off already, or under another one
            return
        if self.previous is None:
            del self.module.train
        else:
            self.module.train = self.previous
        self.module.training = training


def keep_in_eval_(norm: nn.Module) -> StaysInEval | None:
    """Put a normalisation into eval for good; None if it is so already."""
    if isinstance(norm.__dict__.get("train"), StaysInEval):
        return None
    stays = StaysInEval(norm)
    norm.train = stays
    # By attribute: ``eval()`` calls ``train``, which does nothing by now.
    norm.training = False
    return stays


def thaw_(module: nn.Module) -> list[str]:
    """Let every parameter of ``module`` train, in place, whoever froze it: the reverse of :func:`freeze_`.

    Quantised weights stay frozen, since they can have no gradient. Normalisations that :func:`freeze_` keeps in eval
    go back to the mode of the module that holds them.

    Args:
        module: any module.

    Returns:
        Names of the parameters that now train, relative to ``module``.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> undo = freeze_(net)
        >>> thaw_(net)
        ['weight', 'bias']

    Source:
        See :func:`freeze_`.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if can_train(parameter)}
    for parameter in trained.values():
        parameter.requires_grad_(True)
    show_thawed_(module.modules())
    # A norm that was frozen in eval does not know the mode of now; the module around it does.
    holder = {child: parent for parent in module.modules() for child in parent.children()}
    for norm in module.modules():
        stays = norm.__dict__.get("train")
        if isinstance(stays, StaysInEval):
            stays.remove(holder[norm].training if norm in holder else stays.was_training)
    return list(trained)


def can_train(parameter: nn.Parameter) -> bool:
    """Whether a parameter can have a gradient; packed weights of bitsandbytes may call themselves floating point."""
    packed = type(parameter).__module__.startswith("bitsandbytes.")
    return (parameter.is_floating_point() or parameter.is_complex()) and not packed


def freeze_except_(model: nn.Module, *keep: Named) -> list[str]:
    """Freeze everything in ``model`` but what is named, in place. Nothing is thawed.

    Args:
        model: any module.
        keep: what goes on training: a class, a class name, or a pattern of qualified names of modules or parameters,
            in which ``*`` stands for one name and ``**`` for any number (``"blocks.*.norm"``, ``"**.bias"``).
            A parameter that is tied, and so has several names, trains if one of them is meant; this is said.

    Returns:
        Names of the parameters that still train.

    Raises:
        TypeError: an entry of ``keep`` is no string and no class.
        ValueError: nothing is named, an entry matches nothing, or nothing of what is named can train.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> freeze_except_(net, "2")
        ['2.weight', '2.bias']

    Source:
        See :func:`freeze_`.
    """
    if not keep:
        raise ValueError(explain("freeze_except_(model)", "nothing is named that may train", "Use freeze_(model)"))
    chosen = choose(model, *keep)
    training = {name: parameter for name, parameter in chosen.parameters.items() if parameter.requires_grad}
    if not training:
        why = f"none of the {len(chosen.parameters)} parameters that are meant requires a gradient now"
        way_out = "Thaw what you want to train first: thaw_(module)"
        raise ValueError(explain(f"freeze_except_(model, {', '.join(map(repr, keep))})", why, way_out))
    name_of = {parameter: name for name, parameter in training.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in name_of:
            freeze_parameter_(parameter)
        # The same parameter under another name, which was not meant.
        elif name not in training:
            note_once(f"freeze_except_: {name} trains, since it is tied to {name_of[parameter]}")
    for norm in model.modules():
        if keeps_statistics(norm) and norm not in chosen.norms:
            keep_in_eval_(norm)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


@dataclass
class Chosen:
    """What patterns meant: each parameter under every name that was meant, and normalisations."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    norms: list[nn.Module] = field(default_factory=list)


def choose(model: nn.Module, *wanted: Named) -> Chosen:
    """Find the parameters and normalisations that are meant by classes, class names and patterns of qualified names.

    Raises:
        TypeError: an entry is no string and no class.
        ValueError: an entry matches nothing; the message lists near names.

    Example:
        >>> list(choose(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "*.bias").parameters)
        ['0.bias', '1.bias']
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: set[str] = set()
    for one in wanted:
        if not isinstance(one, str | type):
            raise TypeError(explain(f"{one!r}", "a pattern or a class is needed", "Name the module by a string"))
        found = {name for name, module in modules.items() if is_wanted(name, module, one)}
        found |= {name for name in parameters if is_wanted(name, modules[name.rpartition(".")[0]], one)}
        if not found:
            raise ValueError(_nothing_like(one, model, [*modules, *parameters]))
        names |= found
    chosen = {name: parameter for name, parameter in parameters.items() if _is_meant(name, names)}
    norms = [module for name, module in modules.items() if _is_meant(name, names) and keeps_statistics(module)]
    return Chosen(chosen, norms)


def _is_meant(name: str, names: set[str]) -> bool:
    """Whether this name or one of a module around it is among ``names``; the model itself is called ``""``."""
    while name:
        if name in names:
            return True
        name = name.rpartition(".")[0]
    return "" in names


def _nothing_like(one: Named, model: nn.Module, names: list[str]) -> str:
    word = one if isinstance(one, str) else one.__name__
    kinds = {type(module).__name__ for module in model.modules()}
    near = difflib.get_close_matches(word, [*filter(None, names), *kinds], n=4, cutoff=0.5)
    return explain(
        f"{word!r} matches nothing in {type(model).__name__}",
        f"candidates are {list_kinds(model)}",
        f"Near names: {', '.join(near) or 'none'}. Give a name, a pattern such as 'blocks.*', or a class",
    )
