"""Look up a module by its qualified name."""

import difflib

from torch import nn

from lightning_fasttrain.core.messages import explain


def find_module(model: nn.Module, name: str, argument: str) -> nn.Module:
    """Return the module of this name; ``argument`` is the argument that an error names.

    Raises:
        ValueError: there is no such module; the message lists similar names, and the model's children.

    Example:
        >>> find_module(nn.Sequential(nn.Linear(2, 1)), "1", argument="head")
        Traceback (most recent call last):
        ...
        ValueError: head='1' in Sequential: no such module. Similar names are none; its children are 0.
    """
    modules = dict(model.named_modules())
    if name not in modules:
        near = difflib.get_close_matches(name, modules, n=4, cutoff=0.3)
        children = ", ".join(child for child, _ in model.named_children()) or "none"
        way_out = f"Similar names are {', '.join(map(repr, near)) or 'none'}; its children are {children}"
        raise ValueError(explain(f"{argument}={name!r} in {type(model).__name__}", "no such module", way_out))
    return modules[name]
