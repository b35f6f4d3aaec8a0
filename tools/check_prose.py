"""Check the prose of the Markdown pages: no sentence over 35 words, "per" in units, and lists that every reader sees.

Run by `make lint`. Code fences are left out, code in a line counts as one word, and each cell of a table and each item
of a list is a paragraph of its own. "bytes a token" is refused: write "bytes per token". mkdocs sees a list only behind
an empty line, and a list in a list only where it is indented by four.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from check_links import FENCE, markdown_files
from site_links import ROOT

WORDS = 35
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
ITEM = re.compile(r"( *)(?:[-*+]|\d+\.) ")
STARTS = re.compile(r"^\s*(?:[-*+] |\d+\. |#+ |> |\||$)")
SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)[.?!][)\"'*_]*(?=\s+[^a-z]|\s*$)")
MEASURE = (
    r"bits?|bytes?|[KMG]i?B|blocks?|tokens?|entr(?:y|ies)|states?|requests?|steps?|rows?|lines?|objects?|records?"
    r"|messages?|collectives?|process(?:es)?|actors?|checkpoints?|uses?|points?|nats?|ms|us|s|seconds?|microseconds?"
    r"|milliseconds?|FLOPs?|numbers?|values?|sentences?|\d+"
)
PER = r"token|block|byte|state|request|step|row|rank|layer|second|minute|hour|user|GPU|tick|lease|prompt|answer|line"
UNIT = re.compile(rf"(?<![\w`-])(?:{MEASURE})\s+an?\s+(?:{PER})\b(?!-)")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a page, each with the number of its first line."""
    text = COMMENT.sub(lambda match: "\n" * match.group().count("\n"), FENCE.sub(blank, text))
    start, lines = 1, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if STARTS.match(line):
            yield start, " ".join(lines)
            start, lines = number, []
        if line.lstrip().startswith("|"):
            yield from ((number, cell) for cell in line.strip().strip("|").split("|"))
        else:
            lines.append(re.sub(r"^\s*(?:[-*+] |\d+\. |#+ |> )", "", line))


def blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n")


def list_faults(text: str) -> Iterator[tuple[int, str]]:
    """Find lists that mkdocs does not see, with the numbers of their lines."""
    before = ""
    for number, line in enumerate(FENCE.sub(blank, text).splitlines(), start=1):
        if item := ITEM.match(line):
            if len(item[1]) % 4:
                yield number, "indent a list in a list by four"
            if before and not ITEM.match(before) and not before.startswith(" "):
                yield number, "a list needs an empty line before it"
        before = line.rstrip()


def faults(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT)
    yield from (f"{name}:{line}: {fault}" for line, fault in list_faults(path.read_text(encoding="utf-8")))
    for line, raw in paragraphs(path.read_text(encoding="utf-8")):
        text = LINK.sub(r"\1", IMAGE.sub("", CODE.sub("Code", raw)))
        for sentence in SENTENCE_END.split(text):
            count = sum(any(map(str.isalnum, word)) for word in sentence.split())
            if count > WORDS:
                yield f"{name}:{line}: {count} words in a sentence: {sentence.strip()[:60]}..."
        for match in UNIT.finditer(text):
            yield f"{name}:{line}: write 'per': {' '.join(match.group().split())}"


def main() -> int:
    found = [line for path in markdown_files() for line in faults(path)]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
