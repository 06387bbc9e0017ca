"""Own the way from final latents to pixels: decoded on a stream of its own, so that the next picture's steps do not wait.

On the CPU everything happens at once. A picture's latents are decoded alone, a large one's in tiles: that bounds the peak.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mammoth_dit.isolation import failed
from mammoth_dit.jobs import Outcome, Picture
from mammoth_dit.model.vae import ImageDecoder, to_rgb
from mammoth_dit.tiling import Tiling, decode_tiled

__all__ = ["Finisher", "Pending"]

LOWEST_PRIORITY = 0


class Pending:
    """A picture on its way to the host. `ready` asks, `outcome` waits."""

    def __init__(
        self,
        rgb: Tensor,
        finite: Tensor,
        denoise_s: float,
        decode_s: Callable[[], float],
        done: torch.cuda.Event | None,
    ) -> None:
        self._rgb, self._finite, self._done = rgb, finite, done
        self._denoise_s, self._decode_s = denoise_s, decode_s
        self.kernels: str | None = None

    @property
    def ready(self) -> bool:
        return self._done is None or self._done.query()

    def outcome(self) -> Outcome:
        """Return the picture, or the error of one that is not finite."""
        if self._done is not None:
            self._done.synchronize()
        if not self._finite.item():
            return failed(ArithmeticError("a picture is not finite"))
        rgb = self._rgb.numpy()
        digest = hashlib.sha256(rgb.tobytes()).hexdigest()
        return Picture(rgb, digest, self._denoise_s, self._decode_s(), self.kernels)


class Finisher:
    """Turns latents into pictures."""

    def __init__(self, vae: ImageDecoder, device: torch.device, *, tiling: Tiling = Tiling()) -> None:
        self._vae, self._device, self._tiling = vae, device, tiling
        self._stream = torch.cuda.Stream(device, priority=LOWEST_PRIORITY) if device.type == "cuda" else None

    def decode(self, latents_1Chw: Tensor) -> Tensor:
        """Return the image [3, H, W], nominally in [-1, 1]."""
        if not self._tiling.is_whole(*latents_1Chw.shape[2:]):
            return decode_tiled(self._vae, latents_1Chw, self._tiling)
        image: Tensor = self._vae(latents_1Chw)[0]
        return image

    def pixels(self, latents_1Chw: Tensor) -> tuple[Tensor, Tensor]:
        """Return the picture, uint8 [H, W, 3], and whether it is finite; both on the device."""
        image = self.decode(latents_1Chw)
        return to_rgb(image), torch.isfinite(image).all()

    def begin(self, latents_1Chw: Tensor, denoise_s: float) -> Pending:
        """Start to decode; nothing here waits for the device."""
        began_s = time.perf_counter()
        if self._stream is None:
            rgb, finite = self.pixels(latents_1Chw)
            took_s = time.perf_counter() - began_s
            return Pending(rgb, finite, denoise_s, lambda: took_s, None)
        current, stream = torch.cuda.current_stream(self._device), self._stream
        stream.wait_stream(current)
        latents_1Chw.record_stream(stream)
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            began.record()
            rgb, finite = (_to_host(x) for x in self.pixels(latents_1Chw))
            done.record()
        return Pending(rgb, finite, denoise_s, lambda: began.elapsed_time(done) / 1000, done)


def _to_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
