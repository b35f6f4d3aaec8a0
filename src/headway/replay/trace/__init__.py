"""What a trace says before any cache is run on it, and traces made up from a seed."""

__all__: list[str] = []
