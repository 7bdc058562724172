"""Recipes: what is shipped loads, what is saved reads back, what is wrong is named."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from codmd.errors import UserError
from codmd.flow import shifted_steps
from codmd.recipe import Recipe, diff, load_recipe, parse_recipe, shipped_recipes, to_toml
from codmd.schema import flatten


@pytest.fixture(scope="module")
def mini() -> Recipe:
    return load_recipe("mini")


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_reads_back_equal_and_bears_its_name(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert parse_recipe(to_toml(recipe), "saved") == recipe


def test_mini_documents_every_key(mini: Recipe) -> None:
    text = (resources.files("codmd") / "recipes" / "mini.toml").read_text(encoding="utf-8")
    written = set(re.findall(r"^(?:# )?(\w+) = ", text, flags=re.MULTILINE))
    assert written == {key.rpartition(".")[2] for key, _ in flatten(mini)}


def test_mini_walks_the_shifted_steps_of_its_renoising(mini: Recipe) -> None:
    assert mini.rollout.steps == pytest.approx(shifted_steps(mini.renoise.shift, 4), abs=1e-6)


def test_an_override_changes_its_key_and_no_other(mini: Recipe) -> None:
    overrides = ["train.iterations=7", "objective.method=dmd", "rollout.steps=[1, 0.5]", "train.iterations=8"]
    changed = load_recipe("mini", [*overrides, "train.micro_batch=4"])
    assert (changed.train.iterations, changed.rollout.steps) == (8, (1.0, 0.5))
    keys = {"train.iterations", "train.micro_batch", "objective.method", "rollout.steps"}
    assert {d.key for d in diff(mini, changed)} == keys
    assert "train.iterations: 200 -> 8" in map(str, diff(mini, changed))


def test_a_path_is_read_like_a_name(tmp_path: Path, mini: Recipe) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(mini), encoding="utf-8")
    assert load_recipe(path) == load_recipe(str(path)) == mini


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.iteration=1", 'unknown key, did you mean "iterations"?'),
        ("iterations=1", 'unknown key, did you mean "train.iterations"?'),
        ("trian.batch=1", 'unknown key, did you mean "train"?'),
        ("objective.method=codnd", 'did you mean "codmd"?'),
        ("objective.tau=0", "tau"),
        ("objective.frame_weight=-0.1", "frame_weight"),
        ("train.student_lr=-1e-4", "expected a finite number above 0, got -0.0001"),
        ("train.student_lr=nan", "expected a finite number, got nan"),
        ("train.iterations=2.5", "expected a whole number, got 2.5"),
        ("train.iterations=true", "expected a whole number, got true"),
        ("train.micro_batch=5", "expected a divisor of batch = 16, got 5"),
        ("train.choose=best", 'expected "last" or "best:<metric>", got "best"'),
        ("train.betas=[0.9]", "expected a list of 2 numbers, got [0.9]"),
        ("train.precision=fp16", 'expected one of "fp64", "fp32", "bf16", got "fp16"'),
        ("rollout.steps=[1, 0.5, 0.6]", "expected times that fall"),
        ("rollout.steps=[0.9, 0.5]", "expected a list that starts at 1.0"),
        ("rollout.steps=[1, 0]", "above 0 and at most 1, got 0.0"),
        ("rollout.steps=[]", "at least one time"),
        ("renoise.low=0.99", "high"),
        ("seed=-1", "at least 0"),
        ("train=3", "expected a section, got 3"),
        ("name.first=x", "name is a key, not a section"),
        ("train.iterations", "expected section.key=value"),
        ("=3", "expected section.key=value"),
    ],
)
def test_a_wrong_override_is_named_in_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe("mini", [override])
    assert message in str(error.value)
    assert str(error.value).startswith(("--set " + override.split("=")[0], "recipe mini: [renoise] high"))
    assert len(str(error.value).splitlines()) == 1


def test_choosing_the_best_needs_a_curve_to_choose_from() -> None:
    best = "train.choose=best:total"
    assert load_recipe("mini", [best]).train.best_metric == "total"
    with pytest.raises(UserError, match=r"set validation\.every above 0"):
        load_recipe("mini", [best, "validation.every=0"])


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    broken, binary = tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("name = \n")
    binary.write_bytes(b"\xff\xfe\x00")
    cases = {
        "mimi": 'did you mean "mini"?',
        str(tmp_path / "none.toml"): "no such file",
        str(broken): "not valid TOML",
        str(binary): "UTF-8",
        str(tmp_path) + "/": "cannot be read",
        "a\0b.toml": "cannot be read",
    }
    for given, message in cases.items():
        with pytest.raises(UserError) as error:
            load_recipe(given)
        assert message in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_wrong_file_is_named_with_section_and_key(tmp_path: Path, mini: Recipe) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(mini).replace("student_lr", "student_rl"), encoding="utf-8")
    with pytest.raises(UserError, match=r'mine\.toml: \[train\] student_rl: unknown key, did you mean "student_lr"'):
        load_recipe(path)
