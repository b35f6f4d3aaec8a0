"""The live page in a real browser: the numbers that it shows, as they come. Skipped where there is no Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.fakes import Running, running

playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
    # playwright's own event loop is closed late on some versions
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SYSTEM = "You are a patient librarian"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails on whatever its console complains of, a breach of its policy for example."""
    said: list[str] = []
    made = browser.new_page()
    made.set_default_timeout(20_000)
    made.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
    made.on("pageerror", lambda error: said.append(str(error)))
    yield made
    made.close()
    assert not [line for line in said if "401" not in line and "ERR_" not in line]


def shown(page: Any, name: str) -> str:
    text: str = page.locator(f"#{name}").inner_text()
    return text


def rows(page: Any, name: str) -> list[list[str]]:
    """The cells of a table, without what is told below their first line."""
    found = page.locator(f"#{name}-table tr:has(td)").all()
    return [[cell.inner_text().partition("\n")[0] for cell in row.locator("td").all()] for row in found]


def talk(server: Running, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return server.post("/v1/chat/completions", messages=messages, max_tokens=4, temperature=0)


def test_the_page_shows_the_right_numbers_as_they_come(page: Any):
    with running() as server:
        page.goto(server.url)
        page.get_by_text("No requests yet").wait_for()
        answers = [talk(server, question) for question in ("Who are you", "What is it", "Who are you", "Who are you")]
        asked = sum(answer["usage"]["prompt_tokens"] for answer in answers)
        cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
        page.get_by_text(f"4 requests, {asked} tokens since the start").wait_for()
        told = server.http.get("/v1/headway/live").json()
        assert shown(page, "hit-rate") == f"{100 * cached / asked:.0f}%"
        assert shown(page, "verdict-title") == told["verdict"]["title"]
        lines = {row[0]: row[1] for row in rows(page, "tokens")}
        assert lines["reused"] == str(cached)
        assert sum(map(int, lines.values())) == asked
        kinds = {row[0].replace(" ", "_"): row[2] for row in rows(page, "checkpoints")}
        assert kinds == {one["kind"]: str(one["taken"]) for one in told["checkpoints"]}
        assert [int(row[3]) for row in rows(page, "saving")] == [one["reused_tokens"] for one in told["saving"]]
        shares = [float(row[2].rstrip("%")) for row in rows(page, "memory") if not row[0].startswith("of it")]
        assert sum(shares) == pytest.approx(100, abs=2)
        widths = page.locator("#tokens-bar i").evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
        assert widths[0] / sum(widths) == pytest.approx(cached / asked, abs=0.01)


def test_a_key_is_asked_for_and_kept_for_the_tab(page: Any):
    with running(api_key="secret") as server:
        talk(server, "Who are you")
        page.goto(server.url)
        page.get_by_label("This server asks for a key").fill("wrong")
        page.get_by_role("button").click()
        page.get_by_text("this key is wrong").wait_for()
        page.get_by_label("This server asks for a key").fill("secret")
        page.get_by_role("button").click()
        page.get_by_text("1 request,").wait_for()
        page.reload()
        page.get_by_text("1 request,").wait_for()


def test_the_page_says_when_the_server_is_gone(page: Any):
    with running() as server:
        page.goto(server.url)
        page.get_by_text("No requests yet").wait_for()
    page.get_by_text("the server does not answer").wait_for()


def test_what_a_server_tells_is_text_and_never_markup(page: Any):
    with running(explain="all") as server:
        for _ in range(2):
            server.complete("<img src=x onerror=alert>" * 4, max_tokens=1)
        page.goto(server.url)
        page.locator("#saving-table code").first.wait_for()
        assert page.locator("#saving-table code").first.inner_text().startswith("<img src")
        assert page.locator("img").count() == 0
