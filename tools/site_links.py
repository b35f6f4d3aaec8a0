"""A hook of mkdocs: links that leave docs/ lead to the repository.

A page links to code and to other pages of the repository by relative paths, so that it works in any checkout. The site
holds docs/ alone, and needs the address instead. `tools/check_links.py` checks that each of these files exists.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = f"{PROJECT['urls']['Repository']}/blob/main/"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the text of a page with its links out of docs/ made absolute."""
    return re.sub(r"\]\(\.\./", f"]({REPOSITORY}", markdown)
