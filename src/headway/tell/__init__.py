"""What is told of runs: the facts as data, and their rendering on a terminal, as a page, as JSON and as advice.

run, latency        the record of a finished run
reasons             lines of the waterfall: names, meanings, remedies
facts               what there is to say of one run
comparison, labels  several runs side by side, and names for them
sentences, tables   facts in words, and as tables of text
terminal, page      where these are shown; `drawings` are the page's figures
advice, engines     what to set, and how each engine is told
lower               what lower tiers of memory bring
story               one request's way through the cache
"""

from headway.tell.comparison import Comparison, compare
from headway.tell.facts import RunFacts, facts_of, with_facts
from headway.tell.latency import Latency
from headway.tell.run import Figures, GroupSize, Kind, Memory, ModelName, ReplayResult, RunRecord, read_runs

__all__ = [
    "Comparison",
    "Figures",
    "GroupSize",
    "Kind",
    "Latency",
    "Memory",
    "ModelName",
    "ReplayResult",
    "RunFacts",
    "RunRecord",
    "compare",
    "facts_of",
    "read_runs",
    "with_facts",
]
