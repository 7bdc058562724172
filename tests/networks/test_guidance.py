"""Guidance in the standard convention: u + w (c - u)."""

import pytest
import tiny
import torch
from torch import Tensor

from codmd.networks import GuidedTeacher, TextCondition, TextEncoder, WanNetwork

network = WanNetwork(tiny.transformer())
stock = tiny.pipeline()
encoder = TextEncoder(stock.tokenizer, stock.text_encoder.eval())
TEXT = encoder.encode(["a red circle moves left", "the square"])
NEGATIVE = encoder.encode(["a blue triangle"])
X = torch.randn(2, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
T = torch.tensor([0.8, 0.3])


@torch.no_grad()
def guided(scale: float) -> Tensor:
    return GuidedTeacher(network, NEGATIVE, scale).velocity(X, T, TEXT)


@torch.no_grad()
def branches() -> tuple[Tensor, Tensor]:
    return network.velocity(X, T, NEGATIVE.expand(2)), network.velocity(X, T, TEXT)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 3.5, 7.0])
def test_the_standard_convention_holds_and_is_linear_in_w(scale: float) -> None:
    unconditional, conditional = branches()
    expected = unconditional + scale * (conditional - unconditional)
    torch.testing.assert_close(guided(scale), expected, rtol=1e-4, atol=2e-5)


def test_w_1_is_the_conditional_prediction_and_evaluates_nothing_else() -> None:
    calls: list[int] = []
    handle = network.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    at_1, at_2 = guided(1.0), guided(2.0)
    handle.remove()
    assert calls == [2, 4]  # two clips alone; then both branches of both clips in one call
    assert torch.equal(at_1, branches()[1])
    assert not torch.allclose(at_1, at_2)


def test_x0_and_velocity_are_guided_alike() -> None:
    """Guidance of velocities is guidance of x0: both are affine in each other at one x_t and t."""
    teacher = GuidedTeacher(network, NEGATIVE, 3.5)
    with torch.no_grad():
        x0 = teacher.x0(X, T, TEXT)
        unconditional, conditional = network.x0(X, T, NEGATIVE.expand(2)), network.x0(X, T, TEXT)
    torch.testing.assert_close(x0, X - T.view(-1, 1, 1, 1, 1) * guided(3.5), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(x0, unconditional + 3.5 * (conditional - unconditional), rtol=1e-4, atol=2e-5)


def test_it_is_the_stock_pipelines_guidance() -> None:
    """One step of the stock pipeline's own loop: noise_uncond + w (noise_pred - noise_uncond)."""
    full = [torch.nn.functional.pad(p.tokens, (0, 0, 0, 512 - p.tokens.shape[1])) for p in (TEXT, NEGATIVE.expand(2))]
    plain = tiny.transformer()
    with torch.no_grad():
        cond, uncond = (plain(X, timestep=1000 * T, encoder_hidden_states=f, return_dict=False)[0] for f in full)
    torch.testing.assert_close(guided(3.5), uncond + 3.5 * (cond - uncond), rtol=1e-4, atol=5e-5)


def test_expanding_copies_one_prompt() -> None:
    assert isinstance(NEGATIVE.expand(3), TextCondition) and len(NEGATIVE.expand(3)) == 3
