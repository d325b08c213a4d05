"""Seeded mutations of files: of bytes, JSON, safetensors, archives of torch.save, and of what lies at a path.

A mutation takes the bytes of a good file and a ``random.Random``, and returns the bytes of a bad one. ``at_path`` puts
something else than a regular file in its place.
"""

import copy
import io
import json
import math
import os
import pickle
import struct
import zipfile
from pathlib import Path

import torch


class Ran:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


VALUES = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 10**400, -(2**63), 1e308, math.inf, math.nan, "", " ", "0",
    "../../outside/secret", "/etc/passwd", "..", "a\0b", "a\nb", "a" * 5000, "(a+)+$", "os.system", "\ud800", [], {},
    [1, 2, 3], {"a": 1}, [[[]]], nested(300), {"__class__": "os.system"}, ["../../outside/secret"],
)  # fmt: skip
PAYLOADS = (
    b"\x80\x02cposix\nsystem\n(X\x0a\x00\x00\x00touch mark%tR.",
    b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
    b"\x80\x02cbuiltins\nbytearray\n\x8a\x06" + (10**11).to_bytes(6, "little") + b"\x85R.",
    b"\x80\x04\x8d" + (2**60).to_bytes(8, "little") + b"abc.",
    b"\x80\x02\x8b" + (2**31 - 1).to_bytes(4, "little") + b"abc.",
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02tR.",
    b"\x80\x02ctorch\nstorage\n.",
    b"\x80\x04cpathlib\nPosixPath\n}(X\x06\x00\x00\x00existsX\x01\x00\x00\x00xu\x86b.",
    b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".",
    b"\x80\x02" + b"(" * 20_000 + b".",
    b"\x80\x02h\xff.", b"\x80\x02N0.", b"\x80\x02.", b"",
)  # fmt: skip


def flip_bits(data, draw):
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8, 64)) if changed else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncate(data, draw):
    return data[: draw.randrange(len(data) + 1)]


def overwrite(data, draw):
    start, length = draw.randrange(len(data) + 1), draw.choice((1, 8, 512))
    filling = draw.choice((bytes(length), b"\xff" * length, draw.randbytes(length), b"[" * length))
    return data[:start] + filling + data[start + length :]


def repeat(data, draw):
    start = draw.randrange(len(data) + 1)
    part = data[start : start + draw.choice((1, 16, 1000))]
    return data[:start] + part * draw.choice((2, 50)) + data[start + len(part) :]


def replace_all(data, draw):
    return draw.choice((b"", b"{}", b"[]", b"null", b"<html>502</html>", b"\x80\x04N.", b"PK\x03\x04", b"[" * 100_000,
                        b"1" * 100_000, b'{"a":' * 50_000, b"\xff\xfe\x00\xd8", bytes(1000)))  # fmt: skip


BYTES = (flip_bits, truncate, overwrite, repeat, replace_all)


def places_in(tree):
    """Pairs of a container and a key in it, all the way down."""
    found, todo = [], [tree]
    while todo:
        container = todo.pop()
        for key in list(container) if isinstance(container, dict) else range(len(container)):
            found.append((container, key))
            if isinstance(container[key], dict | list):
                todo.append(container[key])
    return found


def change_tree(tree, draw, values=VALUES):
    """Change one to three entries of nested dicts and lists, in place: another value, gone, moved or renamed."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = places_in(tree)
        if not places:
            return
        container, key = draw.choice(places)
        kind = draw.choice(("replace", "replace", "replace", "remove", "move", "rename"))
        if kind == "replace":
            value = draw.choice(values)
            # A copy, since it may be changed in its turn; to copy a Ran would run it.
            container[key] = copy.deepcopy(value) if isinstance(value, dict | list) else value
        elif kind == "remove":
            del container[key]
        elif kind == "move":
            other, there = draw.choice(places)
            container[key] = other[there]
            if isinstance(container[key], dict | list):
                container[key] = type(container[key])()  # without a circle
        elif isinstance(container, dict):
            container[draw.choice(("", "a", "../../outside/secret", "/etc/passwd", "a" * 3000))] = container.pop(key)


def change_json(data, draw):
    tree = json.loads(data)
    change_tree(tree, draw)
    return json.dumps(tree).encode()


def repeat_json_key(data, draw):
    tree = json.loads(data)
    again = json.dumps({draw.choice(list(tree)): draw.choice(VALUES)})
    return data.rstrip()[:-1] + b", " + again[1:].encode()


JSON = (*BYTES, change_json, change_json, change_json, change_json, repeat_json_key)


def change_header(data, draw):
    """Change the header of a safetensors file, whose length is right again."""
    size = struct.unpack("<Q", data[:8])[0]
    header = change_json(data[8 : 8 + size], draw)
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def change_header_length(data, draw):
    return struct.pack("<Q", draw.choice((0, 1, 7, 2**31, 2**62, 2**64 - 1, len(data), len(data) - 8))) + data[8:]


SAFETENSORS = (*BYTES, change_header, change_header, change_header, change_header_length)


def archive(tree):
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


def tensors():
    return (
        torch.ones(()), torch.ones(0), torch.ones(7, dtype=torch.float64), torch.tensor([math.nan, math.inf]),
        torch.ones(3, dtype=torch.complex64), torch.ones(1).expand(10**6, 10**6), torch.tensor([2**62, -1]),
        torch.ones(2, 2).to_sparse(), torch.zeros(4, 4, dtype=torch.bool), torch.empty(5, device="meta"),
        torch.frombuffer(bytearray(archive({"a": 1})), dtype=torch.uint8),
    )  # fmt: skip


def change_archive(data, draw):
    """Change entries of what an archive holds."""
    tree = torch.load(io.BytesIO(data), weights_only=True)
    readable = [value for value in VALUES if value != "\ud800"]
    change_tree(tree, draw, (*readable, *tensors()))
    return archive(tree)


def rezip(data, change, compression=zipfile.ZIP_STORED):
    """Write an archive again with right checksums, each entry by ``change(name, content)``; None leaves it out."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", compression) as new:
        for entry in old.infolist():
            content = change(entry.filename, old.read(entry))
            if content is not None:
                new.writestr(entry.filename, content)
    return buffer.getvalue()


def change_pickle(data, draw):
    """Change the pickle of an archive, whose checksum is right again."""
    how = draw.choice((flip_bits, flip_bits, truncate, overwrite, repeat))
    return rezip(data, lambda name, old: how(old, draw) if name.endswith("data.pkl") else old)


def hostile_pickle(data, draw):
    payload = draw.choice(PAYLOADS)
    return rezip(data, lambda name, old: payload if name.endswith("data.pkl") else old)


def change_entry(data, draw):
    """Cut, lengthen, rewrite or remove an entry of an archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        chosen = draw.choice(file.namelist())
    how = draw.choice((lambda old: None, lambda old: old[:-1], lambda old: old + bytes(100), lambda old: b"", bytes))
    return rezip(data, lambda name, old: how(old) if name == chosen else old)


def compress(data, draw):
    bomb = bytes(draw.choice((1000, 2**20)))
    return rezip(data, lambda name, old: bomb if "/data/" in name else old, zipfile.ZIP_DEFLATED)


def run_code(data, draw):
    """A pickle that runs, in place of the file or of one entry of it."""
    mark = Path(os.environ["FUZZ_MARK"])
    if draw.random() < 0.3:
        return pickle.dumps(Ran(mark))
    tree = torch.load(io.BytesIO(data), weights_only=True)
    change_tree(tree, draw, (Ran(mark),))
    return archive(tree)


ARCHIVES = (
    *BYTES, change_archive, change_archive, change_archive, change_pickle, change_pickle, hostile_pickle, change_entry,
    compress, run_code,
)  # fmt: skip


def at_path(path, outside, draw):
    """Put a link, a folder, a pipe or nothing in the place of the file at ``path``."""
    path.unlink()
    kind = draw.choice(("loop", "dangling", "device", "process", "folder", "pipe", "nothing", "outside"))
    targets = {"loop": path, "dangling": outside / "nowhere", "device": "/dev/zero", "process": "/proc/self/environ",
               "outside": outside / "secret"}  # fmt: skip
    if kind in targets:
        path.symlink_to(targets[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
