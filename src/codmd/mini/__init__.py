"""The miniature Wan2.1: a stock pipeline folder of 25 MB at most, its world, captions, oracle and training."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Where the shipped pipeline folder lies; `diffusers.WanPipeline.from_pretrained` loads it."""
    return Path(__file__).parent / "weights"


__all__ = ["path"]
