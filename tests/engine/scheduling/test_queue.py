from dataclasses import dataclass

import numpy as np
import pytest

from headway.engine import FairQueue


@dataclass(frozen=True)
class Entry:
    user: str
    order: int


def drain(queue: FairQueue[Entry], cost: int = 10) -> list[int]:
    taken = []
    while len(queue):
        head = queue.peek()
        entry = queue.pop()
        assert entry is head
        queue.charge(entry.user, cost)
        taken.append(entry.order)
    assert queue.peek() is None
    return taken


def test_one_user_is_served_in_order_of_arrival():
    queue = FairQueue[Entry]()
    for i in range(5):
        queue.push(Entry("a", i))
    assert drain(queue) == [0, 1, 2, 3, 4]


def test_a_single_request_does_not_wait_behind_another_users_hundred():
    queue = FairQueue[Entry]()
    for i in range(100):
        queue.push(Entry("batch", i))
    queue.push(Entry("chat", 100))
    assert drain(queue).index(100) == 1


def test_users_with_equal_costs_alternate():
    queue = FairQueue[Entry]()
    for i in range(3):
        queue.push(Entry("a", i))
    for i in range(3, 6):
        queue.push(Entry("b", i))
    assert drain(queue) == [0, 3, 1, 4, 2, 5]


def test_who_sends_longer_prompts_gets_fewer_turns():
    queue = FairQueue[Entry]()
    for i in range(40):
        queue.push(Entry("long", 2 * i))
        queue.push(Entry("short", 2 * i + 1))
    turns = {"long": 0, "short": 0}
    for _ in range(40):
        entry = queue.pop()
        queue.charge(entry.user, 90 if entry.user == "long" else 10)
        turns[entry.user] += 1
    assert turns["short"] >= 8 * turns["long"]


def test_idleness_earns_no_credit():
    queue = FairQueue[Entry]()
    for i in range(50):
        queue.push(Entry("busy", i))
    for _ in range(20):
        queue.charge(queue.pop().user, 10)
    for i in range(50, 60):
        queue.push(Entry("late", i))
    first = [queue.pop() for _ in range(1)]
    queue.charge(first[0].user, 10)
    order = drain(queue)
    late = [place for place, i in enumerate(order) if i >= 50]
    assert late[-1] > 12, "the late user must not get ten turns in a row"


def test_returned_entries_go_first_by_arrival():
    queue = FairQueue[Entry]()
    queue.push(Entry("a", 9))
    queue.push_returned(Entry("b", 7))
    queue.push_returned(Entry("a", 3))
    assert [queue.pop().order for _ in range(3)] == [3, 7, 9]


def test_an_entry_that_was_taken_out_comes_back_to_its_place():
    queue = FairQueue[Entry]()
    for i in range(4):
        queue.push(Entry("a", i))
    first, second = queue.pop(), queue.pop()
    queue.push(second)
    queue.push(first)
    assert drain(queue) == [0, 1, 2, 3]


def test_pop_of_an_empty_queue_is_an_index_error():
    with pytest.raises(IndexError, match="empty"):
        FairQueue[Entry]().pop()


@pytest.mark.parametrize("seed", range(20))
def test_random_use_loses_and_repeats_nothing(seed: int):
    rng = np.random.default_rng(seed)
    queue = FairQueue[Entry]()
    inside: dict[int, Entry] = {}
    for order in range(300):
        action = rng.integers(5)
        if action <= 1:
            entry = Entry(f"u{rng.integers(4)}", order)
            inside[order] = entry
            queue.push_returned(entry) if rng.random() < 0.2 else queue.push(entry)
        elif action == 2 and inside:
            entry = queue.pop()
            queue.charge(entry.user, int(rng.integers(1, 100)))
            assert inside.pop(entry.order) is entry
        elif action == 3 and inside:
            entry = inside.pop(int(rng.choice(list(inside))))
            assert queue.remove(entry)
            assert not queue.remove(entry)
        else:
            queue.charge(f"u{rng.integers(8)}", int(rng.integers(1, 50)))
        assert len(queue) == len(inside)
        assert {entry.order for entry in queue} == set(inside)
    assert sorted(drain(queue)) == sorted(inside)


def test_accounts_of_absent_users_are_forgotten():
    queue = FairQueue[Entry]()
    for i in range(5000):
        queue.push(Entry(f"user{i}", i))
        if i >= 3:
            queue.charge(queue.pop().user, 1)
    assert len(queue._accounts) <= 1024 + 2 * 4
