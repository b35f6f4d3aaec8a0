"""Which requests compute which tokens next, on which memory: plain Python and the prefix cache, without torch."""

__all__: list[str] = []
