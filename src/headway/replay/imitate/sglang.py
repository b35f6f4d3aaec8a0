"""SGLang as it serves hybrid models today: a radix tree whose nodes may hold a state, states in slots of their own.

The rules, as its public source of 2026 has them with the extra buffer (`sglang/srt/mem_cache/mamba_radix_cache.py`;
what a hit refreshes: the Mamba component of the unified radix cache):

- A prompt is computed in chunks. Each chunk leaves *one* state, at its last multiple of `grain_tokens`. Where the
  prompt parts from what the tree knows inside the chunk (the branching point), the state is taken there *instead*.
- While an answer is decoded, the state at the last multiple of `track_tokens` is kept; when the request ends it goes
  into the tree, if the answer crossed such a multiple.
- A hit is the deepest state on the path, before the last token of the prompt. It makes that state the youngest.
- Slots are taken from the least recently used state. A state inside a path is dropped alone; one at the end of a path
  takes with it the attention entries that nobody else's state needs.
- Attention memory is a pool of its own: when it runs out, the least recently used path ends go.

Requests run one after another. Not modelled: requests in flight, which hold up to three slots each and hide their
prefixes until a chunk ends; pages of more than one token; the host tier.

The hit refreshes one state and not all those before it on the path, as newer versions have it. The older rule, which
refreshed them all, gives up to 2.8 points less on the synthetic trace, and does not meet the figures in docs/replay.md.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.cache import FullAttention, Recurrent
from headway.errors import ConfigError
from headway.formats import Trace
from headway.replay.config import ReplayConfig, SglangPreset
from headway.replay.run.ledger import Ledger, Progress, StateMark
from headway.replay.trace.prefixes import PrefixKeys, Reading

__all__ = ["Pools", "run_sglang", "sglang_pools"]

_ENDLESS = 1 << 62


@dataclass(frozen=True)
class Pools:
    """How much memory there is of each kind.

    Attributes:
        slots: States.
        tokens: Tokens of attention.
        state_bytes: Bytes of a state on one rank.
        token_bytes: Bytes of a token's attention on one rank.
        ratio: Memory of states over that of attention; 0 where the slots are given.
    """

    slots: int
    tokens: int
    state_bytes: int
    token_bytes: float
    ratio: float = 0.0

    def bytes_for(self, tokens: int) -> int:
        """Memory of which attention gets enough for so many tokens."""
        attention = tokens * self.token_bytes
        return int(attention * (1 + self.ratio) if self.ratio else attention + self.slots * self.state_bytes) + 1


def sglang_pools(config: ReplayConfig, settings: SglangPreset) -> Pools:
    """Split the memory: states get `memory_ratio` times what attention gets, or as many slots as were asked for.

    Raises:
        ConfigError: A model without states or with windows, or memory for less than one state.
    """
    state, token = 0, 0.0
    for group in config.groups:
        if isinstance(group, Recurrent):
            state += group.state_bytes
        elif isinstance(group, FullAttention) and not group.lookahead:
            token += group.bytes_per_token / (config.layout.shards if group.sharded else 1)
        else:
            raise ConfigError(f"preset sglang: group {group.name!r} is not modelled (windows, chunks, lookahead)")
    if not state:
        raise ConfigError("preset sglang is for models with recurrent states; this model has none")
    slots = settings.state_slots or _ENDLESS
    if config.memory is None:
        return Pools(slots, _ENDLESS, state, token)
    if not settings.state_slots:
        slots = int(config.memory * settings.memory_ratio / (1 + settings.memory_ratio)) // state
    rest = config.memory - slots * state
    if slots < 1 or rest <= 0:
        raise ConfigError(
            f"preset sglang: {config.memory} bytes do not hold {max(1, slots)} states of {state} bytes and any "
            f"attention beside them: give more memory or fewer state_slots"
        )
    ratio = 0.0 if settings.state_slots else settings.memory_ratio
    return Pools(slots, int(rest / token) if token else _ENDLESS, state, token, ratio)


def run_sglang(
    trace: Trace,
    config: ReplayConfig,
    settings: SglangPreset,
    reading: Reading,
    matches: NDArray[np.int64],
    progress: Progress | None,
) -> Ledger:
    """Run a trace, one request after another.

    Raises:
        ConfigError: See `sglang_pools`.
    """
    return _Sglang(trace, sglang_pools(config, settings), settings, reading, Ledger(trace, matches, progress)).all()


@dataclass
class _State:
    """A state in the tree: the keys of its path, in steps of the path's grain, and its mark."""

    path: list[int]
    mark: StateMark


class _Sglang:
    def __init__(self, trace: Trace, pools: Pools, settings: SglangPreset, reading: Reading, ledger: Ledger) -> None:
        self._prompts: list[int] = trace.prompt_tokens.tolist()
        self._answers: list[int] = trace.answer_tokens.tolist()
        self._times: list[float] = trace.times.tolist()
        self._pools, self._settings, self._ledger = pools, settings, ledger
        self._keys = PrefixKeys(trace, reading)
        self._grain = settings.grain_tokens
        self._step = max(self._grain, trace.width)
        self._states: OrderedDict[int, _State] = OrderedDict()
        self._below: dict[int, int] = {}
        """How many states lie at or behind each key of a path: the tree, without its edges."""
        self._ever: set[int] = set()

    def all(self) -> Ledger:
        """Run every request."""
        for request in range(len(self._prompts)):
            self._one(request)
        self._sample(len(self._prompts))
        return self._ledger

    def _one(self, request: int) -> None:
        prompt = self._prompts[request]
        if self._ledger.sample_is_due(request):
            self._sample(request)
        if prompt > self._pools.tokens:
            self._ledger.refuse(request, self._pools.bytes_for(prompt))
            return
        total = prompt + self._answers[request]
        keys = self._keys.multiples(request, self._grain, total)
        path = keys if self._step == self._grain else self._keys.multiples(request, self._step, total)
        hit = self._lookup(request, keys[: (prompt - 1) // self._grain])
        parted = self._parted(path[: prompt // self._step])
        for position, kind in self._places(hit, parted, prompt):
            self._take(keys[position // self._grain - 1], path[: position // self._step], kind)
        track = self._settings.track_tokens
        if total // track > prompt // track:
            position = total // track * track
            self._take(keys[position // self._grain - 1], path[: position // self._step], "answer_end")

    def _lookup(self, request: int, keys: list[int]) -> int:
        """The deepest state on the path; it becomes the youngest. Returns its position."""
        states = self._states
        index = next((i for i in range(len(keys) - 1, -1, -1) if keys[i] in states), -1)
        ever = next((i for i in range(len(keys) - 1, index, -1) if keys[i] in self._ever), index)
        if index >= 0:
            states.move_to_end(keys[index])
            self._ledger.resume(states[keys[index]].mark)
        match = self._ledger.match(request)
        self._ledger.note(request, (index + 1) * self._grain, (ever + 1) * self._grain, match)
        return (index + 1) * self._grain

    def _parted(self, path: list[int]) -> int:
        """Tokens of the prompt whose attention entries the tree has."""
        known = 0
        while known < len(path) and path[known] in self._below:
            known += 1
        return known * self._step // self._grain * self._grain

    def _places(self, hit: int, parted: int, prompt: int) -> list[tuple[int, str]]:
        """Where the chunks of a prompt leave their states, and why there."""
        places, start, grain = [], hit, self._grain
        while start < prompt:
            end = min(start + self._settings.chunk_tokens, prompt)
            if hit < parted and start < parted <= end:
                places.append((parted, "junction"))
            elif end // grain * grain > start:
                places.append((end // grain * grain, "chunk_end" if end < prompt else "prompt_end"))
            start = end
        return places

    def _take(self, key: int, path: list[int], kind: str) -> None:
        """Keep a state; make room for it first."""
        if key in self._states:
            self._states.move_to_end(key)
            return
        self._states[key] = _State(path, self._ledger.take(kind))
        self._ever.add(key)
        for prefix in path:
            self._below[prefix] = self._below.get(prefix, 0) + 1
        while len(self._states) > self._pools.slots:
            self._drop(next(iter(self._states)))
        while len(self._below) * self._step > self._pools.tokens:
            ends = (key for key, state in self._states.items() if self._is_end(state))
            self._drop(next(ends, next(iter(self._states))))

    def _is_end(self, state: _State) -> bool:
        """Whether dropping the state would free attention entries."""
        return bool(state.path) and self._below[state.path[-1]] == 1

    def _drop(self, key: int) -> None:
        """Give up a state, and what only it kept in the tree."""
        state = self._states.pop(key)
        for prefix in state.path:
            count = self._below[prefix] - 1
            if count:
                self._below[prefix] = count
            else:
                del self._below[prefix]
        self._ledger.evict(state.mark)

    def _sample(self, done: int) -> None:
        states = len(self._states) * self._pools.state_bytes
        used = int(states + len(self._below) * self._step * self._pools.token_bytes)
        self._ledger.sample(done, self._times[min(done, len(self._times) - 1)], used, states)
