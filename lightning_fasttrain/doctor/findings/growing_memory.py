"""Memory that grows with every step, with the line that keeps the tensors."""

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_fasttrain.core.messages import format_bytes, number_of
from lightning_fasttrain.core.modules.parameters import bytes_of
from lightning_fasttrain.doctor.finding import Cost, Finding
from lightning_fasttrain.doctor.observation.measured import Measured
from lightning_fasttrain.doctor.observation.source_lines import SourceLine, find_growth, is_user_file
from lightning_fasttrain.doctor.observation.watch import Watch

# A tensor may be kept until the next step; what is older than this and was made in both looks is kept forever.
_STEPS_LATER = 2
_LEAST_BYTES = 64 * 2**10


def find_growing_memory(watch: Watch, measured: Measured) -> Iterator[Finding]:
    """Yield the lines whose tensors of two different steps are still alive when the watch ends."""
    now = watch.done - watch.warmup
    looks = [look.find_alive() for number, look in watch.looks.items() if now - number > _STEPS_LATER]
    if len(looks) < 2:
        return
    lasting = set(looks[0]).intersection(*looks[1:])
    with_graph = [line for line in lasting if _has_graph(looks[-1][line])]
    for line in sorted(with_graph) or sorted(lasting):
        kept = looks[-1][line]
        nbytes = bytes_of(kept)
        # A list of detached losses grows by a few bytes, which is no fault.
        if not with_graph and nbytes < _LEAST_BYTES:
            continue
        yield _describe(line, kept, nbytes, with_graph=bool(with_graph))


def _has_graph(tensors: list[Tensor]) -> bool:
    return any(tensor.grad_fn is not None for tensor in tensors)


def _describe(line: SourceLine, kept: list[Tensor], nbytes: int, *, with_graph: bool) -> Finding:
    keeper = _find_keeper(kept[0]) or line
    made = "" if keeper == line else f" made at {line}"
    tensors = f"{number_of(len(kept), 'tensor')}{made}"
    what = f"`{keeper.text}` keeps {tensors} in each step, {format_bytes(nbytes)}, which is never freed"
    cure = "Free them after their last use, or keep fewer"
    if with_graph:
        nodes = max(map(_count_nodes, kept))
        what = f"{what}; {number_of(nodes, 'node')} of the autograd graph stay with it"
        cure = "Keep loss.detach(), or loss.item() once every N steps: the graph is freed"
    cost = Cost(float(nbytes), float(nbytes), float(nbytes), "bytes")
    return Finding("growing_memory", what, cure, "exact", keeper, cost)


def _find_keeper(tensor: Tensor) -> SourceLine | None:
    """Return the line that puts tensors into the container which holds this one."""
    for container in gc.get_referrers(tensor):
        if isinstance(container, list | dict | set | tuple):
            for name, file in _names_of(container):
                line = find_growth(name, file)
                if line is not None:
                    return line
    return None


def _names_of(container: object) -> Iterator[tuple[str, str]]:
    """Yield the names under which the user's code knows a container, with the files that use them."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            for held in (frame.f_locals, frame.f_globals):
                yield from _names_in(held, container, file)
        frame = frame.f_back
    for holder in gc.get_referrers(container):
        file = _file_of_object(holder)
        if file is not None:
            yield from _names_in(vars(holder), container, file)
        elif isinstance(holder, dict):
            yield from _names_in_an_object(holder, container)


def _names_in_an_object(attributes: dict[Any, Any], container: object) -> Iterator[tuple[str, str]]:
    for owner in gc.get_referrers(attributes):
        file = _file_of_object(owner)
        if file is not None and vars(owner) is attributes:
            yield from _names_in(attributes, container, file)


def _names_in(namespace: Mapping[Any, Any], container: object, file: str) -> Iterator[tuple[str, str]]:
    for name, value in list(namespace.items()):
        if value is container:
            yield name, file


def _file_of_object(thing: object) -> str | None:
    """Return the file of an object's class, if the user wrote it."""
    if not hasattr(thing, "__dict__") or isinstance(thing, type):
        return None
    file = getattr(sys.modules.get(type(thing).__module__), "__file__", None)
    if file and is_user_file(file):
        return file
    return None


def _count_nodes(tensor: Tensor) -> int:
    """Return the number of nodes of the graph that a tensor keeps."""
    seen, queue = set[Any](), [tensor.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [following for following, _ in node.next_functions]
    return len(seen)
