"""What things look like: specs, layouts, geometry, prompts and symbols."""
