"""Step 5: compare a model with the 5-gram model on the held-out documents, token for token.

Both see the same tokens; the neural model reads windows of 1,024 tokens that do not overlap and starts each of them
without context, which puts it at a small disadvantage. Bits per byte count all tokens, markers included, over the
UTF-8 bytes of the text alone. The 5-gram model is measured twice: on the whole training text, and on as many tokens
of it as the neural model has read, which differs when the run was shorter than one pass. Writes `metrics.json`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

import kda
from export import BUILTIN
from ngram import Floats, KneserNey


@torch.no_grad()
def model_losses(model: Any, ids: NDArray[Any], window: int) -> Floats:
    """Loss in nats of every token but the first."""
    parts: list[Floats] = []
    for begin in range(0, len(ids) - 1, window):
        piece = torch.from_numpy(ids[begin : begin + window + 1].astype(np.int64))
        logits = model(input_ids=piece[None, :-1], use_cache=False).logits[0]
        parts.append(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="none").numpy())
    return np.concatenate(parts).astype(np.float64)


def kinds(held: Any) -> dict[str, tuple[NDArray[np.bool_], int]]:
    """For all documents, plain documents and dialogues: which tokens they have and how many bytes of text."""
    lengths = np.diff(np.append(held["starts"], len(held["ids"])))
    is_chat = np.repeat(held["chat"], lengths)
    total, chat = int(held["bytes"].sum()), int(held["bytes"][held["chat"]].sum())
    return {"all": (np.ones(len(is_chat), bool), total), "text": (~is_chat, total - chat), "chat": (is_chat, chat)}


def summary(losses: Floats, skipped: int, held: Any) -> dict[str, dict[str, float]]:
    """Nats a token and bits a byte, by kind; `skipped` tokens at the very start have no loss."""
    out = {}
    for kind, (mask, size) in kinds(held).items():
        chosen = losses[mask[skipped:]]
        mean = float(chosen.mean())
        bits = mean * int(mask.sum()) / math.log(2)
        out[kind] = {"nats_per_token": round(mean, 4), "bits_per_byte": round(bits / size, 4)}
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="scratch folder (%(default)s)")
    parser.add_argument("--model", type=Path, default=BUILTIN, help="model folder (%(default)s)")
    parser.add_argument("--window", type=int, default=1024, help="tokens in a window (%(default)s)")
    args = parser.parse_args()
    kda.check()
    kda.install()
    held, train = np.load(args.work / "held.npz"), np.load(args.work / "train.npz")
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.eval()
    read = int(json.loads((args.work / "run.json").read_text())["tokens"])
    metrics: dict[str, Any] = {
        "model": summary(model_losses(model, held["ids"], args.window), 1, held),
        "train_tokens": len(train["ids"]),
        "tokens_read": read,
        "held_tokens": len(held["ids"]),
    }
    for name, ids in {"5-gram": train["ids"], "5-gram on as many tokens": train["ids"][:read]}.items():
        bar = KneserNey(ids, 5, model.config.vocab_size)
        metrics[name] = summary(bar.losses(held["ids"]), 4, held)
    (args.work / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(json.dumps(metrics, indent=1))


if __name__ == "__main__":
    main()
