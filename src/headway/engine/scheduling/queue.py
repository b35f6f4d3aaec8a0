"""The waiting line: first come first served for each user, and fair among users.

Start-time fair queuing: every user has a line of their own and an account of the tokens that were computed for them.
The next request comes from the user with the smallest account, so that one user's thousand prompts do not delay another
user's single one by more than one admission. Who comes back after a pause starts at the present level of the accounts:
idleness earns no credit. Requests that were running already (preempted, or in a step that failed) go before all others,
the longest-standing first: their accounts are charged already and their state is the most likely to be still cached.

Rejected: one line for all (one user's batch starves the rest), and shares by weight or priority (nobody can say what
the weights should be; the account does without).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from headway.engine.request import RunningRequest

__all__ = ["Cancellable", "FairQueue", "Queued", "WaitingRequests"]


class Queued(Protocol):
    """What the queue needs to know of an entry."""

    @property
    def user(self) -> str:
        """Whose account pays for it."""

    @property
    def order(self) -> int:
        """Place in the order of arrival; unique."""


_ACCOUNTS_KEPT = 1024  # beyond it, what users who are not waiting were charged is forgotten

EntryT = TypeVar("EntryT", bound=Queued)


class FairQueue(Generic[EntryT]):
    """Entries in the order in which they should be admitted.

    `push`, `pop` and `charge` cost O(log users), `remove` O(entries of that user).
    """

    def __init__(self) -> None:
        self._lines: dict[str, deque[EntryT]] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._accounts: dict[str, float] = {}
        self._level = 0.0
        self._returned: list[tuple[int, EntryT]] = []
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting + len(self._returned)

    def __iter__(self) -> Iterator[EntryT]:
        """Every entry, in no particular order."""
        for _, entry in self._returned:
            yield entry
        for line in self._lines.values():
            yield from line

    def push(self, entry: EntryT) -> None:
        """Put `entry` into its user's line, in order of arrival; O(entries behind it)."""
        line = self._lines.get(entry.user)
        if not self._lines:
            self._accounts.clear()  # nobody waits, so nobody has been preferred
        if line is None:
            line = self._lines[entry.user] = deque()
            self._accounts[entry.user] = max(self._accounts.get(entry.user, 0.0), self._level)
        place = len(line)
        while place and line[place - 1].order > entry.order:
            place -= 1
        line.insert(place, entry)
        self._waiting += 1
        if place == 0:
            self._enter(entry.user)

    def push_returned(self, entry: EntryT) -> None:
        """Put back an entry that was running already: before all that never ran, in order of arrival."""
        heapq.heappush(self._returned, (entry.order, entry))

    def peek(self) -> EntryT | None:
        """The entry that `pop` would take, or None."""
        if self._returned:
            return self._returned[0][1]
        user = self._next_user()
        return None if user is None else self._lines[user][0]

    def pop(self) -> EntryT:
        """Take the next entry.

        Raises:
            IndexError: The queue is empty.
        """
        if self._returned:
            return heapq.heappop(self._returned)[1]
        user = self._next_user()
        if user is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        self._level = max(self._level, self._accounts[user])
        return self._take(user, 0)

    def remove(self, entry: EntryT) -> bool:
        """Take `entry` out wherever it stands. Returns whether it was there."""
        for place, (_, other) in enumerate(self._returned):
            if other is entry:
                self._returned[place] = self._returned[-1]
                self._returned.pop()
                heapq.heapify(self._returned)
                return True
        line = self._lines.get(entry.user, deque())
        for place, other in enumerate(line):
            if other is entry:
                self._take(entry.user, place)
                return True
        return False

    def charge(self, user: str, tokens: int) -> None:
        """Add `tokens` that were computed for `user` to the account. Where nobody waits, nothing is counted."""
        if not self._lines:
            return
        self._accounts[user] = self._accounts.get(user, self._level) + tokens
        if user in self._lines:
            self._enter(user)
        elif len(self._accounts) > 2 * len(self._lines) + _ACCOUNTS_KEPT:
            self._accounts = {user: self._accounts[user] for user in self._lines}

    def charge_each(self, served: Iterable[tuple[str, int]]) -> None:
        """Charge users for tokens, each user once however often they are named."""
        totals: Counter[str] = Counter()
        for user, tokens in served:
            totals[user] += tokens
        for user, tokens in totals.items():
            if tokens:
                self.charge(user, tokens)

    def _enter(self, user: str) -> None:
        """Put the user's present standing on the heap; older standings there no longer match and are skipped."""
        heapq.heappush(self._heap, (self._accounts[user], self._lines[user][0].order, user))

    def _next_user(self) -> str | None:
        while self._heap:
            account, order, user = self._heap[0]
            line = self._lines.get(user)
            if line and line[0].order == order and self._accounts[user] == account:
                return user
            heapq.heappop(self._heap)
        return None

    def _take(self, user: str, place: int) -> EntryT:
        line = self._lines[user]
        entry = line[place]
        del line[place]
        self._waiting -= 1
        if not line:
            del self._lines[user]
        elif place == 0:
            self._enter(user)
        return entry


class Cancellable(Protocol):
    """Something that a request waits for."""

    def cancel(self) -> None:
        """Nobody waits for it any more."""


class WaitingRequests:
    """The queue, behind some requests followers that wait for what these compute, and requests that wait for loads.

    Attributes:
        queue: Requests that can be admitted, in a fair order.
    """

    def __init__(self) -> None:
        self.queue: FairQueue[RunningRequest] = FairQueue()
        self._followers: dict[str, list[tuple[int, RunningRequest]]] = {}
        self._loads: dict[str, tuple[RunningRequest, Cancellable]] = {}

    def __len__(self) -> int:
        return len(self.queue) + len(self._loads) + sum(len(held) for held in self._followers.values())

    def __iter__(self) -> Iterator[RunningRequest]:
        """Every request that waits, in no particular order."""
        yield from self.queue
        yield from (request for request, _ in self._loads.values())
        for held in self._followers.values():
            yield from (request for _, request in held)

    def hold(self, request: RunningRequest, leader: RunningRequest, position: int) -> None:
        """Let a request, which is in no line, wait until `leader` has computed up to `position` of its prompt."""
        self._followers.setdefault(leader.request_id, []).append((position, request))

    def release(self, leader: RunningRequest, computed: int | None = None) -> None:
        """Queue the followers of a request that wait for what is `computed`; None: all, it computes no more for them.

        Each comes back to its place in the order of arrival.
        """
        held = self._followers.pop(leader.request_id, [])
        rest = [] if computed is None else [one for one in held if one[0] > computed]
        if rest:
            self._followers[leader.request_id] = rest
        for position, request in held:
            if computed is None or position <= computed:
                self.queue.push(request)

    @property
    def loading(self) -> int:
        """Requests that wait for loads."""
        return len(self._loads)

    def wait_for(self, request: RunningRequest, load: Cancellable) -> None:
        """Let a request, which is in no line, wait for a load until `loaded`."""
        self._loads[request.request_id] = request, load

    def loaded(self, request: RunningRequest) -> None:
        """Queue a request whose load has ended, before all that never waited: it has had its turn."""
        del self._loads[request.request_id]
        self.queue.push_returned(request)

    def release_reached(self, leaders: Iterable[RunningRequest]) -> None:
        """Queue the followers of running requests that wait for what these have computed."""
        for leader in leaders:
            self.release(leader, leader.computed)

    def remove(self, request: RunningRequest) -> None:
        """Take a request out wherever it waits; its own followers stay. One that does not wait is ignored."""
        if self.queue.remove(request):
            return
        if request.request_id in self._loads:
            self._loads.pop(request.request_id)[1].cancel()
            return
        for held in self._followers.values():
            held[:] = [one for one in held if one[1] is not request]

    def clear(self) -> list[RunningRequest]:
        """Take all out. Returns them, in no particular order."""
        held = list(self)
        for request in list(self.queue):
            self.queue.remove(request)
        for _, load in self._loads.values():
            load.cancel()
        self._loads.clear()
        self._followers.clear()
        return held
