"""Conversations: messages and tools as clients send them, as templates get them, and as models write them."""

__all__: list[str] = []
