"""The form of a scenario file: a JSON list of small worlds, each with what happens in it and what is right.

`tests/conformance/README.md` documents the form. Steps and expectations are checked while loading, so that a misspelt
key is an error that names scenario, step and key, and never an expectation that is silently not tested. The values
that configure the cache are checked when the scenario runs, because a wrong one may be what it expects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headway.conformance.decoding import Form, Natural, Positive, convert
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

_LONGEST = 1 << 24
"""Most tokens of one request: each is played singly."""


@dataclass(frozen=True)
class Piece:
    """A stretch of text: tokens `start` to `stop` (exclusive) of a stream."""

    stream: str
    start: int
    stop: int


class Image(Form, frozen=True):
    """Equal placeholder ids whose content `key` tells."""

    key: str = msgspec.field(name="image")
    tokens: Positive


Segment = Piece | Image


class RequestForm(Form, frozen=True):
    """What a client asks for.

    Attributes:
        name: The request's name in its scenario.
        prompt: Segments of the prompt, each a `Segment`.
        output: Tokens that it answers.
        salt: Cache salt.
        adapter: Adapter name.
        model: Model name, for worlds with more than one.
        breakpoints: Explicit cache breakpoints, positions.
        boundaries: Message boundaries, positions.
        pin: How many first tokens to protect.
        no_store: Read, and leave nothing behind.
    """

    name: str = msgspec.field(name="start")
    prompt: tuple[Any, ...]
    output: Positive = 1
    salt: str = ""
    adapter: str = ""
    model: str = ""
    breakpoints: tuple[Natural, ...] = ()
    boundaries: tuple[Natural, ...] = ()
    pin: Natural = 0
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


class _Frame(Form, frozen=True):
    """A scenario without the keys of its world."""

    name: str
    why: str = ""
    max_batched_tokens: Positive = 8192
    expect: Any = None
    steps: list[Any] = msgspec.field(default_factory=list)


def _scenario(value: object, where: str) -> Scenario:
    given = convert(value, dict[str, Any], where)
    if isinstance(given.get("name"), str):
        where = f"scenario {given['name']!r}"
    frame = convert({key: item for key, item in given.items() if key not in _WORLD}, _Frame, where)
    return Scenario(
        name=frame.name,
        why=frame.why,
        max_batched_tokens=frame.max_batched_tokens,
        world={key: item for key, item in given.items() if key in _WORLD},
        expect=_expectation(given["expect"], {"geometry", "error"} | _OF_ALL, where) if "expect" in given else None,
        steps=tuple(_steps(frame.steps, f"{where}: ", "")),
    )


class _Repeat(Form, frozen=True):
    repeat: Positive
    steps: list[Any]


def _steps(values: Sequence[object], where: str, round_: str) -> list[StepForm]:
    steps: list[StepForm] = []
    for number, value in enumerate(values, 1):
        label = f"step {round_}{number}"
        given = convert(value, dict[str, Any], where + label)
        if "repeat" in given:
            loop = convert(given, _Repeat, where + label)
            for i in range(loop.repeat):
                steps += _steps(_numbered(loop.steps, i), where, f"{round_}{number}[{i}].")
        else:
            steps.append(_step(given, where, label))
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


class _Compute(Form, frozen=True):
    tokens: Positive | None = None
    drafts: Natural = 0
    accepted: Natural = 0


class _Commit(Form, frozen=True):
    accepted: Natural = 0


class _Wait(Form, frozen=True):
    wait: float


def _step(given: dict[str, Any], where: str, label: str) -> StepForm:
    verbs = [verb for verb in _VERBS if verb in given]
    if len(verbs) > 1:
        raise ScenarioError(f"{where}{label}: a step does one thing, this one has {' and '.join(verbs)}")
    verb = verbs[0] if verbs else ""
    if not verb and "expect" not in given:
        raise ScenarioError(f"{where}{label}: no action: give one of {', '.join(_VERBS)}, or `expect` alone")
    names = () if verb in ("", "reset", "wait") else _names(given[verb], verb, where + label)
    if verb == "reset" and given["reset"] is not True:
        raise ScenarioError(f"{where}{label}: 'reset' must be true")
    label = f"{label} ({' '.join([verb or 'expect', ', '.join(names)]).strip()})"
    place, rest = where + label, {key: item for key, item in given.items() if key not in (verb, "expect")}
    computing, seconds, request, accepted = _Compute(), 0.0, None, 0
    if verb in ("run", "start"):
        request = _request(rest | {"start": names[0]}, place)
    elif verb in ("step", "begin"):
        computing = convert(rest, _Compute, place)
        accepted = computing.accepted
    elif verb == "wait":
        seconds = convert(rest | {"wait": given[verb]}, _Wait, place).wait
    elif verb == "commit":
        accepted = convert(rest, _Commit, place).accepted
    else:
        convert(rest, Form, place)
    return StepForm(
        label=label,
        verb=verb,
        names=names,
        request=request,
        tokens=computing.tokens,
        drafts=computing.drafts,
        accepted=accepted,
        seconds=seconds,
        expect=_expectation(given["expect"], _allowed(verb), place) if "expect" in given else None,
    )


def _names(value: object, verb: str, where: str) -> tuple[str, ...]:
    if verb in _SEVERAL and isinstance(value, list):
        return convert(value, tuple[str, ...], f"{where}: {verb}")
    return (convert(value, str, f"{where}: {verb}"),)


def _allowed(verb: str) -> set[str]:
    if verb in _STARTS:
        return _OF_A_START | _OF_ONE | _OF_ALL
    if verb in ("step", "begin", "finish"):
        return _OF_A_STEP | _OF_ONE | _OF_ALL
    return _OF_ONE | _OF_ALL if verb in ("commit", "fail_step") else _OF_ALL


def _request(given: dict[str, Any], where: str) -> RequestForm:
    form = convert(given, RequestForm, where)
    form = msgspec.structs.replace(form, prompt=tuple(_segment(item, where) for item in form.prompt))
    tokens = form.output + sum(s.tokens if isinstance(s, Image) else s.stop - s.start for s in form.prompt)
    if tokens > _LONGEST:
        raise ScenarioError(
            f"{where}: 'prompt' and 'output' have {tokens:,} tokens together, at most {_LONGEST:,} can be played"
        )
    return form


def _segment(value: object, where: str) -> Segment:
    if isinstance(value, Mapping):
        return convert(value, Image, f"{where}: prompt")
    with suppress(msgspec.ValidationError):
        piece = Piece(*msgspec.convert(value, tuple[str, Natural, Natural]))
        if piece.start <= piece.stop:
            return piece
    right = '["stream", start, stop] or {"image": ..., "tokens": ...}'
    raise ScenarioError(f"{where}: a prompt segment is {right}, got {value!r}")


class _Columns(Form, frozen=True):
    tokens: Positive
    blocks: Natural


class _Figures(Form, frozen=True):
    """What is expected of a group's geometry."""

    span: Natural | UnsetType = UNSET
    blocks: Natural | UnsetType = UNSET
    position: Natural | UnsetType = UNSET
    block_tokens: Natural | UnsetType = UNSET
    shards: Natural | UnsetType = UNSET
    state_blocks: Natural | UnsetType = UNSET
    columns: _Columns | UnsetType = UNSET


def _expectation(value: object, allowed: set[str], where: str) -> Expectation:
    where = f"{where}: expect"
    given = convert(value, dict[str, Any], where)
    for key in given:
        if key not in allowed:
            raise ScenarioError(
                f"{where}: {key!r} cannot be expected here; what can be is {', '.join(sorted(allowed))}"
            )
    if "error" in given and given["error"] not in _ERRORS:
        raise ScenarioError(f"{where}: 'error' is {given['error']!r}, it must be one of {', '.join(_ERRORS)}")
    return Expectation(
        ranges=_ranges({key: given[key] for key in _RANGES if key in given}, where),
        reasons=convert(given.get("reasons", ()), tuple[str, ...], f"{where}: reasons"),
        losses=_ranges(given.get("losses", {}), f"{where}: losses"),
        waterfall=_ranges(given.get("waterfall", {}), f"{where}: waterfall"),
        events=_ranges(given.get("events", {}), f"{where}: events"),
        geometry=_geometry(given.get("geometry", {}), f"{where}: geometry"),
        error=given.get("error", ""),
    )


def _ranges(value: object, where: str) -> dict[str, tuple[int, int]]:
    """Each one number, or [lowest, highest]."""
    ranges: dict[str, tuple[int, int]] = {}
    for key, bounds in convert(value, dict[str, Any], where).items():
        low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (bounds, bounds)
        if type(low) is not int or type(high) is not int or low > high:
            raise ScenarioError(f"{where}: {key!r} must be a whole number or [lowest, highest], got {bounds!r}")
        ranges[key] = low, high
    return ranges


def _geometry(value: object, where: str) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for name, figures in convert(value, dict[str, Any], where).items():
        found = msgspec.structs.asdict(convert(figures, _Figures, f"{where}: {name}"))
        groups[name] = {key: figure for key, figure in found.items() if figure is not UNSET}
    return groups
