"""The threads that take turns do what threads do, in the same order for the same seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.model import turns
from tests.model.turns import Turns


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    turns._turns.close()


def order(seed: int) -> list[int]:
    """The order in which five threads end that take a lock several times each."""
    taking = Turns(seed, haste=0.5)
    lock, ended, threads = turns.Lock(), list[int](), []

    def work(number: int) -> None:
        for _ in range(5):
            with lock:
                pass
        ended.append(number)

    for number in range(5):
        threads.append(turns.Thread(lambda number=number: work(number)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert not taking.alive
    assert not taking.errors
    return ended


def test_a_seed_says_who_goes_first() -> None:
    assert len({tuple(order(seed)) for seed in range(20)}) > 5
    assert order(7) == order(7)
    assert sorted(order(7)) == [0, 1, 2, 3, 4]


def test_waiting_takes_no_time_but_on_their_clock() -> None:
    taking, told = Turns(0), turns.Event()
    turns.Thread(lambda: (taking.pause(1000.0), told.set())).start()
    assert not told.wait(999.0)
    assert taking.now == 999.0
    assert told.wait()
    assert taking.now == 1000.0


def test_a_condition_wakes_those_who_wait_and_nobody_else() -> None:
    taking, changed, through = Turns(0), turns.Condition(), list[int]()

    def wait() -> None:
        with changed:
            through.append(changed.wait(5.0))

    for _ in range(3):
        turns.Thread(wait).start()
    taking.pause(1.0)
    with changed:
        changed.notify(2)
    taking.pause(1.0)
    assert through == [True, True]
    taking.pause(10.0)
    assert through == [True, True, False]


def test_a_deadlock_is_an_error() -> None:
    Turns(0)
    one, other = turns.Lock(), turns.Lock()
    one.acquire()

    def work() -> None:
        with other, one:
            pass

    thread = turns.Thread(work)
    thread.start()
    with pytest.raises(AssertionError, match="wait for each other"):
        thread.join()


def test_what_ends_a_thread_is_kept() -> None:
    taking = Turns(0)
    thread = turns.Thread(lambda: 1 // 0)
    thread.start()
    thread.join()
    assert [type(error) for error in taking.errors] == [ZeroDivisionError]
