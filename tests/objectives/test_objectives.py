"""Laws of the objectives: what each is made of, how they meet, what they cost, and what they refuse."""

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import codmd
from codmd import flow
from codmd.errors import UserError
from codmd.objectives import METHODS, ObjectiveConfig, Predictions, build, objective_gradient, total
from codmd.objectives.config import METHOD_NAMES
from codmd.objectives.dmd import dmd_loss
from codmd.relations import batch_relation_loss, frame_relation_loss, relational_loss, replay


def predictions(batch=4, frames=5, channels=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, eps, real, fake = torch.randn(4, batch, channels, frames, 2, 3, generator=generator, dtype=torch.float64)
    t = 0.1 + 0.8 * torch.rand(batch, generator=generator, dtype=torch.float64)
    return Predictions(x=x, x_t=flow.add_noise(x, eps, t), t=t, real=real, fake=fake)


def weights(**keys):
    return ObjectiveConfig(**{"batch_weight": 0.3, "frame_weight": 0.7, **keys})


def part(p, rows):
    return Predictions(x=p.x[rows], x_t=p.x_t[rows], t=p.t[rows], real=p.real[rows], fake=p.fake[rows])


# What each is made of


@pytest.mark.parametrize(
    ("method", "form", "names"),
    [
        ("dmd", None, ["dmd"]),
        ("codmd", "residual", ["dmd", "batch", "frame"]),
        ("batch", "residual", ["dmd", "batch"]),
        ("frame", "residual", ["dmd", "frame"]),
        ("direct", "direct", ["dmd", "batch", "frame"]),
        ("mse", "mse", ["dmd", "batch", "frame"]),
    ],
)
def test_each_method_is_dmd_plus_its_relational_terms(method, form, names):
    """Eq. 11 and the ablation's rows."""
    p = predictions()
    parts = {
        "dmd": (1.0, dmd_loss(p.x, p.real, p.fake)),
        "batch": (0.3, form and batch_relation_loss(p.x, p.real, p.fake, tau=0.2, form=form)),
        "frame": (0.7, form and frame_relation_loss(p.x, p.real, p.fake, tau=0.2, form=form)),
    }
    terms = build(weights(method=method, tau=0.2))(p)
    assert [term.name for term in terms] == names
    for term in terms:
        weight, values = parts[term.name]
        assert term.weight == weight
        torch.testing.assert_close(term.values, values)
    expected = sum(weight * values.mean() for weight, values in (parts[name] for name in names))
    torch.testing.assert_close(total(terms), expected)


def test_every_name_has_a_method_and_the_defaults_are_the_papers():
    assert set(METHODS) == set(METHOD_NAMES)
    config = ObjectiveConfig()
    assert (config.method, config.batch_weight, config.frame_weight, config.tau) == ("codmd", 0.1, 0.1, 0.1)


def test_codmd_is_dmd_plus_the_function_for_other_trainers():
    p = predictions()
    with_one_call = dmd_loss(p.x, p.real, p.fake).mean() + relational_loss(p.x, p.real, p.fake)
    torch.testing.assert_close(total(build(ObjectiveConfig())(p)), with_one_call)
    assert codmd.relational_loss is relational_loss


def test_lambda_zero_is_dmd():
    p = predictions()
    plain, _ = objective_gradient(build(ObjectiveConfig(method="dmd")), p)
    for method in METHODS:
        off, _ = objective_gradient(build(ObjectiveConfig(method=method, batch_weight=0, frame_weight=0)), p)
        assert torch.equal(off, plain)


@pytest.mark.parametrize("method", ["dmd", "codmd", "batch", "frame", "mse"])
def test_no_gradient_where_fake_is_real(method):
    p = predictions()
    gradient, terms = objective_gradient(build(weights(method=method)), replace(p, fake=p.real))
    assert gradient.abs().max() < 1e-15
    assert total(terms).abs() < 1e-15


@pytest.mark.parametrize("method", METHODS)
def test_gradients_reach_x_only(method):
    p = predictions()
    leaves = {name: getattr(p, name).requires_grad_() for name in ("x", "x_t", "real", "fake")}
    for space in ("x0",) if method == "direct" else ("x0", "score"):
        total(build(weights(method=method, space=space))(p)).backward()
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == ["x"]


# Scores in place of x0-predictions (R2)


def test_score_space_builds_the_teachers_and_the_fakes_matrices_from_scores():
    p = predictions()
    scores = [flow.score_from_x0(p.x_t, z, p.t) for z in (p.real, p.fake)]
    terms = {term.name: term.values for term in build(weights(space="score"))(p)}
    torch.testing.assert_close(terms["batch"], batch_relation_loss(p.x, *scores))
    torch.testing.assert_close(terms["frame"], frame_relation_loss(p.x, *scores))
    torch.testing.assert_close(terms["dmd"], dmd_loss(p.x, p.real, p.fake))
    in_x0 = {term.name: term.values for term in build(weights())(p)}
    assert not torch.allclose(terms["frame"], in_x0["frame"])


def test_score_space_keeps_the_law_that_equal_predictions_mean_no_gradient():
    p = predictions()
    config = weights(method="frame", space="score")
    gradient, _ = objective_gradient(build(config), replace(p, fake=p.real))
    assert gradient.abs().max() < 1e-15


# What they cost


class CountingNetwork(torch.nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv3d(3, 3, 1, dtype=torch.float64)

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def calls_of_a_student_step(method):
    student, teacher, fake = networks = [CountingNetwork() for _ in range(3)]
    noise = torch.randn(4, 3, 2, 2, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    t = torch.full((4,), 0.5, dtype=torch.float64)
    x = student(noise)
    with torch.no_grad():
        x_t = flow.add_noise(x, noise, t)
        real = flow.guide(teacher(x_t), teacher(-x_t), 3.5)
        p = Predictions(x=x, x_t=x_t, t=t, real=real, fake=fake(x_t))
    p = replace(p, x=x)
    before = [network.calls for network in networks]
    total(build(ObjectiveConfig(method=method))(p)).backward()
    assert [network.calls for network in networks] == before
    return before


def test_codmd_evaluates_the_networks_exactly_as_often_as_dmd():
    """Both take the same Predictions and neither has, or is given, anything that could be called for more."""
    assert calls_of_a_student_step("codmd") == calls_of_a_student_step("dmd") == [1, 2, 1]
    for method in METHODS:
        objective = build(ObjectiveConfig(method=method))
        held = [*objective.args, *objective.keywords.values()]
        assert not any(callable(value) for value in held)
    assert all(isinstance(value, torch.Tensor) for value in vars(predictions()).values())


@pytest.mark.parametrize("name", ["rollout", "sampling"])
def test_inference_is_unchanged(name):
    """What makes videos knows nothing of objectives or relations."""
    path = Path(codmd.__file__).parent / f"{name}.py"
    if not path.exists():
        pytest.skip(f"no {name}.py")
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert not [module for module in imported if "objectives" in module or "relations" in module]


def test_relations_and_flow_import_nothing_of_ours_but_the_error():
    package = Path(codmd.__file__).parent
    for name in ("flow", "relations"):
        tree = ast.parse((package / f"{name}.py").read_text())
        ours = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module.startswith("codmd")]
        assert ours == ["codmd.errors"]


# Accumulation


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_two_passes_give_the_weights_gradients_of_one_large_batch(method, micro_batches):
    network = torch.nn.Conv3d(6, 6, 1, dtype=torch.float64)
    objective, p, noise = build(weights(method=method)), predictions(), predictions(seed=1).x

    def weights_gradient():
        result = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
        network.zero_grad()
        return result

    total(objective(replace(p, x=network(noise)))).backward()
    expected = weights_gradient()

    rows = torch.arange(4).chunk(micro_batches)
    with torch.no_grad():
        joined = Predictions.join([replace(part(p, r), x=network(noise[r])) for r in rows])
    gradient, terms = objective_gradient(objective, joined)
    for r in rows:
        replay(network(noise[r]), gradient[r])
    torch.testing.assert_close(weights_gradient(), expected, rtol=0, atol=1e-10)
    assert not any(term.values.requires_grad for term in terms)


# What they refuse


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "codmdd"}, 'method: unknown "codmdd", did you mean "codmd"?'),
        ({"space": "scores"}, 'space: unknown "scores", did you mean "score"?'),
        ({"batch_weight": -0.1}, "batch_weight: expected a finite number at least 0"),
        ({"frame_weight": math.nan}, "frame_weight: expected a finite number at least 0"),
        ({"tau": 0.0}, "tau: expected a finite number above 0"),
        ({"tau": math.inf}, "tau: expected a finite number above 0"),
        ({"method": "direct", "space": "score"}, 'use "x0"'),
    ],
)
def test_a_wrong_value_is_named(keys, message):
    with pytest.raises(UserError) as error:
        ObjectiveConfig(**keys)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
