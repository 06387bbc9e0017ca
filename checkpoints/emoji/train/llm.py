"""Do stage 2: teach the LLM to write the grid of codes after the serving prompt; then let it write.

Teacher forcing through the production decoder, cross-entropy on the visual tokens alone: a row's end is forced in serving
and never scored. The text head stays zero, text to image never reads it.

B sequences a step, L tokens (prompt, grid, padding), G grid tokens, H width, V codes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from checkpoints.emoji.train import recipe
from checkpoints.emoji.train.data import Prepared
from checkpoints.emoji.train.loop import initialise, train
from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.decoder import Decoder

__all__ = ["NUM_GRID", "Sequences", "hidden", "load", "run", "write_grids"]

WEIGHTS = "llm.safetensors"
SIDE = recipe.SIDE_PX // 16
NUM_GRID = SIDE * (SIDE + 1)
WRITE_BATCH = 2048


class Sequences:
    """Prompts and grids on a device, as token ids; padding is id 0 on the right, which causality hides."""

    def __init__(self, prepared: Prepared, device: str) -> None:
        self.prompts_NWL = torch.from_numpy(prepared.prompts).long().to(device)
        self.lengths_NW = torch.from_numpy(prepared.lengths).long().to(device)
        codes = torch.from_numpy(prepared.grids).long().to(device).view(-1, SIDE, SIDE) + recipe.VISUAL_START
        self.grids_NG = functional.pad(codes, (0, 1), value=recipe.EOL).flatten(1)
        self.is_code_G = self.grids_NG[0] != recipe.EOL

    def draw(self, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return pictures [B], prompts [B,L] and their lengths [B]: any picture in any of its wordings."""
        device = self.prompts_NWL.device
        picture_B = torch.randint(len(self.prompts_NWL), (num,), generator=generator, device=device)
        wording_B = torch.randint(self.prompts_NWL.shape[1], (num,), generator=generator, device=device)
        return picture_B, self.prompts_NWL[picture_B, wording_B], self.lengths_NW[picture_B, wording_B]


def joined(prompt_BL: Tensor, length_B: Tensor, grid_BG: Tensor) -> Tensor:
    """Return [prompt | grid | padding], each row compact."""
    place_BG = length_B.unsqueeze(-1) + torch.arange(grid_BG.shape[1], device=grid_BG.device)
    return functional.pad(prompt_BL, (0, grid_BG.shape[1])).scatter(1, place_BG, grid_BG)


def hidden(decoder: Decoder, ids_BL: Tensor) -> Tensor:
    """Return the normed hidden states of whole sequences, [B,L,H]."""
    position_1L = torch.arange(ids_BL.shape[1], device=ids_BL.device).unsqueeze(0)
    sees_1LS = position_1L.unsqueeze(-1) >= position_1L.unsqueeze(1)
    normed_BLH: Tensor = decoder(ids_BL, position_1L, sees_1LS).normed_BLH
    return normed_BLH


def run(work: Path, plan: recipe.StagePlan, device: str, limit: int | None, *, compiled: bool) -> None:
    """Train and write the averaged weights and the loss curve into `work`; print how many codes are recalled."""
    if (work / WEIGHTS).exists():
        return
    prepared = Prepared.open(work, limit)
    sequences = Sequences(prepared, device)
    decoder = _build().to(device)
    loss = torch.compile(_loss) if compiled else _loss

    def loss_of(generator: torch.Generator) -> Tensor:
        picture_B, prompt_BL, length_B = sequences.draw(plan.batch, generator)
        return loss(decoder, prompt_BL, length_B, sequences.grids_NG[picture_B], sequences.is_code_G)

    average = train(decoder, loss_of, plan, work / "llm", device)
    save_file({name: tensor.cpu() for name, tensor in average.state_dict().items()}, work / WEIGHTS)
    _report(load(work, device), sequences, prepared)


def load(work: Path, device: str) -> Decoder:
    """Return the trained decoder in float32, its weights rounded to bfloat16 as the checkpoint stores them."""
    decoder = _build()
    decoder.load_state_dict({name: tensor.bfloat16().float() for name, tensor in load_file(work / WEIGHTS).items()})
    return decoder.to(device).requires_grad_(False).eval()


@torch.no_grad()
def write_grids(
    decoder: Decoder, prompt_BL: Tensor, length_B: Tensor, temperature: float, generator: torch.Generator
) -> Tensor:
    """Return grids [B,G] sampled as in serving, but for the random numbers; `temperature` 0 is greedy."""
    return torch.cat(
        [
            _write(decoder, prompts, lengths, temperature, generator)
            for prompts, lengths in zip(
                torch.split(prompt_BL, WRITE_BATCH), torch.split(length_B, WRITE_BATCH), strict=True
            )
        ]
    )


def _build() -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(LLMConfig.parse(recipe.config()))
    initialise(decoder, seed=1)
    return decoder


def _loss(decoder: Decoder, prompt_BL: Tensor, length_B: Tensor, grid_BG: Tensor, is_code_G: Tensor) -> Tensor:
    normed_BLH = hidden(decoder, joined(prompt_BL, length_B, grid_BG))
    before_BG1 = (length_B.unsqueeze(-1) - 1 + torch.arange(NUM_GRID, device=length_B.device)).unsqueeze(-1)
    logits_BGV = _code_logits(decoder, torch.take_along_dim(normed_BLH, before_BG1, dim=1))
    target_BG = torch.where(is_code_G, grid_BG - recipe.VISUAL_START, -100)
    return functional.cross_entropy(logits_BGV.float().flatten(0, 1), target_BG.flatten(), ignore_index=-100)


def _code_logits(decoder: Decoder, normed_BLH: Tensor) -> Tensor:
    return decoder.visual_logits(normed_BLH, recipe.VISUAL_START, recipe.VISUAL_START + recipe.NUM_CODES)


def _write(
    decoder: Decoder, prompt_BL: Tensor, length_B: Tensor, temperature: float, generator: torch.Generator
) -> Tensor:
    grid_BG = torch.full((len(prompt_BL), NUM_GRID), recipe.EOL, device=prompt_BL.device)
    for index in range(NUM_GRID):
        if index % (SIDE + 1) == SIDE:
            continue
        normed_BLH = hidden(decoder, joined(prompt_BL, length_B, grid_BG[:, :index]))
        last_BH = torch.take_along_dim(normed_BLH, (length_B - 1 + index)[:, None, None], dim=1)[:, 0]
        logits_BV = _code_logits(decoder, last_BH)
        if temperature:
            uniform_BV = torch.rand(logits_BV.shape, generator=generator, device=logits_BV.device)
            logits_BV = logits_BV / temperature - (-uniform_BV.log()).log()
        grid_BG[:, index] = logits_BV.argmax(-1) + recipe.VISUAL_START
    return grid_BG


@torch.no_grad()
def _report(decoder: Decoder, sequences: Sequences, prepared: Prepared) -> None:
    device = sequences.grids_NG.device
    unseen, lengths = (torch.from_numpy(a[:, 0]).long().to(device) for a in (prepared.unseen, prepared.unseen_lengths))
    asks = {"seen": (sequences.prompts_NWL[:, 0], sequences.lengths_NW[:, 0]), "unseen": (unseen, lengths)}
    for wording, (prompt_NL, length_N) in asks.items():
        for temperature in (0.0, 0.7, 1.0):
            generator = torch.Generator(device).manual_seed(0)
            right_NG = write_grids(decoder, prompt_NL, length_N, temperature, generator) == sequences.grids_NG
            recalled = right_NG[:, sequences.is_code_G].float().mean(-1)
            print(
                f"llm {wording} t={temperature} codes {recalled.mean():.4f} pictures {(recalled > 0.9).float().mean():.4f}",
                flush=True,
            )
