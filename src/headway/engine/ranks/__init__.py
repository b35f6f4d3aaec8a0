"""Who computes the steps: this process, processes, or Ray actors, and what the driver says to them."""

__all__: list[str] = []
