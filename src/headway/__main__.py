"""`python -m headway`, for where the script `headway` is not on the path."""

from headway.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
