"""`headway tiers`: look into a disk tier or a shared store, check it, and empty it."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headway.errors import ConfigError
from headway.progress import counting, lasting
from headway.sizes import counted, format_bytes
from headway.tiers.disk import DiskStore
from headway.tiers.objects import parse_name
from headway.tiers.opening import open_store
from headway.tiers.store import Store
from headway.tiers.survey import Fault, Survey, survey, verify

__all__ = ["app", "check", "ls", "purge"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="""Look into a disk tier or a shared store, check it, and empty it.

PLACE is the folder of `headway serve --disk`, or the URL of `--store`. A server may be running meanwhile.""",
)

Place = Annotated[str, typer.Argument(metavar="PLACE", help="A folder, or a URL.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_REMOVED_AT_ONCE = 256


@app.command()
def ls(place: Place, as_json: Json = False) -> None:
    """List what is stored, by model and layout. Salts and prompts cannot be read from outside, so none are shown."""
    store = _open(place)
    try:
        holdings = _seen(place, store).holdings()
    finally:
        store.close()
    if as_json:
        typer.echo(json.dumps([asdict(holding) for holding in holdings]))
        return
    table = Table()
    for title in ("layout", "model", "namespaces", "checkpoints", "bytes", "written"):
        table.add_column(title, justify="left" if title in ("layout", "model") else "right", overflow="fold")
    for h in holdings:
        counts = (f"{count:,}" for count in (h.namespaces, h.checkpoints))
        table.add_row(h.layout[:12], h.label or "?", *counts, format_bytes(h.bytes), _ago(h.modified))
    if holdings:
        Console().print(table)
        if "://" in place:
            typer.echo("a server's budget bounds what it wrote since its start; the store's own limit bounds the rest")
    else:
        typer.echo(f"{_told(place)} holds nothing of Headway")


@app.command()
def check(
    place: Place,
    as_json: Json = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is damaged, and what needs it.")] = False,
) -> None:
    """Read everything and compare it with its checksums.

    Exits 1 if anything is damaged or missing. Objects that no checkpoint names are told, and are no fault: a write
    may be under way.
    """
    store = _open(place)
    try:
        seen = _seen(place, store)
        total = sum(seen.listed[name].length for name, parsed in seen.names.items() if not parsed.what)
        with counting("checking", total, "bytes") as tell:
            faults = verify(store, seen, tell)
        bad = [fault for fault in faults if fault.bad]
        if remove:
            _remove(store, _with_records(seen, bad))
    finally:
        store.close()
    if as_json:
        report = {"checked_bytes": total, "removed": remove, "faults": [asdict(fault) for fault in faults]}
        typer.echo(json.dumps(report))
    else:
        for line in _lines(seen, faults, total, remove):
            typer.echo(line)
    if bad:
        raise typer.Exit(1)


@app.command()
def purge(
    place: Place,
    layout: Annotated[str, typer.Option(help="Only layouts whose digest begins so, as `ls` shows it.")] = "",
    loose: Annotated[bool, typer.Option("--loose", help="Only objects of an hour or more that nothing names.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove what Headway stored; other things at the place stay. Servers that know of it will find it missing."""
    store = _open(place)
    try:
        seen = _seen(place, store)
        names = [name for name in seen.listed if name.startswith(layout) and _ours(seen, name)]
        if loose:
            with counting("looking for what nothing names", max(1, len(names))) as tell:
                old = [f for f in verify(_Unread(store), seen, tell) if f.what == "loose" and (f.seconds or 0) > 3600]
            names = [fault.name for fault in old if fault.name.startswith(layout)]
        size = sum(seen.listed[name].length for name in names)
        told = f"{counted(len(names), 'object')} ({format_bytes(size)}) in {_told(place)}"
        if names and not yes:
            if not sys.stdin.isatty():
                raise ConfigError(f"this would remove {told}: say --yes")
            typer.confirm(f"Remove {told}?", abort=True)
        _remove(store, names)
    finally:
        store.close()
    typer.echo(json.dumps({"removed": len(names), "bytes": size}) if as_json else f"removed {told}")


class _Unread:
    """A store whose objects are not read, for whoever looks at names and records alone."""

    def __init__(self, store: Store) -> None:
        self.names, self.read_small, self.write = store.names, store.read_small, store.write
        self.remove, self.close = store.remove, store.close

    def read(self, name: str, buffer: memoryview) -> int:
        """Nothing."""
        return 0


def _open(place: str) -> Store:
    if "://" in place:
        return open_store(place)[1]
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{place} is no folder: give the one of --disk without its size, or the URL of --store")
    return DiskStore(folder)


def _seen(place: str, store: Store) -> Survey:
    with lasting(f"listing {_told(place)}"):
        return survey(store)


def _told(place: str) -> str:
    """A place without its password and options."""
    scheme, found, rest = place.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}" if found else place


def _ours(seen: Survey, name: str) -> bool:
    layout, _, rest = name.partition("/")
    return name in seen.names or (layout in seen.abouts and rest == "about")


def _with_records(seen: Survey, faults: list[Fault]) -> list[str]:
    """Damaged objects, and the records and objects that stand under the same digests."""
    doomed = {(parsed.folder, parsed.digest) for fault in faults if (parsed := parse_name(fault.name))}
    return [name for name, parsed in seen.names.items() if (parsed.folder, parsed.digest) in doomed]


def _remove(store: Store, names: list[str]) -> None:
    names = sorted(names, key=lambda name: name.count("."))  # records before objects
    with counting("removing", max(1, len(names)), "objects") as tell:
        for start in range(0, len(names), _REMOVED_AT_ONCE):
            store.remove(names[start : start + _REMOVED_AT_ONCE])
            tell(min(len(names), start + _REMOVED_AT_ONCE))


def _lines(seen: Survey, faults: list[Fault], total: int, removed: bool) -> list[str]:
    kinds = {what: [f for f in faults if f.what == what] for what in ("damaged", "missing", "incomplete", "loose")}
    checkpoints = sum(holding.checkpoints for holding in seen.holdings())
    lines = [f"{counted(checkpoints, 'checkpoint')}, {format_bytes(total)} read"]
    lines += [f"{fault.what}: {fault.name}" for fault in faults if fault.bad]
    lines += [f"{len(found):,} {what}" for what, found in kinds.items() if found]
    if removed and any(fault.bad for fault in faults):
        lines.append("what was damaged is removed, with the records that name it")
    elif any(fault.bad for fault in faults):
        lines.append("with --remove, what is damaged is removed, and computed again when it is asked for")
    if any(not fault.bad for fault in faults):
        lines.append("what is loose may belong to a write under way; `headway tiers purge --loose` removes what is old")
    return lines


def _ago(modified: float | None) -> str:
    if modified is None:
        return "?"
    seconds = max(0.0, time.time() - modified)
    if seconds < 100:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 6000 else f"{seconds / 3600:.0f} h ago"
