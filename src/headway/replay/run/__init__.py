"""Running the cache on a trace, in order, with a clock or knowing the future, and counting what came of it."""

__all__: list[str] = []
