"""Where interval:N asks for checkpoints when states can be exported on a coarser grid, and what kinds are worth."""

import pytest

from headway.cache.placement import PayRates, Placement


def test_every_multiple_of_the_interval_is_rounded_down_to_the_grid() -> None:
    """Multiples of 7 are 7, 14, 21 ... 49; at or before them on a grid of 4 lie 4, 12, 20, 28, 32, 40 and 48."""
    placement = Placement(("interval:7",), alignment=4, lookahead=0)
    places, position = [], 0
    while (place := placement.next_interval(position)) is not None and place < 50:
        places.append(place)
        position = place
    assert places == [4, 12, 20, 28, 32, 40, 48]


def _pay(**uses: tuple[int, int]) -> PayRates:
    """Rates after so many checkpoints of each kind were taken, and so many requests resumed from them."""
    pay = PayRates()
    for kind, (taken, resumed) in uses.items():
        for _ in range(taken):
            pay.took(kind)
        for _ in range(resumed):
            pay.resumed(kind)
    return pay


def test_a_kind_weighs_what_its_uses_are_to_those_of_prompt_ends() -> None:
    """(uses + 1) / (taken + 2): prompt ends 5/10, answer ends 1/10, junctions 7/10."""
    pay = _pay(prompt_end=(8, 4), answer_end=(8, 0), junction=(8, 6))
    assert pay.weight("prompt_end") == 1
    assert pay.weight("answer_end") == pytest.approx(1 / 5)
    assert pay.weight("junction") == pytest.approx(7 / 5)


def test_a_kind_with_most_uses_on_a_few_checkpoints_does_not_carry_the_others() -> None:
    assert _pay(prompt_end=(8, 4), junction=(8, 1000)).weight("junction") == 2


def test_before_anything_is_known_all_kinds_weigh_the_same() -> None:
    pay = PayRates()
    assert {pay.weight(kind) for kind in ("prompt_end", "answer_end", "junction", "boundary", "interval:64")} == {1}


def test_a_preempted_request_is_sure_to_come_back() -> None:
    assert _pay(prompt_end=(98, 0)).weight("preempt") == 2


def test_old_evidence_fades() -> None:
    """What nobody uses any more is worth half of what it was after `memory` checkpoints, and less and less."""
    pay = PayRates(memory=10)
    for _ in range(10):
        pay.took("junction")
        pay.resumed("junction")
    before = pay.rate("junction")
    for _ in range(12):
        pay.took("junction")
    assert pay.rate("junction") < before / 2
