"""A training step's forward and backward pass; on a GPU recorded once for each shape, and replayed.

The autoencoder goes through a clip frame by frame: thousands of small kernels, which cost far more to launch one by
one than to run. A CUDA graph launches them all at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WARM_UP = 3  # passes before a recording, in which libraries choose their kernels and take their memory


@dataclass(frozen=True)
class Recording:
    """A graph with the tensors that it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    shown: Tensor
    gradients: tuple[Tensor | None, ...]


class Gradients:
    """Calls `loss(*inputs)`, which gives the loss and a number to show, and leaves the gradients of `parameters`."""

    def __init__(
        self,
        loss: Callable[..., tuple[Tensor, Tensor]],
        parameters: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        self.loss, self.parameters, self.device = loss, parameters, device
        self.recordings: dict[tuple[torch.Size, ...], Recording] = {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The number to show, without gradient."""
        if self.device.type != "cuda":
            return self._pass(inputs)
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self.recordings:
            self.recordings[shapes] = self._record(inputs)
        recording = self.recordings[shapes]
        for static, given in zip(recording.inputs, inputs, strict=True):
            static.copy_(given)
        recording.graph.replay()
        for parameter, gradient in zip(self.parameters, recording.gradients, strict=True):
            parameter.grad = gradient
        return recording.shown

    def _pass(self, inputs: Sequence[Tensor]) -> Tensor:
        for parameter in self.parameters:
            parameter.grad = None
        loss, shown = self.loss(*inputs)
        loss.backward()
        return shown.detach()

    def _record(self, inputs: Sequence[Tensor]) -> Recording:
        static = tuple(x.clone() for x in inputs)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                self._pass(static)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        for parameter in self.parameters:
            parameter.grad = None  # so that the graph makes the gradients anew at each replay, and adds to none
        with torch.cuda.graph(graph):
            loss, shown = self.loss(*static)
            loss.backward()
        return Recording(graph, static, shown.detach(), tuple(p.grad for p in self.parameters))
