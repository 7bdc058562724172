"""The relational loss across ranks: the same weights' gradients at any world size and any accumulation (R11).

One launch of four processes over gloo. Groups of one, two and four of them stand for the three world sizes.
"""

from datetime import timedelta
from multiprocessing import set_forkserver_preload

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from codmd.errors import UserError
from codmd.objectives import ObjectiveConfig, Predictions, build, objective_gradient, total
from codmd.relations import (
    batch_relation_loss,
    frame_relation_loss,
    gradient_at,
    pairwise_diversity,
    pool_samples,
    relational_loss,
    replay,
)

WORLD, BATCH = 4, 8


def problem():
    """The same global batch on every rank, and a student with the same weights."""
    generator = torch.Generator().manual_seed(0)
    noise, real, fake = torch.randn(3, BATCH, 3, 4, 2, 2, generator=generator, dtype=torch.float64)
    network = torch.nn.Conv3d(3, 3, 1, dtype=torch.float64)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return network, noise, real, fake


def average(value, group):
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value / dist.get_world_size(group)


def weights_gradient(network):
    return torch.cat([parameter.grad.flatten() for parameter in network.parameters()])


def one_pass(group, rows, **options):
    """A user's trainer: DDP, one call, one backward. The value is averaged as a log would do it."""
    network, noise, real, fake = problem()
    student = DistributedDataParallel(network, process_group=group)
    loss = relational_loss(student(noise[rows]), real[rows], fake[rows], group=group, **options)
    loss.backward()
    return average(loss, group), weights_gradient(network)


def two_passes(group, rows, micro_batches):
    """Exact accumulation of the whole CoDMD objective."""
    network, noise, real, fake = problem()
    objective = build(ObjectiveConfig(), group)
    parts = rows.chunk(micro_batches)
    with torch.no_grad():
        x = torch.cat([network(noise[part]) for part in parts])
    t = torch.full((len(rows),), 0.5, dtype=torch.float64)
    predictions = Predictions(x=x, x_t=x, t=t, real=real[rows], fake=fake[rows])
    gradient, terms = objective_gradient(objective, predictions)
    for part, part_gradient in zip(parts, gradient.chunk(micro_batches), strict=True):
        replay(network(noise[part]), part_gradient)
    return average(total(terms), group), average(weights_gradient(network), group)


def collectives_of(function):
    """The names of the collectives that a call makes, as torch's own profiler sees them."""
    with torch.autograd.profiler.profile() as profile:
        function()
    return [event.name for event in profile.function_events if event.name.startswith("gloo:")]


def measure(rank, groups):
    """Everything that rank 0 hands to the tests, computed by all."""
    _, noise, real, fake = problem()
    results = {}
    for world, group in groups.items():
        place = rank % world
        rows = torch.arange(BATCH).chunk(world)[place]
        results["one pass", world] = one_pass(group, rows)
        results["release", world] = one_pass(group, rows, frame_weight=0, release_batch_scaling=True)
        results["batch only", world] = one_pass(group, rows, frame_weight=0)
        for micro_batches in (1, 2):
            results["two passes", world, micro_batches] = two_passes(group, rows, micro_batches)
        local = (noise[rows], real[rows], fake[rows])
        results["rows", world] = batch_relation_loss(*local, group=group)
        results["diversity", world] = pairwise_diversity(pool_samples(noise[rows]), group)

    rows = torch.arange(BATCH).chunk(WORLD)[rank]
    x, local = noise[rows], (real[rows], fake[rows])
    results["frame collectives"] = collectives_of(
        lambda: gradient_at(lambda x: frame_relation_loss(x, *local).mean(), x)
    )
    results["batch collectives"] = collectives_of(
        lambda: gradient_at(lambda x: batch_relation_loss(x, *local).mean(), x)
    )
    results["local diversity"] = pairwise_diversity(pool_samples(x))
    uneven = slice(0, 1 + (rank == 0))
    try:
        batch_relation_loss(noise[uneven], real[uneven], fake[uneven])
    except UserError as error:
        results["uneven"] = str(error)
    return results


def run_rank(rank, folder):
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD, timeout=timedelta(minutes=2))
    # Every rank makes every group, and keeps the one that it is in.
    ones = [dist.new_group([r]) for r in range(WORLD)]
    twos = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    results = measure(rank, {1: ones[rank], 2: twos[rank // 2], 4: dist.group.WORLD})
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the four ranks has measured."""
    folder = tmp_path_factory.mktemp("ranks")
    set_forkserver_preload(["torch"])  # imported once for all four
    mp.start_processes(run_rank, (folder,), nprocs=WORLD, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_call_gives_the_full_batch_gradient_at_any_world_size(ranks, world):
    """The averaged gradient, and the averaged value, are those of one process with the whole batch."""
    network, noise, real, fake = problem()
    loss = relational_loss(network(noise), real, fake)
    loss.backward()
    expected = weights_gradient(network)
    for results in ranks:
        value, gradient = results["one pass", world]
        torch.testing.assert_close(value, loss.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_ranks_times_micro_batches_is_one_batch(ranks):
    """1 x 1 = 1 x 2 = 2 x 1 = 2 x 2 = 4 x 1 = 4 x 2, to 1e-10, for the whole objective."""
    network, noise, real, fake = problem()
    x = network(noise)
    t = torch.full((BATCH,), 0.5, dtype=torch.float64)
    loss = total(build(ObjectiveConfig())(Predictions(x=x, x_t=x, t=t, real=real, fake=fake)))
    loss.backward()
    expected = weights_gradient(network)
    for results in ranks:
        for world in (1, 2, 4):
            for micro_batches in (1, 2):
                value, gradient = results["two passes", world, micro_batches]
                torch.testing.assert_close(value, loss.detach(), rtol=0, atol=1e-10)
                torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_sees_the_rows_of_the_global_batch(ranks, world):
    _, noise, real, fake = problem()
    expected = batch_relation_loss(noise, real, fake)
    for results in ranks:
        torch.testing.assert_close(results["rows", world], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_release_scaling_divides_the_batch_term_by_the_world_size(ranks, world):
    """R11: the authors' arithmetic, for those who want to reproduce it. The value stays what it was."""
    for results in ranks:
        value, gradient = results["release", world]
        exact_value, exact_gradient = results["batch only", world]
        torch.testing.assert_close(value, exact_value)
        torch.testing.assert_close(world * gradient, exact_gradient)


def test_the_frame_term_uses_no_collective(ranks):
    """Neither forward nor backward; the batch term gathers its size and its pooled features, once."""
    for results in ranks:
        assert results["frame collectives"] == []
        assert len(results["batch collectives"]) == 2
        assert all("all_gather" in name for name in results["batch collectives"])


def test_diversity_is_a_groups_only_if_asked_for(ranks):
    _, noise, _, _ = problem()
    for rank, results in enumerate(ranks):
        for world in (2, 4):
            torch.testing.assert_close(results["diversity", world], pairwise_diversity(pool_samples(noise)))
        rows = torch.arange(BATCH).chunk(WORLD)[rank]
        torch.testing.assert_close(results["local diversity"], pairwise_diversity(pool_samples(noise[rows])))


def test_uneven_batches_are_refused_on_every_rank(ranks):
    for results in ranks:
        assert "ranks hold [2, 1, 1, 1] samples" in results["uneven"]
