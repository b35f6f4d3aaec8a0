"""The engine's options as flags of a command: every flag arrives in its record, and what cannot work is refused."""

from __future__ import annotations

import pytest
from typer import Typer
from typer.testing import CliRunner

from headway.engine import EngineConfig, ParallelConfig
from headway.errors import ConfigError
from headway.option_records import with_records


def made(*arguments: str) -> EngineConfig:
    """The options that a command line gives."""
    found: list[EngineConfig] = []

    def command(config: EngineConfig) -> None:
        """Take options."""
        found.append(config)

    app = Typer(add_completion=False)
    command.__annotations__ = {"config": EngineConfig, "return": None}
    app.command()(with_records(command))
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return found[0]


def test_no_flags_are_the_defaults() -> None:
    assert made() == EngineConfig()


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        (("--memory", "2GiB"), EngineConfig(memory=2 << 30)),
        (("--placement", "prompt_end, interval:64,"), EngineConfig(placement=("prompt_end", "interval:64"))),
        (("--no-prefix-reuse", "--max-running", "3"), EngineConfig(prefix_reuse=False, max_running=3)),
        (("--draft", "lookup", "--draft-tokens", "4"), EngineConfig(draft="lookup", draft_tokens=4)),
        (("--pcp", "2", "--interleave", "8"), EngineConfig(parallel=ParallelConfig(pcp=2, interleave=8))),
        (
            ("--tp", "4", "--dcp", "2", "--dcp-comm", "a2a", "--rank-timeout", "9"),
            EngineConfig(parallel=ParallelConfig(tp=4, dcp=2, communication="a2a", rank_timeout=9.0)),
        ),
    ],
)
def test_flags_arrive(arguments: tuple[str, ...], config: EngineConfig) -> None:
    assert made(*arguments) == config


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--memory", "much"), "'much' is not a size"),
        (("--placement", "now"), "now"),
        (("--eviction", "fifo"), "eviction is 'fifo', it must be one of"),
        (("--max-running", "99", "--max-batched-tokens", "9"), "--max-batched-tokens 9 is less than --max-running 99"),
        (("--tp", "3", "--dcp", "2"), "--dcp 2 does not divide --tp 3"),
        (("--draft-tokens", "3"), "there is none: add --draft"),
        (("--draft-rule", "token"), "there is none: add --draft"),
        (("--interleave", "2"), "--dcp 1, --pcp 1: leave --interleave out"),
        (("--pcp", "0"), "--pcp is 0, it must be at least 1"),
        (("--pcp", "2", "--executor", "local"), "--pcp 2 need 2: use auto, processes or ray"),
        (("--dcp", "2", "--interleave", "3"), "--interleave 3 does not divide --block-tokens 16"),
        (("--draft-rule", "luck"), "--draft-rule is 'luck', it must be one of match, token, block"),
        (("--on-rank-failure", "hope"), "--on-rank-failure is 'hope', it must be restart or exit"),
    ],
)
def test_what_cannot_work_is_refused_by_name(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        made(*arguments)
