"""Streams depend on their key alone."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codmd.data.streams import (
    keyed_generator,
    prompt_indices,
    sample_ids,
    sample_noise,
    sample_uniform,
    shared_uniform,
)  # fmt: skip

SHAPE = (2, 3, 2, 2)


@settings(max_examples=20, deadline=None)
@given(ids=st.lists(st.integers(0, 10**9), min_size=1, max_size=6), seed=st.integers(0, 2**63 - 1))
def test_a_sample_meets_the_same_noise_in_any_batch(ids: list[int], seed: int) -> None:
    together = sample_noise(seed, 7, ids, SHAPE, "noise")
    times = sample_uniform(seed, 7, ids, "t")
    for row, i in enumerate(ids):
        torch.testing.assert_close(sample_noise(seed, 7, [i], SHAPE, "noise")[0], together[row], rtol=0, atol=0)
        assert sample_uniform(seed, 7, [i], "t")[0] == times[row]


def test_seed_step_sample_and_purpose_each_change_the_stream() -> None:
    base = sample_noise(0, 1, [2], SHAPE, "noise")
    others = [
        sample_noise(1, 1, [2], SHAPE, "noise"),
        sample_noise(0, 2, [2], SHAPE, "noise"),
        sample_noise(0, 1, [3], SHAPE, "noise"),
        sample_noise(0, 1, [2], SHAPE, "other"),
    ]
    assert all(not torch.equal(base, other) for other in others)


def test_keys_do_not_run_together() -> None:
    keys = [(0, "ab"), (0, "a", "b"), (0, 1, 23), (0, 12, 3), (0, "1", 23), (1, 0), (0, 1)]
    first = {torch.rand(1, generator=keyed_generator(*key)).item() for key in keys}
    assert len(first) == len(keys)


def test_streams_of_neighbouring_samples_are_uncorrelated() -> None:
    noise = sample_noise(0, 0, range(64), (1000,), "noise")
    correlation = torch.corrcoef(noise) - torch.eye(64)
    assert correlation.abs().max() < 5 / 1000**0.5
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02


def test_a_shared_draw_is_one_draw_for_any_batch() -> None:
    first, second = shared_uniform(0, 5, range(4), "exit"), shared_uniform(0, 5, range(9, 11), "exit")
    assert first.unique().numel() == 1 and first[0] == second[0]


def test_the_steps_of_a_run_share_no_sample() -> None:
    assert [i for step in range(3) for i in sample_ids(step, 4)] == list(range(12))


def test_every_prompt_comes_once_an_epoch_in_a_new_order() -> None:
    epochs = [prompt_indices(0, range(e * 10, e * 10 + 10), 10) for e in range(3)]
    assert all(sorted(order) == list(range(10)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3
    across = prompt_indices(0, range(5, 15), 10)  # a batch that spans two epochs
    assert across == epochs[0][5:] + epochs[1][:5]
