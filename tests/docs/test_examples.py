"""The documentation's code runs, prints what the pages say, and its claims are true."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docs import pages

import headway.cache

REFRESH = "run `python -m tests.docs.pages --write` if the new output is right"


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_pages_say_what_their_code_prints(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    marked, understood = pages.marks(text)
    assert marked == understood, "a mark without a fence of the right language behind it"
    for claim in pages.claims(text, page.name):
        assert claim.says == claim.should, REFRESH


@pytest.fixture(scope="module")
def toy() -> dict[str, Any]:
    return runpy.run_path(str(pages.DOCS / "examples" / "toy_engine.py"))


def test_toy_engine_prints_its_claims() -> None:
    lines = pages.printed("examples/toy_engine.py").splitlines()
    reused = {
        line.split(":")[0]: int(number[1]) for line in lines if (number := re.search(r"(\d+) of \d+ tokens", line))
    }
    assert reused == {"first": 0, "again": 59, "other": 0, "third": 40, "next turn": 67}
    answers = {line.split(":")[0]: line.split("[")[1].split("]")[0] for line in lines if ": answer [" in line}
    assert answers["first"] == answers["again"]
    assert "  [0, 40) state_never_taken: 40 tokens" in lines
    assert "six requests at once in 4096 blocks: 0 preemptions" in lines
    assert any(re.fullmatch(r"six requests at once in 48 blocks: [1-9]\d* preemptions", line) for line in lines)
    assert lines[-1] == "answers equal: True"


@pytest.mark.parametrize("blocks", [30, 36, 48, 64, 200])
def test_toy_engine_answers_as_without_reuse(toy: dict[str, Any], blocks: int) -> None:
    """Whatever is shared, preempted and evicted, each answer is that of a request alone in a fresh engine."""
    shared = list(range(30))
    prompts = {f"r{i}": shared[: 10 + 5 * (i % 4)] + [100 + i] * (8 + i) for i in range(8)}
    prompts["r8"] = list(prompts["r0"])
    engine = toy["ToyEngine"](blocks)
    together = {request.name: request.tokens for request in engine.run(prompts, answer=30)}
    for name, prompt in prompts.items():
        (alone,) = toy["ToyEngine"](256).run({name: prompt}, answer=30)
        assert together[name] == alone.tokens
    engine.cache.check()
    assert engine.cache.leases == 0


def members() -> Iterator[tuple[str, str]]:
    """Yield class and name of what the cache's public classes offer: fields, methods and properties."""
    for name in headway.cache.__all__:
        member = getattr(headway.cache, name)
        if isinstance(member, type) and not issubclass(member, Exception):
            names = set(vars(member)) | set(getattr(member, "__annotations__", ()))
            yield from ((name, part) for part in sorted(names) if not part.startswith("_"))


OWN = {("Hit", name) for name in ("at", "checkpoint", "index", "version")}
"""Fields that are public for the cache's own modules only."""


def test_reference_names_every_member() -> None:
    page = (pages.DOCS / "cache-api.md").read_text(encoding="utf-8")
    unnamed = {pair for pair in members() if not re.search(rf"`[^`\n]*\b{re.escape(pair[1])}\b[^`\n]*`", page)}
    assert unnamed <= OWN, f"docs/cache-api.md does not name {sorted(unnamed - OWN)}"


def test_reference_names_nothing_else() -> None:
    page = (pages.DOCS / "cache-api.md").read_text(encoding="utf-8")
    reference = page[page.index("## Reference") :]
    bold = set(re.findall(r"\*\*`([A-Za-z_]+)(?:\([^`]*\))?`\*\*", reference))
    assert bold == set(headway.cache.__all__)


def test_waterfall_adds_up() -> None:
    waterfall = runpy.run_path(str(pages.DOCS / "examples" / "waterfall.py"))["workload"](48)
    assert waterfall.reused + sum(waterfall.lost.values()) == waterfall.prompt_tokens
    assert waterfall.reused > 0.75 * waterfall.prompt_tokens


def test_figures_are_there() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in pages.PAGES)
    for name in set(re.findall(r"figures/([\w-]+\.svg)", text)):
        figure = (pages.DOCS / "figures" / name).read_text(encoding="utf-8")
        assert figure.startswith("<?xml")
        assert "<svg" in figure
