"""What users ask: options, models and hardware to runs, grids of runs, advice, one request explained."""

__all__: list[str] = []
