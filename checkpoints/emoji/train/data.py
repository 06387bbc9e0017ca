"""Do the preparation: the npm package to one file of pictures, names, grids and prompts, and the tokenizer files.

    python -m checkpoints.emoji.train data --work build/emoji

Everything here runs on the CPU with fixed seeds, so that an accelerator only trains. Nothing of it is committed.

N pictures, W wordings of each, L prompt tokens (padded).
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from checkpoints.emoji.train import recipe
from checkpoints.emoji.train.words import UNSEEN, is_drawn, name_of, shorter_names, wordings

__all__ = ["PACKAGE", "Prepared", "cutouts", "pictures", "prepare"]

PACKAGE = "@lobehub/fluent-emoji-3d@1.1.0"
ARCHIVE = "lobehub-fluent-emoji-3d-1.1.0.tgz"
PREPARED = "prepared.npz"
TOKENIZER = "tokenizer"
NUM_SHORT = 12  # wordings a picture that hold only a word of its name


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """`pictures` uint8 [N,128,128,3], over white; `alphas` uint8 [N,128,128]; `grids` int16 [N,64]; `prompts` int16 [N,W,L] padded with 0, `lengths` int16
    [N,W]; `unseen` and `unseen_lengths` likewise, of the wordings held back.
    """

    names: list[str]
    pictures: npt.NDArray[np.uint8]
    alphas: npt.NDArray[np.uint8]
    grids: npt.NDArray[np.int16]
    prompts: npt.NDArray[np.int16]
    lengths: npt.NDArray[np.int16]
    unseen: npt.NDArray[np.int16]
    unseen_lengths: npt.NDArray[np.int16]

    @classmethod
    def open(cls, work: Path, limit: int | None = None) -> Prepared:
        """Read what `prepare` wrote; only the first `limit` pictures when one is given."""
        with np.load(work / PREPARED) as file:
            names, *arrays = (file[name][:limit] for name in cls.__slots__)
        return cls([str(name) for name in names], *arrays)


def pictures(work: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """Return {name: uint8 [128,128,3] over white} of every single character, fetching the package when it is not there."""
    return {name: cutout[..., :3] for name, cutout in cutouts(work).items()}


def cutouts(work: Path) -> dict[str, npt.NDArray[np.uint8]]:
    """Return {name: uint8 [128,128,4]}: the colours over white, and how much of each pixel is the emoji's."""
    archive = work / ARCHIVE
    if not archive.exists():
        work.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=work, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, npt.NDArray[np.uint8]] = {}
    with tarfile.open(archive) as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            path = Path(member.name)
            if path.suffix == ".webp" and is_drawn(path.stem) and (file := tar.extractfile(member)):
                found.setdefault(name_of(path.stem), _over_white(file.read()))
    return dict(sorted(found.items()))


def prepare(work: Path) -> None:
    """Write PREPARED and the tokenizer files into `work`, unless they are there."""
    if (work / PREPARED).exists():
        return
    from checkpoints.emoji.train.codes import grids  # torch and the AR stage's tokenizer only where they are needed
    from checkpoints.emoji.train.prompts import Renderer

    found = cutouts(work)
    stacked, alphas = np.split(np.stack(list(found.values())), (3,), axis=-1)
    renderer = Renderer.learn(list(found), work / TOKENIZER)
    prompts, lengths = _padded([renderer.render(asks) for asks in _asks(list(found))])
    unseen, unseen_lengths = _padded([renderer.render(wordings(name, UNSEEN)) for name in found])
    np.savez_compressed(
        work / PREPARED, names=list(found), pictures=stacked, alphas=alphas[..., 0], grids=grids(stacked, recipe.NUM_CODES), prompts=prompts,
        lengths=lengths, unseen=unseen, unseen_lengths=unseen_lengths,
    )  # fmt: skip
    print(f"{len(found)} pictures in {lengths.shape[1]} wordings of at most {lengths.max()} tokens")


def _over_white(webp: bytes) -> npt.NDArray[np.uint8]:
    image = Image.open(io.BytesIO(webp)).convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image)
    white.putalpha(image.getchannel("A"))
    # A resize of RGBA would weigh colours by alpha; these are already what is seen, so each channel is halved alone.
    halved = [band.resize((recipe.SIDE_PX, recipe.SIDE_PX), Image.Resampling.BOX) for band in white.split()]
    return np.stack([np.asarray(band) for band in halved], axis=-1)


def _asks(names: list[str]) -> list[list[str]]:
    """Return as many wordings for every name: the whole name in every wording, then its words, or itself, in some."""
    asks: list[list[str]] = []
    for name, words in shorter_names(names).items():
        short = [text for word in words or [name] for text in wordings(word)]
        order = np.random.default_rng(len(asks)).permutation(len(short))
        asks.append(_both_cases(wordings(name)) + [short[index] for index in np.resize(order, NUM_SHORT)])
    return asks


def _both_cases(texts: list[str]) -> list[str]:
    return texts + [text[0].upper() + text[1:] for text in texts]


def _padded(prompts: list[list[list[int]]]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int16]]:
    longest = max(len(ids) for wordings in prompts for ids in wordings)
    padded = [[ids + [0] * (longest - len(ids)) for ids in wordings] for wordings in prompts]
    lengths = [[len(ids) for ids in wordings] for wordings in prompts]
    return np.array(padded, np.int16), np.array(lengths, np.int16)
