"""Check the Grafana dashboard against a real Prometheus that scrapes a loaded server. Run by `make check-prometheus`.

    python tools/check_prometheus.py [--prometheus PROGRAM] [--dashboard FILE ...]

Starts a server of the built-in model and puts it under load, lets Prometheus scrape it, and runs every query of
`deploy/grafana/headway.json`, and of its variables, by Prometheus's own HTTP API. A query that fails, finds nothing,
or finds only NaN is a fault, and so is what promtool has to say of the metrics. Without `--prometheus` the program is
taken from the path (Debian's package `prometheus` has it).
"""

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from site_links import ROOT
from watched_server import WatchedServer, watched_server

DASHBOARD = ROOT / "deploy" / "grafana" / "headway.json"
CONFIG = """\
global: {scrape_interval: 1s}
scrape_configs:
  - job_name: headway
    static_configs: [{targets: ["TARGET"]}]
"""
DURATION, VARIABLE = re.compile(r"\$__\w+"), re.compile(r"=~?\s*\"\$\w+\"")
SCRAPES = 8
START_SECONDS = 60.0


class Prometheus:
    """A running Prometheus with its data in a folder of its own."""

    def __init__(self, program: str, target: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        (folder / "prometheus.yml").write_text(CONFIG.replace("TARGET", target))
        arguments = ["--config.file", f"{folder}/prometheus.yml", "--storage.tsdb.path", f"{folder}/data"]
        command = [program, *arguments, "--web.listen-address", f"127.0.0.1:{port}", "--log.level", "error"]
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(command)

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the HTTP API; raises `ValueError` with what Prometheus says."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error).get("error", str(error))) from None

    def scrapes(self) -> int:
        """Samples that it has of whether the server answers."""
        try:
            found = self.ask("query", query="sum(count_over_time(up{job='headway'}[10m]))")["result"]
        except (OSError, ValueError):
            return 0
        return int(found[0]["value"][1]) if found else 0

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(30)


def plain(query: str) -> str:
    """A query with values for the variables of the dashboard: a minute, and all of everything."""
    return VARIABLE.sub('=~".*"', DURATION.sub("1m", query))


def queries(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and query of everything that a panel draws."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], plain(target["expr"])


def faults(prometheus: Prometheus, board: dict[str, Any]) -> Iterator[str]:
    for title, query in queries(board):
        try:
            found = prometheus.ask("query", query=query)["result"]
        except ValueError as error:
            yield f"{title}: {query}\n    {error}"
            continue
        if not found:
            yield f"{title}: {query}\n    finds nothing"
        elif all(one["value"][1] == "NaN" for one in found):
            yield f"{title}: {query}\n    finds NaN only"
    for variable in board["templating"]["list"]:
        asked = re.fullmatch(r"label_values\((?:(.+), ?)?(\w+)\)", plain(variable.get("definition", "")))
        if asked and not prometheus.ask(f"label/{asked[2]}/values", **({"match[]": asked[1]} if asked[1] else {})):
            yield f"variable {variable['name']}: {asked[0]} finds nothing"


def lint_faults(program: str, server: WatchedServer) -> Iterator[str]:
    """What promtool says of the metrics, but for names that are others' choice."""
    promtool = shutil.which("promtool", path=str(Path(program).parent)) or shutil.which("promtool")
    if promtool is None:
        return
    text = server.get("/metrics")
    found = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    for line in (found.stdout + found.stderr).splitlines():
        if line and not line.startswith("vllm:"):
            yield f"promtool: {line}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prometheus", default=shutil.which("prometheus"), help="the program (from the path)")
    parser.add_argument("--dashboard", nargs="+", type=Path, default=[DASHBOARD], help="those of others, for vLLM")
    arguments = parser.parse_args()
    if not arguments.prometheus:
        print("there is no `prometheus` here: apt install prometheus, or name it by --prometheus", file=sys.stderr)
        return 2
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.dashboard]
    with tempfile.TemporaryDirectory() as folder, watched_server() as server:
        prometheus = Prometheus(arguments.prometheus, server.url.removeprefix("http://"), Path(folder))
        try:
            deadline = time.monotonic() + START_SECONDS
            while not prometheus.scrapes() and time.monotonic() < deadline:
                time.sleep(0.2)
            before = prometheus.scrapes()
            loading = threading.Thread(target=server.load, args=(24,))
            loading.start()
            loading.join()
            while prometheus.scrapes() < before + SCRAPES and time.monotonic() < deadline:
                time.sleep(0.5)
            found = list(lint_faults(arguments.prometheus, server))
            for board in boards:
                found += faults(prometheus, board)
            scrapes = prometheus.scrapes()
        finally:
            prometheus.stop()
    print("\n".join(found), end="\n" if found else "")
    count = sum(len(list(queries(board))) for board in boards)
    print(f"{count} queries on {scrapes} scrapes, {len(found)} faults")
    return 1 if found or not scrapes else 0


if __name__ == "__main__":
    sys.exit(main())
