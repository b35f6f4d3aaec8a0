"""What things look like: specs, layouts, geometry, prompts and symbols."""

__all__: list[str] = []
