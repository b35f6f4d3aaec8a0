"""What is known and kept: the tree, its checkpoints and blocks, reclaiming, hits and explanations."""
