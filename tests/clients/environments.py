"""An environment of its own for each client, made once in `build/clients/NAME`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.clients.catalogue import Client

__all__ = ["Environment", "NotInstalledError", "prepare"]


class NotInstalledError(Exception):
    """A client cannot be had here."""


@dataclass(frozen=True)
class Environment:
    """Where a client is installed.

    Attributes:
        folder: The folder of the client.
        command: What its program is started with.
        variables: Variables for that.
        versions: Packages and their versions.
    """

    folder: Path
    command: tuple[str, ...]
    variables: dict[str, str]
    versions: dict[str, str]


def prepare(client: Client, folder: Path) -> Environment:
    """Install a client into `folder`, unless it is there.

    Raises:
        NotInstalledError: It cannot be had, and why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if client.program.suffix == ".mjs":
        return _node(client, folder)
    variables: dict[str, str] = {}
    if client.borrows:
        borrowed = os.environ.get(client.borrows)
        if not borrowed:
            raise NotInstalledError(f"{client.borrows} names no folder (`make judge-vllm` makes one)")
        python = Path(borrowed) / "venv" / "bin" / "python"
        variables["PYTHONPATH"] = str(Path(borrowed) / "cpuwheel" / "x")
    else:
        python = folder / "venv" / "bin" / "python"
        _install(client, folder, python)
    names = [package.partition("[")[0] for package in client.packages]
    told = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    if client.borrows:
        told = "import json, vllm.version; print(json.dumps({'vllm': vllm.version.__version__}))"
    asked = [str(python), "-c", told]
    versions = subprocess.run(asked, check=True, capture_output=True, text=True, env={**os.environ, **variables})
    return Environment(folder, (str(python),), variables, json.loads(versions.stdout.splitlines()[-1]))


def _install(client: Client, folder: Path, python: Path) -> None:
    mark = folder / "installed.txt"
    wanted = "\n".join(client.packages)
    if mark.exists() and mark.read_text() == wanted:
        return
    shutil.rmtree(folder / "venv", ignore_errors=True)
    print(f"headway: installing {', '.join(client.packages)}", flush=True)
    if uv := shutil.which("uv"):
        commands = [[uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")]]
        commands.append([uv, "pip", "install", "--quiet", "--python", str(python), *client.packages])
    else:
        commands = [[sys.executable, "-m", "venv", str(folder / "venv")]]
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        commands.append([*pip, *client.packages])
    _run(commands, folder)
    mark.write_text(wanted)


def _node(client: Client, folder: Path) -> Environment:
    if not (shutil.which("node") and shutil.which("npm")):
        raise NotInstalledError("there is no Node.js here")
    modules = folder / "node_modules"
    if not (modules / client.packages[0]).exists():
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        _run(
            [["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *client.packages]],
            folder,
        )
    program = folder / client.program.name  # modules are found beside the program
    shutil.copy(client.program, program)
    versions = {one: json.loads((modules / one / "package.json").read_text())["version"] for one in client.packages}
    return Environment(folder, ("node",), {}, versions)


def _run(commands: list[list[str]], folder: Path) -> None:
    log = folder / "install.txt"
    for command in commands:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        log.write_text(done.stdout)
        if done.returncode:
            raise NotInstalledError("it could not be installed (build/clients/NAME/install.txt says why)")
