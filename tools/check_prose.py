"""Check the prose of the Markdown pages: no sentence over 35 words, and "per" in units.

Run by `make lint`. Code fences are left out, code in a line counts as one word, and each cell of a table and each item
of a list is a paragraph of its own. "bytes a token" is refused: write "bytes per token".
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


def faults(path: Path) -> Iterator[str]:
    for line, raw in paragraphs(path.read_text(encoding="utf-8")):
        text = LINK.sub(r"\1", IMAGE.sub("", CODE.sub("Code", raw)))
        for sentence in SENTENCE_END.split(text):
            count = sum(any(map(str.isalnum, word)) for word in sentence.split())
            if count > WORDS:
                yield f"{path.relative_to(ROOT)}:{line}: {count} words in a sentence: {sentence.strip()[:60]}..."
        for match in UNIT.finditer(text):
            yield f"{path.relative_to(ROOT)}:{line}: write 'per': {' '.join(match.group().split())}"


def main() -> int:
    found = [line for path in markdown_files() for line in faults(path)]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
