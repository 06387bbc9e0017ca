"""Do: measure what a checkpoint draws: pictures of names, end to end through both services, looked up among the real ones.

    python -m bench.eval_checkpoint

- top1, top5: how often a drawn picture is nearest (among the five nearest) to the one that its name belongs to, among all
  pictures of the data, in the features of `bench.retrieval`; `_unseen_wording`: asked for in words that training held back;
- psnr_db: reconstruction by the VAE, mean over all pictures;
- ar_s, dit_s: what a picture took in each stage, as `Done` says, without queues;
- ar_extra_bytes, dit_extra_bytes: how far the memory of each stage rises above that of the warm, idle process;
- guidance_change, steps_change, seed_change: mean difference in grey levels, of 255, to the picture with the default.

The data is fetched with npm into the work folder when it is not there.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import AutoencoderKL
from PIL import Image

from bench import report
from bench.processes import HighWater
from bench.report import Spread
from bench.retrieval import Gallery
from checkpoints.emoji.train.data import PACKAGE, pictures
from checkpoints.emoji.train.sheets import save_sheet
from checkpoints.emoji.train.words import UNSEEN, wordings
from mammoth_client import Client, Picture
from mammoth_client.pipeline import pipeline
from mammoth_serving.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parent.parent
SHEET_SIDE_PX, SHEET_COLUMNS = 80, 20
NUM_WARM_UP, NUM_CHANGED = 2, 16
VAE_BATCH = 32
VAE_PREFIX = "gen_vae."
Rgb = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Workload:
    """`num_names` of the names are drawn, chosen by `seed`, which is every picture's seed too."""

    num_names: int = 200
    guidance: float = 4.0
    steps: int = 20
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """Pictures [M,H,W,3] in the order of the prompts, and what each took."""

    rgb: Rgb
    ar_s: list[float]
    dit_s: list[float]


def draw(client: Client, prompts: list[str], workload: Workload, **changed: Any) -> Drawn:
    """Draw the prompts one after the other."""
    fields = {"guidance": workload.guidance, "steps": workload.steps, "seed": workload.seed, **changed}
    found: list[Picture] = [client.generate(prompt, **fields)[0] for prompt in prompts]
    times = [picture.times for picture in found]
    return Drawn(
        rgb=np.stack([np.asarray(picture.to_pil().convert("RGB")) for picture in found]),
        ar_s=[each.ar_s for each in times],
        dit_s=[each.denoise_s + each.decode_s + each.encode_s for each in times],
    )


def changes(client: Client, names: list[str], drawn: Drawn, workload: Workload) -> dict[str, float]:
    """Return how far pictures move when one parameter does."""
    other = {"guidance": {"guidance": 1.0}, "steps": {"steps": 5}, "seed": {"seed": workload.seed + 1}}
    found = {}
    for name, change in other.items():
        again = draw(client, names[:NUM_CHANGED], workload, **change).rgb
        found[f"{name}_change"] = float(np.abs(again.astype(float) - drawn.rgb[:NUM_CHANGED]).mean())
    return found


@torch.no_grad()
def psnr_db(checkpoint: Checkpoint, found: Rgb) -> float:
    """Return the mean PSNR of the VAE's reconstructions, without noise, of uint8 pictures [N,H,W,3]."""
    vae = AutoencoderKL.from_config(dict(checkpoint.config["gen_vae_config"])).eval()
    stored = checkpoint.tensors(checkpoint.names(VAE_PREFIX))
    vae.load_state_dict({name.removeprefix(VAE_PREFIX): tensor.float() for name, tensor in stored})
    values = []
    for part in (torch.from_numpy(found).permute(0, 3, 1, 2).float() / 127.5 - 1).split(VAE_BATCH):
        again = vae.decode(vae.encode(part).latent_dist.mean).sample.clamp(-1, 1)
        values.append(-10 * ((again - part).square().mean((1, 2, 3)) / 4).log10())
    return float(torch.cat(values).mean())


def run(model: Path, work: Path, workload: Workload, *, sheet: Path, folder: Path) -> Path:
    """Measure, write the contact sheet, and checkpoint.json into `folder`."""
    found = pictures(work)
    names, real = list(found), np.stack(list(found.values()))
    places = np.random.default_rng(workload.seed).choice(len(names), workload.num_names, replace=False)
    asked = [names[place] for place in places]
    held_back = [wordings(name, (template,))[0] for name, template in zip(asked, cycle(UNSEEN), strict=False)]
    with pipeline(model, log_level="warning") as stages, Client(stages.address) as client:
        draw(client, asked[:NUM_WARM_UP], workload)
        memory = HighWater([stages.ar.pid, stages.dits[0].pid])
        drawn = draw(client, asked, workload)
        unseen = draw(client, held_back, workload)
        moved = changes(client, asked, drawn, workload)
        ar_bytes, dit_bytes = memory.extra_bytes()
    save_contact_sheet(drawn.rgb, sheet)
    gallery = Gallery.of(real)
    spread = {"ar_s": Spread.of(drawn.ar_s), "dit_s": Spread.of(drawn.dit_s)}
    return report.write(
        "checkpoint",
        workload={**asdict(workload), "data": PACKAGE, "gallery": len(names), "size_px": list(real.shape[1:3])},
        warm_up=NUM_WARM_UP,
        repeats=workload.num_names,
        spread=spread,
        figures={
            **_hits(gallery.ranks(drawn.rgb, places), ""),
            **_hits(gallery.ranks(unseen.rgb, places), "_unseen_wording"),
            "psnr_db": psnr_db(Checkpoint.open(model), real),
            "bytes": sum(path.stat().st_size for path in model.iterdir() if path.is_file() and path.suffix != ".md"),
            **{name: value.p50 for name, value in spread.items()},
            "ar_extra_bytes": ar_bytes,
            "dit_extra_bytes": dit_bytes,
            **moved,
        },
        folder=folder,
    )


def save_contact_sheet(drawn: Rgb, path: Path) -> None:
    """Write small copies of the pictures side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = (SHEET_SIDE_PX, SHEET_SIDE_PX)
    small = [np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.LANCZOS)) for rgb in drawn]
    save_sheet(small, path, columns=SHEET_COLUMNS)


def _hits(ranks: npt.NDArray[np.int64], suffix: str) -> dict[str, float]:
    return {f"top{most}{suffix}": float((ranks < most).mean()) for most in (1, 5)}


def main() -> None:
    default = Workload()
    parser = argparse.ArgumentParser(
        prog="python -m bench.eval_checkpoint", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "emoji")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "emoji", help="folder of the npm package")
    parser.add_argument("--names", type=int, default=default.num_names)
    parser.add_argument("--guidance", type=float, default=default.guidance)
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--sheet", type=Path, default=ROOT / "docs" / "images" / "emoji-contact-sheet.png")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of checkpoint.json")
    args = parser.parse_args()
    workload = Workload(args.names, args.guidance, args.steps, args.seed)
    run(args.model, args.work, workload, sheet=args.sheet, folder=args.results)


if __name__ == "__main__":
    main()
