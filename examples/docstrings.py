"""A small real task without a download: which part of Python's standard library does a docstring come from?"""

import ast
import random
import sysconfig
from pathlib import Path

TOPICS = {
    "graphics": "tkinter turtle turtledemo",
    "concurrency": "asyncio concurrent multiprocessing threading subprocess queue selectors sched",
    "mail and web": "email http urllib mailbox imaplib smtplib poplib ftplib nntplib socketserver ssl socket wsgiref "
    "xmlrpc ipaddress cgi webbrowser",
    "numbers and dates": "_pydecimal decimal statistics fractions numbers random datetime _pydatetime calendar "
    "colorsys zoneinfo",
    "files": "tarfile zipfile pathlib shutil _pyio os tempfile gzip bz2 lzma glob fileinput posixpath genericpath stat",
    "modules and packaging": "distutils importlib pkgutil zipimport zipapp venv ensurepip imp modulefinder runpy",
    "testing and debugging": "unittest doctest pdb bdb trace traceback inspect pydoc cProfile profile pstats timeit",
    "text and markup": "xml html configparser csv json textwrap string difflib codecs re plistlib pprint reprlib",
}


def docstrings() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """First paragraphs of docstrings, no two alike, with the number of their topic: four fifths, and the rest."""
    found: dict[str, int] = {}
    root = Path(sysconfig.get_path("stdlib"))
    for topic, modules in enumerate(TOPICS.values()):
        for module in modules.split():
            for file in sorted([*root.glob(f"{module}.py"), *root.glob(f"{module}/**/*.py")]):
                if not {"test", "tests"} & set(file.parts):
                    for text in _paragraphs(file):
                        found.setdefault(text, topic)
    items = sorted(found.items())
    random.Random(0).shuffle(items)
    cut = len(items) * 4 // 5
    return items[:cut], items[cut:]


def _paragraphs(file: Path) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, kinds)]
    texts = [(ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ") for node in nodes]
    return [text for text in texts if len(text) >= 25]
