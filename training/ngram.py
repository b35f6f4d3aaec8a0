"""A 5-gram model with interpolated modified Kneser-Ney smoothing: the bar that the neural model has to clear.

It is trained on exactly the tokens that the neural model is trained on. With at most 4,096 token ids an n-gram of up to
five tokens is one 60-bit integer, so counting is sorting and looking up is a binary search.

Run alone it prints the held-out loss in nats a token.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS = 12
Keys = NDArray[np.uint64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """One order: sorted n-grams with their discounted shares, and for every context the weight of the lower order."""

    grams: Keys
    shares: Floats
    contexts: Keys
    backoffs: Floats


def pack(ids: NDArray[Any], order: int) -> Keys:
    """The n-gram that ends at each position from `order - 1` on, first token in the highest bits."""
    count = len(ids) - order + 1
    keys = np.zeros(count, dtype=np.uint64)
    for offset in range(order):
        keys = (keys << np.uint64(BITS)) | ids[offset : offset + count].astype(np.uint64)
    return keys


def _discounts(counts: NDArray[np.int64]) -> Floats:
    """The three discounts (for counts one, two, three and more) estimated from counts of counts; index 0 is unused."""
    n = np.array([max(1, int((counts == k).sum())) for k in range(1, 5)], dtype=np.float64)
    y = n[0] / (n[0] + 2 * n[1])
    return np.array([0.0] + [max(0.0, k - (k + 1) * y * n[k] / n[k - 1]) for k in (1, 2, 3)])


def _table(grams: Keys, counts: NDArray[np.int64]) -> Table:
    """Discounted shares and back-off weights of one order."""
    discount = _discounts(counts)[np.minimum(counts, 3)]
    contexts, first = np.unique(grams >> np.uint64(BITS), return_index=True)
    totals = np.add.reduceat(counts, first).astype(np.float64)
    sizes = np.diff(np.append(first, len(grams)))
    shares = (counts - discount) / np.repeat(totals, sizes)
    return Table(grams, shares, contexts, np.add.reduceat(discount, first) / totals)


def _find(sorted_keys: Keys, keys: Keys, values: Floats, missing: float) -> Floats:
    """`values` at the places of `keys` in `sorted_keys`, `missing` where a key is absent."""
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    found: Floats = np.where(sorted_keys[at] == keys, values[at], missing)
    return found


class KneserNey:
    """The model; `tables[k]` belongs to order k + 1."""

    def __init__(self, ids: NDArray[Any], order: int, vocabulary: int) -> None:
        self.order, self.vocabulary = order, vocabulary
        grams, counts = np.unique(pack(ids, order), return_counts=True)
        tables = [_table(grams, counts)]
        for lower in range(order - 1, 0, -1):
            shorter = grams & np.uint64((1 << (BITS * lower)) - 1)
            grams, counts = np.unique(shorter, return_counts=True)  # in how many different places it appears
            tables.append(_table(grams, counts))
        self.tables = tables[::-1]

    def losses(self, ids: NDArray[Any]) -> Floats:
        """Negative log probability (nats) of every token from index `order - 1` on, given the tokens before it."""
        full = pack(ids, self.order)
        probability = np.full(len(full), 1.0 / self.vocabulary)
        for length, table in enumerate(self.tables, start=1):
            keys = full & np.uint64((1 << (BITS * length)) - 1)
            weight = _find(table.contexts, keys >> np.uint64(BITS), table.backoffs, 1.0)
            probability = _find(table.grams, keys, table.shares, 0.0) + weight * probability
        losses: Floats = -np.log(probability)
        return losses


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="scratch folder (%(default)s)")
    parser.add_argument("--order", type=int, default=5, choices=range(1, 6), help="longest n-gram (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=4096, help="number of token ids (%(default)s)")
    args = parser.parse_args()
    model = KneserNey(np.load(args.work / "train.npz")["ids"], args.order, args.vocabulary)
    losses = model.losses(np.load(args.work / "held.npz")["ids"])
    print(f"{args.order}-gram, modified Kneser-Ney: {losses.mean():.4f} nats a token on {len(losses):,} tokens")


if __name__ == "__main__":
    main()
