"""Griffe extension: what mkdocstrings has to be told about this package.

Docstrings are rewritten in the form that it expects:

- ``:func:`~lightning_fasttrain.micro_batching.split_batch``` becomes inline code.
- "Example:" becomes "Examples:", the name that Griffe knows, so that doctests are shown as code.
- "a, b: text" under "Args:" becomes an entry for each of the arguments.

A function that is exported by a package and named after its file, as ``micro_batching.accumulate_gradients`` is, is
documented in place of the file.
"""

import re
from collections.abc import Iterator
from typing import Any

from griffe import Alias, Docstring, Extension, GriffeLoader, Module, Object

ROLE = re.compile(r":\w+:`(?:~[\w.]*\.)?([^`~]+)`")
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
ARGUMENTS = re.compile(r"^(?:Args|Attributes):\n(?:(?: {4}.*)?\n)+", re.MULTILINE)
ENTRY_OF_SEVERAL = re.compile(r"^ {4}(\w+(?:,\s+\w+)+): (.*\n(?: {5,}.*\n)*)", re.MULTILINE)


class PublicNames(Extension):
    """Prepare docstrings and exports for mkdocstrings."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if isinstance(obj.docstring, Docstring):
            text = ROLE.sub(r"`\1`", f"{obj.docstring.value}\n").replace("``", "`")
            text = ARGUMENTS.sub(lambda section: ENTRY_OF_SEVERAL.sub(_one_entry_each, section[0]), text)
            obj.docstring.value = EXAMPLE.sub("Examples:", text).rstrip()

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: Any) -> None:
        loader.resolve_aliases(implicit=True)  # before names that lead through these files are replaced
        for package in list(_packages(pkg)):
            for name in map(str, package.exports or ()):
                file = package.members.get(name)
                if isinstance(file, Module) and name in file.members:
                    package.members[name] = Alias(name, target=file.members[name], parent=package)
                    package.members[f"_{name}"] = file  # where other extensions find what is in it, and no page does


def _one_entry_each(several: re.Match[str]) -> str:
    return "".join(f"    {name}: {several[2]}" for name in re.split(r",\s+", several[1]))


def _packages(module: Module) -> Iterator[Module]:
    yield module
    for member in module.members.values():
        if isinstance(member, Module):
            yield from _packages(member)
