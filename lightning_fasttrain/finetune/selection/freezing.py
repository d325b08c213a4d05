"""Freeze a module, unfreeze it, or freeze a model except for named modules and parameters."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, note_once
from lightning_fasttrain.core.modules.select import Named, is_a, is_part_of, select
from lightning_fasttrain.core.modules.wrapped_forward import Replacement, Undo
from lightning_fasttrain.finetune.selection.base_fingerprint import list_trainable


@check_arguments
def freeze_(module: nn.Module) -> Undo:
    """Freeze all parameters and running statistics of ``module``, in place.

    ``requires_grad`` of each parameter is set to ``False`` and its gradient to ``None``, so that no optimizer updates
    it, not even by weight decay. Normalisations with running statistics (BatchNorm) are put into eval mode and stay
    there when ``model.train()`` is called. Dropout does not change. Freezing twice has the same effect as once.

    Args:
        module: any module.

    Returns:
        A function that undoes it: it restores ``requires_grad`` of the parameters and the mode of the normalisations.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> undo = freeze_(net)
        >>> net.train()[1].training, net[0].weight.requires_grad
        (False, False)
        >>> undo()
        >>> net[1].training, net[0].weight.requires_grad
        (True, True)

    Source:
        Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167: the inference mode of a network with fixed weights.
    """
    trained = list(filter(freeze_parameter_, module.parameters()))
    in_eval = [stays for norm in module.modules() if keeps_statistics(norm) and (stays := keep_in_eval_(norm))]

    def undo() -> None:
        for parameter in trained:
            parameter.requires_grad_(True)
        for stays in in_eval:
            stays.remove()

    return undo


def show_unfrozen_(modules: Iterable[nn.Module]) -> None:
    """Reassign all parameters, so that compiled code notices their new ``requires_grad``.

    Before torch 2.13, guards of compiled code are evaluated again only for attributes that were written to.

    Source:
        PyTorch issue 139476 and pull request 177158.
    """
    for module in modules:
        for name, parameter in module._parameters.items():
            module._parameters[name] = None
            module._parameters[name] = parameter


def freeze_parameter_(parameter: nn.Parameter) -> bool:
    """Freeze one parameter, and return whether it required a gradient."""
    trained = parameter.requires_grad
    parameter.requires_grad_(False)
    parameter.grad = None  # an optimizer would still apply it
    return trained


def keeps_statistics(module: nn.Module) -> bool:
    """Check whether ``module`` is a normalisation with running statistics."""
    return isinstance(module, _NormBase) and module.track_running_stats


class StaysInEval(Replacement):
    """Replacement of a module's ``train`` that does nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.previous = module.__dict__.get("train")
        self.was_training = module.training

    def __call__(self, mode: bool = True) -> nn.Module:
        return self.module

    def remove(self, around: nn.Module | None = None) -> None:
        """Restore ``train``, and the mode of the module ``around`` this one, or else the mode from before."""
        # Another one may have replaced it since, or it is removed already.
        if self.module.__dict__.get("train") is not self:
            return
        if self.previous is None:
            del self.module.train
        else:
            self.module.train = self.previous
        self.module.training = self.was_training if around is None else around.training


def keep_in_eval_(norm: nn.Module) -> StaysInEval | None:
    """Put a normalisation into eval mode and keep it there; return None if this was done before."""
    if isinstance(norm.__dict__.get("train"), StaysInEval):
        return None
    stays = StaysInEval(norm)
    norm.train = stays
    # By attribute: ``eval()`` calls ``train``, which does nothing from here on.
    norm.training = False
    return stays


def update_statistics_(module: nn.Module) -> None:
    """Let the normalisations in ``module`` update their running statistics again."""
    for part in module.modules():
        stays = vars(part).get("train")
        if isinstance(stays, StaysInEval):
            stays.remove()


@check_arguments
def unfreeze_(module: nn.Module) -> list[str]:
    """Unfreeze all parameters of ``module``, in place; the inverse of :func:`freeze_`.

    It does not matter how they were frozen. Quantised weights stay frozen, since they cannot have a gradient.
    Normalisations that :func:`freeze_` keeps in eval mode get the mode of the module that contains them.

    Args:
        module: any module.

    Returns:
        Names of the parameters that now train, relative to ``module``.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> undo = freeze_(net)
        >>> unfreeze_(net)
        ['weight', 'bias']

    Source:
        See :func:`freeze_`.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if can_train(parameter)}
    for parameter in trained.values():
        parameter.requires_grad_(True)
    show_unfrozen_(module.modules())
    # The current mode is that of the module around a norm, as the norm itself was kept in eval mode.
    holder = map_to_parents(module)
    for norm in module.modules():
        stays = norm.__dict__.get("train")
        if isinstance(stays, StaysInEval):
            stays.remove(holder.get(norm))
    return list(trained)


def map_to_parents(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Map each module inside ``model`` to the module that holds it."""
    return {child: parent for parent in model.modules() for child in parent.children()}


def can_train(parameter: nn.Parameter) -> bool:
    """Check whether a parameter can have a gradient; packed weights of bitsandbytes, in any dtype, cannot."""
    packed = is_a(parameter, "bitsandbytes.nn.Params4bit", "bitsandbytes.nn.Int8Params")
    return (parameter.is_floating_point() or parameter.is_complex()) and not packed


@check_arguments
def freeze_except_(model: nn.Module, *keep: Named) -> list[str]:
    """Freeze everything in ``model`` except what ``keep`` names, in place. Nothing is unfrozen.

    Args:
        model: any module.
        keep: what still trains: a class, a class name, or a pattern of qualified names of modules or parameters, in
            which ``*`` stands for one name and ``**`` for any number (``"blocks.*.norm"``, ``"**.bias"``). A tied
            parameter, which has several names, trains if one of them matches; this is logged.

    Returns:
        Names of the parameters that still train.

    Raises:
        TypeError: an entry of ``keep`` is neither a string nor a class.
        ValueError: ``keep`` is empty, an entry matches nothing, or no matching parameter requires a gradient.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> freeze_except_(net, "2")
        ['2.weight', '2.bias']

    Source:
        See :func:`freeze_`.
    """
    if not keep:
        raise ValueError(explain("freeze_except_(model)", "no module or parameter is named", "Use freeze_(model)"))
    chosen = choose(model, *keep)
    training = {name: parameter for name, parameter in chosen.parameters.items() if parameter.requires_grad}
    if not training:
        why = f"none of the {len(chosen.parameters)} matching parameters requires a gradient"
        way_out = "Unfreeze what should train first: unfreeze_(module)"
        raise ValueError(explain(f"freeze_except_(model, {', '.join(map(repr, keep))})", why, way_out))
    name_of = {parameter: name for name, parameter in training.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in name_of:
            freeze_parameter_(parameter)
        # The same parameter under another name, which did not match.
        elif name not in training:
            note_once(f"freeze_except_: {name} trains, since it is tied to {name_of[parameter]}")
    for norm in model.modules():
        if keeps_statistics(norm) and norm not in chosen.norms:
            keep_in_eval_(norm)
    return list_trainable(model)


@dataclass
class Chosen:
    """Parameters, under each of their matching names, and normalisations that patterns select."""

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    norms: list[nn.Module] = field(default_factory=list)


def choose(model: nn.Module, *wanted: Named) -> Chosen:
    """Find the parameters and normalisations selected by classes, class names and patterns of qualified names.

    Raises:
        TypeError: an entry is neither a string nor a class.
        ValueError: an entry matches nothing; the message lists similar names.

    Example:
        >>> list(choose(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "*.bias").parameters)
        ['0.bias', '1.bias']
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    holders = {name: modules[name.rpartition(".")[0]] for name in parameters}
    names = set(select(model, wanted, {**modules, **holders}))
    chosen = {name: parameter for name, parameter in parameters.items() if is_part_of(name, names)}
    norms = [module for name, module in modules.items() if is_part_of(name, names) and keeps_statistics(module)]
    return Chosen(chosen, norms)
