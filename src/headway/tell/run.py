"""The record of a finished run: what was found, and what it was made from. All that is told of runs comes from here.

`RunRecord` is what `headway replay --json` prints, what a sweep keeps, and what a report is made of.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import TraceError
from headway.formats.lines import Line, decode, read_lines
from headway.tell.latency import Latency, TimeSaved
from headway.tell.prompt_faults import PromptFault

__all__ = [
    "CapacityPoint",
    "Figures",
    "GroupSize",
    "Kind",
    "LostPrefixes",
    "Memory",
    "ModelName",
    "ReplayResult",
    "RunRecord",
    "SharedStretch",
    "Span",
    "Stretch",
    "TierUse",
    "read_runs",
]


@dataclass(frozen=True)
class Figures:
    """What became of a range of requests. Those that were refused are in none of the figures.

    Attributes:
        requests: Requests.
        prompt_tokens: Their prompt tokens.
        hit_tokens: Tokens reused.
        hit_requests: Requests that reused any.
        compute_saved: Share of the prefill compute of all prompts that was not needed (quadratic attention included).
        endless_tokens: Tokens that an endless memory that keeps every position would reuse.
        endless_compute: Share of the compute that it would save.
        lost: Tokens not reused, by line.
        loaded_tokens: Of the tokens reused, those that were read back from lower tiers of memory.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_requests: int
    compute_saved: float
    endless_tokens: int
    endless_compute: float
    lost: dict[str, int]
    loaded_tokens: int = 0

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompt tokens that were reused."""
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def request_hit_rate(self) -> float:
        """Share of the requests that reused anything."""
        return self.hit_requests / max(1, self.requests)

    @property
    def endless_hit_rate(self) -> float:
        """Share of the prompt tokens that an endless memory would reuse."""
        return self.endless_tokens / max(1, self.prompt_tokens)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = ("token_hit_rate", "request_hit_rate", "endless_hit_rate")
        return asdict(self) | {name: getattr(self, name) for name in rates}


@dataclass(frozen=True)
class Kind:
    """What became of the checkpoints of one kind of placement.

    Attributes:
        taken: Checkpoints taken.
        reused: Of these, resumed from at least once.
        resumed: Requests that resumed from one.
        evicted: Checkpoints evicted.
        evicted_unused: Of these, never resumed from.
    """

    taken: int
    reused: int
    resumed: int
    evicted: int
    evicted_unused: int


@dataclass(frozen=True)
class Memory:
    """Memory at one moment.

    Attributes:
        request: Requests that have ended.
        time: Seconds of the trace.
        used: Bytes held, on one rank.
        checkpoints: Of these, bytes of states and windows.
        count: Checkpoints kept.
    """

    request: int
    time: float
    used: int
    checkpoints: int
    count: int


@dataclass(frozen=True)
class Span:
    """Requests [first, stop), in order of arrival.

    Attributes:
        first: The first request.
        stop: The request after the last.
        time: Seconds of the trace at which the first one arrived.
        prompt_tokens: Their prompt tokens.
        hit_tokens: Of these, reused.
        endless_tokens: Of these, reusable with an endless memory.
    """

    first: int
    stop: int
    time: float
    prompt_tokens: int
    hit_tokens: int
    endless_tokens: int


@dataclass(frozen=True)
class Stretch:
    """Tokens [start, stop) of a prompt, which the same requests pass with their prompts or answers.

    Attributes:
        start: First token.
        stop: Token after the last.
        requests: How many requests pass it.
        first_request: The first of them; -1 for none.
        last_request: The last of them; -1 for none.
    """

    start: int
    stop: int
    requests: int
    first_request: int
    last_request: int


@dataclass(frozen=True)
class SharedStretch(Stretch):
    """A stretch that several requests share, and what was made of it.

    Attributes:
        lost_tokens: Its tokens that were known and not reused, over all requests.
        hit_tokens: Its tokens that were reused, over all requests.
    """

    lost_tokens: int
    hit_tokens: int


@dataclass(frozen=True)
class LostPrefixes:
    """What was lost of shared prefixes: tokens that an endless memory would have reused, and this cache did not.

    Attributes:
        stretches: Stretches that lost anything.
        lost_tokens: Tokens lost in all of them.
        worst: Those that lost most, the worst first.
    """

    stretches: int = 0
    lost_tokens: int = 0
    worst: list[SharedStretch] = field(default_factory=list)


@dataclass(frozen=True)
class TierUse:
    """What a tier of lower memory did. Bytes and rates are those of one rank.

    Attributes:
        name: "host", "disk" or "store".
        memory: Bytes that it has.
        used: Bytes that it holds at the end.
        source: What its rates are from.
        requests: Requests that read back from it.
        tokens: Prompt tokens of theirs that were not computed.
        bytes_in: Bytes read back.
        seconds_in: Seconds of these moves.
        declined: Requests that computed what it had, because that was faster.
        checkpoints: Checkpoints that were copied there.
        bytes_out: Bytes copied for them.
        seconds_out: Seconds of these moves.
        skipped: Checkpoints that were not copied: too much waited to be written, or it had no room.
        prefill_seconds: Seconds that computing the tokens would have taken; None where that is not known.
    """

    name: str
    memory: int
    used: int
    source: str
    requests: int
    tokens: int
    bytes_in: int
    seconds_in: float
    declined: int
    checkpoints: int
    bytes_out: int
    seconds_out: float
    skipped: int
    prefill_seconds: float | None = None

    @property
    def paid_seconds(self) -> float:
        """Seconds of every move that anybody waits for.

        Steps wait for moves from and to host memory, requests for moves from disks and stores. Writing to these goes
        on beside the steps.
        """
        return self.seconds_in + (self.seconds_out if self.name == "host" else 0.0)

    @property
    def saved_seconds(self) -> float | None:
        """Seconds of prefill saved after paying for all moves; None where that is not known."""
        return None if self.prefill_seconds is None else self.prefill_seconds - self.paid_seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"saved_seconds": self.saved_seconds}


@dataclass(frozen=True)
class CapacityPoint:
    """What a size of memory reuses, as shares of the whole trace.

    Attributes:
        memory: Bytes of one rank.
        lru_tokens: Prompt tokens reused, least recently used.
        lru_compute: Compute saved, least recently used.
        tokens: Prompt tokens reused by the default policy; None if nobody asked.
        compute: Compute saved by it.
    """

    memory: int
    lru_tokens: float
    lru_compute: float
    tokens: float | None = None
    compute: float | None = None


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found.

    Attributes:
        trace: Name of the trace.
        outputs: How answers were read: "never", "continuation" or "recorded".
        symbol: Tokens in a symbol of the run.
        block_bytes: Bytes of a pool block on one rank.
        blocks: Blocks of the pool; 0 for an endless memory.
        whole: The whole trace.
        second_half: The second half of the requests: the memory is warm.
        kinds: Checkpoints by kind of placement, whole trace.
        second_half_kinds: The same, of the second half.
        memory: Memory over time.
        refused: Requests that the memory could never hold. They are told apart, and are in no other figure.
        seconds: Processor time that the run took.
        clairvoyant: What a cache that knows the future reaches, whole trace; None if nobody asked.
        second_half_clairvoyant: The same, second half.
        over_time: Hits over the trace.
        prefixes: Which shared prefixes lose most.
        latency: What requests waited for, with the clock `trace`; else None.
        preset: The engine that was imitated, with its settings; empty for the cache as it is.
        times: What reuse saves in time; None where the GPU or the model's compute is not known.
        refused_tokens: Prompt tokens of the requests that were refused.
        needed: Bytes of one rank for the cache with which none of them would have been refused; 0 where none was.
        tiers: What each tier of lower memory did, the fastest first.
        capacity: What other sizes of memory reuse, ascending; empty if nobody asked.
    """

    trace: str
    outputs: str
    symbol: int
    block_bytes: int
    blocks: int
    whole: Figures
    second_half: Figures
    kinds: dict[str, Kind]
    second_half_kinds: dict[str, Kind]
    memory: list[Memory]
    refused: int
    seconds: float
    clairvoyant: Figures | None = None
    second_half_clairvoyant: Figures | None = None
    over_time: list[Span] = field(default_factory=list)
    prefixes: LostPrefixes = field(default_factory=LostPrefixes)
    latency: Latency | None = None
    preset: str = ""
    times: TimeSaved | None = None
    refused_tokens: int = 0
    needed: int = 0
    tiers: list[TierUse] = field(default_factory=list)
    capacity: list[CapacityPoint] = field(default_factory=list)

    @property
    def seconds_of_trace(self) -> float:
        """Seconds from the first arrival to the last, or with times to the last end."""
        return self.memory[-1].time - self.memory[0].time if self.memory else 0.0

    @property
    def requests_per_second(self) -> float:
        """Requests that the run handled in a second."""
        return self.whole.requests / max(1e-9, self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        flat = asdict(self) | {"requests_per_second": self.requests_per_second}
        for name in ("whole", "second_half", "clairvoyant", "second_half_clairvoyant"):
            found: Figures | None = getattr(self, name)
            flat[name] = None if found is None else found.as_dict()
        flat["tiers"] = [tier.as_dict() for tier in self.tiers]
        return flat


@dataclass(frozen=True)
class ModelName:
    """The model.

    Attributes:
        name: Its name.
        source: Where its sizes are from.
        notes: What to know about them.
    """

    name: str
    source: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GroupSize:
    """A cache group on one rank, before context parallelism.

    Attributes:
        name: Its name.
        kind: Class of its spec.
        bytes: Bytes of one token, or of one state.
        lookahead: Later tokens that an entry depends on.
        reach: Tokens of a window or chunk, 0 for other kinds.
        sharded: Its tokens are split over context-parallel ranks.
        layers: Layers that it has; 0: not known.
    """

    name: str
    kind: str
    bytes: int
    lookahead: int = 0
    reach: int = 0
    sharded: bool = True
    layers: int = 0


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        model: The model.
        groups: Its cache groups.
        layout: Sizes tp, dcp and pcp.
        memory: Bytes of one rank for the cache; None for endless.
        cost: Compute of a prompt (linear, quadratic) and where it is from.
        policy: The other fields of the configuration, by name. Of its clock: GPU, speed and what a step may hold.
        trace: Format of the trace and tokens in a block of it.
        result: What was found.
        faults: What in the prompts keeps known text from being reused, where the trace shows it.
    """

    model: ModelName
    groups: list[GroupSize]
    layout: dict[str, int]
    memory: int | None
    cost: dict[str, Any]
    policy: dict[str, Any]
    trace: dict[str, Any]
    result: ReplayResult
    faults: list[PromptFault] = field(default_factory=list)

    @property
    def token_bytes(self) -> float:
        """Bytes that a token of full attention takes on one rank."""
        shards = self.layout["dcp"] * self.layout["pcp"]
        attention = (group for group in self.groups if group.kind == "FullAttention")
        return sum(group.bytes / (shards if group.sharded else 1) for group in attention)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes that a checkpoint holds on one rank, beside entries of full attention."""
        sizes = (g.bytes * max(1, g.reach - 1) for g in self.groups if g.kind != "FullAttention")
        return sum(sizes)

    @property
    def state_bytes(self) -> int:
        """Bytes of a request's recurrent states on one rank; 0 for a model without."""
        return sum(group.bytes for group in self.groups if group.kind == "Recurrent")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"result": self.result.as_dict()}

    @classmethod
    def from_dict(cls, found: Any, where: str = "run") -> RunRecord:
        """A record from what `as_dict` gave, through JSON or not. Unknown fields are left out.

        Raises:
            TraceError: Something else; names the field.
        """
        return decode(found, cls, where)


def read_runs(path: Path) -> list[RunRecord]:
    """The runs of a file: one JSON object, or one a line.

    Raises:
        TraceError: Something else; names the file and the field, and what to do with a trace.
    """
    return [_read_run(path, line) for line in read_lines(path)]


def _read_run(path: Path, line: Line) -> RunRecord:
    found = line.fields.get("run", line.fields)
    if isinstance(found, dict) and not {"model", "result"} & found.keys():
        raise TraceError(
            f"{line.where}: this is no result of a replay. If {path.name} is a trace, replay it first: "
            f"headway replay {path} --model MODEL --memory SIZE --json > result.json"
        )
    return RunRecord.from_dict(found, line.where)
