"""Objects of trace files become typed ones, and a fault names its place and what was found there."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headway.errors import TraceError
from headway.formats.lines import Count, Line, Positive, decode, read_lines


@dataclass(frozen=True)
class Inner:
    size: Positive
    names: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Outer:
    title: str
    inner: list[Inner]
    share: float = 0.5
    limit: Count | None = None


GOOD: dict[str, Any] = {"title": "t", "inner": [{"size": 1}], "share": 1, "unknown": "passes"}


def test_a_good_object() -> None:
    assert decode(GOOD, Outer, "f") == Outer("t", [Inner(1)], 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"title": 3}, "f: field 'title': expected a text, found int 3"),
        ({"title": None}, "f: field 'title': expected a text, found null"),
        ({"share": "x" * 99}, f"f: field 'share': expected a number, found str '{'x' * 56}..."),
        ({"inner": {}}, "f: field 'inner': expected a list, found dict {}"),
        (
            {"inner": [{"size": 1}, {"size": 0}]},
            "f: field 'inner[1].size': expected a whole number of at least 1",
        ),
        ({"inner": [{"names": {}}]}, "f: field 'inner[0].size': is missing; found 'names'"),
        ({"inner": [{}]}, "f: field 'inner[0].size': is missing; found no fields"),
        (
            {"inner": [{"size": 1, "names": {"a": "b"}}]},
            "f: field 'inner[0].names[...]': expected a whole number, found str",
        ),
        ({"limit": -1}, "f: field 'limit': expected a whole number of at least 0, found int -1"),
    ],
)
def test_faults(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        decode(GOOD | change, Outer, "f")
    assert str(caught.value).startswith(message)


def test_a_place_inside_a_line_is_named_from_its_start() -> None:
    line = Line("f, line 3", {"items": [{"size": 1}, {"size": "many"}]})
    first, second = line.inner("items", line.fields["items"])
    assert first.to(Inner) == Inner(1)
    with pytest.raises(TraceError, match=r"f, line 3: field 'items\[1\]\.size': expected .*, found str 'many'"):
        second.to(Inner)
    assert str(second.fault("size", "is odd")) == "f, line 3: field 'items[1].size': is odd"


def test_what_is_not_an_object_at_all() -> None:
    with pytest.raises(TraceError, match="f: expected an object, found int 3"):
        decode(3, Outer, "f")


def test_lines_know_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('\n{"a": 1}\n\n{"a": 2.0}\n')
    assert [(line.where, line.fields) for line in read_lines(path)] == [
        (f"{path}, line 2", {"a": 1}),
        (f"{path}, line 4", {"a": 2}),
    ]
    path.write_text('[{"a": 1},\n {"a": 2}]')
    assert [line.where for line in read_lines(path)] == [f"{path}, item 0", f"{path}, item 1"]
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(TraceError, match=r"t\.jsonl, line 1: not JSON: Invalid UTF-8"):
        list(read_lines(path))
