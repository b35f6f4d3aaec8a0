"""What a running engine has counted, to hold a prediction against: the counters of Headway, vLLM and SGLang.

Counters are given as the address of a server, or as files of what its `/metrics` said. One is what was counted since
the engine's start; two are what was counted between them.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from headway.errors import ConfigError
from headway.tell.run import Figures

__all__ = ["Measured", "on_measured", "read_measured"]

COUNTERS = {
    "Headway": ("headway_prompt_tokens_total", "headway_prompt_hit_tokens_total"),
    "vLLM": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    "SGLang": ("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
}
"""By engine: its counters of prompt tokens, and of those that were reused. Our server has vLLM's names as well."""
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)")
_SECONDS = 10.0
_SAME = 0.01
"""Share by which the tokens of a trace may differ from those that were counted, to be the same traffic."""


@dataclass(frozen=True)
class Measured:
    """What an engine counted.

    Attributes:
        engine: Which.
        source: Where it is from.
        prompt_tokens: Prompt tokens.
        hit_tokens: Of these, reused.
    """

    engine: str
    source: str
    prompt_tokens: int
    hit_tokens: int

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompt tokens that were reused."""
        return self.hit_tokens / max(1, self.prompt_tokens)


def read_measured(sources: Sequence[str]) -> Measured:
    """What was counted up to one moment, or between two.

    Raises:
        ConfigError: More than two sources, one that cannot be read, or counters that are of no known engine, of two
            engines, or that went back.
    """
    if not 1 <= len(sources) <= 2:
        raise ConfigError("--against: give the address or file of counters once, or twice for what lies between")
    found = [_counted(source) for source in sources]
    last = found[-1]
    if len(found) == 1:
        return last
    first = found[0]
    prompts, hits = last.prompt_tokens - first.prompt_tokens, last.hit_tokens - first.hit_tokens
    if first.engine != last.engine or prompts < 0 or hits < 0:
        raise ConfigError(f"--against: {sources[1]} does not go on from {sources[0]}: give the earlier one first")
    return Measured(last.engine, f"{first.source} to {last.source}", prompts, hits)


def on_measured(predicted: Figures, measured: Measured) -> str:
    """A prediction beside what was measured."""
    text = (
        f"Predicted: {predicted.hit_tokens:,} of {predicted.prompt_tokens:,} prompt tokens reused "
        f"({predicted.token_hit_rate:.1%}). Measured by {measured.engine}: {measured.hit_tokens:,} of "
        f"{measured.prompt_tokens:,} ({measured.token_hit_rate:.1%}), "
        f"{100 * (predicted.token_hit_rate - measured.token_hit_rate):+.1f} points."
    )
    if abs(predicted.prompt_tokens - measured.prompt_tokens) > _SAME * max(1, measured.prompt_tokens):
        text += (
            " The numbers of prompt tokens differ: the engine counted other requests than the trace has, so the two "
            "cannot be compared. Give counters from just before and just after the trace (--against twice)."
        )
    return text


def _counted(source: str) -> Measured:
    values: dict[str, float] = {}
    for line in _text(source).splitlines():
        if match := _SAMPLE.match(line):
            try:
                values[match[1]] = values.get(match[1], 0.0) + float(match[2])
            except ValueError:
                raise ConfigError(f"--against {source}: {line!r} is no counter") from None
    for engine, (prompts, hits) in COUNTERS.items():
        if prompts in values:
            return Measured(engine, source, int(values[prompts]), int(values.get(hits, 0)))
    known = ", ".join(prompts for prompts, _ in COUNTERS.values())
    raise ConfigError(f"--against {source}: none of the counters {known} is there: is it the /metrics of an engine?")


def _text(source: str) -> str:
    parts = urlsplit(source)
    if parts.scheme not in ("http", "https"):
        try:
            return Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--against {source}: cannot be read: {error}") from None
    address = source if parts.path.strip("/") else f"{source.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
            return str(answer.read().decode("utf-8", errors="replace"))
    except (urllib.error.URLError, OSError) as error:
        raise ConfigError(f"--against {address}: {getattr(error, 'reason', error)}") from None
