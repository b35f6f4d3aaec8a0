"""The list of other engines' faults (`faults.md`) and the tests that have their numbers."""

import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_fault_of_the_list_has_the_tests_that_it_names_and_no_others() -> None:
    found: dict[int, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for name in re.findall(r"^\s*def (test_t\d+_\w+)", path.read_text(), re.MULTILINE):
            for number in re.match(r"test((?:_t\d+)+)_", name)[1].split("_t")[1:]:  # type: ignore[index]
                found[int(number)].add(str(path.relative_to(TESTS)))
    rows = re.findall(r"^\| T(\d+) \|.*\|(.*)\|$", (Path(__file__).parent / "faults.md").read_text(), re.MULTILINE)
    listed = {int(number): set(re.findall(r"`([\w/.]+)`", tests)) for number, tests in rows}
    assert list(listed) == list(range(1, 35))
    assert dict(found) == listed
