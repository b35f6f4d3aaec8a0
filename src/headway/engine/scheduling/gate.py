"""Who may begin: the head of the waiting line, unless it does better to wait.

It waits outside the line for a running prefill that is about to compute what it needs, or for what disks and stores
have of its prompt, and others pass. It waits at the head of the line, and others behind it, while there is no place or
no room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.cache import Hit, PrefixCache, Prompt
from headway.engine.config import EngineConfig
from headway.engine.fetched import Fetched
from headway.engine.request import RunningRequest
from headway.engine.scheduling.admission import fits_beside, leader_of
from headway.engine.scheduling.lower import Begun, LowerTiers
from headway.engine.scheduling.queue import WaitingRequests
from headway.runtime.interface import LongRope

__all__ = ["Gate"]


@dataclass(eq=False)
class Gate:
    """Lets requests of the waiting line begin.

    Attributes:
        cache: The prefix cache.
        config: The options.
        waiting: The line, and who waits outside of it.
        running: Requests that run: the scheduler's list itself.
        answering: Whether a running request only decodes.
        lower: The tiers below the cache's memory, or None.
        long_rope: The model's two sets of rotary frequencies, or None for a model with one.
        closed: Nobody is let in: the memory would be taken back at the next step.
        epoch: Grows with what may let in a request that was found not to fit: prompts computed, requests gone.
    """

    cache: PrefixCache
    config: EngineConfig
    waiting: WaitingRequests
    running: Sequence[RunningRequest]
    answering: Callable[[RunningRequest], bool]
    lower: LowerTiers | None = None
    long_rope: LongRope | None = None
    closed: bool = False
    epoch: int = 0

    def opens(self, *, alone: bool) -> bool:
        """Whether the head of the line may begin now, if it is one that runs alone, or one that does not.

        Heads that do better to wait are taken out of the line until then.
        """
        queue = self.waiting.queue
        while (head := queue.peek()) is not None and head.alone == alone and self._has_place(head):
            hit = head.hit = self.cache.lookup(self.prompt(head))
            if not alone and (self._fetch(head, hit) or self._hold(head, hit)):
                continue
            return self._fits(head, hit)
        return False

    def begin(self, request: RunningRequest) -> Begun:
        """Lease memory for a request, with what lower tiers have of its prompt, unless a hit hides what is wanted.

        Raises:
            UnservableError: The pool could never hold the prompt.
            RanksLostError: The ranks are gone, and the request has no lease.
        """
        prompt = self.prompt(request)
        hit = request.hit or self.cache.lookup(prompt)
        least = self._least_hit(request, hit)
        fetched, request.fetched = request.fetched, None
        if (lower := self._below(request)) is None:
            return Begun(self.cache.lease(prompt, hit, least_hit=least))
        return lower.begin(prompt, hit, least, fetched)

    def prompt(self, request: RunningRequest) -> Prompt:
        """What the cache is asked for. Entries of the long set of frequencies are in a namespace of their own."""
        of_set = "long-rope" if self.begins_long(request) else ""
        return request.cache_prompt(self.cache.namespace(of_set, salt=request.request.salt))

    def begins_long(self, request: RunningRequest) -> bool:
        """Whether a request is computed with the long set of frequencies from its start."""
        rope = self.long_rope
        return rope is not None and rope.begins_long(request.prompt_length, request.known)

    def _has_place(self, request: RunningRequest) -> bool:
        """Whether a request could be admitted now if its tokens fit."""
        full = self.closed or len(self.running) >= self.config.max_running
        return not self.running or not (full or request.refused_epoch == self.epoch)

    def _hold(self, request: RunningRequest, hit: Hit) -> bool:
        """Let the head of the queue wait for a running prefill that is about to compute what it needs, if there is one.

        Returns whether it waits. Who has been running before does not.
        """
        least = self.config.wait_tokens
        single_steps = self.config.step_price is not None
        if least == 0 or single_steps or request.cached_tokens is not None or request.unscored(0):
            return False
        prefills = [r for r in self.running if not self.answering(r)]
        if (found := leader_of(self.cache, hit, prefills, least)) is None:
            return False
        leader, position = found
        if self.lower is not None and position - self.lower.known(self.prompt(request), hit) < least:
            return False
        assert leader.lease is not None
        self.cache.keep_at(leader.lease.row, position)
        self.waiting.queue.pop()
        self.waiting.hold(request, leader, position)
        request.waited_from = hit.tokens if request.waited_from is None else request.waited_from
        return True

    def _fetch(self, request: RunningRequest, hit: Hit) -> bool:
        """Let the head of the queue wait for what disks and stores have of its prompt. Returns whether it waits."""
        if (lower := self._below(request)) is None:
            return False
        if (before := request.fetched) is not None:
            if lower.usable(before, hit):
                return False
            before.release()

        def fetched(what: Fetched) -> None:
            request.fetched = what
            self.waiting.loaded(request)
            self.epoch += 1

        fetch = lower.fetch(self.prompt(request), hit, fetched)
        if fetch is None:
            request.fetched = Fetched()
            return False
        self.waiting.queue.pop()
        self.waiting.wait_for(request, fetch)
        return True

    def _fits(self, request: RunningRequest, hit: Hit) -> bool:
        """Whether the known tokens of all that run fit into the pool beside this request's, and what it reads back."""
        if not self.running:
            return True
        held = [(r.known, r.lease.hit.tokens) for r in self.running if r.lease is not None]
        used = hit.tokens if hit.tokens >= self._least_hit(request, hit) else 0
        fits = fits_beside(self.cache, held, request.known, used)
        lower = self._below(request)
        fits = fits and (lower is None or lower.has_room(hit.prompt, hit, request.fetched))
        request.refused_epoch = None if fits else self.epoch
        return fits

    def _below(self, request: RunningRequest) -> LowerTiers | None:
        """The tiers; None where log probabilities of the prompt are wanted, which only computing tells."""
        return None if request.unscored(0) else self.lower

    def _least_hit(self, request: RunningRequest, hit: Hit) -> int:
        """Tokens from which on a hit is used; more than there are where it hides log probabilities that are wanted."""
        if request.unscored(0) and not request.unscored(hit.tokens):
            return request.known + 1
        return self.config.least_hit(request.known)
