"""The roles' networks (Wan, guidance), text, latents, and the pipeline folder that holds them."""

from codmd.networks.guidance import GuidedTeacher
from codmd.networks.pipeline import Pipeline, load_pipeline, quiet_loading
from codmd.networks.text import TextCondition, TextEncoder
from codmd.networks.vae import LatentCodec
from codmd.networks.wan import WanNetwork

__all__ = [
    "GuidedTeacher", "LatentCodec", "Pipeline", "TextCondition", "TextEncoder", "WanNetwork", "load_pipeline",
    "quiet_loading",
]  # fmt: skip
