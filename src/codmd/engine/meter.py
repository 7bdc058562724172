"""What a run says of its speed: network evaluations as they happen, FLOPs by formula, memory.

The unit of work is the forward-equivalent: one forward of a whole network for one sample. A forward counts 1 and
a backward 2, as its matrix products cost. With FLOPs a forward and a card's peak this gives the share of the peak
that a step reaches (model FLOPs utilisation, MFU).
"""

from __future__ import annotations

import math
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from codmd.networks import WanNetwork

LatentShape = tuple[int, int, int, int]


def video_tokens(config: Mapping[str, Any], latent_shape: LatentShape) -> int:
    """Patches of one clip's latents: what a Wan transformer attends over."""
    return math.prod(size // patch for size, patch in zip(latent_shape[1:], config["patch_size"], strict=True))


def wan_forward_flops(config: Mapping[str, Any], latent_shape: LatentShape, text_tokens: int) -> float:
    """FLOPs of one forward of a text-to-video `WanTransformer3DModel` for one sample; a multiply-add is two.

    `text_tokens` is the number of keys that cross-attention sees: 512 in the stock pipeline, and here the prompt's
    tokens and one slot (networks/text.py). Matrix products only: norms, rotations and sums are left out, as in
    `torch.utils.flop_counter`.
    """
    if config.get("added_kv_proj_dim") or config.get("image_dim"):
        raise ValueError("image conditioning is not counted: expected a text-to-video config, without image_dim")
    dim, ffn = config["num_attention_heads"] * config["attention_head_dim"], config["ffn_dim"]
    n, k = video_tokens(config, latent_shape), text_tokens
    patch = math.prod(config["patch_size"])

    def linear(rows: int, inputs: int, outputs: int) -> int:
        return 2 * rows * inputs * outputs

    def attention(queries: int, keys: int) -> int:
        return 2 * linear(queries, keys, dim)  # logits, then values

    embed_patches = linear(n, config["in_channels"] * patch, dim)
    embed_time = linear(1, config["freq_dim"], dim) + linear(1, dim, dim) + linear(1, dim, 6 * dim)
    embed_text = linear(k, config["text_dim"], dim) + linear(k, dim, dim)
    self_attention = 4 * linear(n, dim, dim) + attention(n, n)
    cross_attention = 2 * linear(n, dim, dim) + 2 * linear(k, dim, dim) + attention(n, k)
    block = self_attention + cross_attention + 2 * linear(n, dim, ffn)
    project = linear(n, dim, (config["out_channels"] or config["in_channels"]) * patch)
    return float(embed_patches + embed_time + embed_text + config["num_layers"] * block + project)


# Dense bf16 with fp32 sums, from the makers' data sheets without the doubling for sparsity. A name ends where its
# pattern does: laptop cards, and slices of a card (MIG), have peaks of their own.
PEAKS = {
    r"A100[- ].*(GB|PCIe)": 312e12,
    r"H100 PCIe": 756e12,
    r"H100 NVL": 835e12,
    r"H100 80GB HBM3": 989e12,
    r"H200 NVL": 835e12,
    r"H200": 989e12,
    r"B200": 2250e12,
    r"L40S": 362e12,
    r"RTX A6000": 154.8e12,
    r"RTX 6000 Ada Generation": 364.2e12,
    r"RTX 4090": 165.2e12,
    r"RTX 3090": 71e12,
    r"MI300X": 1307e12,
}


def peak_of(name: str) -> float | None:
    """FLOPs a second of the card of this name, or None when it is not known."""
    return next((peak for card, peak in PEAKS.items() if re.search(rf"\b{card}$", name)), None)


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOPs a second of this device, or None when it is not known."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


class Evaluations:
    """Counts, in forward-equivalents of one sample, what the networks evaluate: a forward 1, a backward 2.

    A guided teacher's batch of 2B counts 2 a sample; a network that several roles share is heard once a call. The
    backward of frozen weights (adapters) counts 2 as well, and costs less. Only this process is counted; ranks that
    share a sample's tokens each count the whole sample.

    With `recomputed`, what activation checkpointing computes again counts too. It can only be heard inside the blocks,
    where listening cuts the graphs of `torch.compile` into pieces: not for compiled blocks.
    """

    def __init__(self, networks: Iterable[WanNetwork], *, recomputed: bool = True) -> None:
        # Whole numbers of samples, by the number of modules that make a network: sums stay exact.
        self._samples = Counter[int]()
        self._handles: list[RemovableHandle] = []
        for transformer in {id(network.transformer): network.transformer for network in networks}.values():
            # A recomputation may call a block's forward alone, past the block's own hooks: its first child hears it.
            self._listen([block.attn1 for block in transformer.blocks] if recomputed else [transformer])

    @property
    def total(self) -> float:
        """All since the beginning: what a step took is the difference of two."""
        return float(sum(samples / modules for modules, samples in self._samples.items()))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _listen(self, modules: Sequence[nn.Module]) -> None:
        def count(samples: int) -> None:
            self._samples[len(modules)] += samples

        def begun(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            count(len(args[0] if args else named["hidden_states"]))

        def ended(module: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            made = output if isinstance(output, Tensor) else output[0]
            if made.requires_grad:
                made.register_hook(lambda gradient: count(2 * len(gradient)))

        for module in modules:
            # At the beginning, since a recomputation stops as soon as it has what backward needs.
            self._handles.append(module.register_forward_pre_hook(begun, with_kwargs=True))
            self._handles.append(module.register_forward_hook(ended))


class Meter:
    """Turns a step's seconds, evaluations and samples into the figures that a run logs."""

    def __init__(
        self, config: Mapping[str, Any], latent_shape: LatentShape, text_tokens: int, device: torch.device
    ) -> None:
        self.device, self.peak = device, peak_flops(device)
        self.tokens = video_tokens(config, latent_shape)
        self.flops = wan_forward_flops(config, latent_shape, text_tokens)

    def record(self, *, seconds: float, evaluations: float, samples: int) -> dict[str, float]:
        """Figures of one step: `samples` clips in its batch, `evaluations` forward-equivalents on this device (by
        custom without those that were recomputed: a share of the peak that went into progress).

        `tokens_per_second` counts each clip's video tokens once, however many networks saw them: samples × tokens
        a clip / seconds. `mfu` is the share of the dense bf16 peak, whatever the run's precision; it is left out
        where the peak is not known. Memory, in 10⁹ bytes, is the most since the process began: what the allocator
        gave out on a GPU, what was resident on a CPU.
        """
        figures = {"seconds/step": seconds, "tokens_per_second": samples * self.tokens / seconds}
        if self.peak is not None:
            figures["mfu"] = evaluations * self.flops / (seconds * self.peak)
        return figures | {"memory/peak_gb": peak_memory(self.device) / 1e9}


def peak_memory(device: torch.device) -> float:
    """Bytes: the most so far, on the device or, for a CPU, of the process."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
