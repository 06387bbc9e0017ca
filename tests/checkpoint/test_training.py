"""The training code: what it decides as tables, what it computes against the production modules, and all of it once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from checkpoints.emoji.train import dit, export, llm, recipe
from checkpoints.emoji.train.backdrops import over, tints
from checkpoints.emoji.train.bank import select
from checkpoints.emoji.train.codes import grids
from checkpoints.emoji.train.conditioned import Captions
from checkpoints.emoji.train.data import pictures
from checkpoints.emoji.train.loop import train
from checkpoints.emoji.train.optim import orthogonalised
from checkpoints.emoji.train.recipe import StagePlan
from checkpoints.emoji.train.tokens import learn_ranks
from checkpoints.emoji.train.words import SEEN, UNSEEN, is_drawn, name_of, shorter_names, wordings
from mammoth_ar.conditioning import Grid
from mammoth_dit import selection
from mammoth_dit.model.config import TokenIds


@pytest.mark.parametrize(
    ("stem", "drawn"),
    [
        pytest.param("1f34e", True, id="a-character"),
        pytest.param("2764-fe0f", True, id="with-a-variation-selector"),
        pytest.param("1f44b-1f3fb", False, id="with-a-skin-tone"),
        pytest.param("1f468-200d-1f680", False, id="a-sequence"),
    ],
)
def test_only_single_characters_are_drawn(stem, drawn):
    assert is_drawn(stem) == drawn


def test_names_are_those_of_unicode():
    assert name_of("1f34e") == "red apple"
    assert name_of("1facf") == "donkey"  # younger than the tables of Python 3.11
    assert wordings("red apple", ("{a}", "{}")) == ["a red apple", "red apple"]
    assert wordings("owl", ("{a} emoji",)) == ["an owl emoji"]
    assert not set(SEEN) & set(UNSEEN)


def test_a_word_stands_for_a_name_unless_it_is_one_itself():
    short = shorter_names(["red apple", "green apple", "cat", "cat with a hat"])
    assert sorted(short["red apple"]) == ["apple", "red"]
    assert sorted(short["green apple"]) == ["apple", "green"]
    assert (short["cat"], short["cat with a hat"]) == ([], ["hat"])


def test_frequent_pairs_become_ranks():
    ranks = learn_ranks(["abab", "abab", "abc"], 258)
    assert ranks[256:] == [b"ab", b"abab"]


def test_equal_patches_have_equal_codes():
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    picture = np.full((1, 128, 128, 3), 255, np.uint8)
    picture[0, :16, :16] = picture[0, 64:80, 32:48] = noise
    [codes] = grids(picture, 2)
    assert codes[0] == codes[4 * 8 + 2] != codes[1]
    assert len(set(codes.tolist())) == 2


def test_a_tint_lies_where_the_emoji_does_not():
    white = torch.tensor([0.5, 0.5, 1.0]).reshape(1, 1, 1, 3).expand(2, 3, 1, 3)  # solid, a half over white, nothing
    alpha = torch.tensor([1.0, 0.5, 0.0]).reshape(1, 1, 1, 3).expand(2, 1, 1, 3)
    tint = torch.tensor([[1.0, 1.0, 1.0], [0.9, 0.5, 1.0]])
    plain, tinted = over(white, alpha, tint)
    assert torch.equal(plain, white[0])
    assert torch.allclose(tinted[:, 0], torch.tensor([[0.5, 0.4, 0.8], [0.5, 0.0, 0.0], [0.5, 0.5, 1.0]]))


def test_tints_are_pale_and_of_every_hue():
    drawn = tints(1000, torch.Generator().manual_seed(0), "cpu")
    assert 0.9 * 0.7 <= drawn.min() <= drawn.max() <= 1
    assert {int(colour.argmin()) for colour in drawn} == {0, 1, 2}


def test_an_orthogonalised_matrix_has_singular_values_near_one():
    x = torch.randn(3, 24, 8, generator=torch.Generator().manual_seed(0))
    assert torch.linalg.svdvals(orthogonalised(x)).sub(1).abs().max() < 0.4


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    def run(folder, *stops: int) -> nn.Module:
        folder.mkdir()
        for steps in stops:
            torch.manual_seed(0)
            model = nn.Linear(4, 4)
            loss_of = partial(_toy_loss, model)
            average = train(
                model, loss_of, StagePlan(steps, batch=2, lr=1e-2, warm_up=2, decay=0.0), folder / "stage", "cpu"
            )
        return average

    straight, stopped = run(tmp_path / "a", 8), run(tmp_path / "b", 3, 8)
    assert torch.equal(straight.weight, stopped.weight)
    assert (tmp_path / "b" / "stage.curve.png").exists()


def _toy_loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    return model(torch.randn(2, 4, generator=generator)).square().mean()


@pytest.fixture(scope="module")
def batch(painter):
    """Prompts of unequal length with grids of random codes: ids [B,L], lengths [B], grids [B,G]."""
    texts = ["a red apple", "picture of a face with tears of joy", "rocket"]
    prompts = [list(painter.template.render(text, Grid(8, 8)).ids) for text in texts]
    longest = max(map(len, prompts))
    ids_BL = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts])
    codes = torch.randint(recipe.NUM_CODES, (3, llm.NUM_GRID), generator=torch.Generator().manual_seed(0))
    grid_BG = codes + recipe.VISUAL_START
    grid_BG[:, 8::9] = recipe.EOL
    return ids_BL, torch.tensor([len(ids) for ids in prompts]), grid_BG


def test_rows_are_selected_as_in_serving(painter, batch):
    ids_BL, length_B, grid_BG = batch
    text_BTH, num_text_B, image_BGH = select(painter.ar.decoder, ids_BL, length_B, grid_BG)
    tokens = TokenIds.parse(painter.checkpoint.config["llm_config"])
    for row, length in enumerate(length_B.tolist()):
        ids = torch.cat((ids_BL[row, :length], grid_BG[row]))
        with torch.no_grad():
            found = selection.select(llm.hidden(painter.ar.decoder, ids[None])[0], ids, length, tokens)
        torch.testing.assert_close(text_BTH[row, : num_text_B[row]], found.text_LH, rtol=0, atol=1e-5)
        torch.testing.assert_close(image_BGH[row], found.image_LH, rtol=0, atol=1e-5)
        assert not text_BTH[row, num_text_B[row] :].any()


def test_a_padded_batch_of_captions_gives_what_serving_gives(painter, batch):
    rows = select(painter.ar.decoder, *batch)
    text_BTH, num_text_B, image_BGH = rows[0].double(), rows[1], rows[2].double()
    model = dit._build(text_BTH.shape[1]).double()
    for parameter in model.parameters():  # what starts at zero would hide everything behind it
        if not parameter.any():
            nn.init.normal_(parameter, std=0.3)
    generator = torch.Generator().manual_seed(0)
    x, t_B = torch.randn(3, 16, 16, 16, generator=generator).double(), torch.tensor([0.0, 0.3, 0.9]).double()
    dropped_B = torch.tensor([False, False, True])
    with torch.no_grad():
        together = model(x, t_B, Captions(text_BTH, num_text_B, image_BGH, dropped_B))
        for row in range(3):
            queries = model.refiner(image_BGH[row : row + 1])[0]
            caption = model.transformer.caption(
                torch.cat((text_BTH[row, : num_text_B[row]], queries))[: 0 if dropped_B[row] else None]
            )
            alone = model.transformer(x[row : row + 1], t_B[row : row + 1], model.transformer.pack([caption], 8, 8))
            torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-5)


def test_the_package_is_read_by_name(package):
    found = pictures(package)
    assert len(found) == 256
    assert found["rat"].shape == (128, 128, 3)


@pytest.mark.timeout(900)
def test_every_stage_runs_and_the_result_loads(package, open_painter, tmp_path):
    command = [sys.executable, "-m", "checkpoints.emoji.train", "all", "--smoke", "--device", "cpu"]
    command += ["--work", str(package), "--out", str(tmp_path)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=Path(__file__).resolve().parents[2],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    painter = open_painter(tmp_path)
    [written] = painter.write(["a rat"])
    assert painter.draw([written], steps=2).shape == (1, 128, 128, 3)
    factors = json.loads((package / dit.SCALING).read_text())
    assert painter.checkpoint.config["gen_vae_config"]["shift_factor"] == factors["shift_factor"]
    for sheet in ("vae.sheet.png", "dit.sheet.png", "vae.curve.png", "llm.curve.png", "dit.curve.png"):
        assert (package / sheet).stat().st_size > 0
    assert {path.name for path in tmp_path.iterdir()} >= set(export.SHARDS)
