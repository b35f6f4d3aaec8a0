"""What is known and kept: the tree, its checkpoints and blocks, reclaiming, hits and explanations."""

__all__: list[str] = []
