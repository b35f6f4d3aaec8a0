"""Take the screenshots of the live page for docs/watch.md, in headless Chromium. Run by `make check-page`.

    python tools/live_page.py [--chromium PROGRAM] [--write]

Serves the built-in model under a load, once with memory enough and once with too little, and holds the numbers that the
page shows against `/metrics`. With `--write` the pictures of docs/figures are taken anew.
"""

import argparse
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from prometheus_client.parser import text_string_to_metric_families

from site_links import ROOT
from watched_server import WatchedServer, watched_server

FIGURES = ROOT / "docs" / "figures"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
PICTURES = [("live.png", "24MiB", "light"), ("live-evicting.png", "4MiB", "dark")]
"""File, memory of the server, colours."""
CONVERSATIONS, RUNNING = 36, 5


def totals(server: WatchedServer, name: str) -> float:
    """The sum over all labels of a metric."""
    families = text_string_to_metric_families(server.get("/metrics"))
    return sum(one.value for family in families for one in family.samples if one.name == name)


def faults(page: Any, server: WatchedServer) -> list[str]:
    """Numbers of the page that are not those of the metrics."""
    asked, hit = totals(server, "headway_prompt_tokens_total"), totals(server, "headway_prompt_hit_tokens_total")
    requests = totals(server, "headway_requests_admitted_total")
    tokens = f"{requests:,.0f} requests, {asked:,.0f} tokens since the start"
    found = []
    for name, right in {"hit-rate": f"{100 * hit / asked:.0f}%", "tokens": tokens}.items():
        shown = page.locator(f"#{name}").inner_text()
        if shown != right:
            found.append(f"{name}: {shown!r} on the page, {right!r} by the metrics")
    return found


def look(browser: Any, name: str, memory: str, colours: str, folder: Path | None) -> list[str]:
    """Load a server, look at its page and take a picture."""
    with watched_server("--memory", memory) as server:
        server.load(CONVERSATIONS)
        page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme=colours)
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.goto(server.url)
        page.get_by_text("tokens since the start").wait_for()
        page.wait_for_timeout(2500)  # two more records, so that what is shown is of after the load
        found = [*faults(page, server), *said]
        title = page.locator("#verdict-title").inner_text()
        with ThreadPoolExecutor(RUNNING) as pool:  # something that runs, for the picture
            body = {"max_tokens": 120, "ignore_eos": True, "temperature": 0}
            for i in range(RUNNING):
                pool.submit(server.post, "/v1/completions", prompt=f"Chapter {i}. It was", **body)
            page.locator("#requests-table td").first.wait_for()
            if folder is not None:
                page.screenshot(path=folder / name, full_page=True)
        page.close()
    print(f"{name}: {memory}, {title}")
    return [f"{name}: {fault}" for fault in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--chromium", default=next(filter(None, map(shutil.which, CHROMIUM)), None), help="the program")
    parser.add_argument("--write", action="store_true", help="take the pictures of docs/figures anew")
    arguments = parser.parse_args()
    if not arguments.chromium:
        print("there is no Chromium here: apt install chromium, or name it by --chromium", file=sys.stderr)
        return 2
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        folder = FIGURES if arguments.write else None
        found = [fault for picture in PICTURES for fault in look(browser, *picture, folder)]
        browser.close()
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
