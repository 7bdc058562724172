"""Charts: numbers land where they belong, and series differ without colour."""

import re
from itertools import pairwise

import pytest

from codmd.report.charts import axis_start, lines, marker, nice_ticks, radar

SPANS = [(0, 1), (0.41, 0.97), (-0.03, 0.4), (0.5, 0.5), (3, 1234), (0.9001, 0.9003)]


@pytest.mark.parametrize("low, high", SPANS)
def test_ticks_are_round_and_span_the_data(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    steps = {round(b - a, 9) for a, b in pairwise(ticks)}
    assert len(steps) == 1 and ticks[0] <= low + 1e-9 and ticks[-1] >= high - 1e-9
    assert 2 <= len(ticks) <= 8


def test_a_radar_starts_at_zero_unless_all_values_are_large() -> None:
    assert axis_start([0.1, 0.9]) == 0 and axis_start([]) == 0
    assert axis_start([0.65, 0.9]) == 0.6 and axis_start([0.99]) == 0.8


def test_better_lies_farther_out() -> None:
    chart = radar(["a", "b", "c"], {"T": [1.0, 0.5, 0.0]}, "name")
    (path,) = re.findall(r'class="line s0[^"]*" d="M([^"]*)Z"', chart)
    points = [tuple(map(float, p.split())) for p in path.split("L")]
    reach = [((x - 190) ** 2 + (y - 190) ** 2) ** 0.5 for x, y in points]
    assert reach == pytest.approx([106, 53, 0], abs=0.2)
    assert "T, b: 0.500" in chart


def test_higher_lies_higher_and_the_level_is_named() -> None:
    chart = lines({1: [(0, 0.2), (10, 0.8)]}, "name", titles=["Teacher", "DMD"], level=0.9)
    (path,) = re.findall(r'class="line s1" d="M([^"]*)"', chart)
    (x0, y0), (x1, y1) = (tuple(map(float, p.split())) for p in path.split("L"))
    assert x1 > x0 and y1 < y0
    assert "Teacher 0.900" in chart and "DMD, 10: 0.800" in chart


def test_series_differ_without_colour() -> None:
    assert len({re.sub(r"s\d", "", marker(i, 0, 0)) for i in range(4)}) == 4


def test_one_point_or_none_is_no_error() -> None:
    assert "<svg" in lines({1: [(0, 0.5)]}, "name", titles=["T", "D"])
    assert "<svg" in lines({1: []}, "name", titles=["T", "D"], level=0.3)
