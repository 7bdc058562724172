"""The paper's three propositions, checked numerically."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codmd.relations import (
    frame_relation_loss,
    gradient_at,
    pairwise_diversity,
    pool_frames,
    relation_matrix,
    relation_residual,
)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Proposition 1: marginals don't identify relations


def two_frame_videos(channels, count=500):
    """P = (U, U) and Q = (U, -U), from antithetic draws, so that their marginals agree exactly."""
    u = randn(count, channels, 1, 1, 1)
    u = torch.cat([u, -u])
    return torch.cat([u, u], dim=2), torch.cat([u, -u], dim=2)


@pytest.mark.parametrize("channels", [1, 4])
def test_equal_marginals_with_different_relations(channels):
    p, q = two_frame_videos(channels)
    for frame in (0, 1):  # the same multiset of values in every frame and channel
        assert torch.equal(p[:, :, frame].sort(dim=0).values, q[:, :, frame].sort(dim=0).values)

    def correlation(video):
        return (video[:, :, 0] * video[:, :, 1]).mean() / video.square().mean()

    assert correlation(p) == pytest.approx(1)
    assert correlation(q) == pytest.approx(-1)
    # What no function of the marginals can tell apart, the relation matrices do.
    ones = torch.ones(len(p), 2, 2, dtype=torch.float64)
    torch.testing.assert_close(relation_matrix(pool_frames(p)), ones)
    torch.testing.assert_close(relation_matrix(pool_frames(q)), 2 * torch.eye(2, dtype=torch.float64) - ones)
    torch.testing.assert_close(relation_residual(real=p, fake=q), torch.full((len(p),), 2.0, dtype=torch.float64))
    assert (frame_relation_loss(p, real=p, fake=q) > 0.5).all()
    torch.testing.assert_close(frame_relation_loss(p, real=p, fake=p), torch.zeros(len(p), dtype=torch.float64))


def test_with_one_channel_the_loss_sees_the_difference_but_has_no_gradient():
    p, q = two_frame_videos(channels=1)
    for student in (p, q, randn(len(p), 1, 2, 1, 1, seed=1)):
        value, slope = gradient_at(lambda x: frame_relation_loss(x, real=p, fake=q).mean(), student)
        assert value > 0.01
        assert slope.abs().max() < 1e-12


def test_lifted_to_two_channels_descent_finds_the_teachers_relation():
    """A student between P and Q follows the loss to P's relation, while a fake network tracks it."""
    real, _ = two_frame_videos(channels=2, count=20)
    student = randn(*real.shape, seed=1)

    def alignment(video):
        return relation_matrix(pool_frames(video))[:, 0, 1].mean()

    assert alignment(student) < 0.5
    for _ in range(200):
        _, slope = gradient_at(lambda x: frame_relation_loss(x, real, fake=x.detach()).sum(), student)
        student = student - 0.05 * slope
    assert alignment(student) > 0.95


# Proposition 2: reverse KL selects a dominant mode


def kl(q, p):
    support = q > 0
    return (q[support] * (q[support].log() - p[support].log())).sum()


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31), modes=st.integers(2, 6))
def test_reverse_kl_of_one_mode_is_minus_the_log_of_its_weight(seed, modes):
    generator = torch.Generator().manual_seed(seed)
    pi = 0.05 + torch.rand(modes, generator=generator, dtype=torch.float64)
    pi /= pi.sum()
    densities, others = torch.zeros(2, modes, modes * 32, dtype=torch.float64)
    for k in range(modes):  # disjoint supports, arbitrary densities on a grid
        support = slice(32 * k, 32 * (k + 1))
        densities[k, support], others[k, support] = torch.rand(2, 32, generator=generator, dtype=torch.float64).add(
            0.01
        )
    densities /= densities.sum(dim=1, keepdim=True)
    others /= others.sum(dim=1, keepdim=True)
    teacher = pi @ densities

    costs = torch.stack([kl(densities[k], teacher) for k in range(modes)])
    torch.testing.assert_close(costs, -pi.log())
    assert costs.argmin() == pi.argmax()
    for k in range(modes):  # the general version, for any Q_k on the k-th support
        torch.testing.assert_close(kl(others[k], teacher), kl(others[k], densities[k]) - pi[k].log())


def test_reverse_kl_never_notices_modes_that_are_not_covered():
    """Splitting the rest of the teacher into ever more modes costs a single-mode student nothing."""
    costs = []
    for rest in (1, 2, 8):
        pi = torch.tensor([0.4] + [0.6 / rest] * rest, dtype=torch.float64)
        student = torch.zeros_like(pi)
        student[0] = 1
        costs.append(kl(student, pi))
    assert costs[0] == costs[1] == costs[2]


# Proposition 3: the relational statistic does


def sampled_modes(weights, count=400, channels=16, spread=0.1, seed=0):
    """Points around well-separated directions, in the proportions of the mixture; the mode of each point."""
    centres = torch.linalg.qr(randn(channels, channels, seed=seed)).Q[: len(weights)]
    mode = torch.cat([torch.full((round(w * count),), k) for k, w in enumerate(weights)])
    return centres[mode] + spread * randn(len(mode), channels, seed=seed + 1), mode


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.7, 0.2, 0.1), (0.25,) * 4, (0.1,) * 10])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.2])
def test_a_collapsed_student_shows_in_its_diversity(weights, spread):
    """Eq. 6: D(P) - D(P_j) >= Delta (1 - sum pi_k^2) - epsilon, for an empirical mixture and each mode."""
    teacher, mode = sampled_modes(weights, spread=spread)

    def diversity(points):  # of the empirical distribution: with the pairs of a point and itself
        return pairwise_diversity(points) * (len(points) - 1) / len(points)

    distance = 1 - relation_matrix(teacher)
    between = torch.stack(
        [
            torch.stack([distance[mode == a][:, mode == b].mean() for b in range(len(weights))])
            for a in range(len(weights))
        ]
    )
    epsilon = between.diagonal().max()
    apart = between[~torch.eye(len(weights), dtype=torch.bool)].min()
    assert 0 <= epsilon < apart
    pi = torch.bincount(mode).double() / len(mode)
    bound = apart * (1 - pi.square().sum()) - epsilon
    assert bound > 0
    for k in range(len(weights)):
        gap = diversity(teacher) - diversity(teacher[mode == k])
        assert gap >= bound - 1e-12
    if spread == 0:  # points in place of modes attain it
        assert gap == pytest.approx(float(bound))


def test_diversity_grows_with_the_number_of_modes():
    """1 - sum pi_k^2 = 1 - 1/K for even modes at right angles."""
    for modes in (1, 2, 4, 8):
        points, _ = sampled_modes((1 / modes,) * modes, spread=0.0)
        expected = (1 - 1 / modes) * len(points) / (len(points) - 1)
        assert pairwise_diversity(points).item() == pytest.approx(expected)


def test_diversity_is_unbiased_at_any_number_of_samples():
    """Opposite directions at random: D = 1, from pairs as from hundreds."""
    signs = torch.randint(0, 2, (4000, 3, 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    few = torch.stack([pairwise_diversity(points) for points in signs]).mean()
    assert few.item() == pytest.approx(1, abs=0.05)
    assert pairwise_diversity(signs.flatten(0, 1)[:1000]).item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("count", [0, 1])
def test_diversity_of_no_pair_is_zero(count):
    assert pairwise_diversity(randn(count, 4)) == 0


def test_diversity_knows_neither_scale_nor_order_and_has_no_gradient():
    points = randn(10, 4).requires_grad_()
    value = pairwise_diversity(points)
    assert not value.requires_grad
    torch.testing.assert_close(pairwise_diversity(3 * points.flip(0)), value)
