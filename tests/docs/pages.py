"""Runs the code of the documentation. `python -m tests.docs.pages --write` brings the outputs on the pages up to date.

In a page, `<!-- run -->` before a python fence runs it, all such fences of a page in one session; a text fence right
after it is what it prints. `<!-- output of FILE -->` before a text fence: what that script prints. `<!-- file FILE -->`
before a python fence: the text of that file. FILE is relative to docs/.
"""

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = r"```{language}\n(?P<{name}>.*?)^```$"
RUN = re.compile(
    r"^<!-- run -->\n"
    + FENCE.format(language="python", name="code")
    + r"(?:\n\n"
    + FENCE.format(language="text", name="output")
    + ")?",
    re.M | re.S,
)
OUTPUT = re.compile(r"^<!-- output of (?P<file>\S+) -->\n" + FENCE.format(language="text", name="output"), re.M | re.S)
FILE = re.compile(r"^<!-- file (?P<file>\S+) -->\n" + FENCE.format(language="python", name="output"), re.M | re.S)
MARK = re.compile(r"^<!-- (?:run|output of \S+|file \S+) -->$", re.M)


@dataclass
class Claim:
    """Text on a page that is made by something that runs: where it stands, what it says, what it should say."""

    start: int
    stop: int
    says: str
    should: str


@cache
def printed(file: str) -> str:
    """Return what a script below docs/ prints."""
    done = subprocess.run([sys.executable, str(DOCS / file)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def claims(text: str, name: str) -> Iterator[Claim]:
    """Run what a page marks, and yield its claims."""
    session: dict[str, object] = {"__name__": "__docs__"}
    for match in RUN.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        code = compile("\n" * line + match["code"], name, "exec")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, session)
        if match["output"] is None:
            assert not out.getvalue(), f"{name}:{line + 1} prints what the page does not show: {out.getvalue()}"
        else:
            yield Claim(match.start("output"), match.end("output"), match["output"], out.getvalue())
    for match in OUTPUT.finditer(text):
        yield Claim(match.start("output"), match.end("output"), match["output"], printed(match["file"]))
    for match in FILE.finditer(text):
        source = (DOCS / match["file"]).read_text(encoding="utf-8")
        yield Claim(match.start("output"), match.end("output"), match["output"], source)


def marks(text: str) -> tuple[int, int]:
    """Count the marks on a page, and those that belong to a fence."""
    return len(MARK.findall(text)), sum(len(pattern.findall(text)) for pattern in (RUN, OUTPUT, FILE))


def main() -> int:
    write, stale = "--write" in sys.argv[1:], 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for claim in sorted(claims(text, page.name), key=lambda claim: -claim.start):
            if claim.says != claim.should:
                stale += 1
                print(f"{page.relative_to(ROOT)}: {'updated' if write else 'stale'}:\n{claim.should}")
                text = text[: claim.start] + claim.should + text[claim.stop :]
        if write:
            page.write_text(text, encoding="utf-8")
    return 0 if write or not stale else 1


if __name__ == "__main__":
    sys.exit(main())
