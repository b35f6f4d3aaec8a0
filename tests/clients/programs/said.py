"""What the programs of all clients know: where the server is, and how to say what came back."""

import json
import os
from typing import Any

BASE_URL = os.environ["HEADWAY_URL"]  # such as http://127.0.0.1:8000/v1
KEY = "none"
MODEL = os.environ["HEADWAY_MODEL"]
FOLDER = os.environ["HEADWAY_FOLDER"]  # where the program may write
TOKENIZER = os.environ["HEADWAY_TOKENIZER"]  # a folder with the model's config and tokenizer

RULES = "You are a patient librarian. " + "Look things up before you answer, and never invent the title of a book. " * 6


def say(step: str, came: Any) -> None:
    """Say what came back in a step, for the table."""
    text = came if isinstance(came, str) else json.dumps(came, ensure_ascii=False, default=str)
    print("step " + json.dumps([step, text[:200]]), flush=True)
