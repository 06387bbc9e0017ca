"""Do stage 1: train the autoencoder on every picture over any backdrop.

The weight of the KL term is high for a VAE that a diffusion model uses: its noise teaches the decoder to forgive small
errors in the latents, which at this size matter more than the last decibel of reconstruction.

B pictures a step, x in [-1, 1] as [B,3,H,W], z latents [B,16,h,w].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoints.emoji.train import recipe
from checkpoints.emoji.train.backdrops import over, tints
from checkpoints.emoji.train.data import Prepared
from checkpoints.emoji.train.loop import train
from checkpoints.emoji.train.sheets import save_sheet

__all__ = ["build", "encode", "load", "run", "to_alpha", "to_model"]

KL_WEIGHT = 1e-2
EDGE_WEIGHT = 0.5
WEIGHTS = "vae.safetensors"
ENCODE_BATCH = 128


def build() -> Any:
    torch.manual_seed(0)
    return AutoencoderKL.from_config(recipe.config()["gen_vae_config"])


def run(work: Path, plan: recipe.StagePlan, device: str, limit: int | None) -> None:
    """Train and write the averaged weights, a sheet of reconstructions and the loss curve into `work`."""
    if (work / WEIGHTS).exists():
        return
    prepared = Prepared.open(work, limit)
    x, alpha = to_model(prepared.pictures).to(device), to_alpha(prepared.alphas).to(device)
    vae = build().to(device, memory_format=torch.channels_last)

    def loss_of(generator: torch.Generator) -> Tensor:
        index_B = torch.randint(len(x), (plan.batch,), generator=generator, device=device)
        mirrored_B111 = (torch.rand(plan.batch, generator=generator, device=device) < 0.5)[:, None, None, None]
        picked = over(x[index_B], alpha[index_B], tints(plan.batch, generator, device))
        return _loss(vae, torch.where(mirrored_B111, picked.flip(-1), picked), generator)

    average = train(vae, loss_of, plan, work / "vae", device)
    save_file({name: tensor.contiguous().cpu() for name, tensor in average.state_dict().items()}, work / WEIGHTS)
    _report(average, x, work)


def load(work: Path, device: str) -> Any:
    """Return the trained autoencoder in float32, its weights rounded to bfloat16 as the checkpoint stores them."""
    vae = build()
    vae.load_state_dict({name: tensor.bfloat16().float() for name, tensor in load_file(work / WEIGHTS).items()})
    return vae.to(device).requires_grad_(False).eval()


@torch.no_grad()
def encode(vae: Any, x: Tensor) -> Tensor:
    """Return the mean latents of `x`."""
    return torch.cat([vae.encode(part).latent_dist.mean for part in torch.split(x, ENCODE_BATCH)])


def to_model(pictures: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """Return uint8 [N,H,W,3] as float32 [N,3,H,W] in [-1, 1]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def to_alpha(alphas: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """Return uint8 [N,H,W] as float32 [N,1,H,W] in [0, 1]."""
    return torch.from_numpy(alphas).unsqueeze(1).float() / 255


def _loss(vae: Any, x: Tensor, generator: torch.Generator) -> Tensor:
    posterior = vae.encode(x).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=generator, device=x.device)
    error = vae.decode(posterior.mean + posterior.std * noise).sample.float() - x
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).float().mean()
    loss: Tensor = error.abs().mean() + error.square().mean() + EDGE_WEIGHT * edges + KL_WEIGHT * kl
    return loss


@torch.no_grad()
def _report(average: nn.Module, x: Tensor, work: Path) -> None:
    vae = load(work, str(x.device))
    z = encode(vae, x)
    y = torch.cat([vae.decode(part).sample for part in torch.split(z, ENCODE_BATCH)]).clamp(-1, 1)
    psnr_db = -10 * ((y - x).square().mean((1, 2, 3)) / 4).log10()
    print(
        f"vae psnr_db {psnr_db.mean():.2f}, worst {psnr_db.min():.2f}, latents {z.mean():.3f} +- {z.std():.3f}",
        flush=True,
    )
    pairs = torch.stack((x[:64], y[:64]), dim=1).flatten(0, 1)
    rgb = ((pairs + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    save_sheet(list(rgb), work / "vae.sheet.png")
