"""Ranks that share one model: how they talk, how weights and states are cut, how attention is merged."""

__all__: list[str] = []
