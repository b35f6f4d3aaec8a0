"""Check that every link of the project's Markdown files to the project leads somewhere: to a file and to a heading.

Such links are relative, or absolute ones to the repository, as the README needs them on PyPI. Links to the rest of the
web are left alone. Run by `make lint`.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from site_links import PROJECT, ROOT

REPOSITORY = re.compile(re.escape(PROJECT["urls"]["Repository"]) + r"/(?:blob|raw|tree)/main/")
INDEX_PAGES = {ROOT / "README.md", ROOT / "packages" / "builtin-model" / "README.md"}
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|(?:src|href)=\"([^\"]+)\"|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def markdown_files() -> list[Path]:
    places = [ROOT, *(ROOT / name for name in ("docs", "packages", "tests", "training", "benchmarks", "src"))]
    found = {path for place in places for path in place.glob("*.md" if place == ROOT else "**/*.md")}
    return sorted(found)


def anchors(path: Path) -> set[str]:
    """Return the anchors that the headings of a file get, the second of one name with `-1`, as on GitHub."""
    seen: dict[str, int] = {}
    found = set()
    for heading in HEADING.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def broken_links(path: Path) -> Iterator[str]:
    text = CODE.sub("", FENCE.sub("", path.read_text(encoding="utf-8")))
    for match in LINK.finditer(text):
        link = next(group for group in match.groups() if group)
        inside = REPOSITORY.sub("", link)
        if re.match(r"[a-z][a-z0-9+.-]*:", inside):
            continue
        file, _, anchor = inside.partition("#")
        folder = path.parent if inside == link else ROOT
        if inside == link and file and path in INDEX_PAGES:
            yield f"{path.relative_to(ROOT)}: a package index shows this page, so the link must be absolute: {link}"
        target = (folder / file).resolve() if file else path
        if not target.exists():
            yield f"{path.relative_to(ROOT)}: no such file: {link}"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{path.relative_to(ROOT)}: no such heading: {link}"


def main() -> int:
    broken = [line for path in markdown_files() for line in broken_links(path)]
    print("\n".join(broken), end="\n" if broken else "", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
