"""Who decides: placement, eviction, and what was learned of reuse."""
