"""The clock `order`: a trace through `PrefixCache` as it is, each request ending before the next begins.

This is what the cache can do, apart from what load adds. Every request is looked up, leased, computed in one step that
exports its checkpoints on the way, answered and finished, which donates its running state as an engine does.

An answer that no later prompt contains takes memory like any other: its symbols occur nowhere else. Where a later
prompt contains it (`outputs="continuation"`), the request ends with the last whole block that prompt and answer fill,
so that its donated state lies where that prompt comes back to.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.cache import MOST_SAMPLED, Lease, PrefixCache, Prompt
from headway.errors import ConfigError
from headway.formats import Trace
from headway.replay.config import ReplayConfig
from headway.replay.config.groups import checkpoint_blocks
from headway.replay.config.scale import Scale, scale
from headway.replay.run.ledger import Ledger, Progress
from headway.replay.run.lower import LowerRun
from headway.replay.trace.prefixes import Reading, answer_blocks, endless_matches, read_outputs
from headway.tell.reasons import LINES

__all__ = ["OrderedRun", "PausedRun", "SymbolSource"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

STEP_TOKENS = 8192
"""Tokens that an engine computes of one prompt in a step."""
_WHOLE = 1 << 40
_FRESH, _LAST = 1 << 30, 3 << 29
"""Symbols of answers that occur nowhere else count up from here, and start again when they meet those of tails."""


class SymbolSource:
    """The symbols of a trace's requests, as a cache of that scale gets them, one request after another."""

    def __init__(self, trace: Trace, sized: Scale, reading: Reading) -> None:
        self._trace, self._scale, self._reading = trace, sized, reading
        self._tokens: list[int] = trace.prompt_tokens.tolist()
        self._outputs: list[int] = trace.answer_tokens.tolist()
        self._fresh = _FRESH

    def sequence(self, i: int) -> tuple[Ints, Ints, int]:
        """Symbols of prompt and answer, and the position where the request ends.

        The last token of an answer is sampled and not computed; with symbols of many tokens that is neglected.
        """
        trace, parts, symbol, reading = self._trace, self._scale.parts, self._scale.symbol, self._reading
        prompt = trace.prompt(i)
        if trace.width == 1:
            answer = trace.answer(i) if reading.outputs == "recorded" else self._new(self._outputs[i])
            return prompt, answer, len(prompt) + max(0, len(answer) - 1)
        whole = len(prompt) - 1
        blocks = self._split(prompt[:whole]) if parts > 1 else prompt[:whole]
        if reading.outputs == "recorded" or (reading.linked is not None and reading.linked.child[i] >= 0):
            return self._continued(blocks, prompt[whole:], self._split(answer_blocks(trace, reading, i)))
        rest = self._tokens[i] + self._outputs[i] - whole * trace.width
        answer = self._new(-(-rest // symbol) - 1)
        if parts > 1:
            prompt = np.append(blocks, prompt[whole:])
        return prompt, answer, len(prompt) + len(answer)

    def _continued(self, blocks: Ints, tail: Ints, answer: Ints) -> tuple[Ints, Ints, int]:
        """The same for a request whose answer a later prompt contains: it ends with the last whole block."""
        if not len(answer):
            return np.append(blocks, tail), answer, max(1, len(blocks))
        return np.append(blocks, answer[:1]), answer[1:], len(blocks) + len(answer)

    def boundaries(self, i: int, length: int) -> tuple[int, ...]:
        """Message boundaries of a prompt of `length` symbols."""
        return self._scale.boundaries(self._trace.marks(i).tolist(), self._tokens[i], length)

    def _split(self, blocks: Ints) -> Ints:
        """Blocks as symbols."""
        return blocks if self._scale.parts == 1 else np.repeat(blocks, self._scale.parts)

    def _new(self, symbols: int) -> Ints:
        """Symbols that occur nowhere else."""
        if self._fresh + max(0, symbols) > _LAST:
            self._fresh = _FRESH
        first = self._fresh
        self._fresh += max(0, symbols)
        return np.arange(first, self._fresh, dtype=np.int32)


class OrderedRun:
    """One replay under way; `ledger` is what it has found so far, and `lower` what lies below the memory, or None."""

    def __init__(
        self,
        trace: Trace,
        sized: Scale,
        reading: Reading,
        matches: Longs,
        progress: Progress | None = None,
        config: ReplayConfig | None = None,
    ) -> None:
        """Prepare a run; `config` says what lies below the memory, by default nothing."""
        self._trace, self._scale = trace, sized
        self._symbols = SymbolSource(trace, sized, reading)
        self._now = 0.0
        self._cache = PrefixCache(sized.cache, clock=lambda: self._now)
        self.lower = (
            LowerRun(
                self._cache,
                config.tiers,
                sized.block_bytes,
                config.roofline,
                lambda: self._now,
                timed=bool(trace.times[-1] > trace.times[0]),
            )
            if config is not None and config.tiers
            else None
        )
        self._most = max(1, STEP_TOKENS // sized.symbol) if self._cache.geometry.local else _WHOLE
        self._held = checkpoint_blocks(self._cache.geometry)
        self._resends = sized.cache.checkpoint_alignment == 1 and (
            "prompt_end" in sized.cache.placement or not self._cache.geometry.tail_tables
        )
        self.ledger = Ledger(trace, matches, progress, self._cache.counters)

    def all(self) -> Ledger:
        """Run every request."""
        for i, time in enumerate(self._trace.times.tolist()):
            if self.ledger.sample_is_due(i):
                self._sample(i)
            self._now = time
            self.one(i)
        self._sample(len(self._trace))
        return self.ledger

    def before(self, request: int, progress: Progress | None) -> PrefixCache:
        """Run the requests before number `request`. Returns the cache, with the clock at its arrival."""
        for i in range(request):
            self._now = float(self._trace.times[i])
            self.one(i)
            if progress:
                progress(i + 1, request)
        self._now = float(self._trace.times[request])
        return self._cache

    def prompt(self, i: int) -> Prompt:
        """The prompt of a request as the cache gets it."""
        symbols = self._symbols.sequence(i)[0]
        return Prompt(symbols, boundaries=self._symbols.boundaries(i, len(symbols)))

    def one(self, i: int) -> None:
        """One request from lookup to its end."""
        cache, ledger = self._cache, self.ledger
        prompt, answer, stop = self._symbols.sequence(i)
        if (needed := cache.geometry.peak_blocks(stop)) > self._scale.cache.blocks:
            ledger.refuse(i, self._scale.bytes_of(needed))
            return
        lease = self._begin(Prompt(prompt, boundaries=self._symbols.boundaries(i, len(prompt))))
        ledger.explain(i, lease.explanation, len(prompt), self._scale.symbol, resends=self._resends)
        if self._compute(lease, answer, stop):
            cache.finish([lease.row])
        else:  # what resuming there copies did not fit beside the answer: an engine would start over
            cache.abort([lease.row])

    def _begin(self, prompt: Prompt) -> Lease:
        if self.lower is None:
            return self._cache.lease(prompt)
        return self.lower.begin(prompt, self._cache.lookup(prompt), 0).lease

    def _compute(self, lease: Lease, answer: Ints, stop: int) -> bool:
        """Compute a request up to position `stop`. Returns False if it found no memory.

        Prompt and answer are computed together where memory allows: an order of steps that an engine cannot have, and
        which the cache cannot tell from the one that it has. Windows and chunks are let go from step to step, so models
        that have them are computed in steps as long as an engine's.
        """
        cache, row = self._cache, [lease.row]
        known, computed, told = lease.tokens, lease.computed, 0
        while computed < stop:
            ahead = min(len(answer) - told, MOST_SAMPLED)
            step = cache.extend(row, min(known + ahead - computed, stop - computed, self._most))
            granted = step.counts.item(0)
            if not granted:
                return False
            computed += granted
            more = max(0, computed - known)
            if more:
                cache.commit(step, sampled=answer[told : told + more][None, :], sampled_counts=[more])
                told += more
                known += more
            else:
                cache.commit(step)
        return True

    def _sample(self, done: int) -> None:
        size, ledger = self._scale.block_bytes, self.ledger
        used = (self._scale.cache.blocks - self._cache.free_blocks) * size
        ledger.sample(done, self._now, used, ledger.kept * self._held * size)


class PausedRun:
    """A run that has stopped just before one of its requests.

    Attributes:
        cache: The cache as that request finds it.
        prompt: Its prompt, in symbols.
        symbol: Tokens in a symbol.
        endless: Tokens that an endless memory would reuse.
        needed: Bytes of one rank that the request needs, where the memory has fewer, else 0. Known after `resume`.
    """

    needed = 0

    def __init__(self, trace: Trace, config: ReplayConfig, request: int, progress: Progress | None = None) -> None:
        """Run the requests before number `request`.

        Raises:
            ConfigError: No such request, or a configuration that cannot work.
        """
        if not 0 <= request < len(trace):
            raise ConfigError(f"request {request}: the trace has requests 0 to {len(trace) - 1}")
        reading = read_outputs(trace, config.outputs)
        matches, sized = endless_matches(trace, reading), scale(config, trace.width, len(trace.symbols), len(trace))
        self._run, self._request = OrderedRun(trace, sized, reading, matches), request
        self.symbol, self.endless = sized.symbol, int(matches[request])
        self.cache = self._run.before(request, progress)
        self.prompt = self._run.prompt(request)

    def resume(self) -> tuple[int, dict[str, int]]:
        """Run that request. Returns its tokens reused, and its tokens lost by line."""
        self._run.one(self._request)
        found = self._run.ledger
        self.needed = found.refused.get(self._request, 0)
        lost = dict(zip(LINES, found.lost[:, self._request].tolist(), strict=True))
        return int(found.hits[self._request]), {line: tokens for line, tokens in lost.items() if tokens}
