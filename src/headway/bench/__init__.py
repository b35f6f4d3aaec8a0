"""Speed of the cache's bookkeeping, measured: `headway bench`."""

__all__: list[str] = []
