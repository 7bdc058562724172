"""Laws of reading and writing configurations, over a toy one that holds every kind of value."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from codmd.errors import UserError
from codmd.schema import check_number, diff, flatten, from_mapping, to_toml


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    pair: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        check_number("rate", self.rate, above=0)


@dataclass(frozen=True, kw_only=True)
class Outer:
    title: str
    count: int = 1
    flag: bool = False
    kind: Literal["one", "two"] = "one"
    times: tuple[float, ...] = ()
    limit: int | None = None
    inner: Inner = Inner()


finite = st.floats(allow_nan=False, allow_infinity=False)
inners = st.builds(
    Inner,
    rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    pair=st.tuples(finite, finite),
)
outers = st.builds(
    Outer,
    title=st.text(st.characters(codec="utf-8")),
    count=st.integers(-(2**63), 2**63 - 1),
    flag=st.booleans(),
    kind=st.sampled_from(["one", "two"]),
    times=st.lists(finite).map(tuple),
    limit=st.none() | st.integers(),
    inner=inners,
)
values: dict[type, Any] = {
    int: st.integers(),
    float: finite,
    bool: st.booleans(),
    str: st.text(),
    list: st.lists(st.integers(), min_size=3, max_size=3),
    dict: st.just({"a": 1}),
}
accepted = {"title": {str}, "count": {int}, "flag": {bool}, "kind": set(), "limit": {int}, "times": {list}}


@given(outers)
def test_what_is_written_reads_back_equal(config: Outer) -> None:
    again = from_mapping(Outer, tomllib.loads(to_toml(config)), "f.toml")
    assert again == config
    assert to_toml(again) == to_toml(config)


@given(outers, outers)
def test_diff_lists_exactly_the_keys_that_differ(one: Outer, two: Outer) -> None:
    assert diff(one, one) == ()
    a, b = dict(flatten(one)), dict(flatten(two))
    assert {d.key for d in diff(one, two)} == {key for key in a if a[key] != b[key]}
    changed = replace(one, inner=replace(one.inner, rate=one.inner.rate + 1))
    assume(changed != one)
    assert [d.key for d in diff(one, changed)] == ["inner.rate"]


@pytest.mark.parametrize("key", [f.name for f in fields(Outer) if f.name != "inner"])
@given(st.data())
def test_a_wrong_type_is_named_with_its_place(key: str, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([k for k in values if k not in accepted[key]]))
    value = data.draw(values[kind])
    assume(value not in ("one", "two"))
    with pytest.raises(UserError) as error:
        from_mapping(Outer, {"title": "t", key: value}, "f.toml")
    assert str(error.value).startswith(f"f.toml: {key}: expected ")
    assert len(str(error.value).splitlines()) == 1


@given(st.integers(-(2**53), 2**53))
def test_an_integer_is_taken_for_a_number_and_becomes_one(n: int) -> None:
    got = from_mapping(Outer, {"title": "t", "times": [n]}, "f.toml").times[0]
    assert type(got) is float and got == n


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "true", "1" + "0" * 400, '"1"'])
def test_only_finite_numbers_are_numbers(text: str) -> None:
    mapping = tomllib.loads(f'title = "t"\n[inner]\nrate = {text}')
    with pytest.raises(UserError, match=r"^f\.toml: \[inner\] rate: expected a finite number, got "):
        from_mapping(Outer, mapping, "f.toml")
    with pytest.raises(UserError):
        check_number("rate", float("nan"))


@given(st.sampled_from([f.name for f in fields(Outer)]), st.data())
def test_a_mistyped_key_is_answered_with_the_right_one(key: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(key) - 1))
    typed = key[:at] + data.draw(st.sampled_from("xqz_")) + key[at:]
    with pytest.raises(UserError, match=rf'^f\.toml: {typed}: unknown key, did you mean "{key}"\?$'):
        from_mapping(Outer, {"title": "t", typed: 1}, "f.toml")


def test_a_key_of_another_section_is_sent_there() -> None:
    with pytest.raises(UserError, match=r'rate: unknown key, did you mean "inner\.rate"\?'):
        from_mapping(Outer, {"title": "t", "rate": 1.0}, "f.toml")


def test_what_a_section_refuses_is_named_with_the_section() -> None:
    with pytest.raises(UserError, match=r"^f\.toml: \[inner\] rate: expected a finite number above 0, got -1\.0$"):
        from_mapping(Outer, {"title": "t", "inner": {"rate": -1}}, "f.toml")
    with pytest.raises(UserError, match=r"^--set inner\.rate=-1: expected"):
        origins = {"inner.rate": "--set inner.rate=-1"}
        from_mapping(Outer, {"title": "t", "inner": {"rate": -1}}, "f.toml", origins=origins)


def test_what_is_missing_is_named_with_what_was_expected() -> None:
    with pytest.raises(UserError, match=r"^f\.toml: title: missing, expected a string$"):
        from_mapping(Outer, {}, "f.toml")
    with pytest.raises(UserError, match=r"^f\.toml: inner: expected a section, got 3$"):
        from_mapping(Outer, {"title": "t", "inner": 3}, "f.toml")
    with pytest.raises(UserError, match=r"pair: expected a list of 2 numbers, got \[1\]$"):
        from_mapping(Outer, {"title": "t", "inner": {"pair": [1]}}, "f.toml")
