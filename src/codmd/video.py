"""Videos as files: H.264 that plays in browsers, names that are safe for any prompt, nothing half-written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import tempfile
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from codmd.errors import UserError
from codmd.files import write_whole

Frames = UInt8[np.ndarray, "frames height width 3"]

VISIBLE = 256  # small clips are magnified to about this many pixels
SLUG_LENGTH = 48


def magnification(height: int, width: int) -> int:
    """The whole factor by which a small clip is magnified, so that 64 × 64 pixels can be seen."""
    return max(1, VISIBLE // max(height, width))


def encode_mp4(frames: Frames, *, fps: float, scale: int | None = None) -> bytes:
    """An H.264 MP4 as browsers play it (yuv420p, index first), without metadata; the same bytes every time.

    Pixels are repeated `scale` times in each direction, not smoothed; by default small clips are magnified.
    """
    _, height, width, _ = frames.shape
    scale = magnification(height, width) if scale is None else scale
    if scale < 1:
        raise UserError(f"scale: expected a whole number of at least 1, got {scale}")
    big = np.ascontiguousarray(frames.repeat(scale, 1).repeat(scale, 2))
    big = np.pad(big, ((0, 0), (0, big.shape[1] % 2), (0, big.shape[2] % 2), (0, 0)), mode="edge")
    size = f"{big.shape[2]}x{big.shape[1]}"
    # The index can only be put first in a file that can be rewound, so not in a pipe.
    with tempfile.TemporaryDirectory(prefix="codmd-") as folder:
        path = Path(folder) / "clip.mp4"
        # fmt: off
        command = [
            _ffmpeg(), "-hide_banner", "-loglevel", "error", "-nostdin",
            "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", f"{fps:g}", "-i", "pipe:0",
            "-vf", "scale=out_color_matrix=bt709:out_range=tv,format=yuv420p",
            "-c:v", "libx264", "-preset", "veryfast", "-crf", "16", "-threads", "1",
            "-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv",
            "-map_metadata", "-1", "-fflags", "+bitexact", "-flags:v", "+bitexact",
            "-bsf:v", "filter_units=remove_types=6",  # the encoder's own note about itself
            "-movflags", "+faststart", str(path),
        ]
        # fmt: on
        done = subprocess.run(command, input=big.tobytes(), capture_output=True, check=False)
        if done.returncode != 0:
            message = " ".join(done.stderr.decode(errors="replace").split())
            if "No space left" in message:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)
            raise UserError(f"ffmpeg could not encode {len(frames)} frames of {size}: {message[:300]}")
        return path.read_bytes()


def _ffmpeg() -> str:
    import imageio_ffmpeg

    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError:
        raise UserError(
            "no ffmpeg for this machine comes with imageio-ffmpeg: install ffmpeg, "
            "or set IMAGEIO_FFMPEG_EXE to its path"
        ) from None


def file_stem(prompt: str, seed: int, key: Mapping[str, Any]) -> str:
    """A file name without suffix: readable, safe on every system, and different for different `key`s."""
    plain = unicodedata.normalize("NFKD", prompt[:1000]).encode("ascii", "ignore").decode().lower()
    slug = "-".join(re.findall(r"[a-z0-9]+", plain))[:SLUG_LENGTH].strip("-")
    said = json.dumps({"prompt": prompt, "seed": seed, **key}, sort_keys=True).encode()
    return f"{slug or 'prompt'}-s{seed}-{hashlib.blake2b(said, digest_size=5).hexdigest()}"


def write_clip(
    folder: Path, stem: str, frames: Frames, about: Mapping[str, Any], *, fps: float, scale: int | None = None
) -> Path:
    """`stem.mp4` and, after it, `stem.json`: where the second is, the first is whole."""
    path = folder / f"{stem}.mp4"
    write_whole(path, encode_mp4(frames, fps=fps, scale=scale))
    write_whole(path.with_suffix(".json"), (json.dumps(about, indent=2, ensure_ascii=False) + "\n").encode())
    return path


def finished(folder: Path, stem: str) -> bool:
    """Whether `write_clip` has been through with this one."""
    return (folder / f"{stem}.mp4").is_file() and (folder / f"{stem}.json").is_file()
