"""Print the oldest versions that pyproject.toml allows, as pip takes them: `numpy>=2.0` becomes `numpy==2.0.*`.

    python tools/lowest.py [EXTRA ...]    the dependencies of the package, and of these extras

`make test-lowest` installs them, so that the lower bounds are bounds that were tried.
"""

import re
import sys

from site_links import PROJECT


def lowest(requirement: str) -> str:
    """Return the requirement with its lower bound as its version."""
    found = re.fullmatch(r"([\w.\[\]-]+)>=([\d.]+)(,.*)?", requirement)
    if not found:
        raise SystemExit(f"pyproject.toml: {requirement!r} has no lower bound of the form NAME>=VERSION")
    return f"{found[1]}=={found[2]}.*"


def main() -> None:
    extras = [PROJECT["optional-dependencies"][name] for name in sys.argv[1:]]
    print("\n".join(lowest(requirement) for group in (PROJECT["dependencies"], *extras) for requirement in group))


if __name__ == "__main__":
    main()
