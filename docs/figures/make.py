"""Draw the figures of the documentation: `python docs/figures/make.py [NAME ...]`, or `make plots` for all there are.

Every number in them comes from `headway.cache`: geometries from `CacheGeometry`, checkpoints from the events of a real
`PrefixCache`, the waterfall from running one on the workload of `docs/examples/waterfall.py`.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from headway.cache import (
    CacheConfig,
    CacheGeometry,
    CheckpointStored,
    FullAttention,
    LayerSpec,
    ParallelLayout,
    PrefixCache,
    Prompt,
    Reason,
    Recurrent,
    SlidingWindow,
)
from headway.formats import Trace
from headway.incident import block_tables, sessions, steps

HERE = Path(__file__).resolve().parent

# Okabe and Ito's colours, which colour-blind readers tell apart.
INK, GREY, LIGHT = "#222222", "#767676", "#dcdcdc"
BLUE, SKY, ORANGE, GREEN, RED, YELLOW = "#0072b2", "#56b4e9", "#e69f00", "#009e73", "#d55e00", "#f0e442"

STYLE: Any = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "svg.hashsalt": "headway",
    "svg.fonttype": "path",
}


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, **options: Any) -> None:
    """Draw a filled rectangle with a white edge."""
    style: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 1.2, **options}
    axes.add_patch(Rectangle((x, y), width, height, **style))


def bare(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Give axes a range and nothing else."""
    axes.set_xlim(*x)
    axes.set_ylim(*y)
    axes.axis("off")


def serve(cache: PrefixCache, tokens: list[int], answer: list[int], **options: Any) -> int:
    """Serve one request on `cache` and return its hit."""
    lease = cache.lease(Prompt(np.array(tokens), **options))
    while lease.tokens < len(tokens) + len(answer):
        step = cache.extend([lease.row], [lease.next_stop - lease.computed])
        cache.commit(step, sampled=np.array([answer[lease.tokens - len(tokens)]]))
    cache.finish([lease.row])
    return lease.hit.tokens


def idea() -> Figure:
    """One tree path with two requests: checkpoints inside its edges, and the deepest one that serves."""
    groups: list[LayerSpec] = [FullAttention("attention", 64), Recurrent("state", 1_400)]
    cache = PrefixCache(CacheConfig(groups, 256, block_tokens=8))
    stored: list[CheckpointStored] = []
    cache.subscribe(lambda event: stored.append(event) if isinstance(event, CheckpointStored) else None)
    first = list(range(48))
    serve(cache, first, list(range(100, 113)), boundaries=(20, 48))
    ours = [(event.position, event.kind) for event in stored]
    second = first[:33] + list(range(200, 215))
    hit = serve(cache, second, list(range(300, 305)), boundaries=(20, 48))
    junction = next(event.position for event in stored[len(ours) :] if event.kind == "junction")
    span, states = cache.geometry.tables[0].span, cache.geometry.tables[1].state_blocks

    figure, axes = plt.subplots(figsize=(9.4, 4.5))
    bare(axes, (-15.5, 64), (-5.6, 11.4))
    axes.text(-15, 8.35, "first request", va="center", weight="bold")
    for start, stop, colour, label in (
        (0, 20, SKY, "instructions"),
        (20, 48, "#a9d6f2", "question"),
        (48, 60, "#cfe8f8", "answer"),
    ):
        box(axes, start, 7.7, stop - start, 1.3, colour)
        axes.text((start + stop) / 2, 8.35, label, ha="center", va="center")
    for position, kind in ours:
        axes.plot([position], [9.3], marker="v", color=ORANGE, markersize=10, clip_on=False)
        axes.text(position, 9.75, f"{kind}\n{position}", ha="center", va="bottom", fontsize=8.5)
    axes.text(-15, 10.3, "checkpoints", va="center", weight="bold")

    axes.text(-15, 4.65, "second request", va="center", weight="bold")
    box(axes, 0, 4, hit, 1.3, GREEN)
    axes.text(hit / 2, 4.65, f"reused: {hit} tokens", ha="center", va="center", color="white", weight="bold")
    box(axes, hit, 4, junction - hit, 1.3, "#f7d9a0")
    axes.text((hit + junction) / 2, 4.65, "known, no state", ha="center", va="center", fontsize=8.5)
    box(axes, junction, 4, len(second) - junction, 1.3, LIGHT)
    axes.text((junction + len(second)) / 2, 4.65, "new", ha="center", va="center")
    axes.plot([junction, junction], [4.0, 7.7], color=GREY, linewidth=1, linestyle=":")
    axes.text(junction + 0.5, 6.5, "the two part here", fontsize=8.5, color=GREY, va="center")
    axes.annotate(
        "hit = deepest checkpoint on the common path", (hit, 5.3), (hit - 0.4, 6.5), fontsize=8.5, ha="right",
        va="center", color=GREEN, arrowprops={"arrowstyle": "->", "color": GREEN, "linewidth": 1.4},
    )  # fmt: skip
    axes.plot([junction], [3.7], marker="^", color=ORANGE, markersize=10)
    axes.text(junction + 1.2, 3.25, f"junction {junction}: now kept for whoever comes third", va="center", fontsize=8.5)

    axes.text(-15, 0.75, "blocks: attention", va="center", weight="bold")
    for block in range(-(-60 // span)):
        box(axes, block * span, 0.1, min(span, 60 - block * span), 1.3, BLUE if block * span < hit else "#7fb8d8")
        axes.text(block * span + min(span, 60 - block * span) / 2, 0.75, str(block), ha="center", va="center",
                  color="white" if block * span < hit else INK, fontsize=8.5)  # fmt: skip
    axes.text(-15, -1.4, "blocks: states", va="center", weight="bold")
    for position, _ in ours:
        for i in range(states):
            box(axes, position - 1.5, -1.0 - i * 0.75, 3, 0.7, GREEN if position == hit else ORANGE, linewidth=0.8)
    for i in range(states):
        box(axes, junction - 1.5, -1.0 - i * 0.75, 3, 0.7, ORANGE, linewidth=0.8)
    axes.text(
        0, -5.3, f"One pool. A block holds the entries of {span} tokens of this path, or a part of a state: a state "
        f"takes {states} blocks here.\nBlocks 0 to {(hit - 1) // span} and the state at {hit} let the second request "
        f"start at token {hit}. What it goes on writing, it copies first.", fontsize=8.5, color=GREY, va="bottom",
    )  # fmt: skip
    return figure


def geometry() -> Figure:
    """Groups of a hybrid model under decode context parallelism: each has its own geometry."""
    groups: list[LayerSpec] = [
        FullAttention("MLA", 27_648),
        FullAttention("GQA draft", 4_096, sharded=False),
        SlidingWindow("window", 2_048, window=512),
        Recurrent("KDA states", 56_171_520),
    ]
    geometry = CacheGeometry(groups, ParallelLayout(tp=8, dcp=8), block_tokens=16)
    mla, draft, window, state = (geometry.group(spec.name).table for spec in groups)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.8, 4.6), width_ratios=(1.05, 1))

    bare(left, (-4.6, 16.2), (-1.6, 10.2))
    left.text(-4.4, 9.6, "Block 0 of the sharded group, on its 8 ranks", weight="bold")
    left.text(-4.4, 9.0, f"{mla.shards} ranks × {mla.block_tokens} tokens = span {mla.span}", color=GREY)
    positions = np.arange(mla.span)
    row = np.zeros(1, dtype=np.int32)
    for rank in range(mla.shards):
        left.text(-0.4, 7.5 - rank + 0.0, f"rank {rank}", ha="right", va="center")
        slots = mla.slots(positions, rank, row)
        for position in positions[slots >= 0]:
            slot = int(slots[position])
            box(left, slot, 7.05 - rank, 0.96, 0.92, SKY if slot % 2 else "#a9d6f2", linewidth=0.6)
            left.text(slot + 0.48, 7.5 - rank, str(position), ha="center", va="center", fontsize=6.3)
    left.text(0, -0.55, "slot 0 … 15; a number is the token's position", color=GREY, fontsize=8.5)

    bare(right, (-150, 640), (-1.5, 10.2))
    right.text(-140, 9.6, "What one block id covers, by group", weight="bold")
    right.text(-140, 9.0, f"a block is {geometry.block_bytes:,} bytes on every rank", color=GREY)
    rows = (
        (mla, 6.7, "full attention (MLA), sharded", BLUE, f"span {mla.span}"),
        (draft, 4.9, "full attention (GQA draft), replicated", GREEN, f"span {draft.span}"),
        (window, 3.1, "sliding window (512), replicated", ORANGE, f"span {window.span}"),
    )
    for place, y, name, colour, note in rows:
        right.text(-140, y + 1.25, name, va="center", fontsize=8.5)
        first = place.first_needed(640) // place.span
        for block in range(first, -(-640 // place.span)):
            low, high = block * place.span, min(640, (block + 1) * place.span)
            box(right, low, y, high - low, 0.8, colour)
            if high - low > 60:
                right.text((low + high) / 2, y + 0.4, f"{place.span}", ha="center", va="center",
                           color=INK if colour == ORANGE else "white")  # fmt: skip
        right.text(-20, y + 0.4, note, ha="right", va="center", fontsize=8.5, color=colour)
    right.text(-140, 2.45, "recurrent (KDA), split by heads", va="center", fontsize=8.5)
    for i in range(20):
        box(right, 552 + i * 4.4, 1.3, 4.0, 0.8, RED, linewidth=0.3)
    right.text(542, 1.7, f"the state after token 640: {state.state_blocks} blocks", ha="right", va="center",
               fontsize=8.5, color=RED)  # fmt: skip
    right.plot([0, 640], [0.7, 0.7], color=GREY, linewidth=1)
    for tick in range(0, 641, 128):
        right.plot([tick, tick], [0.6, 0.8], color=GREY, linewidth=1)
        right.text(tick, 0.15, str(tick), ha="center", va="center", fontsize=8, color=GREY)
    right.text(640, -0.6, "token positions; to resume at 640 takes exactly these blocks", ha="right", fontsize=8.5,
               color=GREY)  # fmt: skip
    return figure


def life() -> Figure:
    """The life of a request."""
    figure, axes = plt.subplots(figsize=(9.4, 4.1))
    bare(axes, (0, 100), (0, 43))

    def station(x: float, y: float, width: float, name: str, note: str, colour: str) -> None:
        axes.add_patch(
            FancyBboxPatch((x, y), width, 9.4, boxstyle="round,pad=0,rounding_size=1.2", facecolor=colour + "26",
                           edgecolor=colour, linewidth=1.4)
        )  # fmt: skip
        axes.text(x + width / 2, y + 6.7, name, ha="center", va="center", weight="bold")
        axes.text(x + width / 2, y + 2.9, note, ha="center", va="center", fontsize=7.8, color=INK, linespacing=1.25)

    def arrow(x: float, y: float, x2: float, y2: float, label: str = "", **options: Any) -> None:
        style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.3, **options}
        axes.annotate("", (x2, y2), (x, y), arrowprops=style)
        if label:
            axes.text((x + x2) / 2, (y + y2) / 2 + 1.2, label, ha="center", fontsize=7.8, color=GREY)

    station(0.5, 28, 15, "lookup", "changes nothing;\ngives a Hit", BLUE)
    station(20, 28, 17, "lease", "path enters the tree,\npins what it uses", BLUE)
    station(43, 28, 17, "extend", "blocks, copies,\nstate exports", ORANGE)
    station(64, 28, 14, "ranks run", "copies, forward,\nexports", GREY)
    station(82, 28, 17.5, "commit", "tokens count; what is\ncomplete is published", ORANGE)
    arrow(15.5, 32.7, 20, 32.7)
    arrow(37, 32.7, 43, 32.7)
    arrow(60, 32.7, 64, 32.7)
    arrow(78, 32.7, 82, 32.7)
    axes.annotate("", (51.5, 37.4), (90.7, 37.4), arrowprops={
        "arrowstyle": "-|>", "color": INK, "linewidth": 1.3, "connectionstyle": "bar,fraction=0.06"})  # fmt: skip
    axes.text(71, 41.2, "next chunk of the prompt, or next token", ha="center", fontsize=8, color=GREY)

    station(76, 4, 23.5, "finish", "running state becomes the\nanswer_end checkpoint", GREEN)
    station(49, 4, 23.5, "preempt", "running state becomes a\ncheckpoint; back by a hit", GREEN)
    station(22.5, 4, 23, "abort", "leaves only what\nwas published", RED)
    station(0.5, 4, 18, "fail", "the step counts\nfor nothing", RED)
    arrow(92, 28, 92, 13.4)
    arrow(86, 28, 65, 13.4)
    arrow(83, 28, 38, 13.4)
    arrow(67, 28, 14, 13.4, linestyle="--")
    arrow(18.5, 8.7, 22.5, 8.7)
    axes.text(29, 24.4, "a rank failed", fontsize=7.8, color=GREY, ha="right")
    axes.text(93, 20.5, "done", fontsize=7.8, color=GREY)
    axes.text(78.8, 20.5, "memory ran out", fontsize=7.8, color=GREY, ha="left")
    axes.text(55.5, 16.4, "client left", fontsize=7.8, color=GREY, ha="left")
    return figure


def waterfall() -> Figure:
    """The hit waterfall of a generated workload."""
    example = HERE.parent / "examples" / "waterfall.py"
    spec = importlib.util.spec_from_file_location("waterfall_example", example)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    measured = module.workload(6)
    total = measured.prompt_tokens
    left = total - sum(measured.lost[reason] for reason in module.UNAVOIDABLE)
    bars = [("all prompt\ntokens", 0.0, 1.0, LIGHT), ("endless\nmemory", 0.0, left / total, BLUE)]
    colours = {Reason.STATE_NEVER_TAKEN: ORANGE, Reason.EVICTED: RED, Reason.LOOKAHEAD: YELLOW}
    for reason in Reason:
        lost = measured.lost[reason]
        if reason not in module.UNAVOIDABLE and lost:
            name = reason.value.replace("_", "\n", 1).replace("_", " ")
            bars.append((name, (left - lost) / total, lost / total, colours.get(reason, SKY)))
            left -= lost
    assert left == measured.reused
    bars.append(("reused", 0.0, left / total, GREEN))

    figure, axes = plt.subplots(figsize=(9.0, 3.9))
    for i, (_, bottom, height, colour) in enumerate(bars):
        axes.bar([i], [height], bottom=[bottom], color=colour, width=0.62)
        loss = 1 < i < len(bars) - 1
        share = f"{height:.1%}" if height >= 0.001 else f"{height:.2%}"
        axes.text(i, bottom + height + 0.012, f"−{share}" if loss else share, ha="center", va="bottom")
        if i > 1:
            level = bottom + height
            axes.plot([i - 0.69, i + 0.31], [level, level], color=GREY, linewidth=0.8)
    axes.set_xticks(range(len(bars)), [bar[0] for bar in bars], fontsize=8.8)
    axes.set_yticks([])
    axes.set_ylim(0, 1.1)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(
        f"{measured.requests} requests, {total / 1e6:.1f} M prompt tokens, 6 GiB: every lost token on one line",
        loc="left", fontsize=10,
    )  # fmt: skip
    return figure


STEPS_AT = 4
"""Ranks in the figures of docs/incident.md. Hits do not depend on what is answered, so answers are made up."""


def conversations() -> tuple[Trace, int]:
    """The conversations of `headway incident`, and the number of the request that is drawn."""
    random = np.random.default_rng(1)
    asked = list(sessions.conversations(sessions.turns(), lambda _: random.integers(3, 4096, 6, dtype=np.int32)))
    return sessions.recorded(asked), [one.name for one in asked].index("A4")


def incident() -> Figure:
    """What each rule reuses, what it loses to states, and what no cache could save."""
    groups: list[LayerSpec] = [FullAttention("full", 800), Recurrent("state", 19_200), FullAttention("draft", 320)]
    runs = steps.run_steps(conversations()[0], groups, STEPS_AT)
    figure, axes = plt.subplots(figsize=(9.0, 2.7))
    for row, run in enumerate(runs):
        found = run.result.whole
        most, reused = found.endless_hit_rate, found.token_hit_rate
        for left, width, colour in ((0, reused, GREEN), (reused, most - reused, ORANGE), (most, 1 - most, LIGHT)):
            axes.barh(row, width, 0.62, left=left, color=colour)
        axes.text(reused + 0.008, row, f"{reused:.1%}", va="center", color="white" if reused < 0.7 else INK)
        published = steps.PUBLISHED[row]
        if published:
            axes.plot([published] * 2, [row - 0.4, row + 0.4], color=BLUE, linewidth=2.2)
            axes.text(published, row - 0.42, f"published {published:.1%}", ha="center", color=BLUE, fontsize=8)
    axes.set_yticks(range(len(runs)), [f"{n}. {step.name}" for n, step in enumerate(steps.STEPS, 1)])
    axes.set_ylim(len(runs) - 0.5, -0.7)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_xlabel("share of prompt tokens: reused (green), lost to states (orange), new to any cache (grey)")
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    return figure


def incident_tables() -> Figure:
    """The block tables of one request, rank by rank: latents split by tokens, and the state."""
    groups: list[LayerSpec] = [FullAttention("full", 800), Recurrent("state", 19_200), FullAttention("draft", 320)]
    trace, number = conversations()
    hit = block_tables.found_by(trace, steps.configuration(steps.STEPS[-1], groups, STEPS_AT), number)
    latents, state = block_tables.tables_of(hit, STEPS_AT)
    figure, axes = plt.subplots(figsize=(9.0, 2.9))
    bare(axes, (-0.9, 8.1), (-4.7, 1.5))
    for column, name in enumerate(latents.head[1:]):
        axes.text(column + 0.5, 0.62, f"{name}\n{latents.rows[0][column + 1]}", ha="center", fontsize=8.3)
    axes.text(6.75, 0.62, f"{state.head[1]}\nthe state", ha="center", fontsize=8.3)
    for rank in range(STEPS_AT):
        axes.text(-0.12, -rank - 0.0, f"rank {rank}", ha="right", va="center")
        for column, cell in enumerate(latents.rows[rank + 1][1:]):
            box(axes, column, -rank - 0.4, 1, 0.8, SKY)
            axes.text(column + 0.5, -rank, cell, ha="center", va="center", fontsize=7.6)
        box(axes, 5.5, -rank - 0.4, 2.5, 0.8, YELLOW)
        axes.text(6.75, -rank, state.rows[rank][1], ha="center", va="center", fontsize=7.6)
    axes.text(2.5, -4.3, "attention: each rank has a quarter of the tokens under an id", ha="center", fontsize=8.6)
    axes.text(6.75, -4.3, "states: each rank has all of it, for its heads", ha="center", fontsize=8.6)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "idea": idea,
    "geometry": geometry,
    "life": life,
    "waterfall": waterfall,
    "incident": incident,
    "incident-tables": incident_tables,
}


def main(names: list[str]) -> None:
    """Draw the figures named, or all, as SVG beside this file."""
    with plt.rc_context(STYLE):
        for name in names or FIGURES:
            figure = FIGURES[name]()
            figure.savefig(HERE / f"{name}.svg", bbox_inches="tight", pad_inches=0.12, metadata={"Date": None})
            plt.close(figure)
            print(f"docs/figures/{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
