"""The repository keeps its own rules: small files, short functions, nothing of the machine it grew on."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
FILE_LINES = 400
FUNCTION_LINES = 60
TEXT = {"", ".cfg", ".html", ".json", ".jsonl", ".md", ".py", ".svg", ".toml", ".txt", ".yaml", ".yml"}
PLACES = (".ci", "benchmarks", "docs", "src", "tests", "tools", "training")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function from its name to its end, without its docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function) is not None
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def text_files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT)
    for place in PLACES:
        for path in (ROOT / place).rglob("*"):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {function.name: code_lines(function) for function in functions}
    assert {name: lines for name, lines in long.items() if lines > FUNCTION_LINES} == {}


def test_no_path_of_the_machine() -> None:
    """No file names this checkout's own place, a home directory, or an address inside a private network."""
    places = [re.escape(str(path)) for path in (ROOT, Path.home()) if len(str(path)) > len("/app")]
    homes = r"/(?:home|Users)/(?!USER\b|you\b)[\w.-]+"
    private = r"\b(?:10\.\d+|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d+\.\d+\b"
    pattern = re.compile(rf"(?<![\w.~-])(?:{'|'.join(places)}|{homes})(?![\w-])|{private}")
    found = {
        name_of(path): match.group()
        for path in text_files()
        if (match := pattern.search(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert found == {}


def test_the_cache_imports_nothing_above_it() -> None:
    """`headway.cache` uses numpy, the standard library, `headway.errors` and itself."""
    allowed = sys.stdlib_module_names | {"numpy"}
    foreign = {
        f"{name_of(path)}: {module}"
        for path in sorted((ROOT / "src" / "headway" / "cache").rglob("*.py"))
        for module in imported_modules(path)
        if module.partition(".")[0] not in allowed and not re.match(r"headway\.(cache|errors)\b", module)
    }
    assert foreign == set()


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
