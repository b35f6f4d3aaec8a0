"""The story of a request reads well, however long it is."""

from dataclasses import replace

from headway.tell.prompt_text import Change, Place
from headway.tell.run import Stretch
from headway.tell.story import Eviction, Mark, PlacedLoss, Story, story_lines

STORY = Story(
    request=7,
    time=12.5,
    prompt_tokens=1000,
    answer_tokens=20,
    hit_tokens=400,
    endless_tokens=900,
    resumed_from="junction",
    stretches=[Stretch(0, 400, 3, 0, 5), Stretch(400, 900, 1, 5, 5), Stretch(900, 1000, 0, -1, -1)],
    marks=[
        Mark(400, "checkpoint", "junction", 2),
        Mark(700, "gone", "prompt_end", 0, 3.25, "evicted"),
        Mark(900, "resident"),
        Mark(900, "known"),
        Mark(1000, "taken", "prompt_end"),
    ],
    lost={"parted": 100, "evicted": 500},
    evictions=[Eviction(400, 900, 1700, "prompt_end", "evicted", 3.25), Eviction(0, 9, 9, "path", "evicted", 1.0)],
    evicted={"answer_end": 2},
    losses=[
        PlacedLoss("evicted", 400, 900, Place(0, "system", "You are ", "a\nclerk")),
        PlacedLoss("parted", 900, 1000, Place()),
    ],
    changed=Change(900, 905, 60, Place(1, "user"), "08:31"),
)


def lines(story: Story) -> list[str]:
    return [line.strip() for line in story_lines(story, "t.jsonl")]


def test_a_story() -> None:
    assert [line for line in lines(STORY) if line] == [
        "Request 7 of t.jsonl: 1,000 prompt tokens, 20 of answer, arrives at 12.5 s",
        "400 tokens are reused (40%) from a junction checkpoint; an endless memory would reuse 900",
        "Who was here before",
        "[0, 400)              3 requests, from 0 to 5",
        "[400, 900)            request 5",
        "[900, 1,000)          new: nobody",
        "What is on its path",
        "400  checkpoint (junction), wanted 2 times so far  <- it resumes here",
        "700  a checkpoint (prompt_end) was here; evicted 3.2 s before",
        "900  attention is kept up to here",
        "900  the cache knows the path up to here",
        "1,000  this request leaves a checkpoint (prompt_end)",
        "What is lost",
        "500  evicted: was kept, and had to make room; give more memory, split the attention over more ranks (--dcp), "
        "or make states smaller",
        "100  parted: earlier prompts go on differently from here",
        "[400, 900) evicted: the prompt_end checkpoint at 1,700 was evicted 3.2 s ago",
        "[0, 9) evicted: the path was evicted 1.0 s ago",
        "[400, 900) evicted at message 0 (system): `You are |a\\nclerk`",
        "changed at token 900, message 1 (user), `08:31`; 60 tokens behind it are the same as before: if what changes "
        "stood behind them, or not at all, they could be reused",
        "To make room for it, these checkpoints were evicted elsewhere or here: 2 answer_end",
    ]


def test_a_long_path_is_shortened_in_its_middle() -> None:
    marks = [Mark(10 * i, "checkpoint", "junction", 1) for i in range(1, 101)]
    told = lines(replace(STORY, marks=marks, hit_tokens=0, resumed_from=""))
    assert "10  checkpoint (junction), wanted once so far" in told
    assert "1,000  checkpoint (junction), wanted once so far" in told
    assert "... 60 more ..." in told
    assert sum("checkpoint (junction)" in line for line in told) == 40


def test_nothing_known() -> None:
    told = lines(replace(STORY, marks=[], hit_tokens=0, resumed_from="", evicted={}))
    assert "nothing: the cache knows no prompt that begins like this" in told
    assert "0 tokens are reused (0%); an endless memory would reuse 900" in told
    assert not any(line.startswith("To make room") for line in told)
