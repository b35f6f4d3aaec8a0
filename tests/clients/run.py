"""`make clients`: run every client against a server of the built-in model, going on where it was stopped.

Each client has an environment of its own in `build/clients/NAME`, and a line of `tests/clients/results.jsonl`: what
was sent, what came back, what was reused, with the versions of the client and of the server. A client whose line is of
this server is not run again, unless it is named with `--only`. At the end `docs/clients.md` is written from all lines.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headway_builtin_model
import httpx
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.environments import Environment, NotInstalledError, prepare
from tests.clients.page import PAGE, render
from tests.clients.relay import Exchange, relaying
from tests.clients.sharing import allowed

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "clients"
RESULTS = Path(__file__).parent / "results.jsonl"
MODEL = "headway-builtin"
SECONDS = 1800
"""That a client may take."""


@dataclass
class Server:
    """A server that runs, and the file to which it records."""

    port: int
    recording: Path

    def reset(self) -> int:
        """Forget every prefix. Returns how many requests have been recorded so far."""
        httpx.post(f"http://127.0.0.1:{self.port}/reset_prefix_cache", timeout=60).raise_for_status()
        return len(self.recorded(0))

    def recorded(self, first: int) -> list[tuple[list[int], list[int]]]:
        """Prompt and answer of the requests from number `first` on."""
        lines = self.recording.read_text(encoding="utf-8").splitlines()[1 + first :]
        return [(found["prompt"], found["answer"]) for found in map(json.loads, lines)]


@contextmanager
def serving() -> Iterator[Server]:
    """Run `headway serve` with the built-in model."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording.jsonl"
        command = [sys.executable, "-m", "headway", "serve", "--port", "0", "--explain", "all"]
        command += ["--record", str(recording), "--record-form", "tokens"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            port = 0
            for line in process.stderr:
                if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                    port = int(found[1])
                if "startup complete" in line:
                    break
            if not port:
                raise SystemExit("headway: the server did not start")
            log = (BUILD / "server.txt").open("a")
            threading.Thread(target=log.writelines, args=(process.stderr,), daemon=True).start()
            yield Server(port, recording)
        finally:
            process.terminate()
            process.wait()


def commit() -> str:
    """The last commit that changed the server."""
    asked = ["git", "log", "-1", "--format=%h", "--", "src", "packages"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def known() -> dict[str, dict[str, Any]]:
    """The lines of earlier runs, by client."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return {line["client"]: line for line in map(json.loads, lines)}


def try_client(client: Client, environment: Environment, server: Server) -> dict[str, Any]:
    """Run a client's program, and tell what was said."""
    first = server.reset()
    program = client.program if client.program.suffix == ".py" else environment.folder / client.program.name
    with relaying(server.port, explain=client.loops) as (port, exchanges):
        variables = {
            "HEADWAY_URL": f"http://127.0.0.1:{port}/v1",
            "HEADWAY_MODEL": MODEL,
            "HEADWAY_FOLDER": str(environment.folder),
            "HEADWAY_TOKENIZER": str(Path(headway_builtin_model.__file__).parent),
        }
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            done = subprocess.run(
                [*environment.command, str(program)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=environment.folder,
                timeout=SECONDS,
                env=inherited | environment.variables | client.environment | variables,
            )
            printed, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as late:
            printed, code = str(late.stdout or ""), 124
    (environment.folder / "output.txt").write_text(printed)
    (environment.folder / "exchanges.jsonl").write_text(
        "".join(json.dumps([one.method, one.path, one.status, one.body, one.answer]) + "\n" for one in exchanges)
    )
    steps = [json.loads(line.removeprefix("step ")) for line in printed.splitlines() if line.startswith("step ")]
    clean = {str(environment.folder): "FOLDER", str(ROOT): "HEADWAY", f"127.0.0.1:{port}": "127.0.0.1:8000"}
    for step in steps:
        for place, name in clean.items():
            step[1] = step[1].replace(place, name)
    refused = any(one.method == "POST" and one.status >= 400 for one in exchanges)
    outcome = "fails" if code or refused else "works"
    return {"steps": steps, **_told(exchanges, server.recorded(first)), "outcome": outcome}


def _told(exchanges: list[Exchange], recorded: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """What is kept of the traffic of a client."""
    asked = [one for one in exchanges if one.generates]
    counts = [one.cached_of_prompt for one in asked]
    most = allowed(recorded)
    refused = Counter((one.status, one.fault, f"{one.method} {one.path}") for one in exchanges if one.status != 200)
    fields = sorted({name for one in asked for name in one.body})
    return {
        "paths": dict(Counter(f"{one.method} {one.path}" for one in exchanges)),
        "fields": fields,
        "ignored": sorted({name for one in asked for name in one.report.get("ignored", [])}),
        "refused": [[*what, times] for what, times in refused.items()],
        "second": counts[1] if len(counts) > 1 else None,
        "cached": sum(cached for cached, _ in counts),
        "prompt": sum(prompt for _, prompt in counts),
        "allowed": sum(most),
        "loop": _loop(asked, most),
    }


def _loop(asked: list[Exchange], most: list[int]) -> list[dict[str, Any]]:
    """The steps of the longest conversation with tools: each goes on from the one before."""
    chains: list[list[int]] = []
    for i, one in enumerate(asked):
        before = asked[i - 1] if i else None
        kept = before is not None and (before.path, before.body.get("tools")) == (one.path, one.body.get("tools"))
        if before and kept and len(one.turns) >= len(before.turns):
            chains[-1].append(i)
        else:
            chains.append([i])
    loops = [chain for chain in chains if len(chain) > 4 and asked[chain[0]].body.get("tools")]
    longest = max(loops, key=len, default=[])
    steps = []
    for i in longest:
        cached, prompt = asked[i].cached_of_prompt
        step: dict[str, Any] = {"cached": cached, "prompt": prompt}
        step |= {"allowed": most[i]} if len(most) == len(asked) else {}
        if cached < 0.9 * prompt:
            step["losses"] = asked[i].report.get("losses", [])
        steps.append(step)
    return steps


def main() -> int:
    """Run what is missing, tell of each, and write the page. 1 if a client fails."""
    parser = argparse.ArgumentParser(description="Run clients against the built-in model and write docs/clients.md.")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="Run these, whether they have run before or not.")
    parser.add_argument("--page", action="store_true", help="Run nothing, and write the page.")
    given = parser.parse_args()
    found, now = known(), commit()
    BUILD.mkdir(parents=True, exist_ok=True)
    wanted = [one for one in CLIENTS if given.only is None or one.name in given.only]
    if unknown := set(given.only or ()) - {one.name for one in CLIENTS}:
        parser.error(f"{', '.join(sorted(unknown))}: the clients are {', '.join(one.name for one in CLIENTS)}")
    if given.only is None:
        wanted = [one for one in wanted if (line := found.get(one.name)) is None or line.get("server") != now]
    ready = [] if given.page else _prepared(wanted, found, now)
    if ready:
        with serving() as server:
            for client, environment in ready:
                print(f"headway: {client.title or client.name} ...", flush=True)
                line = {"client": client.name, "versions": environment.versions, "server": now}
                found[client.name] = line | try_client(client, environment, server)
                _write(found)
                print(f"headway: {client.title or client.name} {found[client.name]['outcome']}", flush=True)
    _write(found)
    PAGE.write_text(render(CLIENTS, found), encoding="utf-8")
    return 1 if any(found[client.name]["outcome"] == "fails" for client, _ in ready) else 0


def _prepared(wanted: list[Client], found: dict[str, dict[str, Any]], now: str) -> list[tuple[Client, Environment]]:
    """The environments of clients; those that cannot be had are told as not run."""
    ready = []
    for client in wanted:
        try:
            ready.append((client, prepare(client, BUILD / client.name)))
        except NotInstalledError as error:
            print(f"headway: {client.name}: not run: {error}", flush=True)
            found[client.name] = {"client": client.name, "server": now, "outcome": "not run", "reason": str(error)}
    return ready


def _write(found: dict[str, dict[str, Any]]) -> None:
    lines = [json.dumps(found[one.name], ensure_ascii=False) + "\n" for one in CLIENTS if one.name in found]
    RESULTS.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
