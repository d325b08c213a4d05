"""MkDocs hook: files of the repository to which pages link are part of the site too.

Pages link to ``../notebooks/01_first_speedup.ipynb``, which works on a code host and in an editor. MkDocs knows only
what is in ``docs/``, so such files are added to the site, and the links are shortened to match.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

FOLDERS = ("notebooks", "examples/results")
SUFFIXES = {".ipynb", ".png", ".json"}


def on_files(files: Files, config: Any) -> Files:
    """Add the files of ``FOLDERS``."""
    root = Path(config["docs_dir"]).parent
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES:
                name = path.relative_to(root).as_posix()
                files.append(File.generated(config, name, abs_src_path=str(path)))
                # The page of results includes a text that stands beside its pictures.
                if path.suffix == ".png":
                    beside = path.relative_to(root / folder).as_posix()
                    files.append(File.generated(config, beside, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Let links to these files begin at the site's root."""
    return re.sub(rf"\]\(\.\./({'|'.join(FOLDERS)})/", r"](\1/", markdown)
