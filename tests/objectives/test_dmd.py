"""Laws of the DMD surrogate: its gradient is the direction, which is normalised sample by sample."""

import math

import pytest
import torch

from codmd.objectives.dmd import NORMALISER_FLOOR, dmd_direction, dmd_loss
from codmd.relations import gradient_at

SHAPE = (4, 2, 4, 2, 2)  # powers of two: a division by the number of elements is exact


def latents(dtype=torch.float64, shape=SHAPE):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_at_x_is_the_direction_over_the_number_of_elements(dtype):
    """Eq. 3 realises Eq. 1: bit for bit, however small the direction."""
    x, real, fake = latents(dtype)
    for closeness in (1.0, 1e-6):
        near = real + closeness * (fake - real)
        _, slope = gradient_at(lambda x: dmd_loss(x, real, near).mean(), x)  # noqa: B023
        assert torch.equal(slope, dmd_direction(x, real, near) / x.numel())


def test_gradient_holds_for_any_shape():
    x, real, fake = latents(shape=(3, 5, 7, 2, 3))
    _, slope = gradient_at(lambda x: dmd_loss(x, real, fake).mean(), x)
    torch.testing.assert_close(slope, dmd_direction(x, real, fake) / x.numel(), rtol=0, atol=1e-15)


def test_value_is_half_the_mean_square_of_the_written_surrogate():
    """R8, and Eq. 3 as the paper writes it."""
    x, real, fake = latents()
    target = x - dmd_direction(x, real, fake)
    torch.testing.assert_close(dmd_loss(x, real, fake), 0.5 * (x - target).square().mean(dim=(1, 2, 3, 4)))


def test_direction_is_normalised_by_each_samples_own_distance():
    """R7: mean|x - real| over C, F, H, W, one number a sample."""
    x, real, fake = latents()
    delta = dmd_direction(x, real, fake)
    for b in range(SHAPE[0]):
        torch.testing.assert_close(delta[b], (fake[b] - real[b]) / (x[b] - real[b]).abs().mean())
        torch.testing.assert_close(dmd_direction(x[b : b + 1], real[b : b + 1], fake[b : b + 1])[0], delta[b])


def test_direction_is_scale_invariant_and_shift_invariant():
    x, real, fake = latents()
    delta = dmd_direction(x, real, fake)
    torch.testing.assert_close(dmd_direction(3 * x, 3 * real, 3 * fake), delta)
    torch.testing.assert_close(dmd_direction(x + 2, real + 2, fake + 2), delta)


def test_a_step_along_the_gradient_moves_from_fake_to_real():
    x, real, fake = latents()
    _, slope = gradient_at(lambda x: dmd_loss(x, real, fake).mean(), x)
    assert ((-slope * (real - fake)).sum(dim=(1, 2, 3, 4)) > 0).all()


def test_no_gradient_where_fake_is_real():
    x, real, _ = latents()
    value, slope = gradient_at(lambda x: dmd_loss(x, real, real).mean(), x)
    assert value == 0
    assert torch.equal(slope, torch.zeros_like(x))


def test_only_x_has_a_gradient():
    x, real, fake = (z.requires_grad_() for z in latents())
    dmd_loss(x, real, fake).mean().backward()
    assert x.grad is not None
    assert real.grad is None
    assert fake.grad is None


def test_floor_keeps_a_student_that_is_its_teacher_finite_and_touches_no_other():
    _, real, fake = latents()
    torch.testing.assert_close(dmd_direction(real, real, fake), (fake - real) / NORMALISER_FLOOR)
    above = real + 2 * NORMALISER_FLOOR
    torch.testing.assert_close(dmd_direction(above, real, fake), (fake - real) / (2 * NORMALISER_FLOOR))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_prediction_stays_non_finite_in_its_sample_alone(value):
    """R8: nothing is zeroed in silence; the guard has to see it."""
    x, real, fake = latents()
    fake[1, 0, 0, 0, 0] = value
    losses = dmd_loss(x, real, fake)
    assert not losses[1].isfinite()
    assert losses[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    halves = latents(dtype)
    losses = dmd_loss(*halves)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, dmd_loss(*(z.float() for z in halves)))
