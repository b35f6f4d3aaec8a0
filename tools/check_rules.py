"""Check the repository's own rules: small files, short functions, `__all__`, and nothing of the machine it grew on.

Run by `make lint`. Only lines of code count: no blank lines, comments or docstrings. ruff checks docstrings and that
every name in `__all__` exists.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 400
FUNCTION_LINES = 60
TEXT = {"", ".cfg", ".html", ".json", ".jsonl", ".md", ".py", ".svg", ".toml", ".txt", ".yaml", ".yml"}
PLACES = (".ci", "benchmarks", "docs", "packages", "src", "tests", "tools", "training")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_of_code(source: str) -> set[int]:
    """Return the numbers of the lines that hold code."""
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in LAYOUT]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant | ast.JoinedStr):
                lines -= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def size_faults(path: Path, source: str) -> Iterator[str]:
    lines = lines_of_code(source)
    if len(lines) > FILE_LINES:
        yield f"{path}: {len(lines)} lines of code; at most {FILE_LINES}: does the file hold two ideas?"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = sum(node.lineno <= line <= (node.end_lineno or node.lineno) for line in lines)
            if own > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {own} lines of code; at most {FUNCTION_LINES}"


def export_faults(path: Path, source: str) -> Iterator[str]:
    """Find public classes and functions that `__all__` does not name, and names that it has twice."""
    if any(part.startswith("_") and part != "__init__.py" for part in path.parts):
        return
    body = ast.parse(source).body
    named = [ast.literal_eval(value) for target, value in assignments(body) if target == "__all__"]
    if not named:
        yield f"{path}: no __all__"
        return
    defined = [node.name for node in body if isinstance(node, Definition) and not node.name.startswith("_")]
    yield from (f"{path}: {name} is public and not in __all__" for name in defined if name not in named[0])
    yield from (f"{path}: {name} stands in __all__ twice" for name in set(named[0]) if named[0].count(name) > 1)


def assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def text_files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT)
    for place in PLACES:
        for path in (ROOT / place).rglob("*"):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path


def machine_faults() -> Iterator[str]:
    """Find this checkout's own place, home directories, and addresses inside private networks."""
    places = [re.escape(str(path)) for path in (ROOT, Path.home()) if len(str(path)) > len("/app")]
    homes = r"/(?:home|Users)/(?!USER\b|you\b)[\w.-]+"
    private = r"\b(?:10\.\d+|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d+\.\d+\b"
    pattern = re.compile(rf"(?<![\w.~-])(?:{'|'.join([*places, homes])})(?![\w-])|{private}")
    for path in text_files():
        if match := pattern.search(path.read_text(encoding="utf-8", errors="replace")):
            yield f"{path.relative_to(ROOT)}: {match.group()} belongs to one machine"


def main() -> int:
    faults = list(machine_faults())
    for path in sorted((ROOT / "src").rglob("*.py")):
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        faults += [*size_faults(name, source), *export_faults(name, source)]
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
