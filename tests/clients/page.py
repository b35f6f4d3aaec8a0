"""`docs/clients.md`, from the lines of all clients."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clients.catalogue import Client

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"

_HEAD = """# Clients

Point your client at `headway serve` by its base URL, any key, and the name of the model. This page shows which
clients were run unchanged against the built-in model, how each is told of the server, and what it reused.

`make clients` runs them all, each in an environment of its own, and writes this page; `make clients ARGS="--only
openai aider"` runs some. The programs are in `tests/clients/programs`. They talk to the server through a relay on the
same machine, which keeps what was said. For clients that call tools in loops the relay adds one field,
`headway.explain`, so that the server says why it did not reuse more; it changes nothing else.

- **second request**: tokens of its prompt that were reused, of all. Where a program sends the same request twice, all
  tokens but the last one should be.
- **all requests**: the tokens that were reused, of the tokens that *exact sharing* allows: the longest beginning that
  each prompt has in common with what was computed before, prompt or answer. No cache of exact prefixes can reuse
  more.
  Two reasons for less: a state can be resumed only where it was kept. Where two prompts part for the first time, none
  is, and the second leaves a checkpoint for the third. And lm-eval's multiple choice asks for the log probabilities of
  the prompt, so all of it is computed.
- The built-in model knows nothing. Where a tool or a schema is required, its answers are valid all the same. Where a
  client asks for a form in words only, the text does not fit, and the steps say so.

"""


def render(clients: Sequence[Client], found: Mapping[str, Mapping[str, Any]]) -> str:
    """The page."""
    rows = [
        "| client | version | result | requests | second request | all requests | server |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_row(client, found.get(client.name)) for client in clients),
    ]
    looping = [(client, found.get(client.name, {})) for client in clients if client.loops]
    loops = [_loop_row(client, line) for client, line in looping if line.get("loop")]
    details = [_details(client, line) for client in clients if (line := found.get(client.name)) and "steps" in line]
    text = _HEAD + "\n".join(rows) + "\n\n" + (_LOOPS + "\n".join(loops) + "\n\n" if loops else "")
    return text + _WAYS + "\n".join(details)


_LOOPS = """## Loops of tools

The longest conversation with tools of each client. A step sends all earlier calls and results again. The first step
is left out of the rate, because nothing of it was known. *Of what exact sharing allows* compares the steps behind it
with the most that could be reused. `parted` is where text begins that the server has not seen: here the results of
the last calls.

| client | steps | reused | of what exact sharing allows | steps below 90%, and what `headway.explain` says |
| --- | --- | --- | --- | --- |
"""
_WAYS = """## How each is told of the server

In all of these, `BASE_URL` is `"http://127.0.0.1:8000/v1"`, `KEY` is any text if the server has no key, and `MODEL` is
`"headway-builtin"`, or what `--served-model-name` says.

"""


def _title(client: Client) -> str:
    return client.title or client.name


def _row(client: Client, line: Mapping[str, Any] | None) -> str:
    if line is None or "steps" not in line:
        reason = line.get("reason", "") if line else ("as time allows" if client.late else "")
        return f"| {_title(client)} | | not run{': ' + reason if reason else ''} | | | | |"
    version = next(iter(line["versions"].values()))
    asked = sum(times for path, times in line["paths"].items() if path.startswith("POST"))
    second = f"{line['second'][0]:,} of {line['second'][1]:,}" if line["second"] else ""
    share = f"{line['cached']:,} of {line['allowed']:,} ({_percent(line['cached'], line['allowed'])})"
    link = f"[{_title(client)}](#{_anchor(_title(client))})"
    return f"| {link} | {version} | {line['outcome']} | {asked} | {second} | {share} | {line['server']} |"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _loop_row(client: Client, line: Mapping[str, Any]) -> str:
    steps = line["loop"]
    later = steps[1:]
    cached, prompt = (sum(step[name] for step in later) for name in ("cached", "prompt"))
    most = sum(step["allowed"] for step in later) if "allowed" in later[0] else 0
    low = [f"{i}: {_why(step)}" for i, step in enumerate(later, start=2) if step["cached"] < 0.9 * step["prompt"]]
    told = "; ".join(low) or "none"
    return (
        f"| {_title(client)} | {len(steps)} | {_percent(cached, prompt)} | {_percent(cached, most)} | "
        f"{told.replace('|', ' ')} |"
    )


def _why(step: Mapping[str, Any]) -> str:
    said = ", ".join(f"`{one['reason']}` {one['stop'] - one['start']}" for one in step.get("losses", []))
    known = "; no more was known" if step["cached"] >= step.get("allowed", step["prompt"]) else ""
    return f"{step['cached']} of {step['prompt']} ({said}{known})"


def _details(client: Client, line: Mapping[str, Any]) -> str:
    source = client.program.read_text(encoding="utf-8")
    snippet = re.search(r"(?:#|//) settings\n(.*?)(?:#|//) end\n", source, re.DOTALL)
    language = "js" if client.program.suffix == ".mjs" else "python"
    versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items())
    paths = ", ".join(f"`{path}` {times}" for path, times in line["paths"].items())
    text = f"### {_title(client)}\n\n"
    text += f"```{language}\n{snippet[1].strip()}\n```\n\n" if snippet else ""
    text += "".join(f"- {note}\n" for note in client.notes) + ("\n" if client.notes else "")
    text += f"{versions}. Sent: {paths}.\n\nFields: {', '.join(f'`{name}`' for name in line['fields'])}."
    if line["ignored"]:
        text += f" Ignored and told: {', '.join(f'`{name}`' for name in line['ignored'])}."
    for status, message, path, times in line["refused"]:
        text += f" Answered with {status}, {times} times: `{path}`" + (f" ({message})" if message else "") + "."
    text += "\n\n| step | came back |\n| --- | --- |\n"
    return text + "".join(f"| {_cell(step)} | {_cell(came, code=True)} |\n" for step, came in line["steps"])


def _cell(text: str, *, code: bool = False) -> str:
    plain = re.sub(r"\s+", " ", text).strip().replace("|", "/").replace("`", "'")[:120]
    return f"`{plain}`" if code and plain else plain
