"""The built-in model of Headway, as files: weights, configuration, tokenizer, and two drafters in `drafts/`.

Headway finds the folder of this package by its name. There is nothing to import from it.
"""

__all__: list[str] = []
