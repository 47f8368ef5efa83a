"""Tests of what is forecast of a task's rounds to come, from the application's tasks before."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.tasks.forecast import WINDOW, Forecast

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=60)


def learned(lengths: list[int]) -> Forecast:
    """A forecast after tasks of so many rounds."""
    forecast = Forecast()
    for length in lengths:
        for number in range(1, length + 1):
            forecast.began(number, None)
    return forecast


def test_with_nothing_learned_no_round_is_expected_to_follow() -> None:
    forecast = Forecast()
    assert forecast.rounds_to_come(1) == forecast.rounds_to_come(7) == 0
    assert forecast.pause_s == 0.0


def test_tasks_of_four_rounds_are_expected_to_have_four() -> None:
    forecast = learned([4] * 30)
    assert [forecast.rounds_to_come(number) for number in (1, 2, 3, 4, 5)] == [3, 2, 1, 0, 0]


@settings(deadline=None)
@given(LENGTHS)
def test_about_half_of_the_tasks_have_more_rounds_than_forecast(lengths: list[int]) -> None:
    """The rule of succession keeps it from exact: by one task for each round that it looks at."""
    coming = learned(lengths).rounds_to_come(1)
    longer = sum(length - 1 > coming for length in lengths)
    assert longer <= len(lengths) / 2 + coming + 1
    if coming:
        assert sum(length - 1 >= coming for length in lengths) >= len(lengths) / 2 - coming - 1


def test_what_is_long_past_is_forgotten() -> None:
    forecast = learned([8] * (WINDOW // 8))
    assert forecast.rounds_to_come(1) == 7
    for _ in range(WINDOW // 2):
        forecast.began(1, None)
        forecast.began(2, None)
    assert forecast.rounds_to_come(1) == 1


def test_the_pause_is_the_median_of_the_newest() -> None:
    rng, forecast = Random(1), Forecast()
    pauses_s = [rng.uniform(1.0, 3.0) for _ in range(WINDOW)]
    for pause_s in (*[1000.0] * WINDOW, *pauses_s):
        forecast.began(2, pause_s)
    assert forecast.pause_s == sorted(pauses_s)[WINDOW // 2]
