"""The fake network's loss: a flow MSE, which is the paper's x0-MSE over t^2."""

import pytest
import torch

from codmd import flow
from codmd.objectives import flow_mse


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(3, 4, 5, 2, 2, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))


@pytest.mark.parametrize("t", [0.02, 0.5, 0.98])
def test_is_the_papers_denoising_loss_over_t_squared(t):
    """R14: Algorithm 1 has |mu(x_t, t) - x|^2."""
    v, x, eps = tensors()
    prediction = flow.x0_from_velocity(flow.add_noise(x, eps, t), v, t)
    papers = (prediction - x).square().mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(flow_mse(v, x, eps), papers / t**2)


def test_its_minimum_over_constants_is_the_mean_velocity():
    """Flow matching in small: the best prediction is the conditional expectation of eps - x0."""
    _, x, eps = tensors()
    constant = torch.zeros(1, 4, 5, 2, 2, dtype=torch.float64, requires_grad=True)
    flow_mse(constant.expand_as(x), x, eps).mean().backward()
    expected = -2 * (eps - x).mean(dim=0, keepdim=True) / constant.numel()
    torch.testing.assert_close(constant.grad, expected)


def test_the_student_gets_no_gradient_from_it():
    """R15: the fake network learns from x, x does not learn from the fake network."""
    v, x, eps = (z.requires_grad_() for z in tensors())
    flow_mse(v, x, eps).mean().backward()
    assert v.grad is not None
    assert x.grad is None


def test_half_precision_gives_float32():
    halves = tensors(torch.bfloat16)
    assert flow_mse(*halves).dtype == torch.float32
    assert torch.equal(flow_mse(*halves), flow_mse(*(z.float() for z in halves)))
