"""The run: a trace through `PrefixCache` as it is, one request after another (or through a preset, or with a clock).

With the clock `order` each request ends before the next begins: what the cache can do, apart from what load adds. Every
request is looked up, leased, computed in one step that exports its checkpoints on the way, answered and finished, which
donates its running state as an engine does.

An answer that no later prompt contains takes memory like any other: its symbols occur nowhere else. Where a later
prompt contains it (`outputs="continuation"`), the request ends with the last whole block that prompt and answer fill,
so that its donated state lies where that prompt comes back to.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.cache import MOST_SAMPLED, Lease, PrefixCache, Prompt
from headway.errors import ConfigError, UnservableError
from headway.replay.clairvoyant import clairvoyant_hits
from headway.replay.clock.timed import TimedRun
from headway.replay.details import lost_by_prefix, over_time
from headway.replay.endless import Reading, answer_blocks, endless_matches, read_outputs
from headway.replay.noting import note_explanation
from headway.replay.presets.marconi import ALPHAS, marconi_config
from headway.replay.presets.run import run_preset
from headway.replay.presets.settings import MarconiPreset, described, preset_of
from headway.replay.result import LINES, REFUSED, Memory, Recording, ReplayResult, figures, kinds
from headway.replay.scaling import ReplayConfig, Scale, scale
from headway.replay.specs import checkpoint_blocks
from headway.replay.trace import Trace

__all__ = ["Stopped", "replay_trace"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Called now and then with the requests done and the requests in all."""

_SAMPLES = 60
_COLLECT_AFTER = 100_000
"""New containers after which Python looks for garbage in cycles."""
_FRESH, _LAST = 1 << 30, 3 << 29
"""Symbols of answers that occur nowhere else count up from here, and start again when they meet those of tails."""


def replay_trace(
    trace: Trace,
    config: ReplayConfig,
    *,
    matches: Longs | None = None,
    clairvoyant: bool = False,
    progress: Progress | None = None,
) -> ReplayResult:
    """Replay `trace` under `config`.

    Args:
        trace: The trace.
        config: Model, memory and policies.
        matches: What `endless_matches` gave for this trace and reading, to compare many configurations.
        clairvoyant: Compute as well what knowing the future would reach.
        progress: Called now and then.

    Raises:
        ConfigError: A configuration that cannot work.
    """
    reading = read_outputs(trace, config.outputs)
    if matches is None:
        matches = endless_matches(trace, reading)
    with _rare_collections():
        result = _replayed(trace, config, reading, matches, progress)
    if not clairvoyant:
        return result
    hits, half = clairvoyant_hits(trace, config, matches, reading), len(trace) // 2
    return replace(
        result,
        clairvoyant=figures(trace, config.cost, hits, matches, None, 0),
        second_half_clairvoyant=figures(trace, config.cost, hits, matches, None, half),
    )


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for garbage less often: a run leaves next to none in cycles, and every search walks over the whole tree."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _replayed(
    trace: Trace, config: ReplayConfig, reading: Reading, matches: Longs, progress: Progress | None
) -> ReplayResult:
    """Run the cache, or a preset."""
    settings, began = preset_of(config.preset), time.process_time()
    if isinstance(settings, MarconiPreset):
        alpha = settings.alpha if settings.alpha >= 0 else _tuned(trace, config, settings)
        result = _replayed(trace, marconi_config(config, settings, alpha), reading, matches, progress)
        return replace(result, preset=described(replace(settings, alpha=alpha)))
    if settings is not None:
        found = run_preset(trace, config, settings, reading, matches, progress)
        size = found.grain, found.block_bytes, found.blocks
        result = _result(trace, config, size, reading, matches, found.recording, time.process_time() - began)
        return replace(result, preset=described(found.settings))
    if config.timing is not None:
        timed = TimedRun(trace, config, config.timing, reading, matches, progress)
        latency = timed.all()
        size = 1, timed.scale.block_bytes, timed.scale.cache.blocks if config.memory is not None else 0
        result = _result(trace, config, size, reading, matches, timed.recording, time.process_time() - began)
        return replace(result, latency=latency)
    sized = scale(config, trace.width, len(trace.symbols), len(trace))
    run = _Run(trace, sized, reading, matches)
    run.all(progress)
    size = sized.symbol, sized.block_bytes, sized.cache.blocks if config.memory is not None else 0
    return _result(trace, config, size, reading, matches, run.recording, time.process_time() - began)


def _tuned(trace: Trace, config: ReplayConfig, settings: MarconiPreset) -> float:
    """The alpha that reuses most on the first part of the trace; the smallest of equals."""
    head = trace.head(max(1, int(len(trace) * settings.bootstrap)))
    config, reading = replace(config, timing=None), read_outputs(head, config.outputs)
    matches = endless_matches(head, reading)
    hits = {
        alpha: _replayed(head, marconi_config(config, settings, alpha), reading, matches, None).whole.hit_tokens
        for alpha in ALPHAS
    }
    return max(ALPHAS, key=lambda alpha: (hits[alpha], -alpha))


class _Run:
    """One replay under way; `recording` is what it has found so far."""

    def __init__(self, trace: Trace, sized: Scale, reading: Reading, matches: Longs) -> None:
        self._trace, self._scale, self._reading = trace, sized, reading
        self._matches: list[int] = matches.tolist()
        self._tokens: list[int] = trace.prompt_tokens.tolist()
        self._outputs: list[int] = trace.answer_tokens.tolist()
        self._now = 0.0
        self._cache = PrefixCache(sized.cache, clock=lambda: self._now)
        self._counters = self._cache.counters
        self._held = checkpoint_blocks(self._cache.geometry)
        self._fresh = _FRESH
        self._resends = sized.cache.checkpoint_alignment == 1 and (
            "prompt_end" in sized.cache.placement or not self._cache.geometry.tail_tables
        )
        self._within = np.arange(sized.parts, dtype=np.int32)
        self.recording = Recording.of(len(trace))

    def all(self, progress: Progress | None) -> None:
        """Run every request."""
        requests = len(self._trace)
        every = max(1, requests // _SAMPLES)
        times = self._trace.times.tolist()
        for i in range(requests):
            if i % every == 0:
                self._sample(i)
                if progress:
                    progress(i, requests)
            if i == requests // 2:
                self.recording.half = deepcopy(self._counters)
            self._now = times[i]
            self.one(i)
        self._sample(requests)
        self.recording.counters = self._counters
        if progress:
            progress(requests, requests)

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
        symbols = self._sequence(i)[0]
        return Prompt(symbols, boundaries=self._boundaries(i, len(symbols)))

    def one(self, i: int) -> None:
        """One request from lookup to its end."""
        cache, recording = self._cache, self.recording
        prompt, answer, stop = self._sequence(i)
        try:
            lease = cache.lease(Prompt(prompt, boundaries=self._boundaries(i, len(prompt))))
        except UnservableError:
            recording.refused += 1
            recording.lost[LINES.index(REFUSED), i] = self._tokens[i]
            return
        note_explanation(
            recording,
            i,
            lease.explanation,
            len(prompt),
            self._scale.symbol,
            self._matches[i],
            tokens=self._tokens[i],
            resends=self._resends,
        )
        if self._compute(lease, answer, stop):
            cache.finish([lease.row])
        else:
            recording.starved += 1
            cache.abort([lease.row])

    def _compute(self, lease: Lease, answer: Ints, stop: int) -> bool:
        """Compute a request up to position `stop`. Returns False if it found no memory.

        Prompt and answer are computed together where memory allows: an order of steps that an engine cannot have, and
        which the cache cannot tell from the one that it has.
        """
        cache, row = self._cache, [lease.row]
        known, computed, told = lease.tokens, lease.computed, 0
        while computed < stop:
            ahead = min(len(answer) - told, MOST_SAMPLED)
            step = cache.extend(row, min(known + ahead, stop) - computed)
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

    # ---- symbols

    def _sequence(self, i: int) -> tuple[Ints, Ints, int]:
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

    def _boundaries(self, i: int, length: int) -> tuple[int, ...]:
        """Message boundaries of a prompt in symbols, each at the end of the last whole block before it."""
        width, parts = self._trace.width, self._scale.parts
        marks = (mark // width * parts for mark in self._trace.marks(i).tolist())
        return tuple(min(mark, length) for mark in marks if mark)

    def _split(self, blocks: Ints) -> Ints:
        """Blocks as symbols."""
        if self._scale.parts == 1:
            return blocks
        return (blocks[:, None] * np.int32(self._scale.parts) + self._within).reshape(-1)

    def _new(self, symbols: int) -> Ints:
        """Symbols that occur nowhere else."""
        if self._fresh + max(0, symbols) > _LAST:
            self._fresh = _FRESH
        first = self._fresh
        self._fresh += max(0, symbols)
        return np.arange(first, self._fresh, dtype=np.int32)

    def _sample(self, done: int) -> None:
        cache, size, counters = self._cache, self._scale.block_bytes, self._counters
        used = (self._scale.cache.blocks - cache.free_blocks) * size
        kept = sum(counters.taken.values()) - sum(counters.evicted.values())
        self.recording.memory.append(Memory(done, self._now, used, min(used, kept * self._held * size), kept))


class Stopped:
    """A run that has stopped just before one of its requests.

    Attributes:
        cache: The cache as that request finds it.
        prompt: Its prompt, in symbols.
        symbol: Tokens in a symbol.
        endless: Tokens that an endless memory would reuse.
    """

    def __init__(self, trace: Trace, config: ReplayConfig, request: int, progress: Progress | None = None) -> None:
        """Run the requests before number `request`.

        Raises:
            ConfigError: No such request, or a configuration that cannot work.
        """
        if not 0 <= request < len(trace):
            raise ConfigError(f"request {request}: the trace has requests 0 to {len(trace) - 1}")
        reading = read_outputs(trace, config.outputs)
        matches, sized = endless_matches(trace, reading), scale(config, trace.width, len(trace.symbols), len(trace))
        self._run, self._request = _Run(trace, sized, reading, matches), request
        self.symbol, self.endless = sized.symbol, int(matches[request])
        self.cache = self._run.before(request, progress)
        self.prompt = self._run.prompt(request)

    def go_on(self) -> tuple[int, dict[str, int]]:
        """Run that request. Returns its tokens reused, and its tokens lost by line."""
        self._run.one(self._request)
        found = self._run.recording
        lost = dict(zip(LINES, found.lost[:, self._request].tolist(), strict=True))
        return int(found.hits[self._request]), {line: tokens for line, tokens in lost.items() if tokens}


def _result(
    trace: Trace,
    config: ReplayConfig,
    size: tuple[int, int, int],
    reading: Reading,
    matches: Longs,
    found: Recording,
    seconds: float,
) -> ReplayResult:
    half = len(trace) // 2
    symbol, block_bytes, blocks = size
    return ReplayResult(
        trace=trace.name,
        outputs=reading.outputs,
        symbol=symbol,
        block_bytes=block_bytes,
        blocks=blocks,
        whole=figures(trace, config.cost, found.hits, matches, found.lost, 0),
        second_half=figures(trace, config.cost, found.hits, matches, found.lost, half),
        kinds=kinds(found.counters),
        second_half_kinds=kinds(found.counters, found.half),
        memory=found.memory,
        refused=found.refused,
        starved=found.starved,
        seconds=seconds,
        over_time=over_time(trace, found.hits, matches),
        prefixes=lost_by_prefix(trace, reading, found.hits, matches),
    )
