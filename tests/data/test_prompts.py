"""Prompt sources: what is trained on, what is kept, and what is refused."""

from pathlib import Path

import pytest
import torch

from codmd.data.prompts import EncodedPrompts, load_prompts, read_prompts
from codmd.errors import UserError
from codmd.mini import captions
from codmd.networks.text import TextCondition


def mini(**changes: int | None):
    given = {"count": 60, "needed": 1000, "held_out_seed": 0, "validation": 6}
    return load_prompts("mini", **(given | changes))


def test_mini_sets_share_no_caption() -> None:
    prompts = mini()
    assert len(prompts.training) == 60 and len(prompts.validation) == 6
    assert not set(prompts.training) & set(prompts.validation)
    assert not any(captions.held_out(p) for p in prompts.training + prompts.validation)


def test_a_mini_prompt_depends_on_its_index_alone() -> None:
    assert mini(count=20).training == mini().training[:20]
    assert mini(held_out_seed=1).training == mini().training
    assert mini(held_out_seed=1).validation != mini().validation


def test_mini_makes_as_many_as_the_run_needs() -> None:
    assert len(mini(count=None, needed=70).training) == 70


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    odd = "a/b \U0001f600 \x0c c"
    path.write_bytes(f"\ufeffone\r\n\r\n  two  \n{odd}\n\none\n".encode())
    assert read_prompts(path) == ["one", "two", odd, "one"]
    kept = load_prompts(str(path), count=None, needed=9, held_out_seed=3, validation=1)
    assert set(kept.training) | set(kept.validation) == {"one", "two", odd}
    assert not set(kept.training) & set(kept.validation)
    assert load_prompts(str(path), count=2, needed=9, held_out_seed=0, validation=0).training == (
        "one",
        "two",
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "no prompt"), (b" \n\n", "no prompt"), (b"\xff\xfe\x00", "UTF-8"), (None, "no such file")],
)
def test_a_file_that_will_not_do_is_refused_in_one_line(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        read_prompts(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_folder_and_too_few_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(tmp_path)
    path = tmp_path / "one.txt"
    path.write_text("only one\n")
    with pytest.raises(UserError, match="validation"):
        load_prompts(str(path), count=None, needed=1, held_out_seed=0, validation=1)


class CountingEncoder:
    """Encodes a prompt as its characters, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, prompts: list[str], batch: int = 64) -> TextCondition:
        self.asked += prompts
        longest = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), longest + 1, 1)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt), 0] = torch.tensor([float(ord(c)) for c in prompt])
        return TextCondition(tokens, torch.tensor([len(p) for p in prompts]))


def test_each_prompt_is_encoded_once_and_found_again() -> None:
    encoder, seen = CountingEncoder(), []
    prompts = ["bb", "a", "bb", "cccc", "a", "d"]
    encoded = EncodedPrompts(encoder, prompts, batch=2, progress=lambda done, total: seen.append((done, total)))
    assert sorted(encoder.asked) == sorted(set(prompts)) and seen[-1] == (4, 4)
    for indices in ([0, 1, 2], [5], [3, 4]):
        wanted = CountingEncoder().encode([prompts[i] for i in indices])
        torch.testing.assert_close(encoded.select(indices).tokens, wanted.tokens)
        assert encoded.select(indices).lengths.tolist() == wanted.lengths.tolist()
