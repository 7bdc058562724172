"""Laws of the probability path: conversions invert one another, keep fp32, and meet the paper's lists."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codmd import flow
from codmd.errors import UserError

SHAPE = (3, 2, 4, 5, 6)


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("t", [0.02, 0.5, 0.98, torch.tensor(0.3), torch.tensor([0.02, 0.5, 0.98])])
def test_conversions_invert_one_another(pair, t):
    x0, eps = pair
    x_t, v = flow.add_noise(x0, eps, t), flow.velocity(x0, eps)
    torch.testing.assert_close(flow.x0_from_velocity(x_t, v, t), x0, rtol=0, atol=1e-12)
    torch.testing.assert_close(flow.velocity_from_x0(x_t, x0, t), v, rtol=0, atol=1e-12)
    score = flow.score_from_x0(x_t, x0, t)
    torch.testing.assert_close(flow.x0_from_score(x_t, score, t), x0, rtol=0, atol=1e-12)


def test_path_ends_in_data_and_in_noise_and_its_slope_is_the_velocity(pair):
    x0, eps = pair
    assert torch.equal(flow.add_noise(x0, eps, 0.0), x0)
    assert torch.equal(flow.add_noise(x0, eps, 1.0), eps)
    t = torch.full((SHAPE[0],), 0.4, dtype=torch.float64)
    _, slope = torch.func.jvp(lambda t: flow.add_noise(x0, eps, t), (t,), (torch.ones_like(t),))
    torch.testing.assert_close(slope, flow.velocity(x0, eps))


def test_each_sample_has_its_own_time(pair):
    x0, eps = pair
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    one_by_one = [flow.add_noise(x0[b : b + 1], eps[b : b + 1], t[b]) for b in range(3)]
    assert torch.equal(flow.add_noise(x0, eps, t), torch.cat(one_by_one))


@pytest.mark.parametrize("t", [0.1, 0.7])
def test_score_is_the_gradient_of_the_log_density(t):
    """For Gaussian data everything is known: x0 ~ N(m, s^2), x_t ~ N((1-t) m, (1-t)^2 s^2 + t^2)."""
    mean, std = 0.7, 1.3
    x_t = torch.linspace(-2, 2, 8, dtype=torch.float64).reshape(2, 4).requires_grad_()
    variance = ((1 - t) * std) ** 2 + t**2
    log_density = -0.5 * (x_t - (1 - t) * mean).square() / variance
    (score,) = torch.autograd.grad(log_density.sum(), x_t)
    x0 = mean + (1 - t) * std**2 / variance * (x_t - (1 - t) * mean)  # E[x0 | x_t]
    torch.testing.assert_close(flow.score_from_x0(x_t, x0, t), score)


def test_a_difference_of_scores_is_a_scaled_difference_of_predictions(pair):
    """s_fake - s_real = (1-t)/t^2 (fake - real): why DMD may be written with x0-predictions."""
    real, fake = pair
    x_t, t = real + fake, 0.3
    difference = flow.score_from_x0(x_t, fake, t) - flow.score_from_x0(x_t, real, t)
    torch.testing.assert_close(difference, (1 - t) / t**2 * (fake - real))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_half_precision_is_computed_and_returned_in_float32(pair, dtype):
    x0, eps = (z.to(dtype) for z in pair)
    t = torch.tensor([0.02, 0.5, 0.98], dtype=dtype)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for result in (
        flow.add_noise(x0, eps, t),
        flow.velocity(x0, eps),
        flow.x0_from_velocity(x0, eps, t),
        flow.velocity_from_x0(x0, eps, t),
        flow.score_from_x0(x0, eps, t),
        flow.x0_from_score(x0, eps, t),
        flow.guide(x0, eps, 3.5),
        flow.shift(t, 5.0),
    ):
        assert result.dtype == expected
    exact = flow.x0_from_velocity(x0.double(), eps.double(), t.double())
    torch.testing.assert_close(flow.x0_from_velocity(x0, eps, t).double(), exact, rtol=1e-6, atol=1e-6)


def test_guidance_is_the_standard_convention(pair):
    uncond, cond = pair
    assert torch.equal(flow.guide(uncond, cond, 0), uncond)
    torch.testing.assert_close(flow.guide(uncond, cond, 1), cond)
    g = 2.5  # the offset convention's figure for the same guidance
    torch.testing.assert_close(flow.guide(uncond, cond, 3.5), cond + g * (cond - uncond))


def test_guidance_commutes_with_the_conversions(pair):
    """Guiding velocities or x0-predictions is the same thing, both being affine at a fixed x_t."""
    v_u, v_c = pair
    x_t, t = v_u * v_c, 0.6
    in_v = flow.x0_from_velocity(x_t, flow.guide(v_u, v_c, 3.5), t)
    in_x0 = flow.guide(flow.x0_from_velocity(x_t, v_u, t), flow.x0_from_velocity(x_t, v_c, t), 3.5)
    torch.testing.assert_close(in_v, in_x0)


@settings(deadline=None, max_examples=30)
@given(u=st.floats(0, 1), k=st.floats(0.1, 20), m=st.floats(0.1, 20))
def test_shifts_keep_the_ends_rise_and_compose_by_multiplication(u, k, m):
    assert flow.shift(0.0, k) == 0
    assert flow.shift(1.0, k) == pytest.approx(1)
    assert flow.shift(flow.shift(u, k), m) == pytest.approx(flow.shift(u, k * m))
    assert flow.shift(flow.shift(u, k), 1 / k) == pytest.approx(u)
    assert k < 1 or flow.shift(u, k) >= u * (1 - 1e-12)


def test_step_lists_are_the_papers():
    assert flow.shifted_steps(5, 4) == pytest.approx((1, 0.9375, 0.8333, 0.625), abs=5e-5)
    assert flow.shifted_steps(1, 4) == (1, 0.75, 0.5, 0.25)
    assert tuple(1000 * t for t in flow.WAN_1_3B_STEPS) == (1000, 900, 757, 522)


@pytest.mark.parametrize(("shift", "share"), [(8, 0.14), (5, 0.09)])
def test_renoise_times_are_shifted_then_clamped(shift, share):
    """Clamping after the shift piles 14% of the draws up at 0.98 for shift 8, and 9% for shift 5 (R9)."""
    u = torch.linspace(0, 1, 100_001)
    t = flow.renoise_times(u, shift)
    assert t.min() == pytest.approx(0.02)
    assert t.max() == pytest.approx(0.98)
    assert (t == t.max()).float().mean().item() == pytest.approx(share, abs=0.005)
    inside = (t > t.min()) & (t < t.max())
    assert torch.equal(t[inside], flow.shift(u, shift)[inside])


def test_impossible_shifts_and_lists_are_named():
    with pytest.raises(UserError, match="above 0, got 0"):
        flow.shift(0.5, 0.0)
    with pytest.raises(UserError, match="at least 1 step, got 0"):
        flow.shifted_steps(5.0, 0)
