"""Step 3: train the built-in Kimi-Linear model on the token files.

The learning rate follows the clock, so a run always ends after `--minutes`, with its schedule complete, whatever the
machine: constant after a short warm-up, then down to nothing over the last part. Windows have 512 tokens, and 1024 in
the last part. Every `--every` minutes the held-out loss is measured, and the best model so far is kept in `best/`.

With `--resume` the model in `best/` goes on learning for another `--minutes`, with the rate falling from the start.

Writes `best/` (a Hugging Face folder in fp32), `log.jsonl` (one line a measurement) and `run.json`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import KimiLinearConfig, KimiLinearForCausalLM

import kda
import muon

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Schedule:
    """Shares of the whole run: how long warm-up lasts, when the decay and when the longer windows begin."""

    warm_up: float = 0.01
    decay_from: float = 0.45
    long_from: float = 0.8

    def rate(self, progress: float) -> float:
        """Factor on the learning rates at `progress` in [0, 1]."""
        if progress < self.warm_up:
            return progress / self.warm_up + 0.01
        return min(1.0, (1.0 - progress) / (1.0 - self.decay_from)) + 0.002

    def window(self, progress: float) -> int:
        """Tokens in a training window at `progress`."""
        return 1024 if progress >= self.long_from else 512


def model_config() -> KimiLinearConfig:
    """Four layers, KDA x 3 and MLA, three of them with twelve experts: about 3.2 million parameters."""
    return KimiLinearConfig(
        vocab_size=4096, hidden_size=128, intermediate_size=384, moe_intermediate_size=112, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=48, qk_rope_head_dim=8, qk_nope_head_dim=24,
        v_head_dim=32, num_local_experts=12, num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=1.0,
        linear_head_dim=32, linear_num_heads=4, linear_conv_kernel_dim=4, initializer_range=0.03,
        layer_types=["linear_attention"] * 3 + ["full_attention"], mlp_layer_types=["dense"] + ["sparse"] * 3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=32768,
    )  # fmt: skip


class Balancer:
    """Keeps the experts evenly used: after each step, a small push on the router's choosing bias, no extra loss."""

    def __init__(self, model: KimiLinearForCausalLM, push: float = 2e-3) -> None:
        self._push = push
        self._gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self._chosen: dict[int, Tensor] = {}
        for number, gate in enumerate(self._gates):
            gate.register_forward_hook(lambda _m, _i, out, number=number: self._chosen.__setitem__(number, out[2]))

    @torch.no_grad()
    def step(self) -> float:
        """Move the biases; returns the load of the busiest expert relative to an even share."""
        busiest = 0.0
        for number, gate in enumerate(self._gates):
            load = torch.bincount(self._chosen[number].flatten(), minlength=gate.num_experts).float()
            busiest = max(busiest, float(load.max() / load.mean()))
            gate.e_score_correction_bias += self._push * torch.sign(load.mean() - load)
        return busiest


def keep_memory() -> None:
    """Ask glibc to keep freed memory: the same large tensors come back every step, and fresh pages are slow."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            libc.mallopt(option, (1 << 31) - 1)


def free_threads(most: int) -> int:
    """How many threads to use now: the cores that no other program wants, at least one and at most `most`.

    Two threads that share a core wait for each other at every operation, which is slower than one thread.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return most
    running = next(int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("procs_running"))
    return max(1, min(most, (os.cpu_count() or most) - (running - 1)))


def windows(ids: np.ndarray[Any, Any], rng: np.random.Generator, pick: dict[str, int]) -> Iterator[Tensor]:
    """Endless batches of BATCH_TOKENS, every epoch shifted and shuffled anew; `pick["window"]` may change meanwhile."""
    while True:
        window = pick["window"]
        offset = int(rng.integers(window))
        starts = np.arange(offset, len(ids) - window - 1, window)
        rng.shuffle(starts)
        for at in range(0, len(starts) - BATCH_TOKENS // window, BATCH_TOKENS // window):
            batch = [ids[s : s + window + 1] for s in starts[at : at + BATCH_TOKENS // window]]
            pick["seen"] += BATCH_TOKENS
            yield torch.from_numpy(np.stack(batch).astype(np.int64))
            if pick["window"] != window:
                break


def loss_of(model: KimiLinearForCausalLM, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats over all tokens of a batch [n, window + 1]."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: KimiLinearForCausalLM, ids: np.ndarray[Any, Any], tokens: int, window: int = 1024) -> float:
    """Mean loss over windows spread evenly over the held-out tokens."""
    model.eval()  # type: ignore[no-untyped-call]
    count = min(tokens, len(ids) - 1) // window
    starts = np.linspace(0, len(ids) - window - 1, count).astype(int)
    losses = [
        float(loss_of(model, torch.from_numpy(np.stack([ids[s : s + window + 1] for s in group]).astype(np.int64))))
        for group in np.array_split(starts, max(1, count // 4))
    ]
    model.train()
    return float(np.mean(losses))


@dataclass
class Run:
    """What one training run reports."""

    minutes: float
    steps: int = 0
    tokens: int = 0
    best_loss: float = math.inf
    parameters: int = 0


def start_model(args: argparse.Namespace) -> KimiLinearForCausalLM:
    """A fresh model, or with `--resume` the best one so far, ready for training."""
    if args.resume:
        model = KimiLinearForCausalLM.from_pretrained(args.work / "best", dtype=torch.float32)
    else:
        model = KimiLinearForCausalLM(model_config())
    model.set_experts_implementation("eager")
    model.train()
    return model


def train(args: argparse.Namespace, run: Run) -> None:
    """The loop: batches until the time is over, measuring and keeping the best model along the way."""
    ids = np.load(args.work / "train.npz")["ids"]
    held = np.load(args.work / "held.npz")["ids"]
    model = start_model(args)
    run.parameters = sum(p.numel() for p in model.parameters())
    optimisers = muon.make(model, args.matrix_lr, args.other_lr)
    rates = [o.param_groups[0]["lr"] for o in optimisers]
    balancer = Balancer(model)
    schedule = Schedule(warm_up=0.03, decay_from=0.0) if args.resume else Schedule()
    pick = {"window": 512, "seen": run.tokens}
    batches = windows(ids, np.random.default_rng([args.seed, run.steps]), pick)
    begin = time.monotonic()
    next_measure, recent = begin + 60.0 * min(args.every, 2.0), []
    while (progress := (time.monotonic() - begin) / (60.0 * args.minutes)) < 1.0:
        pick["window"] = schedule.window(progress)
        torch.set_num_threads(free_threads(args.threads))
        loss = loss_of(model, next(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, rate in zip(optimisers, rates, strict=True):
            optimiser.param_groups[0]["lr"] = rate * schedule.rate(progress)
            optimiser.step()
            optimiser.zero_grad()
        busiest = balancer.step()
        recent.append(float(loss.detach()))
        run.steps, run.tokens = run.steps + 1, pick["seen"]
        if time.monotonic() > next_measure:
            measure(args, run, model, held, begin, recent, busiest)
            next_measure, recent = time.monotonic() + 60.0 * args.every, []
    measure(args, run, model, held, begin, recent, 0.0)


def measure(
    args: argparse.Namespace, run: Run, model: KimiLinearForCausalLM, held: np.ndarray[Any, Any],
    begin: float, recent: list[float], busiest: float,
) -> None:  # fmt: skip
    """Measure the held-out loss, log it, and save the model if it is the best so far."""
    loss = held_out_loss(model, held, args.held_tokens)
    seconds = time.monotonic() - begin
    line = {
        "minutes": round(seconds / 60, 2), "steps": run.steps, "tokens": run.tokens, "held": round(loss, 4),
        "train": round(float(np.mean(recent)) if recent else math.nan, 4), "busiest": round(busiest, 2),
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    with (args.work / "log.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")
    if loss < run.best_loss:
        run.best_loss = loss
        model.save_pretrained(args.work / "best")
    (args.work / "run.json").write_text(json.dumps(asdict(run), indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="scratch folder (%(default)s)")
    parser.add_argument("--minutes", type=float, default=70.0, help="length of the run (%(default)s)")
    parser.add_argument("--every", type=float, default=5.0, help="minutes between measurements (%(default)s)")
    parser.add_argument("--held-tokens", type=int, default=40_960, help="tokens measured each time (%(default)s)")
    parser.add_argument("--matrix-lr", type=float, default=0.02, help="learning rate of matrices (%(default)s)")
    parser.add_argument("--other-lr", type=float, default=6e-3, help="learning rate of the rest (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads at most (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the best model of an earlier run")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and batches (%(default)s)")
    args = parser.parse_args()
    keep_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    print(f"training core against the library: {kda.check():.1e}")
    kda.install()
    run = Run(minutes=args.minutes)
    if args.resume:
        before = Run(**json.loads((args.work / "run.json").read_text()))
        run = replace(before, minutes=before.minutes + args.minutes, best_loss=math.inf)
    train(args, run)
    print(json.dumps(asdict(run)))


if __name__ == "__main__":
    main()
