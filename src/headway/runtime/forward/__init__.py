"""One step of a model on one rank: blocks of memory, block tables, forwards, and tokens from logits."""

__all__: list[str] = []
