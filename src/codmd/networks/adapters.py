"""Adapter mode: one frozen transformer plays all three roles, student and fake network as LoRA adapters on it.

The teacher is the transformer with its adapters off. Nothing is swapped between calls: all adapters are always
there, and always learn; a call says whose it is, and each layer adds that role's part.

Activation checkpointing calls a block again during the backward pass, when other roles may have been called since,
with other prompts. So a call's role and its bias on padded keys travel with its arguments: they are tied to the rotary
tables, which go to every block as they are, and a block's first layer reads them from there. Whoever checkpoints, in
whichever way, needs no context around the backward pass.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import WanTransformer3DModel
from jaxtyping import Float
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from codmd.config import FINAL_LAYER, AdapterConfig
from codmd.errors import UserError
from codmd.networks.sharding import whole
from codmd.networks.text import FoldedPadding, TextCondition
from codmd.networks.wan import WanNetwork
from codmd.schema import show

Role = Literal["student", "teacher", "fake"]
LEARNING: tuple[Role, ...] = ("student", "fake")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class AdapterNetwork(WanNetwork):
    """One role of a shared transformer; `share` makes the three.

    A bf16 base always runs under bf16 autocast, whatever is around the call: its Linear and Conv weights are then
    what autocast would make of fp32 ones, and the rest (norms, tables, the adapters' own weights) is fp32. An fp32
    base leaves precision to the caller.
    """

    def __init__(self, transformer: WanTransformer3DModel, role: Role, adapters: _Adapters) -> None:
        nn.Module.__init__(self)  # WanNetwork's would give each role a cross-attention of its own, and the last wins
        self.transformer, self.role = transformer, role
        self._adapters, self._padding = adapters, adapters.padding

    def forward(self, x_t: Float[Tensor, "B C F H W"], t: Float[Tensor, " B"], text: TextCondition) -> Tensor:
        """Velocity v = eps - x0 at x_t."""
        with self._adapters.called_by(self.role), self._precision(x_t.device.type):
            return super().forward(x_t, t, text)

    def learned(self) -> dict[str, nn.Parameter]:
        """The parameters that this role alone trains, as they are now (FSDP2 puts others in their place)."""
        return dict(self._adapters.learned(self.role))

    def stock_sizes(self) -> dict[str, int]:
        """Bytes of each tensor that `stock_state` gives."""
        return {name: tensor.numel() * _fine(tensor).itemsize for name, tensor in base_state(self).items()}

    def stock_state(self) -> Iterator[tuple[str, Tensor]]:
        """A stock transformer that is this role, W + alpha/rank B A in fp32, one whole tensor after the other; every
        rank has to take part."""
        learned = {name: parameter.detach() for name, parameter in self.learned().items()}
        scale = self._adapters.config.alpha / self._adapters.config.rank
        for name, tensor in base_state(self).items():
            weight = whole(learned.get(name, tensor)).to(_fine(tensor), copy=True)
            a, b = (learned.get(f"{name.removesuffix('.weight')}.lora_{part}.weight") for part in "AB")
            if a is not None and b is not None:
                with torch.autocast(weight.device.type, enabled=False):
                    weight += scale * (whole(b) @ whole(a))
            yield name, weight

    def _precision(self, device: str) -> Any:
        if self._adapters.config.base_dtype == "fp32":
            return nullcontext()
        # A call uses each weight once: a cache would only serve those from before an update, where autocast goes on.
        return torch.autocast(device, torch.bfloat16, cache_enabled=False)


@dataclass(frozen=True)
class AdapterNetworks:
    """The three roles of one transformer."""

    student: AdapterNetwork
    teacher: AdapterNetwork
    fake: AdapterNetwork


def roles_of(network: AdapterNetwork) -> AdapterNetworks:
    """The three roles of the transformer that this one is a role of."""
    student, teacher, fake = (
        AdapterNetwork(network.transformer, role, network._adapters) for role in ("student", "teacher", "fake")
    )
    return AdapterNetworks(student, teacher, fake)


def share(transformer: WanTransformer3DModel, config: AdapterConfig, seed: int) -> AdapterNetworks:
    """Freezes the transformer, casts it, gives it its two adapters, and makes the three roles of it.

    To be sharded or compiled afterwards; a network without weights yet (on the meta device) needs `reset` once it
    has them. What else calls the transformer meets the teacher.
    """
    assert not hasattr(transformer, "peft_config"), "this transformer has adapters already"
    targets = _layers_named(config.targets, transformer)
    if not isinstance(transformer.blocks[0].attn2.processor, FoldedPadding):
        WanNetwork(transformer)  # one around it already stays as it is, and is another name for the teacher
    for module in transformer.modules():
        if isinstance(module, nn.Linear | nn.Conv3d):
            module.to(DTYPES[config.base_dtype])
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        modules_to_save=[FINAL_LAYER] if config.final_layers else None,
    )
    # peft draws first weights, on the CPU, before `reset` draws ours.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # two adapters are what we want
        for role in LEARNING:
            inject_adapter_in_model(lora, transformer, role)
    transformer.requires_grad_(False)
    adapters = _Adapters(transformer, config)
    for role in LEARNING:
        for _, parameter in adapters.learned(role):
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    networks = roles_of(AdapterNetwork(transformer, "teacher", adapters))
    if not next(transformer.parameters()).is_meta:
        reset(networks, seed)
    return networks


@torch.no_grad()
def reset(networks: AdapterNetworks, seed: int) -> None:
    """Makes student and fake network what the teacher is: A from the seed alone, on any device and any number of
    ranks, B zero, and copied layers equal to those they are copies of."""
    generator = torch.Generator().manual_seed(seed)
    for network in (networks.student, networks.fake):
        originals = base_state(network)
        for name, parameter in network.learned().items():
            if name.endswith("lora_A.weight"):
                drawn = torch.empty(parameter.shape, device="cpu")
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)  # as peft and nn.Linear do
                parameter.copy_(_laid_out_as(parameter, drawn))
            elif name.endswith("lora_B.weight"):
                parameter.zero_()
            else:
                parameter.copy_(originals[name])


def base_state(network: AdapterNetwork) -> dict[str, Tensor]:
    """The shared transformer's own tensors, by the names that they have in a stock one; not copies."""
    state = network.transformer.state_dict()
    own = {name: tensor for name, tensor in state.items() if not re.search(r"\.(lora_[AB]|modules_to_save)\.", name)}
    return {re.sub(r"\.(base_layer|original_module)\b", "", name): tensor for name, tensor in own.items()}


def merged_state(network: AdapterNetwork, dtype: Literal["fp32", "base"] = "fp32") -> dict[str, Tensor]:
    """All that `stock_state` gives, on the CPU; in its fp32, or each tensor in the dtype that the base has it in."""
    base = base_state(network)
    return {
        name: tensor.to("cpu", base[name].dtype if dtype == "base" else tensor.dtype)
        for name, tensor in network.stock_state()
    }


# ---- the adapters' layers ------------------------------------------------------------------------


class _Adapters:
    """The layers of one transformer that have adapters, and whose turn it is in them."""

    def __init__(self, transformer: WanTransformer3DModel, config: AdapterConfig) -> None:
        self.config, self.padding = config, transformer.blocks[0].attn2.processor
        kinds = (LoraLayer, ModulesToSaveWrapper)
        self.layers = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, kinds)}
        self._caller: Role = "teacher"
        self._active: list[str] = []
        for layer in self.layers.values():
            # peft's own switches turn requires_grad on and off with the adapter, which takes gradients away from
            # graphs that are still to be walked. All layers hold this one list instead; empty, it is the base.
            layer._active_adapter = self._active
            # Autocast casts a layer's input as its weight; a cast to the weight's fp32 before that is for nothing.
            layer.cast_input_dtype_enabled = False
        # The tables are made first in a transformer's call, and self-attention is first among a block's layers.
        transformer.rope.register_forward_hook(self._begin)
        for block in transformer.blocks:
            block.attn1.register_forward_pre_hook(self._enter_block, with_kwargs=True)

    @contextmanager
    def called_by(self, role: Role) -> Iterator[None]:
        """A call of the transformer is this role's; outside of it, the teacher's."""
        self._caller = role
        try:
            yield
        finally:
            self._caller = "teacher"

    def learned(self, role: Role) -> Iterator[tuple[str, nn.Parameter]]:
        """What a role trains, by names that are the same for every role, as in a file of peft's."""
        if role == "teacher":
            return
        for name, layer in self.layers.items():
            if isinstance(layer, LoraLayer):
                parts = {f"{name}.lora_A": layer.lora_A[role], f"{name}.lora_B": layer.lora_B[role]}
            else:
                parts = {name: layer.modules_to_save[role]}
            for part, module in parts.items():
                yield from module.named_parameters(prefix=part)

    def _begin(self, rope: nn.Module, inputs: tuple[Any, ...], tables: tuple[Tensor, ...]) -> _Tables:
        return self._restore(_Tables(tables, self._caller, self.padding.bias))

    def _enter_block(self, attention: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        tables = next((given for given in (*inputs, *named.values()) if isinstance(given, _Tables)), None)
        assert tables is not None, "a block got other rotary tables than its transformer made"
        self._restore(tables)

    def _restore(self, tables: _Tables) -> _Tables:
        self._active[:] = [] if tables.role == "teacher" else [tables.role]
        self.padding.bias = tables.bias
        return tables


class _Tables(tuple[Tensor, ...]):
    """The rotary tables of one call, with its role and its bias on padded keys."""

    role: Role
    bias: Tensor | None

    def __new__(cls, tables: tuple[Tensor, ...], role: Role, bias: Tensor | None) -> _Tables:
        made = super().__new__(cls, tables)
        made.role, made.bias = role, bias
        return made


def _layers_named(targets: tuple[str, ...], transformer: nn.Module) -> list[str]:
    """Every linear layer whose name ends in one of these."""
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    found = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    for target, names in found.items():
        if not names:
            known = sorted({re.sub(r"^blocks\.\d+\.", "", name) for name in linear})
            raise UserError(
                f"targets: no linear layer's name ends in {show(target)}; the transformer has {', '.join(known)}"
            )
    return sorted({name for names in found.values() for name in names})


def _fine(tensor: Tensor) -> torch.dtype:
    """The dtype to sum a weight in: fp32 or better."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _laid_out_as(parameter: Tensor, value: Tensor) -> Tensor:
    """The value on the parameter's device, and cut up among the ranks as it is."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
