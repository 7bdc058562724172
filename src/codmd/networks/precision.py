"""The arithmetic that a network's call is done in; its weights keep theirs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

Precision = Literal["fp64", "fp32", "bf16"]


def arithmetic(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """For one call: `bf16` is autocast, `fp64` is fp64 throughout, `fp32` needs nothing.

    One context for each call: within one, autocast would reuse in a call with gradients the weights that it cast in
    those without, and no gradient would reach them.
    """
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return Double() if precision == "fp64" else nullcontext()


@contextmanager
def reproducible(wanted: bool = True) -> Iterator[None]:
    """On a GPU, only kernels whose results are the same each time: flash attention's slower backward, and plain
    matrix products where flash attention cannot be used."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Double(TorchFunctionMode):
    """Wan's norms and modulations say `.float()`, for bf16's sake; in fp64 that would be a loss."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (torch.Tensor.double if function is torch.Tensor.float else function)(*args, **(kwargs or {}))


def double_blocks(transformer: nn.Module) -> None:
    """A block keeps fp64 by itself: recomputed in a backward pass, it is outside the call that it belongs to."""
    for block in transformer.blocks:  # type: ignore[union-attr]
        block.forward = _doubled(block.forward)


def _doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Any, **named: Any) -> Any:
        with Double():
            return forward(*inputs, **named)

    return run
