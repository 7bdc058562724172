"""docs/paper.md names tests, functions and options: all of them exist."""

import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", TEXT))))
def test_every_named_test_exists(name):
    path, _, function = name.partition("::")
    assert re.search(rf"^def {function}", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(codmd(?:\.\w+)+)`", TEXT))))
def test_every_named_function_exists(name):
    module, _, attribute = name.rpartition(".")
    try:
        assert hasattr(import_module(module), attribute)
    except (AssertionError, ModuleNotFoundError):
        import_module(name)


@pytest.mark.parametrize(
    "key", sorted(set(re.findall(r"`((?:model|objective|rollout|renoise|train)\.\w+)(?: =[^`]*)?`", TEXT)))
)
def test_every_named_option_exists(key):
    from codmd.recipe import Recipe

    section, _, name = key.partition(".")
    assert name in [field.name for field in fields(get_type_hints(Recipe)[section])]


def test_every_reading_is_there_and_says_what_shows_it():
    readings = dict(re.findall(r"^\*\*(R\d+) ·(.*?)(?=^\*\*R\d+ ·|^## )", TEXT, re.MULTILINE | re.DOTALL))
    assert list(readings) == [f"R{i}" for i in range(1, 20)]
    shown = re.compile(r"`tests/[\w/]+\.py::\w+`|`(?:model|objective|rollout|renoise|train)\.\w+")
    assert not [name for name, text in readings.items() if not shown.search(text)]
