"""Each word of an object's phrase is asked for its own object, and for no other."""

import numpy as np
import torch

from codmd.mini.captions import describe, sample_prior, write
from codmd.mini.reading import ANSWERS, NOT_ASKED, OPPOSITE, Reading, questions
from codmd.mini.words import new_tokenizer
from codmd.mini.world import sample_scene


def answers(caption: str) -> list[tuple[str, str, str] | None]:
    """In words; None where nothing is asked."""
    rows = questions(caption, 32).tolist()
    return [None if NOT_ASKED in row else tuple(a[i] for a, i in zip(ANSWERS, row, strict=True)) for row in rows]


def test_a_pair_is_told_apart() -> None:
    found = answers("a red circle left of a shape, both move up, gray background")
    assert found[:3] == [("left of", "red", "circle")] * 3
    assert found[3:5] == [None, None]
    assert found[5:7] == [("right of", "unsaid", "unsaid")] * 2
    assert found[7:] == [None] * 25


def test_one_object_alone_and_none() -> None:
    found = answers("a large red square moves left, white background")
    assert found[:4] == [("unsaid", "red", "square")] * 4 and set(found[4:]) == {None}
    assert set(answers("")) == {None}


def test_answers_follow_the_scene_and_words_are_tokens() -> None:
    tokenizer = new_tokenizer()
    rng = np.random.default_rng(0)
    pairs = 0
    for _ in range(200):
        scene = sample_scene(sample_prior(rng, 0.7), rng)
        asked = describe(scene, rng)
        text = write(asked)
        words = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
        objects = list(dict.fromkeys(a for a in answers(text) if a is not None))
        places = ("unsaid",) if asked.relation is None else (asked.relation, OPPOSITE[asked.relation])
        wanted = [
            (place, colour or "unsaid", shape or "unsaid")
            for place, colour, shape in zip((places * 2)[: asked.count], asked.colour, asked.shape, strict=True)
        ]
        assert objects == list(dict.fromkeys(wanted)), text
        for word, answer in zip(words, answers(text), strict=False):
            if word in ANSWERS[1]:
                assert answer is not None and answer[1] == word
        pairs += asked.count == 2
    assert pairs > 100


def test_right_answers_cost_nothing_and_a_batch_without_questions_neither() -> None:
    reading = Reading(4)
    asked = torch.stack([questions("a red circle", 8)])
    for head, right in zip(reading.heads, asked[0, 0].tolist(), strict=True):
        head.weight.data.zero_()
        head.bias.data.fill_(0).index_fill_(0, torch.tensor([right]), 100.0)
    tokens = torch.randn(1, 8, 4, requires_grad=True)
    assert reading(tokens, asked) < 1e-6
    nothing = reading(tokens, torch.full((1, 8, 3), NOT_ASKED))
    nothing.backward()
    assert nothing == 0 and torch.isfinite(tokens.grad).all()
