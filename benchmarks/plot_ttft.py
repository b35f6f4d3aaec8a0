"""Measure and draw the time to first token against the tokens that a hit skips: `make plots ARGS=ttft`.

The built-in model runs in this process, behind the engine that `headway serve` runs, on one thread of the CPU. In each
round every prompt is new: one request per length warms a prefix with a breakpoint wherever a hit is wanted, then
requests that share just so much of it are sent one at a time in random order. A request that skips another number of
tokens than intended ends the run. Figures are medians over the rounds.

    python benchmarks/plot_ttft.py             writes docs/figures/ttft.json and ttft.svg, prints a table
    python benchmarks/plot_ttft.py --quick     a small run: prints the table only, unless --out names a directory
    python benchmarks/plot_ttft.py --redraw    draws the figures of ttft.json again
"""

import argparse
import gc
import importlib.util
import itertools
import json
import logging
import platform
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.engine import Engine, EngineConfig, GenerationRequest
from headway.engine.build import build_engine

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
LENGTHS, ROUNDS = (1024, 2048, 4096), 7
QUICK_LENGTHS, QUICK_ROUNDS = (256, 512), 3
EIGHTHS = 8
FIRST_ORDINARY = 16  # ids below are special tokens and the like
MEMORY = 512 * 2**20  # holds all of a round, so nothing is evicted

Int32s = NDArray[np.int32]


@dataclass(frozen=True)
class Line:
    """What was measured for prompts of one length.

    Attributes:
        prompt_tokens: Tokens of each prompt.
        skipped: Tokens that the hit skipped, ascending; the other lists go with it.
        ttft_ms: Median milliseconds from arrival to the first token.
        low_ms: First quartile.
        high_ms: Third quartile.
        ms_per_skipped_token: What the least-squares line through the medians saves for a skipped token.
        r_squared: How much of the medians' variance that line explains.
    """

    prompt_tokens: int
    skipped: list[int]
    ttft_ms: list[float]
    low_ms: list[float]
    high_ms: list[float]
    ms_per_skipped_token: float
    r_squared: float


def hits(length: int) -> list[int]:
    """Tokens to skip in a prompt of `length`: none, its eighths, and all but the last."""
    return [length * eighth // EIGHTHS for eighth in range(EIGHTHS)] + [length - 1]


def tokens(rng: np.random.Generator, count: int, vocabulary: int) -> Int32s:
    """Random ordinary tokens."""
    return rng.integers(FIRST_ORDINARY, vocabulary, count, dtype=np.int32)


def prompt_after(base: Int32s, skipped: int, length: int, rng: np.random.Generator, vocabulary: int) -> Int32s:
    """A new prompt of `length` that shares exactly its first `skipped` tokens with `base`."""
    prompt = tokens(rng, length, vocabulary)
    prompt[:skipped] = base[:skipped]
    while skipped < len(base) and prompt[skipped] == base[skipped]:
        prompt[skipped] = tokens(rng, 1, vocabulary)[0]
    return prompt


def measure_one(engine: Engine, prompt: Int32s, skipped: int, salt: str) -> float:
    """Milliseconds from the arrival of one request to its first token.

    Raises:
        RuntimeError: It skipped another number of tokens than intended.
    """
    result = engine.submit(GenerationRequest(prompt, max_tokens=1, salt=salt)).result()
    if result.cached_tokens != skipped:
        raise RuntimeError(f"a prompt of {len(prompt)} tokens was to skip {skipped} and skipped {result.cached_tokens}")
    seconds = result.timings.to_first_token
    assert seconds is not None
    return seconds * 1e3


def one_round(engine: Engine, lengths: tuple[int, ...], rng: np.random.Generator) -> dict[tuple[int, int], float]:
    """Measure every length and hit once, on an empty cache: milliseconds by (length, skipped)."""
    engine.reset()
    vocabulary = engine.model.vocab_size
    bases = {length: tokens(rng, length - 1, vocabulary) for length in lengths}
    for length, base in bases.items():
        wanted = tuple(hits(length)[1:-1])  # the last hit is the end of this prompt, which is kept anyway
        engine.submit(GenerationRequest(base, max_tokens=1, salt=str(length), breakpoints=wanted)).result()
    cells = [(length, skipped) for length in lengths for skipped in hits(length)]
    gc.collect()
    measured: dict[tuple[int, int], float] = {}
    for i in rng.permutation(len(cells)):
        length, skipped = cells[i]
        prompt = prompt_after(bases[length], skipped, length, rng, vocabulary)
        salt = str(length) if skipped else f"{length}, nothing known"
        measured[length, skipped] = measure_one(engine, prompt, skipped, salt)
    return measured


def measure(lengths: tuple[int, ...], rounds: int, step_tokens: int) -> list[Line]:
    """Run all rounds, and a short one before them that does not count."""
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # hints at faster kernels, which are for GPUs
    engine = build_engine(None, EngineConfig(memory=MEMORY, max_batched_tokens=step_tokens)).engine.start()
    rng = np.random.default_rng(20)
    samples: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    try:
        one_round(engine, lengths[:1], rng)
        for number in range(rounds):
            for cell, milliseconds in one_round(engine, lengths, rng).items():
                samples[cell].append(milliseconds)
            print(f"round {number + 1} of {rounds}", flush=True)
    finally:
        engine.close()
    return [summary(length, [samples[length, skipped] for skipped in hits(length)]) for length in lengths]


def summary(length: int, samples: list[list[float]]) -> Line:
    """Medians, quartiles and the fitted line of one length."""
    skipped = np.array(hits(length))
    low, median, high = np.percentile(np.array(samples), [25, 50, 75], axis=1)
    slope, start = np.polyfit(skipped, median, 1)
    rest = median - (start + slope * skipped)
    r_squared = 1 - float(rest @ rest) / float(np.sum((median - median.mean()) ** 2))
    medians, lows, highs = ([round(float(value), 2) for value in values] for values in (median, low, high))
    return Line(length, hits(length), medians, lows, highs, round(-float(slope), 4), round(r_squared, 4))


def table(lines: list[Line]) -> str:
    """The medians and the fits as a table in Markdown."""
    columns = [f"prompt of {line.prompt_tokens:,}" for line in lines]
    rows = [["tokens skipped", *columns], ["---", *["---:"] * len(columns)]]
    names = ["none", *(f"{eighth}/{EIGHTHS} of the prompt" for eighth in range(1, EIGHTHS)), "all but the last token"]
    for i, name in enumerate(names):
        rows.append([name, *(f"{line.ttft_ms[i]:,.1f} ms" for line in lines)])
    rows.append(["fit: saved by a skipped token", *(f"{line.ms_per_skipped_token:.3f} ms" for line in lines)])
    rows.append(["R² of the fit", *(f"{line.r_squared:.3f}" for line in lines)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def house_style() -> Any:
    """The module `docs/figures/make.py`, for its colours and its style."""
    spec = importlib.util.spec_from_file_location("headway_figures", FIGURES / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw_line(axes: Any, line: Line, colour: str, marker: str) -> None:
    """Draw one length: medians, quartiles, and what proportionality to the tokens left would give."""
    skipped, median = np.array(line.skipped), np.array(line.ttft_ms)
    quartiles = np.abs(np.array([line.low_ms, line.high_ms]) - median)
    axes.plot([0, line.prompt_tokens], [median[0], 0], color=colour, linewidth=1.2, linestyle=(0, (4, 3)), alpha=0.8)
    axes.errorbar(
        skipped, median, quartiles, color=colour, marker=marker, markersize=6, linewidth=1.8, elinewidth=1,
        capsize=2.5, label=f"prompt of {line.prompt_tokens:,} tokens",
    )  # fmt: skip


def draw(lines: list[Line], out: Path) -> None:
    """Draw `ttft.svg` in the directory `out`."""
    house = house_style()
    looks = itertools.cycle(zip((house.ORANGE, house.BLUE, house.GREEN, house.RED), "so^D", strict=True))
    with house.plt.rc_context(house.STYLE):
        figure, axes = house.plt.subplots(figsize=(9.0, 4.3))
        for line, (colour, marker) in zip(lines, looks, strict=False):
            draw_line(axes, line, colour, marker)
        axes.plot([], [], color=house.GREY, linewidth=1.2, linestyle=(0, (4, 3)), label="in proportion to what is left")
        axes.set_xlabel("tokens skipped by the hit")
        axes.set_ylabel("time to first token, ms")
        axes.set_xlim(left=-0.015 * lines[-1].prompt_tokens)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(house.plt.MultipleLocator(lines[-1].prompt_tokens // EIGHTHS))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y", color=house.LIGHT, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper right")
        axes.set_title("Time to first token, built-in model, one CPU thread: median and quartiles", loc="left",
                       fontsize=10)  # fmt: skip
        figure.savefig(out / "ttft.svg", bbox_inches="tight", pad_inches=0.12, metadata={"Date": None})
        house.plt.close(figure)


def save(lines: list[Line], rounds: int, step_tokens: int, out: Path) -> None:
    """Write `ttft.json` in the directory `out`."""
    machine = {"python": platform.python_version(), "torch": torch.__version__, "processor": platform.machine()}
    figures = {
        "unit": "milliseconds from arrival to first token; median, first and third quartile",
        "model": "built-in", "threads": 1, "rounds": rounds, "max_batched_tokens": step_tokens, "machine": machine,
        "lines": [asdict(line) for line in lines],
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "ttft.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="Time to first token against the tokens that a hit skips.")
    parser.add_argument("--quick", action="store_true", help="a small run that writes nothing unless --out is given")
    parser.add_argument("--redraw", action="store_true", help="draw the figures of ttft.json again")
    parser.add_argument("--rounds", type=int, help="rounds to measure")
    parser.add_argument(
        "--max-batched-tokens",
        type=int,
        default=EngineConfig.max_batched_tokens,
        help="most tokens computed in one step, as of `headway serve`",
    )
    parser.add_argument("--out", type=Path, help="directory for ttft.json and ttft.svg, docs/figures by default")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main() -> None:
    """Measure, save, draw and print, as the options say."""
    options = parse()
    out = options.out or (None if options.quick else FIGURES)
    if options.redraw:
        out = options.out or FIGURES
        lines = [Line(**line) for line in json.loads((out / "ttft.json").read_text(encoding="utf-8"))["lines"]]
    else:
        rounds: int = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
        lines = measure(QUICK_LENGTHS if options.quick else LENGTHS, rounds, options.max_batched_tokens)
        if out is not None:
            save(lines, rounds, options.max_batched_tokens, out)
    if out is not None:
        draw(lines, out)
    print(table(lines))


if __name__ == "__main__":
    main()
