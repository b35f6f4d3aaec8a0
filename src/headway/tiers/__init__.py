"""Lower tiers of memory: what the device has no room for is kept below it, and comes back as a hit."""
