"""Other APIs than chat: each is translated to a chat at the edge, and the answer to that chat back."""

__all__: list[str] = []
