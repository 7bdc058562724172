"""Laws of the relational loss: the appendix's closed forms, invariances, edge cases and precision."""

import inspect
import math

import pytest
import torch

import codmd
from codmd import relations
from codmd.errors import UserError
from codmd.relations import (
    batch_relation_loss,
    frame_relation_loss,
    gradient_at,
    pool_frames,
    pool_samples,
    relation_matrix,
    relational_kl,
    relational_loss,
    replay,
)

TAU = 0.1
FORMS = relations.FORMS
LEVELS = [frame_relation_loss, batch_relation_loss]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def latents(batch=4, frames=5, channels=6, dtype=torch.float64):
    return tuple(randn(batch, channels, frames, 2, 3, seed=seed, dtype=dtype) for seed in (1, 2, 3))


def matrices(n=5, lead=()):
    return tuple(relation_matrix(randn(*lead, n, 6, seed=seed)) for seed in (1, 2, 3))


def gradient(loss, x):
    return gradient_at(loss, x)[1]


# The closed forms of the appendix


@pytest.mark.parametrize("lead", [(), (3,)])
def test_gradient_is_the_closed_form(lead):
    """Eq. 15: dL/dS_stu = (P_stu - P_tgt) / (N tau), exactly, for any tau."""
    S_stu, S_real, S_fake = matrices(lead=lead)
    for tau in (0.05, 0.1, 1.0):
        S = S_stu.clone().requires_grad_()
        relational_kl(S, S_real, S_fake, tau).mean(-1).sum().backward()
        p_stu = torch.softmax(S_stu / tau, -1)
        p_tgt = torch.softmax((S_stu - (S_fake - S_real)) / tau, -1)
        torch.testing.assert_close(S.grad, (p_stu - p_tgt) / (5 * tau), rtol=0, atol=1e-10)


def test_loss_is_the_row_averaged_kl():
    """Eq. 12, written out with a loop over rows and torch's own KL between distributions."""
    S_stu, S_real, S_fake = matrices()
    for form, logits in (("residual", S_stu - (S_fake - S_real)), ("direct", S_real)):
        p, q = (torch.distributions.Categorical(logits=z / TAU) for z in (logits, S_stu))
        expected = torch.distributions.kl_divergence(p, q)
        torch.testing.assert_close(relational_kl(S_stu, S_real, S_fake, TAU, form), expected)
        assert (expected > 0).all()


def test_direct_gradient_knows_nothing_of_the_fake_network():
    S_stu, S_real, S_fake = matrices()
    S = S_stu.clone().requires_grad_()
    relational_kl(S, S_real, S_fake, TAU, "direct").mean().backward()
    expected = (torch.softmax(S_stu / TAU, -1) - torch.softmax(S_real / TAU, -1)) / (5 * TAU)
    torch.testing.assert_close(S.grad, expected, rtol=0, atol=1e-10)
    values = [relational_kl(S_stu, S_real, fake, TAU, "direct") for fake in (S_fake, -S_fake)]
    assert torch.equal(*values)


def test_mse_gradient_is_the_residual_itself():
    """R13: with the mean over the N^2 entries, dL/dS_stu = Delta_S / N^2, at any temperature."""
    S_stu, S_real, S_fake = matrices()
    S = S_stu.clone().requires_grad_()
    relational_kl(S, S_real, S_fake, TAU, "mse").mean().backward()
    torch.testing.assert_close(S.grad, (S_fake - S_real) / 25, rtol=0, atol=1e-10)


def first_order(S_stu, delta, tau):
    """Eq. 20: J(S_stu / tau) Delta_S / (N tau^2), row by row."""
    p = torch.softmax(S_stu / tau, -1)
    return (p * delta - p * (p * delta).sum(-1, keepdim=True)) / (S_stu.shape[-1] * tau**2)


def test_first_order_expansion_and_the_order_of_its_remainder():
    """Halving Delta_S quarters what Eq. 20 leaves out; doubling tau at least quarters it."""
    S_stu, S_real, S_fake = matrices()
    delta = S_fake - S_real

    def remainder(scale, tau):
        S = S_stu.clone().requires_grad_()
        relational_kl(S, S_stu - scale * delta, S_stu, tau).mean().backward()
        return (S.grad - first_order(S_stu, scale * delta, tau)).norm()

    for scale in (1e-3, 1e-4):
        assert remainder(scale, TAU) / remainder(scale / 2, TAU) == pytest.approx(4, rel=0.02)
    # With everything else fixed the remainder falls as tau^-3 once tau is large.
    assert remainder(1, 64.0) / remainder(1, 128.0) == pytest.approx(8, rel=0.05)


def test_a_descent_step_on_S_goes_along_the_first_order_direction():
    """The preconditioner is positive semidefinite: <gradient, Delta_S> >= 0 in every row."""
    S_stu, S_real, S_fake = matrices(lead=(20,))
    S = S_stu.clone().requires_grad_()
    relational_kl(S, S_real, S_fake, TAU).sum().backward()
    assert ((S.grad * (S_fake - S_real)).sum(-1) >= 0).all()


@pytest.mark.parametrize("loss", LEVELS)
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_from_the_loss_to_x(loss, form):
    """Autograd against finite differences, with the stopped target held where it is."""
    x, real, fake = latents(batch=3, frames=3, channels=3)

    def pooled(z):
        return pool_frames(z) if loss is frame_relation_loss else pool_samples(z)

    S_stu, S_real, S_fake = (relation_matrix(pooled(z)) for z in (x, real, fake))
    target = S_real if form == "direct" else S_stu - (S_fake - S_real)

    def with_fixed_target(x):
        S = relation_matrix(pooled(x))
        if form == "mse":
            return 0.5 * (S - target).square().mean()
        return relational_kl(S, target, S, TAU, "direct").mean()

    x.requires_grad_()
    assert torch.autograd.gradcheck(with_fixed_target, (x,))
    frozen = gradient(with_fixed_target, x)
    actual = gradient(lambda x: loss(x, real, fake, tau=TAU, form=form).mean(), x)
    torch.testing.assert_close(actual, frozen, rtol=0, atol=1e-10)


@pytest.mark.parametrize("loss", LEVELS)
def test_zero_loss_and_gradient_where_fake_is_real(loss):
    x, real, _ = latents()
    for form in ("residual", "mse"):
        value, slope = gradient_at(lambda x: loss(x, real, real, form=form).mean(), x)  # noqa: B023
        assert abs(value) < 1e-15
        assert slope.abs().max() < 1e-15


@pytest.mark.parametrize("loss", LEVELS)
def test_direct_form_is_zero_where_student_is_teacher(loss):
    x, _, fake = latents()
    value, slope = gradient_at(lambda z: loss(z, x, fake, form="direct").mean(), x)
    assert abs(value) < 1e-15
    assert slope.abs().max() < 1e-15


# Invariances


@pytest.mark.parametrize("loss", LEVELS)
@pytest.mark.parametrize("form", FORMS)
def test_scale_invariance(loss, form):
    """Cosines know no norm: scaling x, real or fake changes nothing; the gradient scales inversely."""
    x, real, fake = latents()
    value, slope = gradient_at(lambda x: loss(x, real, fake, form=form).mean(), x)
    scaled_value, scaled_slope = gradient_at(lambda x: loss(x, 7 * real, 0.2 * fake, form=form).mean(), 3 * x)
    torch.testing.assert_close(scaled_value, value)
    torch.testing.assert_close(3 * scaled_slope, slope)
    # So do scales of one's own for each sample, and for each frame of it.
    scales = 0.1 + randn(4, 1, 5 if loss is frame_relation_loss else 1, 1, 1, seed=9).abs()
    torch.testing.assert_close(loss(scales * x, real, fake, form=form), loss(x, real, fake, form=form))


@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1e18, 1e25])
def test_scale_invariance_holds_where_squares_would_over_or_underflow(scale):
    x, real, fake = latents(dtype=torch.float32)
    for loss in LEVELS:
        torch.testing.assert_close(loss(scale * x, real, fake), loss(x, real, fake), rtol=1e-4, atol=1e-6)


def test_a_shift_of_a_row_cancels():
    """R19: what is invariant to a bias is the row softmax; the mse form is not."""
    S_stu, S_real, S_fake = matrices()
    bias = randn(5, 1, seed=8)
    torch.testing.assert_close(
        relational_kl(S_stu, S_real + bias, S_fake, TAU), relational_kl(S_stu, S_real, S_fake, TAU)
    )
    biased, plain = (relational_kl(S_stu, S, S_fake, TAU, "mse") for S in (S_real + bias, S_real))
    assert not torch.allclose(biased, plain)


@pytest.mark.parametrize("form", FORMS)
def test_permutation_equivariance_over_samples_and_frames(form):
    x, real, fake = latents()
    samples, frames = torch.tensor([2, 0, 3, 1]), torch.tensor([4, 2, 0, 1, 3])

    by_sample = [z[samples] for z in (x, real, fake)]
    for loss in LEVELS:
        torch.testing.assert_close(loss(*by_sample, form=form), loss(x, real, fake, form=form)[samples])
        slope = gradient(lambda z: loss(z, real, fake, form=form).mean(), x)  # noqa: B023
        permuted = gradient(lambda z: loss(z, *by_sample[1:], form=form).mean(), by_sample[0])  # noqa: B023
        torch.testing.assert_close(permuted, slope[samples])

    by_frame = [z[:, :, frames] for z in (x, real, fake)]
    for loss in LEVELS:  # neither level knows the order of the frames
        torch.testing.assert_close(loss(*by_frame, form=form), loss(x, real, fake, form=form))
    matrix = relation_matrix(pool_frames(x))
    torch.testing.assert_close(relation_matrix(pool_frames(by_frame[0])), matrix[:, frames][:, :, frames])


def test_pooling_keeps_channels_and_ignores_where_in_space():
    """R3: batch level means over F, H, W; frame level over H, W."""
    x, *_ = latents()
    torch.testing.assert_close(pool_samples(x)[1, 2], x[1, 2].mean())
    torch.testing.assert_close(pool_frames(x)[1, 3, 2], x[1, 2, 3].mean())
    torch.testing.assert_close(pool_frames(x.flip(-1, -2)), pool_frames(x))
    torch.testing.assert_close(pool_frames(x).mean(1), pool_samples(x))


def test_a_grid_of_cells_sees_where_things_are():
    """The grid's cells average to the plain mean; a thing that moves turns the frames' vectors only with a grid."""
    x = randn(2, 6, 5, 4, 6)
    cells = pool_frames(x, 2)
    assert cells.shape == (*x.shape[:1], x.shape[2], 4 * x.shape[1])
    torch.testing.assert_close(cells.unflatten(-1, (x.shape[1], 4)).mean(-1), pool_frames(x))
    torch.testing.assert_close(pool_samples(x, 2), cells.mean(dim=1))

    moving = torch.zeros(1, 2, 2, 4, 4)
    moving[0, :, 0, :2, :2], moving[0, :, 1, 2:, 2:] = 1, 1
    assert relation_matrix(pool_frames(moving))[0, 0, 1] == pytest.approx(1)
    assert relation_matrix(pool_frames(moving, 2))[0, 0, 1] == pytest.approx(0)
    assert frame_relation_loss(moving, moving.flip(1), moving, pool_grid=2).shape == (1,)
    with pytest.raises(UserError, match="pool_grid"):
        pool_frames(moving, 5)


def test_matrix_is_torchs_cosine():
    features = randn(3, 5, 6)
    expected = torch.cosine_similarity(features.unsqueeze(-2), features.unsqueeze(-3), dim=-1)
    matrix = relation_matrix(features)
    torch.testing.assert_close(matrix, expected)
    assert torch.equal(matrix, matrix.mT)
    assert torch.equal(matrix.diagonal(dim1=-2, dim2=-1), torch.ones(3, 5, dtype=torch.float64))


# Reductions and structure


@pytest.mark.parametrize("form", FORMS)
def test_frame_level_treats_each_video_alone(form):
    """R4: [B], no coupling between samples, and vectorised: the same as one call a video."""
    x, real, fake = latents()
    together = frame_relation_loss(x, real, fake, form=form)
    alone = [frame_relation_loss(*(z[b : b + 1] for z in (x, real, fake)), form=form) for b in range(4)]
    torch.testing.assert_close(together, torch.cat(alone))
    assert together.shape == (4,)


def test_no_loop_over_samples():
    """The number of tensor operations does not depend on the size of the batch."""

    class Counter(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    counts = []
    for batch in (1, 32):
        with Counter() as counter:
            relational_loss(*latents(batch=batch))
        counts.append(counter.calls)
    assert counts[0] == counts[1]


def test_the_one_call_is_the_weighted_sum_of_the_two_levels():
    """The relational part of Eq. 11, with the paper's tau = 0.1 and weights of 0.1 by default."""
    x, real, fake = latents()
    frame, batch = frame_relation_loss(x, real, fake).mean(), batch_relation_loss(x, real, fake).mean()
    torch.testing.assert_close(codmd.relational_loss(x, real, fake), 0.1 * batch + 0.1 * frame)
    torch.testing.assert_close(relational_loss(x, real, fake, batch_weight=2, frame_weight=0), 2 * batch)
    torch.testing.assert_close(relational_loss(x, real, fake, batch_weight=0, frame_weight=3), 3 * frame)
    assert not torch.isclose(relational_loss(x, real, fake, tau=0.2), relational_loss(x, real, fake))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_flow_to_x_only(form):
    x, real, fake = (z.requires_grad_() for z in latents())
    relational_loss(x, real, fake, form=form).backward()
    assert x.grad.abs().max() > 0
    assert real.grad is None
    assert fake.grad is None


# Edge cases


@pytest.mark.parametrize("form", FORMS)
def test_a_single_sample_or_frame_gives_zero(form):
    """A 1x1 matrix relates nothing: zero with zero gradient, exactly."""
    for loss, shape in ((batch_relation_loss, {"batch": 1}), (frame_relation_loss, {"frames": 1})):
        x, real, fake = latents(**shape)
        value, slope = gradient_at(lambda x: loss(x, real, fake, form=form).mean(), x)  # noqa: B023
        assert value == 0
        assert torch.equal(slope, torch.zeros_like(x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_vectors_give_finite_losses_and_gradients(form, dtype):
    for zeroed in range(3):
        inputs = [z.clone() for z in latents(dtype=dtype)]
        inputs[zeroed][0] = 0  # a whole video
        inputs[zeroed][1, :, 2] = 0  # a single frame
        x, real, fake = inputs
        value, slope = gradient_at(lambda x: relational_loss(x, real, fake, form=form), x)  # noqa: B023
        assert value.isfinite()
        assert slope.isfinite().all()
    nothing = torch.zeros(2, 3, 4, 2, 2, dtype=dtype)
    value, slope = gradient_at(lambda x: relational_loss(x, nothing, nothing, form=form), nothing)
    assert value == 0
    assert torch.equal(slope, nothing)


def test_a_zero_vector_has_no_direction():
    """Its cosines are 0, with itself too, and no gradient reaches it; the others keep theirs."""
    features = randn(4, 3)
    features[1] = 0
    matrix = relation_matrix(features)
    assert torch.equal(matrix[1], torch.zeros(4, dtype=torch.float64))
    weights = randn(4, 4, seed=1)
    slope = gradient(lambda f: (weights * relation_matrix(f)).sum(), features.requires_grad_())
    assert torch.equal(slope[1], torch.zeros(3, dtype=torch.float64))
    others = [0, 2, 3]
    without = gradient(lambda f: (weights[others][:, others] * relation_matrix(f)).sum(), features[others])
    torch.testing.assert_close(slope[others], without)


def test_one_channel_has_no_gradient():
    """With C = 1 every cosine is +1 or -1: the loss is there, its gradient is not."""
    x, real, fake = latents(channels=1)
    value, slope = gradient_at(lambda x: relational_loss(x, real, fake), x)
    assert value > 0.01
    assert slope.abs().max() < 1e-14


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_prediction_is_not_hidden(value):
    """Non-finite numbers are the training guard's business: they must reach it."""
    x, real, fake = latents()
    real[1, 0, 0, 0, 0] = value
    assert not relational_loss(x, real, fake).isfinite()


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_inputs_give_float32_losses(dtype, form):
    """Computed as in float32 from the rounded inputs; the gradient comes back in x's precision."""
    halves = [z.to(dtype) for z in latents(dtype=torch.float32)]
    for loss in LEVELS:
        value = loss(*halves, form=form)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, loss(*(z.float() for z in halves), form=form), rtol=1e-5, atol=1e-6)
    slope = gradient(lambda x: relational_loss(x, *halves[1:], form=form), halves[0])
    assert slope.dtype == dtype
    assert slope.isfinite().all()


def test_float64_stays_float64():
    assert relational_loss(*latents()).dtype == torch.float64


def test_autocast_does_not_round_the_matrices():
    inputs = latents(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = relational_loss(*inputs)
    assert torch.equal(under_autocast, relational_loss(*inputs))


def test_low_temperatures_do_not_overflow():
    x, real, fake = latents(dtype=torch.float32)
    value, slope = gradient_at(lambda x: relational_loss(x, real, fake, tau=1e-4), x)
    assert value.isfinite()
    assert slope.isfinite().all()


# Accumulation


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 6])
def test_two_passes_give_the_gradient_of_one_large_batch(micro_batches):
    """Weights' gradients agree to 1e-10 for any number of micro-batches, which plain accumulation misses."""
    network = torch.nn.Conv3d(4, 6, 1, dtype=torch.float64)
    noise, real, fake = randn(6, 4, 5, 2, 3), randn(6, 6, 5, 2, 3, seed=2), randn(6, 6, 5, 2, 3, seed=3)

    def weights_gradient():
        result = torch.cat([p.grad.flatten() for p in network.parameters()])
        network.zero_grad()
        return result

    relational_loss(network(noise), real, fake).backward()
    expected = weights_gradient()

    parts = noise.chunk(micro_batches)
    with torch.no_grad():
        x = torch.cat([network(part) for part in parts])
    value, slope = gradient_at(lambda x: relational_loss(x, real, fake), x)
    for part, part_slope in zip(parts, slope.split([len(part) for part in parts]), strict=True):
        replay(network(part), part_slope)
    torch.testing.assert_close(weights_gradient(), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(value, relational_loss(x, real, fake))

    if micro_batches > 1:
        for rows in zip(parts, real.chunk(micro_batches), fake.chunk(micro_batches), strict=True):
            (relational_loss(network(rows[0]), *rows[1:]) / micro_batches).backward()
        assert (weights_gradient() - expected).norm() > 1e-3 * expected.norm()


# Errors, as people see them: without the type checks that these tests add


@pytest.mark.parametrize("loss", [*LEVELS, relational_loss])
def test_wrong_input_is_one_line_that_says_what_to_do(loss):
    x, real, fake = latents()
    for tau in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UserError, match="tau must be above 0"):
            loss(x, real, fake, tau=tau)
    with pytest.raises(UserError, match="unknown form 'cosine', expected one of residual, direct, mse"):
        loss(x, real, fake, form="cosine")
    with pytest.raises(UserError, match=r"real has shape \(3, 6, 5, 2, 3\), expected .* \(4, 6, 5, 2, 3\)"):
        inspect.unwrap(loss)(x, real[:3], fake)
    with pytest.raises(UserError, match=r"x has shape \(6, 5, 2, 3\), expected \[B, C, F, H, W\]"):
        inspect.unwrap(loss)(x[0], real[0], fake[0])


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["batch_weight", "frame_weight"])
def test_negative_weights_are_named(name, weight):
    with pytest.raises(UserError, match=f"{name} must be a number from 0 up"):
        relational_loss(*latents(), **{name: weight})


def test_a_gradient_of_another_split_is_named():
    x = randn(2, 3, 1, 1, 1).requires_grad_() * 1
    with pytest.raises(UserError, match="split the gradient as the batch was split"):
        inspect.unwrap(replay)(x, randn(1, 3, 1, 1, 1))
