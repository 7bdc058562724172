"""One network over many ranks: FSDP2 by block, context parallelism, recomputed activations, compiled blocks.

Everything here changes where numbers lie and when they are computed, never what they are (beyond rounding).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from diffusers import WanTransformer3DModel
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from codmd.errors import UserError

if TYPE_CHECKING:
    from codmd.networks.wan import WanNetwork

Restore = Callable[[], None]


def shard(transformer: nn.Module, mesh: DeviceMesh, precision: str, *, offload: bool = False) -> None:
    """FSDP2: each block's weights are gathered for its own passes alone, the rest with the root.

    Shards keep their precision; with bf16, copies are gathered and used in it, and gradients are reduced in fp32.
    Inputs are not cast: a time of 937.5 is not a bf16 number.
    """
    bf16 = precision == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    options["offload_policy"] = CPUOffloadPolicy() if offload else OffloadPolicy()
    # Nobody here changes a network's output in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for block in transformer.blocks:  # type: ignore[union-attr]
        fully_shard(block, **options)  # type: ignore[arg-type]
    # By default a root keeps its gathered copy after a forward: weights that are traded since (an average's) would not
    # be seen by the next.
    fully_shard(transformer, reshard_after_forward=True, **options)


def share_context(transformer: WanTransformer3DModel, mesh: DeviceMesh) -> None:
    """Each of the ranks in `mesh`, `ring` x `ulysses`, holds a part of every sample's tokens; attention brings them
    together.

    diffusers' own hooks. Its `enable_parallelism` counts accelerators and finds none on a CPU, so this calls what
    lies below it. The plan's entry for times of single tokens (Wan2.2) is left out: here a sample has one.
    """
    heads, ring, ulysses = transformer.config.num_attention_heads, mesh["ring"].size(), mesh["ulysses"].size()
    if heads % ulysses:
        raise UserError(f"parallel.context: {ulysses} does not divide the network's {heads} attention heads")
    on_gpu = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device(mesh.device_type)
    if ring > 1 and not on_gpu:
        raise UserError('parallel.context_method: "ring" needs a GPU\'s attention kernels; use "ulysses"')
    inner = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh)
    config = ParallelConfig(context_parallel_config=inner)
    config.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
    for block in transformer.blocks:
        block.attn1.processor._parallel_config = config
        if ring > 1:
            block.attn1.set_attention_backend("_native_flash")
    plan = {name: entry for name, entry in transformer._cp_plan.items() if name}
    apply_context_parallel(transformer, inner, plan)


def recompute_blocks(network: WanNetwork, *, selective: bool) -> None:
    """Keeps only each block's input for the backward pass (or also attention's outputs, the dearest to recompute).

    A recomputation has to meet what the forward pass met: `network.remember` says how to bring that back.
    """
    contexts = {"context_fn": _keep_attention} if selective else {}
    for block in network.transformer.blocks:
        block.forward = _recomputed(block.forward, network.remember, contexts)


def _recomputed(
    forward: Callable[..., Tensor], remember: Callable[[], Restore], contexts: Mapping[str, Any]
) -> Callable[..., Tensor]:
    def run(*inputs: Any, **named: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        restore = remember()

        def again(*inputs: Any, **named: Any) -> Tensor:
            restore()
            return forward(*inputs, **named)

        # No random numbers inside: none has to be brought back.
        return checkpoint(again, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts, **named)

    return run


def _keep_attention() -> Any:
    def policy(_: Any, operation: Any, *args: Any, **named: Any) -> CheckpointPolicy:
        kept = "scaled_dot_product" in str(operation) and "backward" not in str(operation)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def offload(transformer: nn.Module, device: torch.device) -> None:
    """The weights wait in the host's memory, and come to the device for each call."""
    transformer.register_forward_pre_hook(lambda module, _: module.to(device) and None)
    transformer.register_forward_hook(lambda module, *_: module.to("cpu") and None)
    transformer.to("cpu")


def compile_blocks(transformer: nn.Module) -> None:
    """One graph serves all blocks; with and without gradient, and for each role of shared weights, it is another."""
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 32)
    for block in transformer.blocks:  # type: ignore[union-attr]
        block.compile()


# ---- without a full copy on any rank -------------------------------------------------------------


def empty_transformer(folder: Path) -> WanTransformer3DModel:
    """The network of a transformer's folder, with no weights yet: nothing is allocated."""
    with torch.device("meta"):
        transformer = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(folder))
    assert isinstance(transformer, WanTransformer3DModel)
    return transformer.eval()


def fill(
    transformer: WanTransformer3DModel,
    folder: Path,
    device: torch.device,
    *,
    waits: bool = False,
    state: Callable[[], Mapping[str, Tensor]] | None = None,
) -> None:
    """Gives an empty network, sharded or not, its weights: each rank reads its own parts of each tensor.

    `waits` keeps them in the host's memory, as FSDP's offloading wants it. `state` is what is to be read where that
    isn't all of the network's own state.
    """
    transformer.to_empty(device="cpu" if waits else device)
    config = transformer.config
    rope = WanRotaryPosEmbed(config.attention_head_dim, tuple(config.patch_size), config.rope_max_seq_len)
    for name, table in rope.named_buffers():  # computed, and in no file
        setattr(transformer.rope, name, table.to(device))
    read_into(transformer.state_dict() if state is None else state(), folder)


def read_into(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fills tensors, sharded ones too, from the safetensors files of a folder, whatever ranks wrote them."""
    reader = HuggingFaceStorageReader(str(folder))
    entries = reader.read_metadata().state_dict_metadata
    there = {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    for name, tensor in tensors.items():
        if there.get(name) != tuple(tensor.shape):
            found = f"has shape {list(there[name])}" if name in there else "is missing"
            raise UserError(f"{folder}: the weights do not fit: {name} {found}, expected {list(tensor.shape)}")
    surplus = sorted(there.keys() - tensors.keys())
    if surplus:
        raise UserError(f"{folder}: the weights do not fit: {surplus[0]} is in no part of the network")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a process alone is alone
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())


def detached_copy(tensor: Tensor) -> Tensor:
    """A copy in the host's memory; of a sharded tensor, of this rank's part."""
    return tensor.detach().to("cpu", copy=True)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
