"""`headway lint`: what in the prompts of a log keeps known text from being reused. For people and for CI."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.console import Console

from headway.cache import FullAttention
from headway.errors import ConfigError
from headway.formats import Trace
from headway.formats.chat import ChatEntry
from headway.option_records import with_records
from headway.progress import lasting
from headway.replay.ask import options as opt
from headway.replay.ask.prompt_faults import ChatLog, TokenLog, find_faults
from headway.replay.ask.rendering import renderer_of
from headway.replay.ask.setting import Setting
from headway.replay.config import ReplayConfig
from headway.replay.replay import replay_trace
from headway.sizes import counted
from headway.tell.prompt_faults import PromptFault, on_faults
from headway.tell.run import Figures

__all__ = ["faults_of", "lint"]


@with_records
def lint(
    source: opt.TraceChoice,
    model: opt.ModelChoice,
    ranks: opt.RankChoice,
    hardware: opt.Hardware,
    policy: opt.PolicyChoice,
    least: Annotated[
        float, typer.Option("--least", help="Percent of the prompt tokens that mending must save to be a fault.")
    ] = 1.0,
    as_json: opt.AsJson = False,
) -> None:
    """Find what in the prompts of a log keeps known text from being reused, where it is, and what mending it would win.

    For example:

        headway lint log.jsonl --tokenizer ./model

        headway lint log.jsonl --tokenizer ./model --model qwen3-next --memory 20GB

    A clock, a request id or a name near the beginning of a prompt, tools in another order, or old messages that are
    cut: what stands behind is the same text as before, and no cache can reuse it. The log is written anew without the
    fault and replayed, so each gain is that of the replay. Without a model it is that of an endless memory.

    It takes logs of chats and recordings of tokens. The exit code is 1 if something was found, else 0, and 2 for wrong
    options or files.
    """
    if source.trace is None:
        raise ConfigError("which log? Name a file of chats, or a recording of tokens")
    source.require()
    config = ReplayConfig((FullAttention("attention", 1),), None, outputs=source.outputs)
    if model.model or model.by_hand:
        config, _ = Setting(model, ranks, hardware, policy, outputs=source.outputs).configure()
    elif hardware != opt.Hardware() or ranks != opt.RankChoice() or policy != opt.PolicyChoice():
        raise ConfigError("memory, layout and policies need a model: give --model, or leave them out")
    entries: list[ChatEntry] = []
    trace = source.load(entries)
    if trace.width > 1:
        raise ConfigError(
            f"{source.trace}: hashes of blocks do not show what changed in front of known text; give a log of chats "
            f"(with --tokenizer), or a recording of tokens (headway serve --record-form tokens)"
        )
    found = [fault for fault in faults_of(trace, entries, source.tokenizer, config) if 100 * fault.gain >= least]
    if as_json:
        typer.echo(json.dumps([asdict(fault) for fault in found], indent=2))
    else:
        console = Console()
        nothing = f"{counted(len(trace), 'request')}: nothing was found that changes in front of known text."
        for text in on_faults(found) or [nothing]:
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    sys.exit(1 if found else 0)


def faults_of(
    trace: Trace, entries: Sequence[ChatEntry], tokenizer: str | None, config: ReplayConfig
) -> list[PromptFault]:
    """What in the prompts of a trace keeps known text from being reused, priced under a configuration.

    Args:
        trace: The trace; one of blocks has no faults that could be seen.
        entries: Its requests in the order of the file, if it is a log of chats.
        tokenizer: Name of the tokenizer that it was read with.
        config: What it is replayed against; its clock is not used.
    """
    if trace.width > 1:
        return []
    plain = replace(config, timing=None)

    def run(rewritten: Trace) -> Figures:
        return replay_trace(rewritten, plain).whole

    with lasting("looking for what changes in front of known text"):
        if trace.format != "chat":
            return find_faults(TokenLog(trace), run)
        log = ChatLog(trace, [entries[i] for i in trace.ordinals.tolist()], renderer_of(tokenizer or ""))
        return find_faults(log, run)
