"""Three roles on one transformer: each learns alone, none is in another's way, and what is learned is a stock model."""

import copy
from collections.abc import Callable, Iterator

import pytest
import tiny
import torch
import torch.distributed as dist
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from codmd import mini
from codmd.errors import UserError
from codmd.networks import GuidedTeacher, TextEncoder, WanNetwork
from codmd.networks.adapters import (
    AdapterConfig,
    AdapterNetwork,
    AdapterNetworks,
    base_state,
    merged_state,
    reset,
    share,
)
from codmd.networks.sharding import recompute_blocks

stock = tiny.pipeline()
encoder = TextEncoder(stock.tokenizer, stock.text_encoder.eval())
TEXT = encoder.encode(["a red circle moves left", "the square"])
OTHER_TEXT = encoder.encode(["a blue triangle", "the green square spins right and still moves up"])
X = torch.randn(2, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
T = torch.tensor([0.8, 0.3])
FP32 = AdapterConfig(base_dtype="fp32")
WITH_FINAL = AdapterConfig(base_dtype="fp32", rank=4, alpha=6.0, final_layers=True)


def made(config: AdapterConfig = FP32, seed: int = 0) -> AdapterNetworks:
    return share(tiny.transformer(), config, seed)


def moved(networks: AdapterNetworks) -> AdapterNetworks:
    """As if both adapters had learned for a while."""
    generator = torch.Generator().manual_seed(1)
    for network in (networks.student, networks.fake):
        for parameter in network.learned().values():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return networks


def loss(network: WanNetwork) -> Tensor:
    return network.x0(X, T, TEXT).square().mean()


def gradients(network: WanNetwork) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in network.learned().items()}


def step(network: AdapterNetwork) -> None:
    optimizer = torch.optim.AdamW(network.learned().values(), lr=1e-2)
    loss(network).backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def answer(network: WanNetwork) -> Tensor:
    return network(X, T, TEXT)


def snapshot(tensors: dict[str, Tensor] | dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor] | dict[str, nn.Parameter]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- where they start ----------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FP32, WITH_FINAL])
def test_all_three_start_as_the_base_bit_for_bit(config: AdapterConfig) -> None:
    before = answer(WanNetwork(tiny.transformer()))
    networks = made(config)
    for network in (networks.student, networks.teacher, networks.fake):
        assert torch.equal(answer(network), before)


def test_a_bf16_base_answers_as_the_fp32_one_under_autocast() -> None:
    """So a teacher at half the size is the teacher of a bf16 run, bit for bit, whatever is around the call."""
    with torch.autocast("cpu", torch.bfloat16):
        before = answer(WanNetwork(tiny.transformer()))
    networks = made(AdapterConfig())
    for network in (networks.student, networks.teacher, networks.fake):
        assert torch.equal(answer(network), before)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(answer(networks.teacher), before)
    assert networks.student.x0(X, T, TEXT).dtype == torch.float32


def test_the_seed_alone_decides_the_start_and_no_other_draw_notices() -> None:
    transformer = tiny.transformer()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = share(transformer, FP32, 0)
    assert torch.equal(torch.get_rng_state(), state)
    second, third = made(seed=0), made(seed=1)
    assert same(snapshot(first.student.learned()), second.student.learned())
    assert same(snapshot(first.fake.learned()), second.fake.learned())
    name = "blocks.0.attn1.to_q.lora_A.weight"
    assert not torch.equal(first.student.learned()[name], third.student.learned()[name])
    assert not torch.equal(first.student.learned()[name], first.fake.learned()[name])


def test_names_say_nothing_of_the_role() -> None:
    networks = made(WITH_FINAL)
    names = list(networks.student.learned())
    assert names == list(networks.fake.learned())
    assert {"blocks.1.attn2.to_out.0.lora_B.weight", "blocks.0.ffn.net.2.lora_A.weight", "proj_out.bias"} <= set(names)
    assert not [name for name in names if "student" in name or "fake" in name]
    assert len(names) == 2 * 2 * 10 + 2  # A and B, of 2 blocks' 10 layers; the final layer's weight and bias
    assert networks.teacher.learned() == {}
    assert all(p.dtype == torch.float32 for p in made(AdapterConfig()).student.learned().values())


def test_a_network_that_gets_its_weights_later_starts_alike() -> None:
    """As one that is sharded before any rank has read it."""
    expected = made(WITH_FINAL)
    with torch.device("meta"):
        transformer = tiny.transformer()
    late = share(transformer, WITH_FINAL, 0)
    transformer.to_empty(device="cpu")
    for name, table in tiny.transformer().rope.named_buffers():  # in no file
        setattr(transformer.rope, name, table)
    for name, tensor in base_state(late.teacher).items():
        tensor.copy_(tiny.transformer().state_dict()[name])
    reset(late, 0)
    assert same(snapshot(late.student.learned()), expected.student.learned())
    assert same(snapshot(late.fake.learned()), expected.fake.learned())


# ---- what learns ---------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FP32, WITH_FINAL, AdapterConfig()])
def test_an_update_of_one_leaves_the_others_as_they_were(config: AdapterConfig) -> None:
    networks = made(config)
    base, teacher = snapshot(base_state(networks.teacher)), answer(networks.teacher)
    for learner, other in [(networks.student, networks.fake), (networks.fake, networks.student)] * 2:
        mine, theirs, their_answer = snapshot(learner.learned()), snapshot(other.learned()), answer(other)
        step(learner)
        assert not any(torch.equal(mine[name], p) for name, p in learner.learned().items() if "lora_B" in name)
        assert same(theirs, other.learned()) and torch.equal(answer(other), their_answer)
        assert not torch.equal(answer(learner), teacher)
    assert same(base, base_state(networks.teacher)) and torch.equal(answer(networks.teacher), teacher)
    learning = [p for p in networks.student.transformer.parameters() if p.requires_grad]
    assert len(learning) == len(networks.student.learned()) + len(networks.fake.learned())


def with_stock_checkpointing(networks: AdapterNetworks) -> None:
    networks.student.transformer.enable_gradient_checkpointing()


def with_reentrant_checkpointing(networks: AdapterNetworks) -> None:
    def again(module: nn.Module, *inputs: Tensor) -> Tensor:
        return checkpoint(module, inputs[0].requires_grad_(), *inputs[1:], use_reentrant=True)

    networks.student.transformer.enable_gradient_checkpointing(again)


def with_our_checkpointing(networks: AdapterNetworks) -> None:
    recompute_blocks(networks.student, selective=False)


WAYS = [None, with_stock_checkpointing, with_reentrant_checkpointing, with_our_checkpointing]


@pytest.mark.parametrize("checkpointing", WAYS)
@pytest.mark.parametrize("config", [WITH_FINAL, AdapterConfig()])
def test_gradients_reach_all_of_their_own_and_nothing_else(
    config: AdapterConfig, checkpointing: Callable[[AdapterNetworks], None] | None
) -> None:
    """Whatever is called between a forward and its backward, with other prompts and another batch too."""
    plain = moved(made(config))
    for network in (plain.student, plain.fake):
        loss(network).backward()
    networks = moved(made(config))
    if checkpointing is not None:
        checkpointing(networks)
    teacher = GuidedTeacher(networks.teacher, encoder.encode([""]), 3.5)

    of_student = loss(networks.student)
    with torch.no_grad():
        teacher.x0(X, T, OTHER_TEXT)
        networks.fake.x0(X, T, OTHER_TEXT)
    of_fake = loss(networks.fake)
    teacher.x0(X, T, OTHER_TEXT)
    of_student.backward()
    assert all(gradient is None for gradient in gradients(networks.fake).values())
    networks.student.x0(X, T, OTHER_TEXT)
    held = {name: gradient.clone() for name, gradient in gradients(networks.student).items() if gradient is not None}
    of_fake.backward()

    assert same(held, {name: g for name, g in gradients(networks.student).items() if g is not None})
    for expected, network in [(plain.student, networks.student), (plain.fake, networks.fake)]:
        for name, gradient in gradients(network).items():
            assert gradient is not None and gradient.abs().max() > 0, name
            assert torch.equal(gradient, expected.learned()[name].grad), name
    learned = {id(p) for network in (networks.student, networks.fake) for p in network.learned().values()}
    others = [p for p in networks.student.transformer.parameters() if id(p) not in learned]
    assert not any(p.requires_grad or p.grad is not None for p in others)


@pytest.mark.parametrize("checkpointing", WAYS[:2])
def test_one_backward_through_both_roles(checkpointing: Callable[[AdapterNetworks], None] | None) -> None:
    plain, networks = moved(made()), moved(made())
    for network in (plain.student, plain.fake):
        loss(network).backward()
    if checkpointing is not None:
        checkpointing(networks)
    (loss(networks.student) + loss(networks.fake)).backward()
    for expected, network in [(plain.student, networks.student), (plain.fake, networks.fake)]:
        assert same(gradients(network), gradients(expected))


def test_one_autocast_around_several_calls_does_no_harm() -> None:
    """Its cache would hold the weights as they were before an update."""
    networks = made(AdapterConfig())
    with torch.autocast("cpu", torch.bfloat16):
        answer(networks.student)
        loss(networks.student).backward()
        moved(networks)
        after = answer(networks.student)
    assert all(gradient is not None for gradient in gradients(networks.student).values())
    assert torch.equal(after, answer(networks.student))


def test_outside_of_a_roles_call_the_transformer_is_the_teacher() -> None:
    """Also after a backward pass that recomputed the student's blocks, and after an error."""
    around = WanNetwork(tiny.transformer())
    before = answer(around)
    networks = moved(share(around.transformer, FP32, 0))
    with_stock_checkpointing(networks)
    loss(networks.student).backward()
    with pytest.raises(RuntimeError):
        networks.student(X[:, :1], T, TEXT)
    assert torch.equal(answer(around), before)
    assert not torch.equal(answer(networks.student), before)


# ---- what leaves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FP32, WITH_FINAL])
def test_merged_weights_make_a_stock_transformer_of_the_role(config: AdapterConfig) -> None:
    networks = moved(made(config))
    for network in (networks.student, networks.teacher, networks.fake):
        state = merged_state(network)
        transformer = tiny.transformer(seed=1)
        assert list(state) == list(transformer.state_dict())
        transformer.load_state_dict(state, strict=True)
        assert network.stock_sizes() == {name: tensor.nbytes for name, tensor in state.items()}
        assert same(dict(network.stock_state()), state)
        torch.testing.assert_close(answer(WanNetwork(transformer)), answer(network), rtol=1e-4, atol=1e-5)
    distance = (answer(networks.student) - answer(networks.teacher)).abs().mean()
    assert distance > 0.05 and same(merged_state(networks.teacher), tiny.transformer().state_dict())


def test_merged_weights_are_summed_in_fp32_and_come_in_the_dtype_asked_for() -> None:
    networks = moved(made(AdapterConfig(rank=4, alpha=6.0)))
    with torch.autocast("cpu", torch.bfloat16):
        exact, rounded = merged_state(networks.student), merged_state(networks.student, "base")
    name, learned = "blocks.1.ffn.net.2", networks.student.learned()
    a, b = (learned[f"{name}.lora_{part}.weight"].detach() for part in "AB")
    weight = tiny.transformer().state_dict()[f"{name}.weight"].bfloat16().float() + 1.5 * (b @ a)
    assert torch.equal(exact[f"{name}.weight"], weight)
    assert torch.equal(rounded[f"{name}.weight"], weight.bfloat16())
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    assert rounded["blocks.0.scale_shift_table"].dtype == torch.float32  # as the base has it
    held = base_state(networks.teacher)["patch_embedding.weight"]
    assert rounded["patch_embedding.weight"].data_ptr() != held.data_ptr()


# ---- what it costs -------------------------------------------------------------------------------


def miniature() -> WanTransformer3DModel:
    return WanTransformer3DModel.from_pretrained(mini.path(), subfolder="transformer")


def size(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def held_in_training(learned: dict[str, nn.Parameter]) -> int:
    """Bytes of gradients and of what AdamW keeps."""
    parameters = list(learned.values())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    moments = [m for state in optimizer.state.values() for key, m in state.items() if key != "step"]
    return size(*[p.grad for p in parameters if p.grad is not None], *moments)


def test_a_bf16_base_is_half_as_large() -> None:
    small, full = share(miniature(), AdapterConfig(), 0), miniature().state_dict()
    assert 0.5 <= size(*base_state(small.teacher).values()) / size(*full.values()) < 0.51


def test_training_holds_a_third_of_what_three_networks_do() -> None:
    """Weights, gradients and moments: three networks in fp32, of which two learn, against adapters of rank 16."""
    full = [WanNetwork(miniature()) for _ in range(3)]
    of_full = sum(size(*network.parameters()) for network in full)
    of_full += sum(held_in_training(network.learned()) for network in full[:2])
    networks = share(miniature(), AdapterConfig(), 0)
    of_adapters = size(*networks.student.transformer.parameters())
    of_adapters += sum(held_in_training(network.learned()) for network in (networks.student, networks.fake))
    assert of_adapters / of_full <= 0.35


# ---- sharded -------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", WAYS[:2])
@pytest.mark.parametrize("config", [WITH_FINAL, AdapterConfig()])
def test_it_works_sharded(
    process_group: None, config: AdapterConfig, checkpointing: Callable[[AdapterNetworks], None] | None
) -> None:
    """FSDP2 puts DTensors in the parameters' place, and gathers frozen bf16 and learned fp32 ones together."""
    plain, networks = moved(made(config)), moved(made(config))
    transformer, mesh = networks.student.transformer, init_device_mesh("cpu", (1,))
    for block in transformer.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(transformer, mesh=mesh)
    if checkpointing is not None:
        checkpointing(networks)
    assert all(isinstance(p, DTensor) for p in networks.fake.learned().values())
    for expected, network in [(plain.student, networks.student), (plain.fake, networks.fake)]:
        loss(expected).backward()
        of_network = loss(network)
        answer(networks.teacher)
        of_network.backward()
        whole = {name: p.grad.full_tensor() for name, p in network.learned().items() if p.grad is not None}
        assert same(whole, gradients(expected))
    assert same(merged_state(networks.student), merged_state(plain.student))
    reset(networks, 3)
    again = {name: p.full_tensor() for name, p in networks.fake.learned().items()}
    assert same(again, made(config, seed=3).fake.learned())


# ---- what a person may get wrong -----------------------------------------------------------------


def test_an_unknown_target_is_refused_and_the_error_names_those_that_exist() -> None:
    with pytest.raises(UserError) as error:
        made(AdapterConfig(targets=("to_q", "to_x")))
    for part in ('"to_x"', "attn2.to_q", "ffn.net.0.proj", "condition_embedder.time_proj", "proj_out"):
        assert part in str(error.value)
    with pytest.raises(UserError, match='"to_out"'):  # a list of layers, not one
        made(AdapterConfig(targets=("to_out",)))


def test_targets_may_be_any_ends_of_names() -> None:
    networks = made(AdapterConfig(targets=("blocks.1.attn1.to_q", "time_proj", "proj_out"), base_dtype="fp32"))
    layers = {name.partition(".lora_")[0] for name in networks.student.learned()}
    assert layers == {"blocks.1.attn1.to_q", "condition_embedder.time_proj", "proj_out"}
    loss(moved(networks).student).backward()
    assert all(gradient is not None for gradient in gradients(networks.student).values())


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("rank", {"rank": 0}),
        ("alpha", {"alpha": 0.0}),
        ("alpha", {"alpha": float("nan")}),
        ("targets", {"targets": ()}),
        ("targets", {"targets": ("proj_out",), "final_layers": True}),
    ],
)
def test_a_config_validates_itself(key: str, config: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"^{key}: expected"):
        AdapterConfig(**config)  # type: ignore[arg-type]


def test_a_copy_stands_alone() -> None:
    networks = moved(made())
    before, twin = answer(networks.student), copy.deepcopy(networks)
    step(twin.student)
    assert torch.equal(answer(networks.student), before)
    assert not torch.equal(answer(twin.student), before)
