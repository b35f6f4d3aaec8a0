"""The live page: one file of HTML, style and script, and the headers that it is served with.

It holds no data and asks for all of it, so it may be shown to anyone; who needs a key gives it to the page. It runs
nothing but its own script and style, which the policy names by their digests, and talks to its own server alone. What
the server tells is put into the page as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

__all__ = ["live_page"]


@cache
def live_page() -> tuple[str, dict[str, str]]:
    """The page, and the headers of its response. It asks for `v1/headway/live` beside its own path."""
    text = (Path(__file__).parent / "templates" / "live.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_digest('script', text)}; style-src {_digest('style', text)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
        "X-Content-Type-Options": "nosniff",
    }


def _digest(tag: str, text: str) -> str:
    """The source expression of what stands in the only element of a name."""
    (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
