"""Large pictures are decoded in overlapping tiles: which ones, how near the whole they come, and how large a tile gets."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from mammoth_dit.finishing import Finisher
from mammoth_dit.jobs import Picture
from mammoth_dit.model.weights import load
from mammoth_dit.testing import TinyEngine
from mammoth_dit.tiling import Tiling, blended
from mammoth_serving.checkpoint import Checkpoint

CPU = torch.device("cpu")
SMALL = Tiling(max_latents=16, overlap=2)
TILED = Tiling(max_latents=24 * 24, overlap=6)
EMOJI = Path(__file__).resolve().parents[2] / "checkpoints" / "emoji"


@pytest.mark.parametrize(
    ("size_px", "grid", "tile_px"),
    [
        pytest.param((1024, 1024), (1, 1), (1024, 1024), id="whole"),
        pytest.param((1536, 1024), (1, 1), (1536, 1024), id="whole: the bound itself"),
        pytest.param((1552, 1024), (2, 1), (840, 1024), id="a little above: the longer side is cut"),
        pytest.param((2048, 2048), (2, 2), (1088, 1088), id="the largest that is served unasked"),
        pytest.param((512, 8192), (1, 3), (512, 2816), id="a strip is cut along its length alone"),
        pytest.param((4096, 4096), (4, 4), (1120, 1120), id="huge"),
    ],
)
def test_how_a_size_is_cut(size_px, grid, tile_px):
    rows, columns = Tiling().spans(size_px[0] // 8, size_px[1] // 8)
    assert (len(rows), len(columns)) == grid
    assert {span.stop - span.start for span in rows} == {tile_px[0] // 8}
    assert {span.stop - span.start for span in columns} == {tile_px[1] // 8}


@pytest.mark.parametrize("size", [(4, 5), (6, 9), (3, 40), (31, 17)])
def test_tiles_cover_a_picture_overlap_and_count_once(size):
    decoded: list[tuple[int, int]] = []

    def constant(tile: Tensor) -> Tensor:
        decoded.append((tile.shape[2], tile.shape[3]))
        return torch.ones(3, 8 * tile.shape[2], 8 * tile.shape[3])

    for axis, spans in zip(size, SMALL.spans(*size), strict=True):
        assert (spans[0].start, spans[-1].stop) == (0, axis)
        assert all(before.stop - after.start >= SMALL.overlap for before, after in itertools.pairwise(spans))
    image = blended(torch.zeros(1, 16, *size), constant, SMALL)
    assert max(height * width for height, width in decoded) <= SMALL.max_latents < math.prod(size)
    torch.testing.assert_close(image, torch.ones(3, 8 * size[0], 8 * size[1]))


def test_a_picture_in_tiles_is_near_the_whole_one():
    """With weights that were trained: those of the checkpoint that ships, over latents of its own encoder."""
    checkpoint = Checkpoint.open(EMOJI)
    vae = load(checkpoint, dtype=torch.float32, parts=["vae"]).vae
    latents = encoded(checkpoint, scene(256))
    with torch.inference_mode():
        whole, tiled = (Finisher(vae, CPU, tiling=tiling).decode(latents) for tiling in (Tiling(), TILED))
        apart = blended(vae.enter(latents), lambda tile: vae.leave(tile)[0], TILED)
    assert psnr_db(tiled, whole) > 36
    assert psnr_db(apart, whole) < psnr_db(tiled, whole) - 6, "sharing the norms' moments is what keeps the colours"
    torch.testing.assert_close(whole, vae(latents)[0], rtol=0, atol=0)


def encoded(checkpoint: Checkpoint, image: Tensor) -> Tensor:
    """Return the latents [1, C, h, w] of an image [3, H, W], as the transformer would hand them over."""
    vae = AutoencoderKL.from_config(dict(checkpoint.config["gen_vae_config"])).eval()
    stored = checkpoint.tensors(checkpoint.names("gen_vae."))
    vae.load_state_dict({name.removeprefix("gen_vae."): tensor.float() for name, tensor in stored})
    with torch.inference_mode():
        mean = vae.encode(image[None]).latent_dist.mean
    return (mean - vae.config["shift_factor"]) * vae.config["scaling_factor"]


def scene(side: int) -> Tensor:
    """Return discs on a slope of colours, [3, side, side] in [-1, 1]."""
    y, x = torch.meshgrid(*[torch.linspace(0, 1, side)] * 2, indexing="ij")
    image = torch.stack((x, y, 1 - x))
    for number, colour in enumerate(torch.eye(3)):
        disc = (x - 0.25 * (number + 1)).square() + (y - 0.3 * (number + 1)).square() < 0.02
        image = torch.where(disc, colour[:, None, None], image)
    return 2 * image - 1


def psnr_db(made: Tensor, expected: Tensor) -> float:
    return float(-10 * ((made.clamp(-1, 1) - expected.clamp(-1, 1)).square().mean() / 4).log10())


def test_no_tile_is_larger_than_the_bound_and_company_changes_no_bit(tmp_path):
    engine = TinyEngine(tmp_path, dtype=torch.float32)
    engine._finisher = Finisher(engine._model.vae, CPU, tiling=SMALL)
    seen: list[int] = []
    engine._model.vae.decoder.conv_out.register_forward_hook(lambda *args: seen.append(args[2].shape[2:].numel()))
    jobs = [engine.job("a", size_px=(64, 48)), engine.job("b", size_px=(64, 48), seed=2), engine.job("small")]
    together = engine.sample(jobs)
    assert max(seen) <= 64 * SMALL.max_latents < 64 * 48
    for job, outcome in zip(jobs, together, strict=True):
        [alone] = engine.sample([job])
        assert isinstance(outcome, Picture)
        assert outcome.rgb.shape[:2] == job.key[:2]
        assert outcome.rgb_sha256 == alone.rgb_sha256
