"""The hit waterfall of a small generated workload: agents and chats that share instructions and branch.

No model runs: the cache is driven as an engine would drive it, up to eight requests at a time, and says what became of
every prompt token. The sizes are those of Qwen3-Next-80B-A3B on one rank, with one MTP layer as its draft.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.cache import CacheConfig, FullAttention, LayerSpec, PrefixCache, Prompt, Reason, Recurrent, Waterfall

GROUPS: list[LayerSpec] = [
    FullAttention("attention", bytes_per_token=24_576),
    FullAttention("mtp", bytes_per_token=2_048, lookahead=1),
    Recurrent("gated-delta-net", state_bytes=77_266_944),
]
TOGETHER = 8  # requests that run at once
CHUNK = 2_048  # most tokens of one request in one step
UNAVOIDABLE = (Reason.NOTHING_MATCHED, Reason.OTHER_NAMESPACE, Reason.PARTED, Reason.LAST_TOKEN)

Tokens = NDArray[np.int32]


class Conversation:
    """A chat in one of several applications: each turn sends all that was said, and sometimes a turn is redone."""

    def __init__(self, rng: np.random.Generator, application: int, instructions: Tokens) -> None:
        """Start with the application's instructions."""
        self.rng = rng
        self.application = application
        self.said = [instructions]
        self.turns = int(rng.integers(2, 9))

    def prompt(self) -> Tokens:
        """Return the next prompt: usually one more turn, sometimes the last question again, put differently."""
        if len(self.said) > 2 and self.rng.random() < 0.2:
            del self.said[-2:]
        self.said.append(self.words(200, 1_500))
        return np.concatenate(self.said)

    def words(self, low: int, high: int) -> Tokens:
        """Return a stretch of new text."""
        return self.rng.integers(0, 150_000, int(self.rng.integers(low, high)), dtype=np.int32)


def serve(cache: PrefixCache, batch: list[Conversation]) -> None:
    """Answer one turn of each conversation, all of them together."""
    leases, answers = [], []
    for conversation in batch:
        salt = "a tenant of its own" if conversation.application == 0 and conversation.rng.random() < 0.3 else ""
        namespace = cache.namespace(salt=salt)
        prompt = conversation.prompt()
        boundaries = np.cumsum([len(part) for part in conversation.said]).tolist()
        leases.append(cache.lease(Prompt(prompt, namespace, boundaries=boundaries)))
        answers.append(conversation.words(20, 120))
    running = list(range(len(batch)))
    while running:
        active = [leases[i] for i in running]
        counts = [min(CHUNK, lease.next_stop - lease.computed) for lease in active]
        step = cache.extend([lease.row for lease in active], counts)
        assert not step.exhausted.any(), "this workload fits"
        told = [leases[i].tokens - len(leases[i].prompt.tokens) for i in running]
        cache.commit(step, sampled=np.array([answers[i][t] for i, t in zip(running, told, strict=True)]))
        ended = [i for i in running if leases[i].tokens - len(leases[i].prompt.tokens) == len(answers[i])]
        cache.finish([leases[i].row for i in ended])
        running = [i for i in running if i not in ended]
    for conversation, answer in zip(batch, answers, strict=True):
        conversation.said.append(answer)
        conversation.turns -= 1


def workload(gib: float, **options: Any) -> Waterfall:
    """Run the workload with `gib` GiB of cache memory and return its waterfall; `options` go to `CacheConfig`."""
    block_bytes = CacheConfig(GROUPS, blocks=1).geometry().block_bytes
    cache = PrefixCache(CacheConfig(GROUPS, int(gib * 2**30) // block_bytes, **options))
    rng = np.random.default_rng(7)
    instructions = [rng.integers(0, 150_000, int(n), dtype=np.int32) for n in rng.integers(1_000, 4_000, 6)]
    waiting = [Conversation(rng, i % 6, instructions[i % 6]) for i in range(60)]
    present: list[Conversation] = []
    while present or waiting:
        while waiting and len(present) < 3 * TOGETHER:
            present.append(waiting.pop(0))
        chosen = [present[int(i)] for i in rng.permutation(len(present))[:TOGETHER]]
        serve(cache, chosen)
        present = [conversation for conversation in present if conversation.turns > 0]
    return cache.waterfall


def table(waterfall: Waterfall) -> str:
    """Return the waterfall as lines of text: from the hit rate of an endless memory to the one achieved."""
    total = waterfall.prompt_tokens
    left = total - sum(waterfall.lost[reason] for reason in UNAVOIDABLE)
    lines = [f"{waterfall.requests} requests, {total:,} prompt tokens"]
    lines += [f"{'an endless memory would reuse':32}{left:>10,}  {left / total:6.1%}"]
    for reason in Reason:
        if reason not in UNAVOIDABLE and waterfall.lost[reason]:
            lost = waterfall.lost[reason]
            lines.append(f"{'  lost: ' + reason.value:32}{-lost:>10,}  {-lost / total:6.1%}")
    return "\n".join([*lines, f"{'reused':32}{waterfall.reused:>10,}  {waterfall.reused / total:6.1%}"])


def main() -> None:
    """Print the waterfall with 6 GiB, and the shares reused with other memories and policies."""
    print(table(workload(6)))
    print()
    for gib, eviction in ((6, "lru"), (6, "value"), (12, "lru"), (12, "value"), (48, "value")):
        waterfall = workload(gib, eviction=eviction)
        print(f"{gib:>2} GiB, {eviction:5}: {waterfall.reused / waterfall.prompt_tokens:.1%} reused")


if __name__ == "__main__":
    main()
