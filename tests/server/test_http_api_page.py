"""The page of the HTTP API names the fields and codes that the server sends, all of them and no others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.server.fakes import ByteTokenizer, running

import headway
from headway.server.protocol import HeadwayOptions

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def first_column(text: str) -> set[str]:
    """What stands in backticks in the first column of the tables of a section."""
    return {
        name for line in text.splitlines() if line[:3] == "| `" for name in re.findall("`(.+?)`", line.split("|")[1])
    }


def fields(value: Any, path: str, stop: set[str]) -> Iterator[str]:
    """The paths of all fields; what is documented as one field is one."""
    if path in stop:
        yield path
    inner: dict[str, Any] = {}
    if isinstance(value, dict):
        inner = {f"{path}.{name}": one for name, one in value.items()}
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        inner = {f"{path}[]": value[0]}
    elif path not in stop:
        yield path
    for name, one in inner.items() if not path.endswith("message") else ():
        yield from fields(one, name, stop)


def test_the_fields_of_the_report_are_documented():
    documented = first_column(section("Fields that Headway adds to an answer"))
    with running(words=ByteTokenizer()) as server:
        for minute in "12":
            system = f"Now 08:3{minute}. You are a careful agent that is brief and kind."
            answer = server.post(
                "/v1/chat/completions",
                messages=[{"role": "system", "content": system}, {"role": "user", "content": "Hello"}],
                max_tokens=2,
                cache_salt="me",
                headway={"explain": True},
                metadata={"a": 1},
            )
        sent = set(fields(answer["headway"], "headway", documented))
        reset = set(server.post("/reset_prefix_cache"))
    assert sent == documented
    assert reset == first_column(section("Resetting the cache"))


def test_the_fields_of_a_request_are_documented():
    documented = first_column(section("Fields that Headway adds to a request"))
    ours = {name.removeprefix("headway.") for name in documented if name.startswith("headway.")}
    assert ours == set(HeadwayOptions.model_fields)


def test_the_codes_of_errors_are_documented():
    rows = [line.split("|")[3] for line in section("Errors").splitlines() if line[:3] == "| 4"]
    documented = {code for codes in rows for code in re.findall("`([a-z_]+)`", codes)}
    package, sent = Path(headway.__file__).parent, {"unservable", "queue_full"}
    for path in [*package.glob("server/**/*.py"), *package.glob("engine/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RequestError":
                given = [*node.args[2:3], *(word.value for word in node.keywords if word.arg == "code")]
                sent |= {code.value for code in given if isinstance(code, ast.Constant)}
    assert sent == documented
