"""Write a tiny random Kimi-K3 in the published form, with the tokenizer of the built-in model, to serve and to try.

python tools/tiny_kimi_k3.py FOLDER [--seed 0]
headway serve FOLDER
"""

import argparse
from pathlib import Path

from headway.models.kimi_k3.tiny import write_tiny, write_tiny_draft
from headway.runtime.sources import resolve_source


def main() -> None:
    """Read the arguments and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write it; it is made")
    parser.add_argument("--seed", type=int, default=0, help="seed of its weights: the same one makes the same bytes")
    options = parser.parse_args()
    write_tiny(options.folder, Path(resolve_source(None)[1]), options.seed)
    write_tiny_draft(options.folder / "draft", options.seed)


if __name__ == "__main__":
    main()
