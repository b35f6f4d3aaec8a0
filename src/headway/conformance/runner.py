"""Runs scenarios against the cache and says which answers were wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from headway.cache import Explanation
from headway.conformance.engine import Exhausted, Request, ToyEngine
from headway.conformance.form import Expectation, Scenario, StepForm
from headway.conformance.report import Failure, Report
from headway.conformance.world import configuration
from headway.errors import ConfigError, LeaseError, ScenarioError, UnservableError

__all__ = ["run"]


def run(scenario: Scenario) -> Report:
    """Run one scenario.

    Raises:
        ScenarioError: The scenario cannot be run as written: it steps a request that is not running, say.
    """
    report = Report(scenario.name, scenario.why)
    expect = scenario.expect or Expectation()
    try:
        config = configuration(scenario.world, f"scenario {scenario.name!r}")
        engine = ToyEngine.build(config, scenario.max_batched_tokens)
    except ConfigError as error:
        if expect.error != "config":
            report.failures.append(Failure("configuration", "error", "none", f"config ({error})"))
        return report
    if expect.error:
        report.failures.append(Failure("configuration", "error", expect.error, "none"))
    play = _Play(engine, report, f"scenario {scenario.name!r}")
    if scenario.expect:
        play.judge("configuration", scenario.expect, None)
    for step in scenario.steps:
        try:
            if not play.do(step):
                break
        except LeaseError as error:
            raise ScenarioError(f"scenario {scenario.name!r}: {step.label}: {error}") from error
    return report


class _Play:
    """One scenario being played: does steps, compares, notes failures."""

    def __init__(self, engine: ToyEngine, report: Report, where: str) -> None:
        self.engine = engine
        self.report = report
        self.where = where
        self.events: Counter[str] = Counter()
        engine.cache.subscribe(lambda event: self.events.update([type(event).__name__]))

    def do(self, step: StepForm) -> bool:
        """Do one step and compare. False where it ended in an unexpected error, so that nothing can follow."""
        self._require_running(step)
        expect = step.expect or Expectation()
        error, words = "", ""
        try:
            self._act(step)
        except UnservableError as refusal:
            error, words = "unservable", str(refusal)
        except Exhausted as refusal:
            error, words = "exhausted", str(refusal)
        if step.verb in ("step", "begin") and not self.engine.granted:
            error, words = "exhausted", "the step was granted nothing"
        if error != expect.error:
            self._note(step.label, "error", expect.error or "none", f"{error} ({words})" if error else "none")
            if error:
                return False
        request = self.engine.requests.get(step.names[0]) if step.names else None
        self.judge(step.label, expect, request)
        return True

    def _act(self, step: StepForm) -> None:
        engine, names = self.engine, step.names
        match step.verb:
            case "run" | "start":
                assert step.request is not None
                engine.start(step.request)
                if step.verb == "run":
                    engine.finish(names[0])
            case "resume":
                engine.resume(names[0])
            case "begin":
                engine.begin(names, step.tokens, step.drafts)
            case "step":
                engine.begin(names, step.tokens, step.drafts)
                if engine.granted:
                    engine.commit(names, step.accepted)
            case "commit":
                engine.commit(names, step.accepted)
            case "fail_step":
                engine.fail(names)
            case "finish":
                engine.finish(names[0])
            case "preempt":
                engine.preempt(names[0])
            case "abort":
                engine.abort(names[0])
            case "reset":
                engine.cache.reset()
            case "wait":
                engine.clock.now += step.seconds
            case _:
                assert not step.verb

    def _require_running(self, step: StepForm) -> None:
        """Refuse a scenario that acts on requests in an impossible order."""
        for name in step.names:
            known = self.engine.requests.get(name)
            running = known is not None and known.lease is not None
            if step.verb in ("run", "start") and running:
                raise ScenarioError(f"{self.where}: {step.label}: request {name!r} is already running")
            if step.verb == "resume" and (known is None or running):
                raise ScenarioError(f"{self.where}: {step.label}: request {name!r} was not preempted")
            if step.verb not in ("run", "start", "resume") and not running:
                raise ScenarioError(f"{self.where}: {step.label}: request {name!r} is not running")
        if step.verb == "commit" and not self.engine.under_way(step.names):
            raise ScenarioError(f"{self.where}: {step.label}: `begin` names no step of just these requests before it")

    def judge(self, label: str, expect: Expectation, request: Request | None) -> None:
        """Compare every expectation with what the cache says now."""
        for key, bounds in expect.ranges.items():
            self._within(label, key, bounds, self._figure(key, request))
        explanation = request.explanation if request else None
        if expect.reasons or expect.losses:
            self._judge_losses(label, expect, _losses(explanation))
        for line, bounds in expect.waterfall.items():
            self._within(label, f"waterfall.{line}", bounds, self._waterfall().get(line, 0))
        for kind, bounds in expect.events.items():
            self._within(label, f"events.{kind}", bounds, self.events[kind])
        for group, figures in expect.geometry.items():
            self._judge_group(label, group, figures, request)

    def _figure(self, key: str, request: Request | None) -> int:
        stats = self.engine.cache.stats()
        pool = {
            "leases": stats.leases,
            "free_blocks": stats.free,
            "held_blocks": stats.leased,
            "reusable_blocks": stats.free + stats.evictable,
            "granted": self.engine.granted,
            "copies": self.engine.copies,
        }
        if key in pool:
            return pool[key]
        assert request is not None
        if key == "computed":
            return request.running.computed
        assert request.hit is not None
        return request.hit.tokens if key == "hit" else request.hit.matched

    def _waterfall(self) -> dict[str, int]:
        waterfall = self.engine.cache.waterfall
        lost = {reason.name: tokens for reason, tokens in waterfall.lost.items()}
        return {"reused": waterfall.reused, "prompt_tokens": waterfall.prompt_tokens, **lost}

    def _judge_losses(self, label: str, expect: Expectation, losses: Mapping[str, int]) -> None:
        for reason in expect.reasons:
            if reason not in losses:
                self._note(label, "reasons", f"{reason} among them", ", ".join(sorted(losses)) or "none")
        for reason, bounds in expect.losses.items():
            self._within(label, f"losses.{reason}", bounds, losses.get(reason, 0))

    def _judge_group(self, label: str, name: str, figures: Mapping[str, Any], request: Request | None) -> None:
        groups = {group.spec.name: group for group in self.engine.cache.geometry.groups}
        if name not in groups:
            raise ScenarioError(f"{self.where}: {label}: no group is called {name!r}")
        table = groups[name].table
        for figure, expected in figures.items():
            if figure == "columns":
                actual, expected = table.blocks_for(expected.tokens), expected.blocks
            elif figure == "blocks":
                actual = request.ids[table.index] if request else 0
            elif figure == "position":
                actual = request.hit.tokens if request and request.hit else 0
            else:
                actual = getattr(table, figure)
            self._within(label, f"geometry.{name}.{figure}", (expected, expected), actual)

    def _within(self, label: str, key: str, bounds: tuple[int, int], actual: int) -> None:
        low, high = bounds
        if not low <= actual <= high:
            self._note(label, key, str(low) if low == high else f"{low} to {high}", str(actual))

    def _note(self, label: str, key: str, expected: str, actual: str) -> None:
        self.report.failures.append(Failure(label, key, expected, actual))


def _losses(explanation: Explanation | None) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for loss in explanation.losses if explanation else ():
        sums[loss.reason.name] += loss.stop - loss.start
    return dict(sums)
