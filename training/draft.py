"""Train a drafter for the built-in model: an MTP head or a DSpark drafter.

The model is frozen. It reads windows of the training tokens; what it puts out between its layers is the drafter's
input, and its distributions are what the drafter learns to match: the loss is the total variation between both
distributions (one minus it is the chance that a drawn token is accepted), with some cross-entropy, most of it at the
beginning, where total variation alone says little.

An MTP head is trained on a whole draft of its own chain, each step reading the output of the one before, as in
serving. A DSpark drafter is trained on whole drafts that begin at random places of each window, and its confidence head
on what would be accepted.

Needs the token files of `tokenizer.py`. The learning rate follows the clock, so a run ends after `--minutes`. Writes
the drafter's folder and prints what it would accept on held-out text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import fit
import kda
import muon
from headway.runtime.drafting.dspark import DSparkNetwork
from headway.runtime.drafting.features import FeatureTap
from headway.runtime.drafting.layers import Attend, attend
from headway.runtime.drafting.loading import DrafterConfig, save_drafter
from headway.runtime.drafting.mtp import MtpNetwork
from headway.runtime.drafting.target import Target

BUILTIN = Path(__file__).parents[1] / "packages/builtin-model/src/headway_builtin_model"
WINDOW, WINDOWS = 256, 4
CONFIGS = {
    "mtp": DrafterConfig(
        drafter="mtp", hidden_size=128, vocab_size=4096, feature_layers=(3,), draft_tokens=3,
        layers=1, heads=4, kv_heads=1, head_dim=32, intermediate_size=384,
    ),
    "dspark": DrafterConfig(
        drafter="dspark", hidden_size=128, vocab_size=4096, feature_layers=(0, 1, 2, 3), draft_tokens=5,
        layers=2, heads=4, kv_heads=1, head_dim=32, intermediate_size=384, markov_rank=96,
    ),
}  # fmt: skip


class Teacher:
    """The frozen model: tokens in, features and logits out."""

    def __init__(self, path: Path, layers: tuple[int, ...]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.set_experts_implementation("eager")
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.target = Target.of(self.model)
        self._tap = FeatureTap(self.model, layers)

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Features [rows, tokens, width] and logits [rows, tokens, vocab]."""
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return self._tap.take(), logits


class Losses:
    """Sums of the loss, and the chance of acceptance at each place of a draft."""

    def __init__(self, places: int, cross: float) -> None:
        self.total: Any = 0.0
        self.shared: list[Tensor] = [torch.zeros(0)] * places
        self._cross = cross

    def add(self, place: int, logits: Tensor, wanted: Tensor, weight: float) -> Tensor:
        """Count `place`: drafted logits and the model's, [n, vocab] each. Returns the chance of acceptance, [n]."""
        p_draft, p_target = logits.softmax(-1), wanted.softmax(-1)
        shared = torch.minimum(p_draft, p_target).sum(-1)
        cross = -(p_target * logits.log_softmax(-1)).sum(-1)
        self.total = self.total + weight * ((1 - shared).mean() + self._cross * cross.mean())
        self.shared[place] = shared.detach()
        return shared.detach()


def mtp_losses(
    network: MtpNetwork, teacher: Teacher, tokens: Tensor, config: DrafterConfig, cross: float, rng: np.random.Generator
) -> Losses:
    """Losses of the chain on windows [rows, WINDOW + 1]."""
    features, wanted = teacher.read(tokens)
    losses = Losses(config.draft_tokens, cross)
    count = tokens.shape[1] - 1
    embedded = teacher.target.embed(tokens[:, 1:])
    positions = torch.arange(count).expand(len(tokens), -1)
    hidden = features[:, :count]
    held: list[list[tuple[Tensor, Tensor]]] = [[] for _ in network.layers]
    # All places of a draft are measured at the same positions, so that their chances can be multiplied.
    picked = torch.from_numpy(rng.choice(np.arange(config.draft_tokens, count - 1), count // 2, replace=False))
    for step in range(config.draft_tokens):
        attending = [unrolled(entries, step, count) for entries in held]
        output = network(hidden, embedded, positions, attending)
        at = picked - (config.draft_tokens - 1 - step)
        logits = teacher.target.logits(network.out_norm(output[:, at]))
        losses.add(step, logits.flatten(0, 1), wanted[:, at + 1].flatten(0, 1), 0.8**step)
        hidden = torch.cat([torch.zeros_like(output[:, :1]), output[:, :-1]], dim=1)
    return losses


def unrolled(held: list[tuple[Tensor, Tensor]], step: int, count: int) -> Attend:
    """Attention at step `step` of the chain: real entries up to where the draft begins, then the chain's own."""

    def attending(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        held.append((keys, values))
        place = torch.arange(count)
        behind = place[:, None] - place  # how far a column lies back
        masks = [behind >= step, *(behind == step - earlier for earlier in range(1, step + 1))]
        own = behind == 0  # the first positions have no chain behind them: they see themselves, and count nowhere
        mask = torch.cat([*masks[:-1], masks[-1] | own] if step else masks, dim=1)
        all_keys, all_values = (torch.cat(parts, dim=1) for parts in zip(*held, strict=True))
        return attend(query, all_keys, all_values, mask[None, None])

    return attending


def dspark_losses(
    network: DSparkNetwork, teacher: Teacher, tokens: Tensor, config: DrafterConfig, cross: float,
    rng: np.random.Generator,
) -> Losses:  # fmt: skip
    """Losses of drafts that begin at random places of windows [rows, WINDOW + 1], the confidence head's included."""
    features, wanted = teacher.read(tokens)
    losses = Losses(config.draft_tokens, cross)
    rows, count, length = len(tokens), tokens.shape[1] - 1, config.draft_tokens
    begins = torch.from_numpy(np.sort(rng.choice(np.arange(4, count - length), 40, replace=False)))
    places = begins[:, None] + torch.arange(length)
    context = network.context(features[:, :count])
    anchors = teacher.target.embed(tokens[:, begins])
    x = network.inputs(anchors.flatten(0, 1), length).view(rows, len(begins) * length, -1)
    positions = places.flatten().expand(rows, -1)
    owner = torch.arange(len(begins)).repeat_interleave(length)
    mask = torch.cat([torch.arange(count) < begins[owner][:, None], owner[:, None] == owner], dim=1)[None, None]
    everywhere = torch.arange(count).expand(rows, -1)
    entries = [layer.keys_values(context, everywhere) for layer in network.layers]

    def attending(past: tuple[Tensor, Tensor]) -> Attend:
        return lambda q, k, v: attend(q, torch.cat([past[0], k], 1), torch.cat([past[1], v], 1), mask)

    hidden = network(x, positions, [attending(past) for past in entries]).view(rows, len(begins), length, -1)
    for k in range(length):
        before = tokens[:, begins + k]
        logits = teacher.target.logits(hidden[:, :, k]) + network.correction(before)
        weight = float(np.exp(-k / length))
        shared = losses.add(k, logits.flatten(0, 1), wanted[:, begins + k].flatten(0, 1), weight)
        chance = network.chance(hidden[:, :, k].detach(), before).flatten()
        losses.total = losses.total + weight * nn.functional.binary_cross_entropy_with_logits(chance, shared)
    return losses


def optimisers_of(network: nn.Module, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the Markov and confidence heads and for vectors."""
    matrices = [p for n, p in network.named_parameters() if p.ndim == 2 and "markov" not in n and "confidence" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in network.parameters() if id(p) not in chosen]
    adam = torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.01)
    return [muon.Muon(matrices, lr=matrix_lr), adam]


def windows(ids: np.ndarray[Any, Any], rng: np.random.Generator) -> Iterator[Tensor]:
    """Endless batches of windows, int64 [WINDOWS, WINDOW + 1]."""
    while True:
        starts = rng.integers(0, len(ids) - WINDOW - 1, WINDOWS)
        yield torch.from_numpy(np.stack([ids[s : s + WINDOW + 1] for s in starts]).astype(np.int64))


def accepted(losses: Losses) -> list[float]:
    """Expected accepted tokens of a drawn draft of 1, 2, ... tokens, by the token rule on the given text."""
    survival = torch.stack(losses.shared).cumprod(0).mean(1)
    return [round(float(value), 3) for value in survival.cumsum(0)]


def bigrams(ids: np.ndarray[Any, Any], vocab: int) -> Tensor:
    """How much likelier each token is behind each other one than anywhere, as logarithms, float32 [before, behind]."""
    pairs = ids[:-1].astype(np.int64) * vocab + ids[1:]
    counts = torch.from_numpy(np.bincount(pairs, minlength=vocab * vocab).astype(np.float32)).view(vocab, vocab)
    share = (counts.sum(0) + 1) / (counts.sum() + vocab)
    smooth = 8.0  # pairs that a token would have seen if it knew nothing
    return ((counts + smooth * share) / (counts.sum(1, keepdim=True) + smooth) / share).log()


def start(network: nn.Module, teacher: Teacher, pairs: Tensor) -> None:
    """Begin near the model: its own final norm, small outputs of layers, and bigrams where the token before goes in."""
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.03)
        if name.endswith(("o_proj.weight", "down_proj.weight", "confidence.weight")):
            nn.init.zeros_(parameter)
        if name.endswith("mask"):
            nn.init.normal_(parameter, std=0.03)
    with torch.no_grad():
        network.out_norm.weight.copy_(teacher.model.model.norm.weight)
        width = network.out_norm.weight.shape[0]
        first = network.project if isinstance(network, MtpNetwork) else network.context_project
        first.weight[:, -width:] += torch.eye(width) * 0.5
        if isinstance(network, DSparkNetwork):
            left, size, right = torch.svd_lowrank(pairs, q=network.markov_in.weight.shape[1], niter=3)
            network.markov_in.weight.copy_(left * size.sqrt())
            network.markov_out.weight.copy_(right * size.sqrt())
        else:
            given = network.token_norm(teacher.target.embed(torch.arange(len(pairs))))
            head = teacher.model.lm_head.weight * network.out_norm.weight
            network.project.weight[:, width:] = torch.linalg.lstsq(head, torch.linalg.lstsq(given, pairs)[0].T)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", choices=(*CONFIGS, "both"), default="both", help="which kind (%(default)s)")
    parser.add_argument(
        "--work", type=Path, default=Path("build/training"), help="folder of the token files (%(default)s)"
    )
    parser.add_argument("--model", type=Path, default=BUILTIN, help="target (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the drafters' folders (MODEL/drafts)")
    parser.add_argument("--minutes", type=float, default=12.0, help="length of the training (%(default)s)")
    parser.add_argument("--every", type=float, default=4.0, help="minutes between two measurements (%(default)s)")
    parser.add_argument("--checks", type=int, default=4, help="held-out batches of a measurement (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads at most (%(default)s)")
    parser.add_argument("--matrix-lr", type=float, default=0.02, help="learning rate of Muon (%(default)s)")
    parser.add_argument("--other-lr", type=float, default=0.008, help="learning rate of AdamW (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed (%(default)s)")
    args = parser.parse_args()
    kda.check()
    kda.install()
    fit.keep_memory()
    for drafter in CONFIGS if args.drafter == "both" else (args.drafter,):
        make(args, CONFIGS[drafter])


def make(args: argparse.Namespace, config: DrafterConfig) -> None:
    """Train one drafter and write its folder."""
    print(f"== {config.drafter}", flush=True)
    teacher = Teacher(args.model, config.feature_layers)
    torch.manual_seed(args.seed)
    network = config.network()
    start(network, teacher, bigrams(np.load(args.work / "train.npz")["ids"], config.vocab_size))
    train(args, config, network, teacher)
    out = args.out / config.drafter if args.out else args.model / "drafts" / config.drafter
    save_drafter(out, network, config)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(json.dumps({"folder": str(out), "bytes": size, "parameters": sum(p.numel() for p in network.parameters())}))


def train(args: argparse.Namespace, config: DrafterConfig, network: Any, teacher: Teacher) -> None:
    """Train until the time is over, telling now and then how it goes."""
    loss_of: Any = mtp_losses if config.drafter == "mtp" else dspark_losses
    rng = np.random.default_rng(args.seed)
    batches = windows(np.load(args.work / "train.npz")["ids"], rng)
    held = windows(np.load(args.work / "held.npz")["ids"], np.random.default_rng(1))
    checks = [next(held) for _ in range(args.checks)]
    optimisers = optimisers_of(network, args.matrix_lr, args.other_lr)
    rates = [optimiser.param_groups[0]["lr"] for optimiser in optimisers]
    schedule = fit.Schedule(warm_up=0.02, decay_from=0.3)
    begin = told = time.monotonic()
    steps = 0
    tell(steps, 0.0, checks, network, teacher, config)
    while (progress := (time.monotonic() - begin) / (60.0 * args.minutes)) < 1.0:
        torch.set_num_threads(fit.free_threads(args.threads))
        losses = loss_of(network, teacher, next(batches), config, 0.1 + 0.9 * max(0.0, 1 - 2 * progress), rng)
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimiser, rate in zip(optimisers, rates, strict=True):
            optimiser.param_groups[0]["lr"] = rate * schedule.rate(progress)
            optimiser.step()
            optimiser.zero_grad()
        steps += 1
        if time.monotonic() - told > 60.0 * args.every:
            told = time.monotonic()
            tell(steps, told - begin, checks, network, teacher, config)
    tell(steps, time.monotonic() - begin, checks, network, teacher, config)


@torch.no_grad()
def tell(
    steps: int, seconds: float, checks: list[Tensor], network: Any, teacher: Teacher, config: DrafterConfig
) -> None:
    """Print the expected accepted tokens on held-out text, for drafts of 1, 2, ... tokens."""
    loss_of: Any = mtp_losses if config.drafter == "mtp" else dspark_losses
    rng = np.random.default_rng(2)
    found = np.array([accepted(loss_of(network, teacher, batch, config, 0.0, rng)) for batch in checks])
    line = {"minutes": round(seconds / 60, 2), "steps": steps, "tokens": steps * WINDOW * WINDOWS}
    print(json.dumps(line | {"accepted": found.mean(0).round(3).tolist()}), flush=True)


if __name__ == "__main__":
    main()
