"""Video files: what comes out is what went in, browsers can play it, and nothing is left half-written."""

import errno
import os
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from codmd import video
from codmd.errors import UserError
from codmd.video import encode_mp4, file_stem, magnification, write_clip


def clip(frames: int = 5, height: int = 32, width: int = 48) -> np.ndarray:
    """A smooth ramp of colours that moves."""
    y, x = np.mgrid[:height, :width] / max(height, width)
    stack = [np.stack([x, y, np.full_like(x, f / frames)], -1) for f in range(frames)]
    return (np.stack(stack) * 255).astype(np.uint8)


def decode(content: bytes, tmp_path: Path, height: int, width: int) -> np.ndarray:
    (tmp_path / "in.mp4").write_bytes(content)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(tmp_path / "in.mp4")]
    command += ["-vf", "scale=in_color_matrix=bt709,format=rgb24", "-f", "rawvideo", "-"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


@pytest.mark.parametrize("scale", [1, 4])
def test_pixels_survive(tmp_path: Path, scale: int) -> None:
    frames = clip()
    back = decode(encode_mp4(frames, fps=8, scale=scale), tmp_path, 32 * scale, 48 * scale)
    assert len(back) == len(frames)
    expected = frames.repeat(scale, 1).repeat(scale, 2)
    assert np.abs(back.astype(float) - expected).mean() < 3


def test_the_file_is_one_that_browsers_play(tmp_path: Path) -> None:
    content = encode_mp4(clip(), fps=8)
    assert content.index(b"moov") < content.index(b"mdat")  # the index first
    (tmp_path / "in.mp4").write_bytes(content)
    facts = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(tmp_path / "in.mp4")], capture_output=True, check=False
    ).stderr.decode()
    assert "h264" in facts and "yuv420p" in facts and "bt709" in facts and "8 fps" in facts
    assert b"Lavf" not in content and b"x264 - core" not in content  # no metadata, no note of the encoder
    assert content == encode_mp4(clip(), fps=8)


@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 33, 47), (2, 16, 64)])
def test_odd_sizes_and_single_frames(shape: tuple[int, int, int], tmp_path: Path) -> None:
    content = encode_mp4(clip(*shape), fps=16, scale=1)
    assert len(decode(content, tmp_path, shape[1] + shape[1] % 2, shape[2] + shape[2] % 2)) == shape[0]


def test_small_clips_are_magnified_and_large_ones_are_not() -> None:
    assert magnification(64, 64) == 4 and magnification(480, 832) == 1
    with pytest.raises(UserError, match="scale"):
        encode_mp4(clip(), fps=8, scale=0)


def test_names_tell_prompts_and_settings_apart() -> None:
    stems = {file_stem(p, s, k) for p in ("a b", "a  b", "a/b") for s in (0, 1) for k in ({}, {"steps": 4})}
    assert len(stems) == 12
    assert file_stem("A red circle!", 3, {}).startswith("a-red-circle-s3-")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(video.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_clip(tmp_path, "clip", clip(), {}, fps=8)
    assert list(tmp_path.iterdir()) == []
