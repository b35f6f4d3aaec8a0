"""Readers that turn the formats found in Debian documentation packages into plain text.

Three formats cover everything the corpus uses: HTML pages, dictd dictionaries (gzip-compatible, with a plain layout of
head words and indented bodies) and R's lazy-load data (zlib blocks of serialised strings). Each reader is a generator
of `Document`; nothing here knows which packages exist.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

_SKIP_TAGS = {"script", "style", "head", "nav", "svg", "footer", "form"}
_SKIP_CLASSES = {
    "sphinxsidebar", "related", "navheader", "navfooter", "nosearch", "headerlink", "toc", "contents", "footer",
    "toctree-wrapper", "indextable", "legalnotice",
}  # fmt: skip
_BLOCK_TAGS = {
    "p", "div", "section", "ul", "ol", "dl", "dt", "dd", "li", "table", "tr", "blockquote", "pre", "br", "hr",
    "h1", "h2", "h3", "h4", "h5", "h6", "body", "caption",
}  # fmt: skip
_HEADINGS = {"h1": "# ", "h2": "## ", "h3": "### ", "h4": "#### ", "h5": "#### ", "h6": "#### "}


@dataclass(frozen=True)
class Document:
    """One document: where it came from, its name inside that source, and its text."""

    source: str
    name: str
    text: str


class _Page(HTMLParser):
    """Collect the readable blocks of one HTML page, headings marked with `#`, code indented by four spaces."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self._inline: list[str] = []
        self._prefix = ""
        self._in_pre = False
        self._skipping: tuple[str, int] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipping is not None:
            if tag == self._skipping[0]:
                self._skipping = (tag, self._skipping[1] + 1)
            return
        classes = set((dict(attrs).get("class") or "").split())
        if tag in _SKIP_TAGS or classes & _SKIP_CLASSES:
            self._skipping = (tag, 1)
            return
        if tag in _BLOCK_TAGS and not (self._in_pre and tag == "br"):
            self._flush()
        if tag in _HEADINGS:
            self._prefix = _HEADINGS[tag]
        elif tag == "li":
            self._prefix = "- "
        elif tag in ("td", "th") and self._inline:
            self._inline.append(" | ")
        elif tag == "pre":
            self._in_pre = True

    def handle_endtag(self, tag: str) -> None:
        if self._skipping is not None:
            if tag == self._skipping[0]:
                depth = self._skipping[1] - 1
                self._skipping = (tag, depth) if depth else None
            return
        if tag in _BLOCK_TAGS:
            self._flush()
        if tag == "pre":
            self._in_pre = False

    def handle_data(self, data: str) -> None:
        if self._skipping is None:
            self._inline.append(data)

    def _flush(self) -> None:
        raw, self._inline = "".join(self._inline).replace("¶", ""), []
        if self._in_pre:
            lines = [f"    {line}".rstrip() for line in raw.strip("\n").splitlines()]
            block = "\n".join(lines)
        else:
            block = " ".join(raw.split())
            if block:
                block = self._prefix + block
        if block.strip():
            self.blocks.append(block)
            self._prefix = ""


def html_text(html: str) -> str:
    """The readable text of an HTML page: blocks parted by blank lines, list items by single line breaks."""
    start = re.search(r'<div class="body"', html)
    page = _Page()
    page.feed(html[start.start() :] if start else html)
    page.close()
    page._flush()
    parts: list[str] = []
    for block in page.blocks:
        tight = bool(parts) and block.startswith("- ") and parts[-1].startswith("- ")
        parts.append(block if not parts else ("\n" if tight else "\n\n") + block)
    return "".join(parts).strip()


def html_documents(source: str, root: Path, pattern: str) -> Iterator[Document]:
    """One document for every HTML page under `root` that matches the glob `pattern`."""
    for path in sorted(root.glob(pattern)):
        text = html_text(path.read_text(encoding="utf-8", errors="replace"))
        if len(text) > 200:
            yield Document(source, str(path.relative_to(root)), text)


def dict_entries(path: Path) -> Iterator[tuple[str, str]]:
    """(head word, body) for every entry of a dictd dictionary whose head words start in the first column."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
    head: str | None = None
    body: list[str] = []
    for line in text.splitlines():
        if line[:1].strip():
            if head is not None:
                yield head, "\n".join(body).strip("\n")
            head, body = line.strip(), []
        else:
            body.append(line)
    if head is not None:
        yield head, "\n".join(body).strip("\n")


def devil_entries(path: Path) -> Iterator[tuple[str, str]]:
    """(head word, definition) of Bierce's dictionary, whose entries read `WORD, n.  Definition` in running text."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
    head = r"^[A-Z][A-Z' -]{2,}, "
    kind = r"(?:n|v|adj|adv|pp|p|x)[a-z.]*\.[a-z. ]*"
    pattern = re.compile(rf"({head}){kind}(.*?)(?={head}|\Z)", re.M | re.S)
    for match in pattern.finditer(text):
        yield match.group(1).strip(", "), match.group(2).strip()


def rdb_lines(path: Path) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load database: for every zlib block, its strings in order."""
    data = path.read_bytes()
    position = 0
    while position + 4 < len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        reader = zlib.decompressobj()
        raw = reader.decompress(data[position + 4 :])
        consumed = len(data) - position - 4 - len(reader.unused_data)
        position += 4 + consumed
        if size != len(raw):
            raise ValueError(f"{path}: a block of {len(raw)} bytes announces {size}; not an R lazy-load database?")
        yield _r_strings(raw)


def _r_strings(raw: bytes) -> list[str]:
    """Strings of one serialised R object: each is flags ending in type 9, a 4-byte length, then its bytes."""
    out: list[str] = []
    for match in re.finditer(rb"\x00[\x04\x08]\x00\x09(?=\x00\x00)", raw):
        begin = match.end()
        length = int.from_bytes(raw[begin : begin + 4], "big")
        out.append(raw[begin + 4 : begin + 4 + length].decode("utf-8", errors="replace"))
    return out
