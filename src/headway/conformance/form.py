"""The form of a scenario file: a JSON list of small worlds, each with what happens in it and what is right.

`tests/conformance/README.md` documents the form. Steps and expectations are checked while loading, so that a misspelt
key is an error that names scenario, step and key, and never an expectation that is silently not tested. The values
that configure the cache are checked when the scenario runs, because a wrong one may be what it expects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.conformance.fields import Fields
from headway.errors import ScenarioError

__all__ = ["Expectation", "Image", "Piece", "RequestForm", "Scenario", "Segment", "StepForm", "load", "read"]

_OF_THE_POOL = ("leases", "free_blocks", "held_blocks", "reusable_blocks")
_RANGES = ("hit", "matched", "computed", "granted", "copies", *_OF_THE_POOL)
_STARTS = ("run", "start", "resume")
_SEVERAL = ("step", "begin", "commit", "fail_step")
_VERBS = ("run", "start", *_SEVERAL, "preempt", "resume", "finish", "abort", "reset", "wait")

_OF_A_START = {"hit", "matched", "reasons", "losses", "geometry", "error"}
_OF_A_STEP = {"granted", "copies", "error"}
_OF_ONE = {"computed"}
_OF_ALL = {*_OF_THE_POOL, "waterfall", "events"}
_ERRORS = ("config", "exhausted", "unservable")
_GEOMETRY = ("span", "blocks", "position", "block_tokens", "shards", "state_blocks", "columns")

_LONGEST = 1 << 24
"""Most tokens of one request: each is played singly."""


@dataclass(frozen=True)
class Piece:
    """A stretch of text: tokens `start` to `stop` (exclusive) of a stream."""

    stream: str
    start: int
    stop: int


@dataclass(frozen=True)
class Image:
    """Equal placeholder ids whose content `key` tells."""

    key: str
    tokens: int


Segment = Piece | Image


@dataclass(frozen=True)
class RequestForm:
    """What a client asks for.

    Attributes:
        name: The request's name in its scenario.
        prompt: Segments of the prompt.
        output: Tokens that it answers.
        salt: Cache salt.
        adapter: Adapter name.
        model: Model name, for worlds with more than one.
        breakpoints: Explicit cache breakpoints, positions.
        boundaries: Message boundaries, positions.
        pin: How many first tokens to protect.
        no_store: Read, and leave nothing behind.
    """

    name: str
    prompt: tuple[Segment, ...]
    output: int = 1
    salt: str = ""
    adapter: str = ""
    model: str = ""
    breakpoints: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    pin: int = 0
    no_store: bool = False


@dataclass(frozen=True)
class Expectation:
    """What must hold after a step.

    Attributes:
        ranges: key -> (lowest, highest), both included.
        reasons: Names, each of which must be among the reasons that the explanation gives.
        losses: reason -> (lowest, highest) tokens that the explanation puts on it.
        waterfall: line -> (lowest, highest) tokens summed over all requests.
        events: kind of event -> (lowest, highest) count since the scenario began.
        geometry: group -> figure -> value.
        error: `config`, `exhausted` or `unservable`; empty for none.
    """

    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    losses: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    waterfall: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    events: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    geometry: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class StepForm:
    """One step of a scenario.

    Attributes:
        label: Number and action in words, for messages: `step 3 (run B)`.
        verb: What happens; empty for a step that only expects.
        names: The requests it happens to.
        request: The request that begins here (`run`, `start`).
        tokens: Most prompt tokens of this step (None: the scenario's `max_batched_tokens`).
        drafts: Draft tokens that this decoding step verifies.
        accepted: How many of the draft tokens turn out right.
        seconds: Time that passes (`wait`).
        expect: What must hold afterwards.
    """

    label: str
    verb: str = ""
    names: tuple[str, ...] = ()
    request: RequestForm | None = None
    tokens: int | None = None
    drafts: int = 0
    accepted: int = 0
    seconds: float = 0.0
    expect: Expectation | None = None


@dataclass(frozen=True)
class Scenario:
    """A small world and what happens in it.

    Attributes:
        name: Its name.
        why: The reason for its numbers.
        max_batched_tokens: Most tokens of one step.
        world: The keys that make the cache's configuration, read by `headway.conformance.world`.
        expect: What the configuration itself must answer.
        steps: What happens, in order.
    """

    name: str
    why: str
    max_batched_tokens: int
    world: Mapping[str, Any]
    expect: Expectation | None
    steps: tuple[StepForm, ...]


def load(path: Path) -> list[Scenario]:
    """Read a scenario file, or every `*.json` of a directory in the order of their names.

    Raises:
        ScenarioError: No such file, not JSON, or not of the form.
    """
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise ScenarioError(f"{path}: no *.json files in this directory")
        return [scenario for file in files for scenario in load(file)]
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ScenarioError(f"{path}: not JSON ({error})") from error
    return read(value, str(path))


def read(value: object, source: str = "scenarios") -> list[Scenario]:
    """Read scenarios from a JSON value.

    Raises:
        ScenarioError: It is not of the form. The message names the scenario, the step and the key.
    """
    if not isinstance(value, list):
        raise ScenarioError(f"{source}: a scenario file is a list of scenarios")
    if not value:
        raise ScenarioError(f"{source}: the list of scenarios is empty")
    scenarios = [_scenario(item, f"{source}: scenario {number}") for number, item in enumerate(value, 1)]
    names: set[str] = set()
    for scenario in scenarios:
        if scenario.name in names:
            raise ScenarioError(f"{source}: two scenarios are called {scenario.name!r}")
        names.add(scenario.name)
    return scenarios


_MEMORY = ("blocks", "block_tokens", "block_bytes", "pin_share", "pin_seconds", "history_tokens", "answer_stretch")
_POLICY = ("checkpoint_alignment", "placement", "eviction", "cost", "exports_inside")
_WORLD = ("groups", "layout", *_MEMORY, *_POLICY)


def _scenario(value: object, where: str) -> Scenario:
    fields = Fields(value, where)
    name = fields.text("name")
    fields.where = f"scenario {name!r}"
    world = {key: fields.raw(key) for key in _WORLD if fields.has(key)}
    scenario = Scenario(
        name=name,
        why=fields.text("why", ""),
        max_batched_tokens=fields.integer("max_batched_tokens", 8192, least=1),
        world=world,
        expect=_expectation(fields, {"geometry", "error"} | _OF_ALL) if fields.has("expect") else None,
        steps=tuple(_steps(fields.items("steps"), f"scenario {name!r}: ", "")),
    )
    fields.done()
    return scenario


def _steps(values: Sequence[object], where: str, round_: str) -> list[StepForm]:
    steps: list[StepForm] = []
    for number, value in enumerate(values, 1):
        label = f"step {round_}{number}"
        if isinstance(value, Mapping) and "repeat" in value:
            fields = Fields(value, where + label)
            times, body = fields.integer("repeat", least=1), fields.items("steps", required=True)
            fields.done()
            for i in range(times):
                steps += _steps(_numbered(body, i), where, f"{round_}{number}[{i}].")
        else:
            steps.append(_step(Fields(value, where + label), label))
    return steps


def _numbered(value: Any, i: int) -> Any:
    """`value` with every `{i}` in its strings replaced."""
    if isinstance(value, str):
        return value.replace("{i}", str(i))
    if isinstance(value, list):
        return [_numbered(item, i) for item in value]
    if isinstance(value, Mapping):
        return {key: _numbered(item, i) for key, item in value.items()}
    return value


def _step(fields: Fields, label: str) -> StepForm:
    verbs = [verb for verb in _VERBS if fields.has(verb)]
    if len(verbs) > 1:
        raise fields.error(f"a step does one thing, this one has {' and '.join(verbs)}")
    verb = verbs[0] if verbs else ""
    if not verb and not fields.has("expect"):
        raise fields.error(f"no action: give one of {', '.join(_VERBS)}, or `expect` alone")
    seconds = fields.number("wait", 0.0)
    names = () if verb in ("", "reset", "wait") else _names(fields, verb)
    if verb == "reset" and fields.flag("reset") is not True:
        raise fields.error("'reset' must be true")
    words = f"{label} ({' '.join([verb or 'expect', ', '.join(names)]).strip()})"
    fields.where = fields.where.replace(label, words)
    computes = verb in ("step", "begin")
    step = StepForm(
        label=words,
        verb=verb,
        names=names,
        request=_request(fields, names[0]) if verb in ("run", "start") else None,
        tokens=fields.integer("tokens", least=1) if computes and fields.has("tokens") else None,
        drafts=fields.integer("drafts", 0) if computes else 0,
        accepted=fields.integer("accepted", 0) if computes or verb == "commit" else 0,
        seconds=seconds,
        expect=_expectation(fields, _allowed(verb)) if fields.has("expect") else None,
    )
    fields.done()
    return step


def _names(fields: Fields, verb: str) -> tuple[str, ...]:
    if verb in _SEVERAL and isinstance(fields.raw(verb), list):
        return fields.texts(verb)
    return (fields.text(verb),)


def _allowed(verb: str) -> set[str]:
    if verb in _STARTS:
        return _OF_A_START | _OF_ONE | _OF_ALL
    if verb in ("step", "begin", "finish"):
        return _OF_A_STEP | _OF_ONE | _OF_ALL
    return _OF_ONE | _OF_ALL if verb in ("commit", "fail_step") else _OF_ALL


def _request(fields: Fields, name: str) -> RequestForm:
    segments = tuple(_segment(item, fields) for item in fields.items("prompt", required=True))
    output = fields.integer("output", 1, least=1)
    tokens = output + sum(s.tokens if isinstance(s, Image) else s.stop - s.start for s in segments)
    if tokens > _LONGEST:
        raise fields.error(f"'prompt' and 'output' have {tokens:,} tokens together, at most {_LONGEST:,} can be played")
    return RequestForm(
        name=name,
        prompt=segments,
        output=output,
        salt=fields.text("salt", ""),
        adapter=fields.text("adapter", ""),
        model=fields.text("model", ""),
        breakpoints=fields.integers("breakpoints"),
        boundaries=fields.integers("boundaries"),
        pin=fields.integer("pin", 0),
        no_store=fields.flag("no_store"),
    )


def _segment(value: object, fields: Fields) -> Segment:
    if isinstance(value, Mapping):
        image = Fields(value, f"{fields.where}: prompt")
        segment = Image(image.text("image"), image.integer("tokens", least=1))
        image.done()
        return segment
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str):
        start, stop = value[1:]
        if type(start) is int and type(stop) is int and 0 <= start <= stop:
            return Piece(value[0], start, stop)
    right = '["stream", start, stop] or {"image": ..., "tokens": ...}'
    raise fields.error(f"a prompt segment is {right}, got {value!r}")


def _expectation(fields: Fields, allowed: set[str]) -> Expectation:
    inner = fields.child("expect")
    for key in list(inner.left):
        if key not in allowed:
            known = ", ".join(sorted(allowed))
            raise inner.error(f"{key!r} cannot be expected here; what can be is {known}")
    error = inner.text("error", "")
    if inner.has("error") and error not in _ERRORS:
        raise inner.error(f"'error' is {error!r}, it must be one of {', '.join(_ERRORS)}")
    expectation = Expectation(
        ranges={key: _range(inner.raw(key), inner, key) for key in _RANGES if inner.has(key)},
        reasons=inner.texts("reasons"),
        losses=_ranges(inner, "losses"),
        waterfall=_ranges(inner, "waterfall"),
        events=_ranges(inner, "events"),
        geometry=_geometry(inner),
        error=error,
    )
    inner.done()
    return expectation


def _range(value: object, fields: Fields, key: str) -> tuple[int, int]:
    """One number, or [lowest, highest]."""
    low, high = value if isinstance(value, list) and len(value) == 2 else (value, value)
    if type(low) is not int or type(high) is not int or low > high:
        raise fields.error(f"{key!r} must be a whole number or [lowest, highest], got {value!r}")
    return low, high


def _ranges(fields: Fields, key: str) -> dict[str, tuple[int, int]]:
    if not fields.has(key):
        return {}
    inner = fields.child(key)
    return {name: _range(inner.raw(name), inner, name) for name in list(inner.left)}


def _geometry(fields: Fields) -> dict[str, dict[str, Any]]:
    if not fields.has("geometry"):
        return {}
    groups: dict[str, dict[str, Any]] = {}
    outer = fields.child("geometry")
    for name in list(outer.left):
        inner = outer.child(name)
        figures: dict[str, Any] = {k: inner.integer(k) for k in _GEOMETRY if k != "columns" and inner.has(k)}
        if inner.has("columns"):
            columns = inner.child("columns")
            figures["columns"] = (columns.integer("tokens", least=1), columns.integer("blocks"))
            columns.done()
        inner.done()
        groups[name] = figures
    return groups
