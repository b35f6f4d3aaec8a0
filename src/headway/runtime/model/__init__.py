"""What a model stores and attends to, read off the model itself, and how much memory that takes."""

__all__: list[str] = []
