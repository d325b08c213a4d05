"""Leave out biases that a BatchNorm right after the layer removes again."""

import copy
import operator
import warnings
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fasttrain.core.checks import check_arguments
from lightning_fasttrain.core.messages import explain, list_some, note_once
from lightning_fasttrain.core.modules.select import Blocks, as_list, find_skipped, group_by_reason
from lightning_fasttrain.core.modules.wrapped_forward import (
    Undo,
    WrappedForward,
    count_wrapped,
    list_wrapped,
    undo_all,
)
from lightning_fasttrain.technique import Exactness, Surgery, Technique


class BiasFreeForward(WrappedForward):
    """The forward of a linear or convolutional layer whose bias is zero and is not added."""

    def __call__(self, input: Tensor) -> Tensor:
        layer: Any = self.module
        if not isinstance(layer, nn.Linear):
            return layer._conv_forward(input, layer.weight, None)
        if input.ndim != 2:
            what = f"a linear layer without its bias gets an input of shape {tuple(input.shape)}"
            why = "the norm after it is over another axis than the bias"
            raise ValueError(explain(what, why, "Leave it out with skip="))
        return F.linear(input, layer.weight)


@check_arguments
def drop_bias_before_norm_(model: nn.Module, *, skip: Blocks = ()) -> dict[str, Undo]:
    """Leave out the bias of each linear or convolutional layer whose output only a BatchNorm reads, in place.

    In training BatchNorm subtracts the mean of the batch, and with it the bias, whose gradient is therefore zero up to
    rounding. What is saved is the addition, the sum of gradients for the bias, and its optimizer state. The running
    mean becomes that of the outputs without the bias, so evaluation does not change either.

    Pairs are found by tracing the model, or the largest parts of it that can be traced. Each is tried on random inputs
    in training and in evaluation, and left out if its output changes by more than rounding.

    Args:
        model: any module. Layers that are called from elsewhere than the traced forward, such as from
            ``training_step``, belong in ``skip``.
        skip: layers to leave as they are.

    Returns:
        Qualified name of each changed layer → how to undo it. Its bias stays under the same key of the ``state_dict``,
        as zeros that do not train. A checkpoint from before is loaded as always: its biases are moved into the running
        means when they have been read. Undoing leaves the bias at zero and the running mean shifted, which is the same
        function.

    Raises:
        ValueError: no such layer was found; the message says why others were left out.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> list(drop_bias_before_norm_(net))
        ['0']
        >>> net[0].bias.detach()
        tensor([0., 0., 0., 0.])

    Source:
        Ioffe & Szegedy 2015, "Batch Normalization", https://arxiv.org/abs/1502.03167, section 3.2.
    """
    already = list_wrapped(model, BiasFreeForward)
    if already:
        return dict.fromkeys(already, _do_nothing)
    skipped = find_skipped(model, skip)
    found, left = find_bias_before_norm(model)
    undos: dict[str, Undo] = {}
    for name, norm in found.items():
        if name in skipped:
            continue
        if _changes_output(model.get_submodule(name), model.get_submodule(norm)):
            left[name] = "its output changed in a trial"
            continue
        undos[name] = _drop_(model, name, norm)
    if not undos:
        reasons = [f"{list_some(names)} ({reason})" for reason, names in group_by_reason(left).items()]
        why = "no output of a layer with a bias goes to a BatchNorm alone"
        if reasons:
            why += f"; left out are {', '.join(reasons)}"
        raise ValueError(explain(f"drop_bias_before_norm_({type(model).__name__})", why, "Remove it"))
    for reason, names in group_by_reason(left).items():
        note_once(f"drop_bias_before_norm_: left out {list_some(names)}: {reason}")
    return undos


def _do_nothing() -> None:
    pass


def _drop_(model: nn.Module, name: str, norm: str) -> Undo:
    layer: Any = model.get_submodule(name)
    _move_bias_(layer, model.get_submodule(norm))
    # The innermost module that holds both, so that both have been read when its hook is called.
    shared = ".".join(_common(name.split(".")[:-1], norm.split(".")[:-1]))
    inside = f"{shared}."
    after_load = partial(_after_load, name.removeprefix(inside), norm.removeprefix(inside))
    hook = model.get_submodule(shared).register_load_state_dict_post_hook(after_load)
    trains, bias = layer.bias.requires_grad, layer.bias

    def train_again() -> None:
        bias.requires_grad_(trains)

    bias.requires_grad_(False)
    bias.grad = None
    return undo_all([hook.remove, train_again, BiasFreeForward(layer).install()])


def _common(one: list[str], other: list[str]) -> list[str]:
    same = [*map(operator.eq, one, other), False]
    return one[: same.index(False)]


def _after_load(name: str, norm: str, module: nn.Module, incompatible: object) -> None:
    """Hook of the module that holds both: the checkpoint may be from before, with a bias that is not zero."""
    _move_bias_(module.get_submodule(name), module.get_submodule(norm))


@torch.no_grad()
def _move_bias_(layer: object, norm: object) -> None:
    """Subtract the bias from the running mean, and set it to zero."""
    if norm.running_mean is not None:
        norm.running_mean -= layer.bias.to(norm.running_mean.dtype)
    layer.bias.zero_()


def _changes_output(layer: object, norm: object) -> bool:
    """Whether a layer and its norm have another output without the bias, in training or in evaluation.

    On copies in float64, in which rounding is far below what a bias changes, and with a random bias, which may still be
    at its start of zero.
    """
    if layer.weight.is_meta or isinstance(layer.weight, FakeTensor):
        return False  # there are no values to compare
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        copied, stages = copy.deepcopy(layer).cpu().double(), []
        copied._forward_hooks.clear()
        copied._forward_pre_hooks.clear()
        copied.bias.normal_(generator=generator)
        x = torch.randn(_size_of_input(copied), dtype=torch.float64, generator=generator)
        for _ in range(2):
            stage = copy.deepcopy(norm).cpu().double()
            if stages:
                _move_bias_(copied, stage)
            stages.append((_normalize(stage, copied(x), training=True), _normalize(stage, copied(x), training=False)))
    is_close = partial(torch.allclose, rtol=1e-6, atol=1e-8)
    return not all(map(is_close, *stages))


def _normalize(norm: object, x: Tensor, training: bool) -> Tensor:
    """Return what a norm computes, for SyncBatchNorm on a CPU too; its running mean follows in training."""
    by_batch = training or norm.running_mean is None
    running = norm.running_mean, norm.running_var
    return F.batch_norm(x, *running, norm.weight, norm.bias, by_batch, norm.momentum or 0.1, norm.eps)


def _size_of_input(layer: object) -> tuple[int, ...]:
    if isinstance(layer, nn.Linear):
        return 8, layer.in_features
    sides = [dilation * (kernel - 1) + 4 for kernel, dilation in zip(layer.kernel_size, layer.dilation, strict=True)]
    return 2, layer.in_channels, *sides


class DropBiasBeforeNorm(Technique):
    """Leave out biases that a BatchNorm right after the layer removes again; see :func:`drop_bias_before_norm_`.

    Acts right after ``configure_model``, before the optimizer exists; undone at teardown. Outputs and the gradients of
    all other parameters are the same up to rounding. But an adaptive optimizer moves the bias of the plain run by what
    rounding leaves of its gradient, and weight decay shrinks it, while here it is zero and the running mean is that
    without it.

    Args:
        skip: as for :func:`drop_bias_before_norm_`.

    Raises:
        ValueError: when the run begins, no such layer was found.

    Example:
        >>> leaner = DropBiasBeforeNorm(skip="stem.*")

    Source:
        Ioffe & Szegedy 2015, "Batch Normalization", https://arxiv.org/abs/1502.03167, section 3.2.
    """

    exactness: ClassVar[Exactness] = Exactness.CHANGES_TRAINING
    surgery: ClassVar[Surgery | None] = Surgery.ARCHITECTURE
    effect: ClassVar[str] = "biases that a BatchNorm removes again are not added; the function stays the same"
    when: ClassVar[str] = "a ConvNet has biases before BatchNorm, as older code and tutorials do"
    in_a_loop: ClassVar[str] = "architecture.drop_bias_before_norm_(model)"
    predicted: ClassVar[bool] = True

    def __init__(self, *, skip: Blocks = ()) -> None:
        self.skip: Blocks = tuple(as_list(skip))

    def apply(self, model: nn.Module) -> Undo:
        return undo_all(drop_bias_before_norm_(model, skip=self.skip).values())

    def describe_effect(self, model: nn.Module) -> str:
        layers = count_wrapped(model, BiasFreeForward, "layer")
        return layers and f"{layers} without their bias"


LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FORWARDS = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


class _Tracer(fx.Tracer):
    """Traces through everything but layers and norms, also those that inherit from torch's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (*LAYERS, _BatchNorm)) or super().is_leaf_module(m, module_qualified_name)


def find_bias_before_norm(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Return which layer's output goes to which norm alone, and why other layers before a norm are left out.

    Modules that cannot be traced, as where the code depends on values, are looked for parts that can be.

    Returns:
        Name of a layer → name of its norm, and name of a layer → reason.

    Example:
        >>> find_bias_before_norm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
        ({'0': '1'}, {})
    """
    found: dict[str, str] = {}
    left: dict[str, str] = {}
    _search(model, "", found, left)
    modules = dict(model.named_modules())
    for name, norm in list(found.items()):
        reason = _why_unfit(model, modules[name], modules[norm])
        if reason:
            left[name] = reason
            del found[name]
    return found, left


def _search(module: nn.Module, prefix: str, found: dict[str, str], left: dict[str, str]) -> None:
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    layers = [part for part in module.modules() if isinstance(part, LAYERS)]
    if not norms or not layers:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = _Tracer().trace(module)
    except Exception:  # a user's code may raise anything when it is given proxies
        for name, child in module.named_children():
            _search(child, f"{prefix}{name}.", found, left)
        return
    _read(graph, module, prefix, found, left)


def _read(graph: fx.Graph, module: nn.Module, prefix: str, found: dict[str, str], left: dict[str, str]) -> None:
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    for name, nodes in calls.items():
        layer = module.get_submodule(name)
        norms = [_norm_after(node, module) for node in nodes]
        if not isinstance(layer, LAYERS) or layer.bias is None or not any(norms):
            continue
        if len(set(norms)) > 1 or norms[0] is None or any(len(node.users) != 1 for node in nodes):
            left[prefix + name] = "its output is used by more than one norm"
        elif any(node.args[0] not in nodes for node in calls[norms[0]]):
            left[prefix + name] = "its norm reads the outputs of other layers too"
        else:
            found[prefix + name] = prefix + norms[0]


def _norm_after(node: fx.Node, module: nn.Module) -> str | None:
    """Return the name of a norm that reads the output of a node."""
    for user in node.users:
        if user.op == "call_module" and isinstance(module.get_submodule(str(user.target)), _BatchNorm):
            return str(user.target)
    return None


def _why_unfit(model: nn.Module, layer: object, norm: object) -> str:
    """Return why the bias of a layer before a norm cannot be left out; "" if it can."""
    if type(layer).forward not in _FORWARDS or "forward" in vars(layer):
        return "its class has a forward of its own"
    if type(norm).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return "its norm has a forward of its own"
    if model.training and not norm.training:
        return "its norm is frozen in eval mode, so the bias trains"
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    if channels != norm.num_features:
        return "its norm is not over its output channels"
    holders = 0
    for module in model.modules():
        for parameter in module._parameters.values():
            holders += parameter is layer.bias
    if holders > 1:
        return "its bias is shared with another layer"
    return ""
