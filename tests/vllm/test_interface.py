"""The list of what `headway.vllm` relies on: it is complete, and whatever moves is refused by name."""

import ast
import hashlib
import inspect
import logging
import math
import re
import secrets
import sys
import threading
import time
from collections import deque
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import fastapi
import msgspec
import numpy as np
import pytest
import torch
from prometheus_client import Counter, Gauge
from pydantic import BaseModel, ValidationError
from tests.vllm.fabricated import write_vllm
from tests.vllm.one_by_one import OneByOne
from tools.vllm_interface import SCHEDULER, record, used_names

import headway.vllm
from headway.errors import ConfigError
from headway.vllm.interface import VERSIONS, VllmSource, check_version, find_moved, recorded

MANAGER = f"{SCHEDULER}>kv_cache_manager."
# Asked for by what is refused at the start: KV connectors and auxiliary outputs.
NOT_ASKED = {
    "coordinator.get_num_blocks_to_allocate",
    "evict_blocks",
    "finalize_partial_tail_offloads",
    "get_block_ids",
    "get_block_ids_for_computed_tokens",
    "get_computed_blocks_for_connector",
    "record_blocks_for_zeroing",
    "truncate_computed_blocks",
}


@pytest.mark.parametrize("release", VERSIONS)
def test_a_vllm_that_is_as_recorded_has_moved_nothing(tmp_path: Path, release: str) -> None:
    assert find_moved(VllmSource(write_vllm(tmp_path, recorded(release), f"{release}.0")), recorded(release)) == []


@pytest.mark.parametrize(
    ("key", "old", "new", "says"),
    [
        (
            "full_sequence_must_fit",
            "full_sequence_must_fit=0",
            "whole_sequence=0",
            f"{MANAGER}allocate_slots lost full_sequence_must_fit and got whole_sequence",
        ),
        (
            "throttle_prefills",
            "throttle_prefills=",
            "throttle=",
            f"{SCHEDULER}:Scheduler.schedule lost throttle_prefills= and got throttle=",
        ),
        ("num_preemptions", "num_preemptions", "preemptions", "vllm.v1.request:Request.num_preemptions is gone"),
        ("class AsyncScheduler", "class Async", "class Overlap", "async_scheduler:AsyncScheduler is gone"),
        ("dst_block_id", "    dst_block_id", "    size: int\n    dst_block_id", "KVCacheBlockCopy got size"),
        ("def asks", "def asks():", "def asks():\n    kv_cache_manager.swap(1, to=2)", "swap is new: call(1, to)"),
    ],
    ids=["keyword of a call", "keyword of a method", "attribute", "class", "field", "new call"],
)
def test_whatever_moves_is_named(tmp_path: Path, key: str, old: str, new: str, says: str) -> None:
    expected = recorded("0.33")
    package = write_vllm(tmp_path, expected, "0.33.0")
    changed = [path for path in package.rglob("*.py") if key in path.read_text()]
    path = next(path for path in changed if key != "def asks" or path.name == "scheduler.py")
    path.write_text(path.read_text().replace(old, new, 1))
    moved = find_moved(VllmSource(package), expected)
    assert any(says in sentence for sentence in moved), moved
    assert len(moved) == 1


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1+cpu"])
def test_supported_releases_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(tmp_path, monkeypatch, recorded(version[:4]), version)
    check_version()


@pytest.mark.parametrize("version", ["0.34.0", "0.33.0"])
def test_a_vllm_that_has_moved_something_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    moved = {key: shape for key, shape in recorded("0.33").items() if not key.endswith("Request.num_tokens")}
    install(tmp_path, monkeypatch, moved, version)
    with pytest.raises(ConfigError, match=rf"works with vLLM 0\.32 and 0\.33, .* {version}: .*num_tokens is gone"):
        check_version()


def test_an_unknown_release_is_refused_though_nothing_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, recorded("0.33"), "0.35.2")
    with pytest.raises(ConfigError, match=r"this is 0\.35\.2: .*nobody has tried it"):
        check_version()


def test_without_vllm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"needs vLLM \(0\.32 and 0\.33\)"):
        check_version()


def test_every_name_of_vllm_that_the_package_uses_is_on_the_list() -> None:
    known = {key for release in VERSIONS for key in recorded(release)}
    missing = [f"{where}: {' or '.join(keys)}" for where, keys in used_names() if not known.intersection(keys)]
    assert not missing, "run tools/vllm_interface.py: " + "; ".join(missing)


def test_no_attribute_has_escaped_the_list() -> None:
    """Whatever is taken from an object is Headway's own, Python's, numpy's or on the list: no holder is forgotten."""
    ours: set[str] = set()
    for path in Path(headway.__file__).parent.rglob("*.py"):
        text = path.read_text()
        ours |= {
            *re.findall(r"(?:def |class |self\.)(\w+)", text),
            *re.findall(r"^ +(\w+)(?::| = )", text, re.MULTILINE),
        }
    listed = {re.split(r"[.:>]", key)[-1] for release in VERSIONS for key in recorded(release)}
    python = (int, str, list, dict, set, tuple, deque, threading, time, secrets, hashlib, type(hashlib.blake2b()), math)
    arrays = (np, np.ndarray, torch, torch.Tensor)
    others = (logging.Logger, msgspec, Counter, Gauge, fastapi.FastAPI, fastapi.Request, BaseModel, ValidationError)
    given = {name for kind in (*python, *arrays, *others) for name in dir(kind)}
    escaped = {}
    for path in {*Path(headway.vllm.__path__[0]).glob("*.py")} - {Path(str(headway.vllm.interface.__file__))}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr not in ours | listed | given:
                escaped[node.attr] = path.name
    assert not escaped, "add what holds these to HOLDS in tools/vllm_interface.py"


def test_the_list_is_what_the_tool_records(tmp_path: Path) -> None:
    made = {name: write_vllm(tmp_path / name, recorded(name), f"{name}.0") for name in VERSIONS}
    again = record(made)
    assert {release: _of(again, release) for release in VERSIONS} == {one: recorded(one) for one in VERSIONS}


@pytest.mark.parametrize("release", VERSIONS)
def test_the_manager_answers_whatever_vllm_asks(release: str) -> None:
    manager = OneByOne("full").manager
    for key, shape in recorded(release).items():
        member = key.removeprefix(MANAGER)
        if member == key or member in NOT_ASKED:
            continue
        answer = attrgetter(member)(manager)
        if shape.startswith("call"):
            most, *words = shape[len("call(") : -1].split(", ")
            signature = inspect.signature(answer)
            positional = list(signature.parameters)[: int(most)]
            signature.bind(*[None] * int(most), **{word: None for word in words if word not in positional})


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_installed_vllm_is_as_recorded() -> None:
    check_version()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, str], version: str) -> None:
    write_vllm(folder, expected, version)
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    assert import_module("vllm").__version__ == version


def _of(found: dict[str, str | dict[str, str]], release: str) -> dict[str, str]:
    shapes = {key: shape if isinstance(shape, str) else shape.get(release, "") for key, shape in found.items()}
    return {key: shape for key, shape in shapes.items() if shape}
