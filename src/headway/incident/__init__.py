"""The incident that this project began with, re-enacted: `headway incident`, explained in `docs/incident.md`.

Conversations are recorded once (`sessions`) and then go through the bookkeeping of caches under four rules (`steps`).
The last rule is also served by real ranks, a process each, with a tiny Kimi-K3 and its drafter (`ranks`).
"""

__all__: list[str] = []
