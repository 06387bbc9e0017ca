"""Do stage 3: train the diffusion transformer and the Q-Former together, by flow matching under the serving conditioning.

x_t = (1 - t) * noise + t * image, the target is image - noise, times lean towards those of the serving schedule. A tenth
of the captions is dropped, which is what guidance compares with. Some text rows come from another picture: image rows are
to be trusted where the two disagree, so that what the LLM drew decides the picture. Each picture comes over many backdrops, of
which rows say nothing: those are the noise's to choose.

B pictures a step, M entries of the bank, z latents [N,K,16,h,w] normalised, K backdrops a picture.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.emoji.train import llm, recipe, vae
from checkpoints.emoji.train.backdrops import over, tints
from checkpoints.emoji.train.bank import Bank
from checkpoints.emoji.train.conditioned import Captions, Conditioned
from checkpoints.emoji.train.data import Prepared
from checkpoints.emoji.train.loop import initialise, train
from checkpoints.emoji.train.sheets import save_sheet
from mammoth_dit.model.config import LATENT_FACTOR, ModelConfig
from mammoth_dit.model.qformer import QFormer
from mammoth_dit.model.transformer import DiffusionTransformer
from mammoth_dit.model.weights import build
from mammoth_dit.sampling import SHIFT_UNIT, Guidance, Schedule, denoise, initial_noise, step_times

__all__ = ["SCALING", "WEIGHTS", "run"]

WEIGHTS = "dit.safetensors"
SCALING = "scaling.json"
DROPPED = 0.1
MISLEADING = 0.15
UNIFORM_TIMES = 0.5  # the other times follow the serving schedule
PER_PICTURE = 8
NUM_BACKDROPS = 32
SIDE = recipe.SIDE_PX // 16
SHEET_PICTURES = 96
SHEET_STEPS, SHEET_GUIDANCE = 20, 4.0


def run(work: Path, plan: recipe.StagePlan, device: str, limit: int | None, *, compiled: bool) -> None:
    """Train and write the averaged weights, the loss curve and a sheet into `work`."""
    if (work / WEIGHTS).exists():
        return
    prepared = Prepared.open(work, limit)
    z = normalised(work, prepared, device)
    bank = Bank.fill(llm.load(work, device), llm.Sequences(prepared, device), PER_PICTURE)
    model = _build(bank.text_MTH.shape[1]).to(device)
    if compiled:
        for block in (*model.transformer.noise_refiner, *model.transformer.layers):
            block.compile()

    def loss_of(generator: torch.Generator) -> Tensor:
        entry_B = torch.randint(len(bank.picture_M), (plan.batch,), generator=generator, device=device)
        backdrop_B = torch.randint(z.shape[1], (plan.batch,), generator=generator, device=device)
        return _loss(model, z[bank.picture_M[entry_B], backdrop_B], _captions(bank, entry_B, generator), generator)

    average = train(model, loss_of, plan, work / "dit", device)
    assert isinstance(average, Conditioned)
    save_file({name: tensor.contiguous().cpu() for name, tensor in average.state_dict().items()}, work / WEIGHTS)
    _report(average, bank, z, vae.to_alpha(prepared.alphas).to(device), work)


def normalised(work: Path, prepared: Prepared, device: str) -> Tensor:
    """Return the latents of all pictures, shifted and scaled to unit size; write the two factors to SCALING."""
    autoencoder = vae.load(work, device)
    x, alpha = vae.to_model(prepared.pictures).to(device), vae.to_alpha(prepared.alphas).to(device)
    generator = torch.Generator(device).manual_seed(5)
    versions = [vae.encode(autoencoder, over(x, alpha, tints(len(x), generator, device))) for _ in range(NUM_BACKDROPS)]
    z = torch.stack(versions, dim=1)
    shift, scale = round(float(z.mean()), 4), round(1 / float(z.std()), 4)
    (work / SCALING).write_text(json.dumps({"scaling_factor": scale, "shift_factor": shift}) + "\n")
    return (z - shift) * scale


def _build(max_text: int) -> Conditioned:
    config = ModelConfig.parse(recipe.config())
    transformer, refiner = build("transformer", config), build("refiner", config)
    assert isinstance(transformer, DiffusionTransformer)
    assert isinstance(refiner, QFormer)
    initialise(transformer, seed=3)
    initialise(refiner, seed=4)
    return Conditioned(transformer, refiner, config, max_text, SIDE)


def _captions(bank: Bank, entry_B: Tensor, generator: torch.Generator) -> Captions:
    draw_2B = torch.rand((2, len(entry_B)), generator=generator, device=entry_B.device)
    text_B = torch.where(draw_2B[0] < MISLEADING, entry_B.roll(1), entry_B)
    return Captions(bank.text_MTH[text_B], bank.num_text_M[text_B], bank.image_MGH[entry_B], draw_2B[1] < DROPPED)


def _loss(model: Conditioned, image: Tensor, captions: Captions, generator: torch.Generator) -> Tensor:
    noise = torch.randn(image.shape, generator=generator, device=image.device)
    t_B = _times(len(image), generator, image.device)
    t_B111 = t_B[:, None, None, None]
    velocity = model(torch.lerp(noise, image, t_B111), t_B, captions)
    loss: Tensor = (velocity.float() - (image - noise)).square().mean()
    return loss


def _times(num: int, generator: torch.Generator, device: torch.device) -> Tensor:
    tau_B, kind_B = torch.rand((2, num), generator=generator, device=device)
    shift = math.sqrt((recipe.SIDE_PX // LATENT_FACTOR) ** 2) / SHIFT_UNIT
    return torch.where(kind_B < UNIFORM_TIMES, tau_B, tau_B / (shift - shift * tau_B + tau_B))


@torch.no_grad()
def _report(model: Conditioned, bank: Bank, z: Tensor, alpha: Tensor, work: Path) -> None:
    """Draw some pictures with guidance, print how near the emoji come, and write them beside true ones over some backdrop."""
    apart = max(PER_PICTURE, len(bank.picture_M) // SHEET_PICTURES)  # no picture twice
    entry_B = torch.arange(0, len(bank.picture_M), apart, device=z.device)[:SHEET_PICTURES]
    captions = Captions(
        bank.text_MTH[entry_B], bank.num_text_M[entry_B], bank.image_MGH[entry_B], torch.zeros_like(entry_B).bool()
    )
    size_px, num = (recipe.SIDE_PX, recipe.SIDE_PX), len(entry_B)
    guided, empty = (model.context(c) for c in (captions, replace(captions, is_dropped_B=captions.is_dropped_B | True)))
    schedule = Schedule.plan(
        step_times(SHEET_STEPS, size_px), [Guidance(SHEET_GUIDANCE, (0, 1))] * num, z.dtype, z.device
    )
    noise = torch.cat([initial_noise(seed, z.shape[2], size_px, z.dtype) for seed in range(num)]).to(z.device)
    drawn = denoise(
        noise, schedule, lambda x, t: model.transformer(x, t, guided), lambda x, t: model.transformer(x, t, empty)
    )
    factors = json.loads((work / SCALING).read_text())
    decoder = vae.load(work, str(z.device))
    pairs = (
        torch.stack((z[bank.picture_M[entry_B], 0], drawn), dim=1).flatten(0, 1) / factors["scaling_factor"]
        + factors["shift_factor"]
    )
    images = torch.cat([decoder.decode(part).sample for part in torch.split(pairs, vae.ENCODE_BATCH)]).clamp(-1, 1)
    true, drawn = images[0::2], images[1::2]
    share = alpha[bank.picture_M[entry_B]]
    error_B = (share * (true - drawn).square()).mean((1, 2, 3)) / share.mean((1, 2, 3))
    psnr_db = -10 * (error_B / 4).log10()
    print(f"dit drawn against true psnr_db {psnr_db.mean():.2f}, worst {psnr_db.min():.2f}", flush=True)
    rgb = ((images + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    save_sheet(list(rgb), work / "dit.sheet.png")
