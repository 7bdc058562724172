"""What a run says of its speed agrees with what torch counts, and with what the networks did."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from diffusers import WanTransformer3DModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from codmd import mini
from codmd.engine import meter as module
from codmd.engine.meter import Evaluations, Meter, peak_flops, peak_of, video_tokens, wan_forward_flops
from codmd.networks import GuidedTeacher, TextCondition, WanNetwork

WAN = dict(patch_size=(1, 2, 2), in_channels=16, out_channels=16, attention_head_dim=128, text_dim=4096, freq_dim=256)
WAN_1_3B = WAN | dict(num_attention_heads=12, ffn_dim=8960, num_layers=30)
WAN_14B = WAN | dict(num_attention_heads=40, ffn_dim=13824, num_layers=40)
# No two sizes alike, and patches in time as well: whatever is left out or mixed up shows.
ODD = dict(patch_size=(2, 2, 1), num_attention_heads=2, attention_head_dim=12, in_channels=3, out_channels=5,
           text_dim=20, freq_dim=16, ffn_dim=40, num_layers=3, rope_max_seq_len=64)  # fmt: skip
CLIP = (16, 21, 60, 104)  # 81 frames of 480 × 832


def miniature() -> dict[str, Any]:
    return json.loads((Path(mini.path()) / "transformer" / "config.json").read_text())


def counted_by_torch(config: dict[str, Any], latent_shape: tuple[int, ...], text_tokens: int) -> int:
    """The stock transformer on the meta device: shapes only. MATH, since a CPU's fused attention goes uncounted."""
    with torch.device("meta"):
        model = WanTransformer3DModel(**{k: v for k, v in config.items() if not k.startswith("_")})
        inputs = torch.empty(1, *latent_shape), torch.empty(1), torch.empty(1, text_tokens, config["text_dim"])
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            model(*inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("config", "latent_shape", "text_tokens"),
    [
        (miniature(), (16, 5, 8, 8), 17),
        (miniature(), (16, 5, 8, 8), 512),
        (ODD, (3, 6, 10, 7), 9),
        (WAN_1_3B, CLIP, 512),
    ],
)
def test_the_formula_is_what_torch_counts(
    config: dict[str, Any], latent_shape: tuple[int, int, int, int], text_tokens: int
) -> None:
    assert wan_forward_flops(config, latent_shape, text_tokens) == counted_by_torch(config, latent_shape, text_tokens)


def test_the_known_figures_of_wan() -> None:
    assert video_tokens(WAN_1_3B, CLIP) == 32760
    assert wan_forward_flops(WAN_1_3B, CLIP, 512) / 1e15 == pytest.approx(0.283, abs=5e-4)
    assert wan_forward_flops(WAN_14B, CLIP, 512) / 1e15 == pytest.approx(1.678, abs=5e-4)


def test_a_network_that_looks_at_images_is_refused() -> None:
    with pytest.raises(ValueError, match="text-to-video"):
        wan_forward_flops(WAN_14B | {"image_dim": 1280}, CLIP, 512)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GB200", None),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
    ],
)
def test_a_peak_is_that_of_the_very_card_or_unknown(name: str, teraflops: float | None) -> None:
    assert peak_of(name) == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None


# ---- evaluations -----------------------------------------------------------------------------------------------------


def text(batch: int) -> TextCondition:
    return TextCondition(torch.randn(batch, 5, 16) * (torch.arange(5) < 4)[:, None], torch.full((batch,), 4))


def forward(network: WanNetwork, batch: int) -> torch.Tensor:
    return network.velocity(torch.randn(batch, 4, 3, 4, 4), torch.rand(batch), text(batch))


@pytest.fixture
def network() -> WanNetwork:
    return WanNetwork(tiny.transformer(layers=3))


class Taken:
    """What was counted since the last look."""

    def __init__(self, *networks: WanNetwork, recomputed: bool = True) -> None:
        self.evaluations, self.seen = Evaluations(networks, recomputed=recomputed), 0.0

    def __call__(self) -> float:
        before, self.seen = self.seen, self.evaluations.total
        return self.seen - before


both_ways = pytest.mark.parametrize("recomputed", [True, False])


@both_ways
def test_a_forward_counts_one_a_sample_and_a_backward_two(network: WanNetwork, recomputed: bool) -> None:
    taken = Taken(network, recomputed=recomputed)
    assert taken() == 0
    with torch.no_grad():
        forward(network, 2)
    assert taken() == 2
    made = forward(network, 5)
    assert taken() == 5
    made.sum().backward()
    assert taken() == 10
    forward(network.requires_grad_(False), 1)
    assert taken() == 1


@both_ways
def test_a_guided_evaluation_counts_two_a_sample(network: WanNetwork, recomputed: bool) -> None:
    taken = Taken(network, recomputed=recomputed)
    x, t = torch.randn(3, 4, 3, 4, 4), torch.rand(3)
    with torch.no_grad():
        GuidedTeacher(network, text(1), 3.5).velocity(x, t, text(3))
        assert taken() == 6
        GuidedTeacher(network, text(1), 1.0).velocity(x, t, text(3))
        assert taken() == 3


@both_ways
def test_frozen_weights_before_what_learns_count_their_backward(network: WanNetwork, recomputed: bool) -> None:
    taken = Taken(network.requires_grad_(False), recomputed=recomputed)
    x = torch.randn(2, 4, 3, 4, 4, requires_grad=True)
    network.velocity(x, torch.rand(2), text(2)).sum().backward()
    assert taken() == 2 * (1 + 2)


def wrapped(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False) if torch.is_grad_enabled() else forward(*args)


@both_ways
@pytest.mark.parametrize("way", ["blocks called again", "blocks called again, reentrant", "forwards called again"])
def test_a_recomputation_counts_one_more_where_it_is_asked_for(network: WanNetwork, way: str, recomputed: bool) -> None:
    if way == "forwards called again":
        for block in network.transformer.blocks:
            block.forward = wrapped(block.forward)
    else:
        network.transformer.enable_gradient_checkpointing(
            lambda block, *args: checkpoint(block, *args, use_reentrant=way.endswith("reentrant"))
        )
    taken = Taken(network, recomputed=recomputed)
    made = forward(network, 2)
    assert taken() == 2
    made.sum().backward()
    assert taken() == 2 * (recomputed + 2)
    with torch.no_grad():
        forward(network, 2)
    assert taken() == 2


@both_ways
def test_networks_add_up_and_one_that_roles_share_counts_once(network: WanNetwork, recomputed: bool) -> None:
    other = WanNetwork(tiny.transformer(layers=2))
    shared = WanNetwork(network.transformer)
    taken = Taken(network, shared, other, recomputed=recomputed)
    forward(network, 1)
    forward(shared, 2)
    forward(other, 4).sum().backward()
    assert taken() == 1 + 2 + 12


@both_ways
def test_listening_changes_no_number_and_ends(network: WanNetwork, recomputed: bool) -> None:
    alone = copy.deepcopy(network)
    evaluations = Evaluations([network], recomputed=recomputed)
    for one in (alone, network):
        torch.manual_seed(0)
        forward(one, 2).square().sum().backward()
    for a, b in zip(alone.parameters(), network.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
    counted = evaluations.total
    assert counted == 6
    evaluations.close()
    forward(network, 2).sum().backward()
    assert evaluations.total == counted


# ---- the meter -------------------------------------------------------------------------------------------------------


@pytest.fixture
def known_peak(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    monkeypatch.setattr(module, "peak_flops", lambda device: 1e15)
    yield 1e15


def test_figures_of_a_step(known_peak: float) -> None:
    one = Meter(WAN_1_3B, CLIP, 512, torch.device("cpu"))
    figures = one.record(seconds=4.0, evaluations=10.5, samples=2)
    assert figures["seconds/step"] == 4.0
    assert figures["tokens_per_second"] == 2 * 32760 / 4.0
    assert figures["mfu"] == pytest.approx(10.5 * wan_forward_flops(WAN_1_3B, CLIP, 512) / 4.0 / known_peak)
    assert list(figures) == ["seconds/step", "tokens_per_second", "mfu", "memory/peak_gb"]


def test_a_share_of_an_unknown_peak_is_left_out() -> None:
    figures = Meter(WAN_1_3B, CLIP, 512, torch.device("cpu")).record(seconds=1.0, evaluations=3, samples=1)
    assert "mfu" not in figures and figures["seconds/step"] == 1.0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to ask")
def test_memory_is_between_what_is_resident_now_and_what_the_machine_has() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    held = torch.ones(25_000_000)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
    figures = Meter(WAN_1_3B, CLIP, 512, torch.device("cpu")).record(seconds=1.0, evaluations=1, samples=1)
    assert held.nbytes < 0.98 * resident <= 1e9 * figures["memory/peak_gb"] < os.sysconf("SC_PHYS_PAGES") * page
