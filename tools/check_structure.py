"""Check that docs/structure.md names every module of src/headway exactly once, and nothing that does not exist.

Run by `make lint`. A package has a heading, a module a line of a list; both begin with a path in backticks and a colon.
Other modules that the page mentions, as in the way of a request, must exist too.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from site_links import ROOT

PAGE = ROOT / "docs" / "structure.md"
SOURCE = ROOT / "src" / "headway"
ENTRY = re.compile(r"^(?:#+|-) `([\w/.]+)`: \S", re.MULTILINE)
MENTION = re.compile(r"`((?:\w+/)*\w+\.py|(?:\w+/)+)`")


def modules() -> Iterator[str]:
    """Yield the modules below src/headway: `cache/shape/spec.py`, and packages as folders: `cache/shape/`."""
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        if path.name != "__init__.py":
            yield place.as_posix()
        elif place.parent != Path():
            yield f"{place.parent.as_posix()}/"


def faults(text: str) -> Iterator[str]:
    there, told = set(modules()), Counter(ENTRY.findall(text))
    yield from (f"no line for {name}" for name in sorted(there - told.keys()))
    yield from (f"there is no {name} in src/headway" for name in sorted({*told, *MENTION.findall(text)} - there))
    yield from (f"{count} lines for {name}" for name, count in sorted(told.items()) if count > 1)


def main() -> int:
    found = [f"docs/structure.md: {line}" for line in faults(PAGE.read_text(encoding="utf-8"))]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
