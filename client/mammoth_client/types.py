"""Decide what a caller sees of a running request: frozen events, and the picture at the end of them."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mammoth_client.receipts import ConditioningParameters, DiffusionParameters, Receipt

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "Accepted", "ArProgress", "Batched", "Conditioned", "Done", "Event", "Picture", "Queued", "ServiceHealth", "Step",
    "Times",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request as it will be served, every default filled in. Image i of `num_images` uses seed + i."""

    request_id: str
    eta_s: float | None
    diffusion: DiffusionParameters
    conditioning: ConditioningParameters
    num_images: int


@dataclass(frozen=True, slots=True)
class Queued:
    """The DiT stage holds a place for a picture behind `position` others."""

    image_index: int
    position: int
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class ArProgress:
    """The AR stage has written `tokens` of `total` visual tokens."""

    image_index: int
    tokens: int
    total: int


@dataclass(frozen=True, slots=True)
class Conditioned:
    """All that the DiT needs for a picture has reached it."""

    image_index: int


@dataclass(frozen=True, slots=True)
class Batched:
    """A picture joined a wave of `size` pictures."""

    image_index: int
    size: int


@dataclass(frozen=True, slots=True)
class Step:
    """`index` of `total` denoising steps are done."""

    image_index: int
    index: int
    total: int
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Times:
    """Where the seconds of a picture went. `queue_s` to `encode_s` and the wave's size are the DiT's."""

    ar_queue_s: float
    ar_s: float
    handover_s: float
    queue_s: float
    denoise_s: float
    decode_s: float
    encode_s: float
    batch_size: int


@dataclass(frozen=True, slots=True)
class Done:
    """The server has finished a picture. The Picture itself is the next event."""

    image_index: int
    receipt: Receipt
    times: Times


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished picture: the bytes of a PNG file, and the receipt that can make it again."""

    png: bytes = field(repr=False)
    receipt: Receipt
    image_index: int
    times: Times

    def save(self, path: str | Path) -> Path:
        """Write the PNG file to `path` and return it. Raises OSError when that cannot be."""
        path = Path(path)
        path.write_bytes(self.png)
        return path

    def to_pil(self) -> Image:
        """Return the picture decoded by Pillow. Raises ImportError when Pillow is not installed."""
        from PIL import Image

        image = Image.open(io.BytesIO(self.png))
        image.load()
        return image

    def verify(self) -> bool:
        """Return whether the pixels have the digest that the receipt names. Needs Pillow."""
        pixels = self.to_pil().convert("RGB").tobytes()
        return hashlib.sha256(pixels).hexdigest() == self.receipt.rgb_sha256


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """What grpc.health.v1 says of a service; the empty name is the server as a whole."""

    service: str
    state: str

    @property
    def serving(self) -> bool:
        return self.state == "SERVING"


Event = Accepted | Queued | ArProgress | Conditioned | Batched | Step | Done | Picture
