"""Random small worlds and prompts for the state machine: a few dozen tokens, and forks on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from headway.cache import (
    EVICTIONS,
    CacheConfig,
    CacheGeometry,
    ChunkedLocal,
    FullAttention,
    ParallelLayout,
    Recurrent,
    SlidingWindow,
)
from headway.errors import ConfigError

__all__ = ["LAYOUTS", "Plan", "Probe", "World", "fits", "plans", "probes", "tight", "worlds"]

PIN_SECONDS = 20.0
ROOMY = 4096


@dataclass(frozen=True)
class World:
    """A configuration and what the tests need to know about it.

    Attributes:
        config: The cache's configuration.
        roomy: The pool is so large that nothing ever has to go.
        ghosts_kept: Nothing that was computed is ever forgotten for lack of room in the history.
        arrays: Small batches take the way of large ones, through whole arrays, instead of row by row.
    """

    config: CacheConfig
    roomy: bool
    ghosts_kept: bool
    arrays: bool


LAYOUTS = [
    (1, 1, 1, 1),
    (2, 2, 1, 1),
    (4, 2, 1, 2),
    (1, 1, 2, 1),
    (2, 2, 2, 1),
    (8, 4, 1, 1),
    (8, 8, 1, 1),
    (2, 1, 1, 1),
]
_KINDS = [
    ("full",),
    ("full",),
    ("full", "state"),
    ("full", "state"),
    ("full", "window"),
    ("full", "window", "state"),
    ("full", "window", "chunk", "state"),
    ("full", "chunk"),
    ("window", "state"),
    ("state",),
    ("chunk",),
]
_PLACEMENTS = [
    ("prompt_end", "answer_end", "junction", "breakpoint", "boundary"),
    ("prompt_end", "answer_end", "junction", "breakpoint"),
    ("prompt_end",),
    ("answer_end", "junction"),
    ("breakpoint", "junction"),
    ("interval:4", "answer_end"),
    ("interval:7", "prompt_end", "junction"),
    (),
]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A small world."""
    kinds = draw(st.sampled_from(_KINDS))
    lookahead = draw(st.sampled_from([0, 0, 0, 1, 2, 3]))
    groups: list[Any] = []
    if "full" in kinds:
        groups.append(FullAttention("full", 4))
        extra = draw(st.sampled_from(["", "", "draft", "replicated"]))
        if extra:
            groups.append(FullAttention("draft", 2, lookahead=lookahead, sharded=extra == "draft"))
    if "window" in kinds:
        groups.append(SlidingWindow("window", draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 2, 3, 6, 9]))))
        if draw(st.integers(0, 3)) == 0:
            groups.append(SlidingWindow("other window", 4, 5, lookahead=lookahead))
    if "chunk" in kinds:
        groups.append(ChunkedLocal("chunk", 4, draw(st.sampled_from([3, 4, 8]))))
    if "state" in kinds:
        groups.append(Recurrent("state", draw(st.sampled_from([8, 16, 40]))))
    if draw(st.integers(0, 3)) == 0:
        groups.reverse()
    tp, dcp, pcp, interleave = draw(st.sampled_from(LAYOUTS))
    block_tokens = draw(st.sampled_from([1, 2, 3, 4, 6])) * interleave * (2 if interleave > 1 else 1)
    layout = ParallelLayout(tp, dcp, pcp, interleave)
    while not fits(groups, layout, block_tokens):
        block_tokens *= 2
    roomy = draw(st.integers(0, 2)) == 0
    history = draw(st.sampled_from([None, None, 0, 20, 100]))
    index_bytes = draw(
        st.sampled_from([None, None, None, 0, 8_000, 30_000])
    )  # a branch takes some 1,300, a state 1,600
    config = CacheConfig(
        groups=tuple(groups),
        blocks=ROOMY if roomy else tight(groups, layout, block_tokens) * draw(st.sampled_from([4, 5, 7, 10, 15])) // 4,
        block_tokens=block_tokens,
        layout=layout,
        checkpoint_alignment=draw(st.sampled_from([1, 1, 2, 4])),
        placement=draw(st.sampled_from(_PLACEMENTS)),
        eviction=draw(st.sampled_from(EVICTIONS)),
        exports_inside=draw(st.booleans()),
        max_leases=draw(st.sampled_from([1, 2, 8])),
        pin_seconds=PIN_SECONDS,
        pin_share=draw(st.sampled_from([0.5, 0.5, 0.25, 1.0])),
        steps_in_flight=draw(st.sampled_from([1, 2])),
        answer_stretch=draw(st.sampled_from([256, 1, 3, 8])),
        history_tokens=history,
        index_bytes=index_bytes,
    )
    unbound = index_bytes is None
    return World(config, roomy and unbound, history is None and unbound, draw(st.booleans()))


def tight(groups: list[Any], layout: ParallelLayout, block_tokens: int) -> int:
    """Blocks with which a prompt of 24 tokens can be served and its end kept."""
    geometry = CacheGeometry(groups, layout, block_tokens=block_tokens)
    return sum(2 * t.state_blocks if t.state_blocks else t.blocks_for(24) + 1 for t in geometry.tables)


def fits(groups: list[Any], layout: ParallelLayout, block_tokens: int) -> bool:
    """Whether a block of the first table can hold at least one stripe of every other one."""
    try:
        CacheGeometry(groups, layout, block_tokens=block_tokens)
    except ConfigError:
        return False
    return True


@dataclass(frozen=True)
class Plan:
    """How to make a prompt: a stretch of an earlier sequence, then new text, perhaps with a picture.

    Attributes:
        base: Which earlier sequence to go on from (modulo their number); -1 for none.
        cut: How much of it to keep (per mille).
        stream: Which new text follows.
        length: How much of it.
        image: Content of a picture at the beginning of the new text, or empty.
        salt: Cache salt of a prompt without base.
        begin: A prompt without base begins with the token with which many do.
        marks: Breakpoints, per mille of the prompt.
        edges: Message boundaries, per mille of the prompt.
        pin: Tokens to pin, per mille of the prompt; 0 for none.
        pin_seconds: For how long; None for as long as the configuration says.
        no_store: Leave nothing behind.
        own_blocks: Keep its own blocks until it ends.
        flavour: Which answer the model gives.
    """

    base: int
    cut: int
    stream: int
    length: int
    image: str
    salt: str
    begin: bool
    marks: tuple[int, ...]
    edges: tuple[int, ...]
    pin: int
    pin_seconds: float | None
    no_store: bool
    own_blocks: bool
    flavour: int


_SHARES = st.sampled_from([1000, 1000, 500, 250, 750, 900, 333])


_RARE = st.integers(0, 19)
_BASES = st.sampled_from([0, 1, 2, 3, 4, 5, -1])
_STREAMS = st.integers(0, 2)
_LENGTHS = st.sampled_from([0, 1, 2, 3, 5, 8, 13, 21])
_PICTURES = st.sampled_from(["x", "y"])
_EITHER = st.booleans()
_PIN_TIMES = st.sampled_from([None, PIN_SECONDS / 4, 2.9 * PIN_SECONDS])
_OF_FOUR = st.integers(0, 3)
_FLAVOURS = st.integers(0, 1)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A prompt to be."""
    rare = draw(_RARE)
    return Plan(
        base=draw(_BASES),
        cut=draw(_SHARES),
        stream=draw(_STREAMS),
        length=draw(_LENGTHS),
        image=draw(_PICTURES) if rare in (0, 1) else "",
        salt="t" if rare in (2, 3, 15) else "",
        begin=draw(_EITHER),
        marks=(draw(_SHARES),) if rare in (4, 5, 6, 7, 8) else (),
        edges=(333, 900) if rare in (9, 10) else (),
        pin=draw(_SHARES) if rare in (7, 8, 11, 12) else 0,
        pin_seconds=draw(_PIN_TIMES),
        no_store=rare in (13, 14),
        own_blocks=draw(_OF_FOUR) == 0,
        flavour=draw(_FLAVOURS),
    )


@dataclass(frozen=True)
class Probe:
    """How to make a prompt to look up: an earlier sequence, changed.

    Attributes:
        which: Which earlier sequence (modulo their number).
        cuts: Two places in it, per mille: it ends at the first, or goes on behind the second.
        middle: It goes on there.
        stream: Which new text follows.
        more: How much of it.
        elsewhere: In another namespace than its own.
    """

    which: int
    cuts: tuple[int, int]
    middle: bool
    stream: int
    more: int
    elsewhere: bool


def probes() -> st.SearchStrategy[Probe]:
    """A prompt to look up."""
    return st.builds(
        Probe,
        which=st.integers(0, 11),
        cuts=st.tuples(st.sampled_from([1000, 1000, 1000, 700, 400]), st.sampled_from([1000, 900, 600, 500])),
        middle=st.booleans(),
        stream=st.integers(0, 2),
        more=st.sampled_from([0, 0, 1, 2, 3]),
        elsewhere=st.sampled_from([False, False, False, True]),
    )
