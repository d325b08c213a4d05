"""Find layers with a bias whose output only a BatchNorm reads, by tracing a model."""

import warnings

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

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
