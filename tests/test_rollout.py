"""Rollout: what it visits, where it stops, what it differentiates."""

import pytest
import torch
from torch import Tensor

from codmd import flow
from codmd.rollout import rollout

STEPS = (1.0, 0.9, 0.757, 0.522)
SHAPE = (3, 4, 2, 3, 3)


class Predictor(torch.nn.Module):
    """A one-parameter x0 prediction that remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.7))
        self.calls: list[tuple[Tensor, bool]] = []

    def forward(self, x_t: Tensor, t: Tensor, text: None) -> Tensor:
        self.calls.append((t, torch.is_grad_enabled()))
        return self.weight * x_t + t.view(-1, 1, 1, 1, 1)


def noise_of(step: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


def by_hand(predictor: Predictor, row: int, last: int) -> Tensor:
    """The loop of the paper's Algorithm 1 for one sample."""
    y = noise_of(0)[row : row + 1]
    for j in range(last):
        x = predictor(y, torch.tensor([STEPS[j]]), None)
        y = flow.add_noise(x, noise_of(j + 1)[row : row + 1], STEPS[j + 1])
    return predictor(y, torch.tensor([STEPS[last]]), None)


@pytest.mark.parametrize("last", range(4))
def test_it_stops_at_the_exit_and_differentiates_the_last_call_only(last: int) -> None:
    predictor, asked = Predictor(), []

    def renoise(j: int) -> Tensor:
        asked.append(j)
        return noise_of(j)

    x = rollout(predictor, noise_of(0), None, STEPS, renoise, last)
    assert [t.unique().item() for t, _ in predictor.calls] == pytest.approx(STEPS[: last + 1])
    assert [grad for _, grad in predictor.calls] == [False] * last + [True]
    assert asked == list(range(1, last + 1))
    assert x.requires_grad
    torch.testing.assert_close(x, torch.cat([by_hand(predictor, row, last) for row in range(3)]))


def test_inference_is_the_rollout_to_the_end() -> None:
    predictor = Predictor()
    with torch.no_grad():
        x = rollout(predictor, noise_of(0), None, STEPS, noise_of)
    assert len(predictor.calls) == len(STEPS) and not x.requires_grad
    torch.testing.assert_close(x, rollout(predictor, noise_of(0), None, STEPS, noise_of, 3), rtol=0, atol=0)


@pytest.mark.parametrize("exits", [[0, 2, 1], [3, 0, 0], [1, 1, 1], [0, 0, 0]])
def test_each_sample_may_have_its_own_exit(exits: list[int]) -> None:
    predictor = Predictor()
    x = rollout(predictor, noise_of(0), None, STEPS, noise_of, torch.tensor(exits))
    assert [grad for _, grad in predictor.calls] == [False] * max(exits) + [True]
    expected = torch.cat([by_hand(predictor, row, last) for row, last in enumerate(exits)])
    torch.testing.assert_close(x, expected)


def test_an_exit_outside_the_list_is_refused() -> None:
    for wrong in (4, -1):
        with pytest.raises(ValueError, match="exit_step"):
            rollout(Predictor(), noise_of(0), None, STEPS, noise_of, wrong)
