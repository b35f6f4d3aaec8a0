"""Check that no modules of `src/headway` import each other in a circle, and what the cache imports from outside.

Run by `make lint`. A circle of any length counts, and so do imports for types only and imports inside functions: who
reads one module of a circle has to read them all. import-linter checks which package may import which (pyproject.toml).
"""

import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import grimp

CACHE = "headway.cache"
ALLOWED = sys.stdlib_module_names | {"numpy"}


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Return one circle of modules, each imported by the one before it, or an empty list."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]
    return []


def foreign_imports(imports: dict[str, set[str]]) -> Iterator[str]:
    """Find what modules of the cache import beside numpy, the standard library and `headway`."""
    for module, imported in sorted(imports.items()):
        if module == CACHE or module.startswith(f"{CACHE}."):
            names = {name.partition(".")[0] for name in imported} - ALLOWED - {"headway"}
            yield from (f"{module} imports {name}: the cache needs numpy alone" for name in sorted(names))


def main() -> int:
    graph = grimp.build_graph("headway", include_external_packages=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    faults = list(foreign_imports(imports))
    if ring := circle(imports):
        faults.append("these modules import each other in a circle: " + " -> ".join(ring))
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
