"""Models that transformers lacks, in its own form: a configuration, layers, and names of published weights."""

__all__: list[str] = []
