"""Where interval:N asks for checkpoints when states can be exported on a coarser grid, and what kinds are worth."""

from headway.cache.policy.placement import Placement


def test_every_multiple_of_the_interval_is_rounded_down_to_the_grid() -> None:
    """Multiples of 7 are 7, 14, 21 ... 49; at or before them on a grid of 4 lie 4, 12, 20, 28, 32, 40 and 48."""
    placement = Placement(("interval:7",), alignment=4, lookahead=0)
    places, position = [], 0
    while (place := placement.next_interval(position)) is not None and place < 50:
        places.append(place)
        position = place
    assert places == [4, 12, 20, 28, 32, 40, 48]
