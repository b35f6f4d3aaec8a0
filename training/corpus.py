"""Step 1: Debian packages -> a text corpus, split by document into a training and a held-out part.

The packages are fetched with `apt-get download` (no root, nothing is installed) and unpacked with `dpkg-deb -x`. Only
texts in the public domain or under permissive licences are used; `SOURCES` below is the list, and its licence column
is what NOTICE reports. A document is one manual page, one chapter of a novel or one dictionary entry; a hash of its
name decides the part it goes to, so the split never changes and never cuts a document in two.

Writes `train.jsonl`, `held.jsonl` (one object a line: `source`, `name` and `text` or `messages`) and `stats.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import chat
from sources import Document, devil_entries, dict_entries, html_documents, rdb_lines

HELD_OUT_ONE_IN = 50
LONGEST_DOCUMENT = 60_000


@dataclass(frozen=True)
class Source:
    """A Debian package, the files in it that we read, its licence, and how many characters we take at most."""

    name: str
    package: str
    root: str
    pattern: str
    licence: str
    limit: int
    title: str


SOURCES = (
    Source("austen", "r-cran-janeaustenr", "usr/lib/R/site-library/janeaustenr/data", "Rdata.rdb",
           "public domain (the novels); MIT (the package)", 5_000_000, "the six novels of Jane Austen"),
    Source("devil", "dict-devil", "usr/share/dictd", "*.dict.dz",
           "public domain", 1_000_000, "The Devil's Dictionary, Ambrose Bierce"),
    Source("jargon", "dict-jargon", "usr/share/dictd", "*.dict.dz",
           "public domain", 2_000_000, "The Jargon File 4.4.7"),
    Source("wordnet", "dict-wn", "usr/share/dictd", "*.dict.dz",
           "WordNet 3.0 licence (permissive)", 0, "WordNet 3.0, Princeton University"),
    Source("sqlite", "sqlite3-doc", "usr/share/doc/sqlite3", "**/*.html",
           "public domain", 2_200_000, "SQLite documentation"),
    Source("python", "python3.11-doc", "usr/share/doc/python3.11/html", "**/*.html",
           "PSF licence 2 (documentation examples also 0BSD)", 3_500_000, "Python 3.11 documentation"),
    Source("postgresql", "postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html", "*.html",
           "PostgreSQL licence", 2_200_000, "PostgreSQL 15 documentation"),
    Source("cmake", "cmake-doc", "usr/share/doc/cmake-data/html", "**/*.html",
           "BSD 3-clause", 600_000, "CMake 3.25 documentation"),
)  # fmt: skip

_NOT_PROSE = re.compile(
    r"requirements|crossref|capi3ref|bookindex|genindex|changes\.html|license|copyright|search|releaselog"
)


def fetch(source: Source, work: Path) -> Path:
    """Download and unpack the package of `source` unless that is already done; returns the unpacked folder."""
    target = work / "packages" / source.package
    if target.is_dir():
        return target
    folder = work / "debs"
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(f"{source.package}_*.deb")):
        subprocess.run(["apt-get", "download", "-q", source.package], cwd=folder, check=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    (package,) = folder.glob(f"{source.package}_*.deb")
    subprocess.run(["dpkg-deb", "-x", str(package), str(target)], check=True)
    return target


def is_held_out(source: str, name: str) -> bool:
    """Whether a document belongs to the held-out part; depends on nothing but its own name."""
    return _hash(f"{source}/{name}") % HELD_OUT_ONE_IN == 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _unwrap(lines: Iterable[str]) -> str:
    """Join hard-wrapped lines into paragraphs parted by blank lines."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def novel_documents(path: Path) -> Iterator[Document]:
    """One document for every chapter of every novel in the R database."""
    for lines in rdb_lines(path):
        title = lines[0].strip().title()
        chapters = re.split(r"\n\s*\n(?=chapter [0-9ivxl]+)", "\n".join(lines), flags=re.I)
        for number, chapter in enumerate(chapters):
            yield Document("austen", f"{title} {number}", f"{title}\n\n{_unwrap(chapter.splitlines())}")


def entry_documents(source: str, entries: Iterable[tuple[str, str]]) -> Iterator[Document]:
    """One document for every dictionary entry: the head word, a blank line, the definition."""
    for head, body in entries:
        clean = re.sub(r"[{}]", "", body)
        if not head.startswith("00-database") and len(clean) > 20:
            yield Document(source, head, f"{head}\n\n{_unwrap(clean.splitlines())}")


def read(source: Source, folder: Path) -> Iterator[Document]:
    """All documents of one source, before any limit."""
    root = folder / source.root
    if source.pattern.endswith(".html"):
        yield from html_documents(source.name, root, source.pattern)
        return
    (path,) = root.glob(source.pattern)
    if source.name == "austen":
        yield from novel_documents(path)
    else:
        entries = devil_entries(path) if source.name == "devil" else dict_entries(path)
        yield from entry_documents(source.name, entries)


def limited(source: Source, documents: Iterable[Document]) -> list[Document]:
    """Drop indexes and the like, cut overlong pages, and keep a fixed pseudo-random choice within the limit."""
    wanted = sorted((d for d in documents if not _NOT_PROSE.search(d.name)), key=lambda d: _hash(d.source + d.name))
    kept: list[Document] = []
    total = 0
    for document in wanted:
        text = document.text[:LONGEST_DOCUMENT]
        total += len(text)
        if source.limit and total > source.limit:
            break
        kept.append(Document(document.source, document.name, text))
    return kept


def rows_of(documents: list[Document], dialogues: int, seed: int) -> list[dict[str, object]]:
    """The rows of one part: its plain documents (the dictionary of words only through dialogues) and its dialogues."""
    rows: list[dict[str, object]] = [
        {"source": d.source, "name": d.name, "text": d.text} for d in documents if d.source != "wordnet"
    ]
    rng = random.Random(seed)
    for number, messages in enumerate(chat.dialogues(documents, dialogues, rng)):
        rows.append({"source": "chat", "name": str(number), "messages": messages})
    rng.shuffle(rows)
    return rows


def write(rows: list[dict[str, object]], path: Path) -> dict[str, int]:
    """Write the rows as JSON lines; returns characters by source."""
    sizes: Counter[str] = Counter()
    with path.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            messages = row.get("messages")
            text = "".join(m["content"] for m in messages) if isinstance(messages, list) else str(row["text"])
            sizes[str(row["source"])] += len(text)
    return dict(sizes)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="scratch folder (%(default)s)")
    parser.add_argument("--dialogues", type=int, default=24_000, help="dialogues made for training (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the dialogues (%(default)s)")
    args = parser.parse_args()
    documents: list[Document] = []
    for source in SOURCES:
        found = limited(source, read(source, fetch(source, args.work)))
        documents += found
        print(f"{source.name:12} {len(found):7,} documents {sum(len(d.text) for d in found):12,} characters")
    parts: dict[str, list[Document]] = {"train": [], "held": []}
    for document in documents:
        parts["held" if is_held_out(document.source, document.name) else "train"].append(document)
    stats = {}
    for number, (part, members) in enumerate(parts.items()):
        count = args.dialogues if part == "train" else args.dialogues // HELD_OUT_ONE_IN
        stats[part] = write(rows_of(members, count, args.seed + number), args.work / f"{part}.jsonl")
        print(part, f"{sum(stats[part].values()):,} characters", stats[part])
    (args.work / "stats.json").write_text(json.dumps(stats, indent=1) + "\n")


if __name__ == "__main__":
    main()
