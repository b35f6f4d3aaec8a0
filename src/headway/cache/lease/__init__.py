"""What runs: the table of leases, and how they are opened, extended, committed and ended."""

__all__: list[str] = []
