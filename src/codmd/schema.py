"""Plain mappings to frozen dataclasses and back, with errors that name the place and the mend.

A configuration lives with the component it configures, as a frozen dataclass that validates itself.
This module knows none of them: it reads a mapping (from TOML) into any such class, writes it as TOML
that reads back to an equal object, and lists where two differ.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from codmd.errors import UserError

T = TypeVar("T")
NO_ORIGINS: Mapping[str, str] = {}


def show(value: object) -> str:
    """A value as a person would write it in TOML, on one line and not too long."""
    try:
        text = _toml_value(value)
    except TypeError:
        text = str(value)
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, known: Iterable[str]) -> str:
    """`did you mean "…"?`, or the whole list when nothing is near."""
    known = sorted(known)
    close = get_close_matches(word, known, n=1)
    return f'did you mean "{close[0]}"?' if close else f"known: {', '.join(known)}"


# ---- validators, for the dataclasses' own __post_init__ ------------------------------------------


def check(ok: bool, key: str, expected: str, got: object) -> None:
    if not ok:
        raise UserError(f"{key}: expected {expected}, got {show(got)}")


def check_number(
    key: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> None:
    """A finite number within the bounds; NaN and infinity never pass."""
    limits = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    bounds = [f"{word} {limit:g}" for word, limit in limits.items() if limit is not None]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    ok = (
        number
        and math.isfinite(value)
        and (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (below is None or value < below)
        and (at_most is None or value <= at_most)
    )
    check(ok, key, " ".join(["a finite number", " and ".join(bounds)]).strip(), value)


# ---- reading -------------------------------------------------------------------------------------


def from_mapping(
    cls: type[T],
    mapping: Mapping[str, Any],
    where: str,
    *,
    origins: Mapping[str, str] = NO_ORIGINS,
    section: str = "",
) -> T:
    """Reads `mapping` into the dataclass `cls`; every mistake is a UserError that names its place.

    `where` names the file; `origins` names another place for single dotted keys (an override).
    """
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)

    def place(key: str) -> str:
        dotted = f"{section}.{key}" if section else key
        key = key if key.isidentifier() else show(key)
        return origins.get(dotted) or f"{where}: {f'[{section}] ' if section else ''}{key}"

    for key in mapping:
        if key not in known:
            raise UserError(f"{place(key)}: unknown key, {_nearest_key(key, cls)}")

    values: dict[str, Any] = {}
    for name, field in known.items():
        nested = hints[name] if is_dataclass(hints[name]) else None
        if name not in mapping and not _required(field):
            continue
        if nested is not None:
            inner = mapping.get(name, {})
            if not isinstance(inner, Mapping):
                raise UserError(f"{place(name)}: expected a section, got {show(inner)}")
            path = f"{section}.{name}" if section else name
            values[name] = from_mapping(nested, inner, where, origins=origins, section=path)
        elif name not in mapping:
            raise UserError(f"{place(name)}: missing, expected {_describe(hints[name])}")
        else:
            values[name] = _convert(mapping[name], hints[name], place(name))
    try:
        return cls(**values)
    except ValueError as error:
        message = str(error)
        key, colon, rest = message.partition(":")
        if colon and key in known:
            raise UserError(f"{place(key)}:{rest}") from None
        raise UserError(f"{where}: {f'[{section}] ' if section else ''}{message}") from None


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _nearest_key(key: str, cls: type) -> str:
    """The key of this section that is near, or the section below it that has the key."""
    hints = typing.get_type_hints(cls)
    for name, hint in hints.items():
        if is_dataclass(hint) and any(field.name == key for field in fields(hint)):
            return f'did you mean "{name}.{key}"?'
    return nearest(key, hints)


def _convert(value: Any, hint: Any, place: str) -> Any:
    """`value` as the type `hint`: only an integer for a float is taken for what it isn't."""
    options = _without_none(hint)
    if options is not None:
        return _convert(value, options, place)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if not any(value == arg and type(value) is type(arg) for arg in args):
            near = (
                get_close_matches(value, [a for a in args if isinstance(a, str)], n=1) if isinstance(value, str) else []
            )
            hint_text = f', did you mean "{near[0]}"?' if near else ""
            raise UserError(f"{place}: expected {_describe(hint)}, got {show(value)}{hint_text}")
        return value
    if origin is tuple:
        variadic = len(args) == 2 and args[1] is Ellipsis
        if not isinstance(value, list | tuple) or (not variadic and len(value) != len(args)):
            raise UserError(f"{place}: expected {_describe(hint)}, got {show(value)}")
        hints = [args[0]] * len(value) if variadic else args
        return tuple(_convert(v, h, f"{place}[{i}]") for i, (v, h) in enumerate(zip(value, hints, strict=True)))
    if hint is float and type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    elif hint in (int, bool, str) and type(value) is hint:
        return value
    elif hint not in (int, float, bool, str):
        raise TypeError(f"{place}: a configuration cannot hold {hint!r}")
    raise UserError(f"{place}: expected {_describe(hint)}, got {show(value)}")


def _without_none(hint: Any) -> Any:
    """`X` of `X | None`; None when `hint` is no such union."""
    if get_origin(hint) not in (Union, types.UnionType):
        return None
    rest = [arg for arg in get_args(hint) if arg is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"a configuration cannot hold {hint!r}")
    return rest[0]


def _describe(hint: Any) -> str:
    """A type in a person's words."""
    inner = _without_none(hint)
    if inner is not None:
        return _describe(inner)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(show(arg) for arg in get_args(hint))
    if get_origin(hint) is tuple:
        args = get_args(hint)
        count = "" if args[-1] is Ellipsis else f"{len(args)} "
        return f"a list of {count}{_PLURAL.get(args[0], 'values')}"
    return _WORDS.get(hint, str(hint))


_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a string"}
_PLURAL = {int: "whole numbers", float: "numbers", bool: "true or false", str: "strings"}


# ---- writing -------------------------------------------------------------------------------------


def to_toml(config: object) -> str:
    """`config` as TOML, sections after plain keys; None is said by leaving the key out."""
    lines: list[str] = []
    _write(config, "", lines)
    return "\n".join(lines).strip() + "\n"


def _write(config: Any, section: str, lines: list[str]) -> None:
    if section:
        lines += ["", f"[{section}]"]
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    for name, value in values.items():
        if value is not None and not is_dataclass(value):
            lines.append(f"{name} = {_toml_value(value)}")
    for name, value in values.items():
        if is_dataclass(value):
            _write(value, f"{section}.{name}" if section else name, lines)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which only TOML forbids.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    raise TypeError(f"no TOML for {type(value).__name__}")


# ---- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One key that two configurations do not share."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {_or_none(self.before)} -> {_or_none(self.after)}"


def _or_none(value: Any) -> str:
    return "(not set)" if value is None else show(value)


def flatten(config: Any, section: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value."""
    for field in fields(config):
        value, key = getattr(config, field.name), f"{section}.{field.name}" if section else field.name
        if is_dataclass(value):
            yield from flatten(value, key)
        else:
            yield key, value


def diff(before: T, after: T) -> tuple[Difference, ...]:
    """The keys whose values differ, in the order in which they are written."""
    other = dict(flatten(after))
    return tuple(
        Difference(key=key, before=value, after=other[key]) for key, value in flatten(before) if value != other[key]
    )
