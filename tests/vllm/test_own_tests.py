"""How the results of vLLM's own tests are compared. To run them takes vLLM: `make judge-vllm JUDGE=own-tests`."""

from pathlib import Path

import pytest
from tests.vllm.own_tests.__main__ import differences, read, report

OWN = {"t::a": "passed", "t::b[1]": "passed", "t::b[2]": "passed", "t::c": "no device"}


@pytest.mark.parametrize(
    ("ours", "listed", "says"),
    [
        ({"t::a": "passed", "t::b[1]": "no", "t::b[2]": "passed", "t::c": "no"}, {"t::b[1]": "why"}, ""),
        ({"t::a": "passed", "t::b[1]": "no", "t::b[2]": "no", "t::c": "passed"}, {"t::b": "why"}, ""),
        ({"t::a": "bad", "t::b[1]": "passed", "t::b[2]": "passed"}, {}, "differs, unlisted: t::a: bad"),
        ({"t::a": "passed", "t::b[1]": "passed", "t::b[2]": "passed"}, {"t::a": "why"}, "listed, but passes: t::a"),
        ({"t::a": "passed", "t::b[2]": "passed"}, {}, "differs, unlisted: t::b[1]: did not run"),
    ],
    ids=["listed", "all parameters", "unlisted", "stale", "lost"],
)
def test_only_what_is_listed_may_differ(
    ours: dict[str, str], listed: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(OWN, ours, listed, whole=True) == int(bool(says))
    assert says in capsys.readouterr().out


def test_results_are_read_by_module_and_name(tmp_path: Path) -> None:
    (tmp_path / "x.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.v1.core.test_a" name="t[1]"/>'
        '<testcase classname="tests.v1.core.test_a" name="u"><failure message="assert 0&#10;more"/></testcase>'
        '<testcase classname="tests.v1.core.test_a" name="v"><skipped/></testcase></testsuite></testsuites>'
    )
    assert read(tmp_path / "x.xml") == {"test_a::t[1]": "passed", "test_a::u": "assert 0\nmore", "test_a::v": "skipped"}


def test_every_difference_has_a_reason() -> None:
    assert all(len(reason) > 20 and "::" in test for test, reason in differences().items())
