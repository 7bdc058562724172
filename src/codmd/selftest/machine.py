"""What the report's reader has to know of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

from codmd import __version__


def facts(device: torch.device, world: int) -> dict[str, str]:
    """No name of a host, a person or a folder: the report is made to be shown."""
    packages = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors")
    found = {
        "codmd": __version__,
        "packages": ", ".join(f"{name} {_version(name)}" for name in packages),
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "CPU": f"{_cpu()}, {os.cpu_count()} cores",
    }
    if device.type == "cuda":
        count = torch.cuda.device_count()
        memory = torch.cuda.get_device_properties(device).total_memory / 1e9
        found["GPU"] = f"{count} × {torch.cuda.get_device_name(device)}, {memory:.0f} GB"
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = f"{_driver()}; torch was built for CUDA {torch.version.cuda}, NCCL {nccl}"
    found["attention"] = _attention(device)
    if device.type == "cuda":
        precision = torch.get_float32_matmul_precision()
        found["fp32"] = f'matrix products "{precision}" ("highest" is full fp32), convolutions full fp32, not TF32'
    found["checked on"] = f"{device}, {world} rank{'s' * (world > 1)}"
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return ", ".join(sorted(set(done.stdout.split()))) or "unknown"


@torch.no_grad()
def _attention(device: torch.device) -> str:
    """The kernel that torch chooses for heads of Wan's width."""
    found = []
    for what, dtype, masked in (
        ("bf16", torch.bfloat16, False),
        ("bf16 with padding", torch.bfloat16, True),
        ("fp32", torch.float32, False),
    ):
        q = torch.zeros(1, 12, 256, 128, device=device, dtype=dtype)
        bias = torch.zeros(1, 1, 1, 256, device=device, dtype=dtype).expand(1, 12, 256, 256) if masked else None
        try:
            kernel = SDPBackend(torch._fused_sdp_choice(q, q, q, bias)).name.lower().removesuffix("_attention")
        except Exception as error:  # a private function: a report without this fact is still a report
            kernel = type(error).__name__
        found.append(f"{what} {kernel}")
    return ", ".join(found)
