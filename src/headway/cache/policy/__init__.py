"""Who decides: placement, eviction, and what was learned of reuse."""

__all__: list[str] = []
