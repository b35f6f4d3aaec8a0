"""The command `headway incident`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from headway.errors import ConfigError
from headway.formats import Trace
from headway.incident.block_tables import found_by, tables_of, two_sizes
from headway.incident.ranks import RANKS, Served, answered_by_one, served_by_ranks, write_model
from headway.incident.sessions import BLOCK, SCALE, Request, recorded, turns
from headway.incident.steps import PUBLISHED, PUBLISHED_MOST, STEPS, configuration, hits_of, run_steps, what_fails
from headway.progress import counting
from headway.replay.ask import options as opt
from headway.tell import compare, facts_of
from headway.tell.page import require_report, write_report
from headway.tell.run import RunRecord
from headway.tell.tables import Table
from headway.tell.terminal import rich_table, rich_waterfall

__all__ = ["Story", "incident", "show"]

_DRAWN = "A4"
"""The request whose block tables are drawn."""


@dataclass(frozen=True)
class Story:
    """All that was found.

    Attributes:
        ranks: Ranks.
        requests: The conversations, as one process answered them.
        served: What the ranks did with them.
        runs: A record for each step.
        tables: Block tables of one request, and the sizes that the fault mixed up.
        faults: What does not hold, in words.
    """

    ranks: int
    requests: Sequence[Request]
    served: Served
    runs: Sequence[RunRecord]
    tables: Sequence[Table]
    faults: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        steps = [
            asdict(step) | {"published": published, "run": run.as_dict()}
            for step, published, run in zip(STEPS, PUBLISHED, self.runs, strict=True)
        ]
        tokens, most = sum(len(one.tokens) for one in self.requests), self.runs[-1].result.whole.endless_hit_rate
        ranks = {"ranks": self.ranks, "hits": self.served.hits}
        ranks |= {"drafted": self.served.drafted, "accepted": self.served.accepted}
        return {
            "requests": len(self.requests),
            "prompt_tokens": tokens,
            "steps": steps,
            "endless_hit_rate": most,
            "published_most": PUBLISHED_MOST,
            "served": ranks,
            "block_tables": [asdict(table) for table in self.tables],
            "faults": list(self.faults),
        }


def incident(
    ranks: Annotated[int, typer.Option(help="Ranks: 4 or 8. A block of latents covers so many times its tokens.")] = 4,
    html: opt.Html = None,
    as_json: opt.AsJson = False,
) -> None:
    """Re-enact the incident that this project began with: a prefix cache that found nothing, and what mended it.

    A server splits the attention entries of a long conversation over several GPUs (*decode context parallelism*,
    DCP), but not the recurrent states of a hybrid model. Where one size of blocks is taken for both, nothing that was
    computed is found again. docs/incident.md tells the story from its beginning.

    Conversations with shared instructions and branches are answered by a tiny random Kimi-K3 and then go through the
    cache's bookkeeping under four rules, each better than the one before. The last one is Headway's, and is also
    served for real: a process for each rank, a DSpark drafter, and answers that must equal those of transformers in one
    process without a cache, token for token. No times are measured. It takes about two minutes on two cores.

        headway incident

        headway incident --ranks 8 --html incident.html

    Exits 1 if a step does not hold: tokens or hits that differ, or a rule that reuses no more than the one before.
    """
    if ranks not in RANKS:
        raise ConfigError(f"--ranks {ranks}: use {' or '.join(map(str, RANKS))}")
    if html is not None:
        require_report(html)
    story = _told(ranks)
    if html is not None:
        write_report(compare(story.runs, labels=[step.name for step in STEPS]), html)
        Console(stderr=True).print(f"the report is in {html}", highlight=False)
    if as_json:
        typer.echo(json.dumps(story.as_dict(), indent=2))
    else:
        show(story, Console())
    if story.faults:
        raise typer.Exit(1)


def _told(ranks: int) -> Story:
    console, count = Console(stderr=True), len(turns())

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, style="dim")

    with tempfile.TemporaryDirectory(prefix="headway-incident-") as folder:
        model = Path(folder) / "tiny-k3"
        say("writing a tiny random Kimi-K3 and its drafter")
        write_model(model, ranks)
        with counting("answered by one process without a cache", count, "requests", console) as tell:
            requests = answered_by_one(model, tell)
        with counting(f"served by {ranks} ranks", count, "requests", console) as tell:
            served = served_by_ranks(model, ranks, requests, say, tell)
    say("running the four rules")
    trace = recorded(requests)
    runs = run_steps(trace, served.groups, ranks)
    faults = [*what_fails(runs), *_differences(requests, served, hits_of(trace, served.groups, ranks))]
    return Story(ranks, requests, served, runs, _tables(trace, requests, served, ranks), faults)


def _differences(requests: Sequence[Request], served: Served, hits: Sequence[int]) -> list[str]:
    """Where the ranks did something else than one rank, or than the bookkeeping alone."""
    found = []
    for one, answer, hit, expected in zip(requests, served.answers, served.hits, hits, strict=True):
        if answer.tolist() != one.answer.tolist():
            found.append(f"request {one.name}: the ranks answered {answer.tolist()}, one process {one.answer.tolist()}")
        if hit != expected:
            found.append(f"request {one.name}: the ranks reused {hit} tokens, the bookkeeping alone {expected}")
    return found


def _tables(trace: Trace, requests: Sequence[Request], served: Served, ranks: int) -> list[Table]:
    number = next(i for i, one in enumerate(requests) if one.name == _DRAWN)
    hit = found_by(trace, configuration(STEPS[-1], served.groups, ranks), number)
    return [*tables_of(hit, ranks), two_sizes(ranks, len(requests[number].tokens))]


def show(story: Story, console: Console) -> None:
    """Print the story: each step with its waterfall, rates beside those published, block tables, the verdict."""

    def write(*lines: str, style: str | None = None) -> None:
        for line in lines:
            console.print(line, markup=False, highlight=False, style=style)

    tokens = sum(len(one.tokens) for one in story.requests)
    write(
        f"{len(story.requests)} requests, {tokens:,} prompt tokens, {story.ranks} ranks. A token here stands for "
        f"{SCALE} of Kimi-K3's: in steps 1 to 3 a block has {BLOCK} tokens on a rank, and a block of latents covers "
        f"{BLOCK * story.ranks} over all ranks.",
        "",
    )
    for number, (step, run) in enumerate(zip(STEPS, story.runs, strict=True), 1):
        write(f"Step {number}: {step.name}", style="bold")
        write(step.why)
        console.print(rich_waterfall(facts_of(run)))
    console.print(rich_table(_rates(story)))
    write(
        f"Request {_DRAWN}, in step {len(STEPS)}, rank by rank. An id means the same block on every rank.", style="bold"
    )
    for table in story.tables:
        console.print(rich_table(table))
    for fault in story.faults:
        write(fault, style="bold red")
    if not story.faults:
        write(
            f"All steps hold. {story.ranks} ranks answered every request with the tokens of one process that computed "
            f"all of it. They reused {sum(story.served.hits):,} tokens, as the bookkeeping alone says for step "
            f"{len(STEPS)}. {story.served.accepted} of {story.served.drafted} drafted tokens were accepted: the "
            f"drafter is random.",
            style="bold green",
        )


def _rates(story: Story) -> Table:
    rows = [
        (f"{number}. {step.name}", f"{run.result.whole.token_hit_rate:.2%}", f"{published:.2%}" if published else "")
        for number, (step, published, run) in enumerate(zip(STEPS, PUBLISHED, story.runs, strict=True), 1)
    ]
    most = f"{story.runs[-1].result.whole.endless_hit_rate:.2%}"
    rows.append(("the most that could be reused", most, f"{PUBLISHED_MOST:.2%}"))
    return Table(
        "Prompt tokens reused",
        ("rule", "here", "published"),
        rows,
        note="published: vllm#53598, other traffic; compare the order of the steps, not the figures",
    )
