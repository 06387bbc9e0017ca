"""The committed checkpoint draws what it is asked for, and stops doing so when something that matters is broken.

A drawing counts as right when, among drawings of the same prompts with another seed, the one of its own prompt is nearest.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from mammoth_ar.testing import open_tokenizer
from mammoth_dit.model.rotary import caption_positions, image_positions, rotation
from mammoth_dit.model.transformer import Context
from mammoth_dit.sampling import Guidance, Schedule, step_times
from mammoth_wire.params import Defaults

MAX_BYTES = 16_000_000
PROMPTS = [
    "red apple", "an emoji of a rocket", "picture of a unicorn face", "snowflake", "a dodo", "the guitar", "sunflower emoji",
    "draw an octopus", "penguin", "a bicycle", "slice of pizza", "an image of an umbrella",
]  # fmt: skip
SEED_CHANGE = 0.5  # grey levels between two seeds of one prompt, measured 0.4


def near(drawn: np.ndarray, gallery: np.ndarray) -> float:
    """Return the share of `drawn` to which the picture at the same place of `gallery` is the nearest, at 16 x 16 pixels."""
    small, targets = (x.reshape(len(x), 16, 8, 16, 8, 3).mean((2, 4)).reshape(len(x), -1) for x in (drawn, gallery))
    distance = np.square(small[:, None] - targets[None]).sum(-1)
    return float((distance.argmin(1) == np.arange(len(drawn))).mean())


def change(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean difference in grey levels."""
    return float(np.abs(one.astype(float) - other).mean())


@pytest.fixture(scope="module")
def written(painter):
    return [each for start in range(0, len(PROMPTS), 4) for each in painter.write(PROMPTS[start : start + 4])]


@pytest.fixture(scope="module")
def drawn(painter, written):
    return painter.draw(written)


@pytest.fixture(scope="module")
def gallery(painter, written):
    return painter.draw(written, seed=1)


def test_the_files_are_small_complete_and_of_one_kind(painter):
    path = painter.checkpoint.path
    assert sum(file.stat().st_size for file in path.iterdir() if file.is_file() and file.suffix != ".md") <= MAX_BYTES
    for shard in path.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            names = file.keys()
            assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert painter.scope == open_tokenizer(painter.checkpoint).scope()
    assert Defaults.from_generation_config(painter.checkpoint.generation).height == 128
    assert painter.checkpoint.names("gen_vae.encoder.")


def test_every_prompt_becomes_its_own_picture(drawn, gallery):
    assert near(drawn, gallery) == 1.0


def test_one_seed_gives_the_same_bytes_alone_and_in_a_batch_of_four(painter, written, drawn):
    for place in (0, 3):
        [alone] = painter.write([PROMPTS[place]])
        assert torch.equal(alone.hidden_TH, written[place].hidden_TH)
        assert torch.equal(alone.ids_T, written[place].ids_T)
        assert np.array_equal(painter.draw([alone])[0], drawn[place])
    assert np.array_equal(painter.draw(written[:4]), drawn[:4])


def test_seed_steps_and_guidance_change_the_picture(painter, written, drawn, gallery):
    assert 0.1 < change(drawn, gallery) < SEED_CHANGE
    assert change(painter.draw(written[:4], steps=5), drawn[:4]) > 0.3
    assert change(painter.draw(written[:4], guidance=1.0), drawn[:4]) > 1.0


def test_a_word_that_several_pictures_share_is_the_seeds_to_fill(painter):
    houses = np.concatenate([painter.draw(painter.write(["house"], seed=seed)) for seed in (0, 1, 2)])
    assert max(change(houses[0], houses[1]), change(houses[0], houses[2])) > 10


def hidden(painter, ids: list[int], *, causal: bool, gap: int, num_prompt: int) -> Tensor:
    """Run the whole sequence at once, with a mask that hides the future or not, and `gap` positions before the grid."""
    position_1L = torch.arange(len(ids))[None]
    sees_1LL = position_1L[..., None] >= position_1L[:, None] if causal else torch.ones(1, len(ids), len(ids)).bool()
    with torch.no_grad():
        return painter.ar.decoder(
            torch.tensor([ids]), position_1L + gap * (position_1L >= num_prompt), sees_1LL
        ).normed_BLH[0]


def write_broken(painter, written, **broken):
    """Write the grid again, greedily, on broken hidden states."""
    ids = written.ids_T[: written.num_prompt].tolist()
    for index in range(72):
        hidden_LH = hidden(painter, ids, num_prompt=written.num_prompt, **broken)
        logits_V = painter.ar.decoder.visual_logits(hidden_LH[-1], painter.scope.visual_start, painter.scope.visual_end)
        ids.append(painter.scope.eol_id if index % 9 == 8 else painter.scope.visual_start + int(logits_V.argmax()))
    hidden_LH = hidden(painter, ids, num_prompt=written.num_prompt, **broken)
    return replace(written, hidden_TH=hidden_LH, ids_T=torch.tensor(ids, dtype=torch.int32))


def with_the_queries_of_a_neighbour(painter, written):
    """The text rows stay; the rows that the Q-Former reads are the next prompt's."""
    swapped = []
    for mine, other in zip(written, written[1:] + written[:1], strict=True):
        rows = torch.cat((mine.hidden_TH[: mine.num_prompt], other.hidden_TH[other.num_prompt :]))
        swapped.append(replace(mine, hidden_TH=rows))
    return painter.draw(swapped)


def with_the_mask_dropped(painter, written):
    return painter.draw([write_broken(painter, each, causal=False, gap=0) for each in written])


def with_grid_positions_shifted(painter, written):
    return painter.draw([write_broken(painter, each, causal=True, gap=4) for each in written])


def with_image_positions_shifted(painter, written):
    """Rows and columns of the image start at 2 where a caption is there, as if a margin had been counted in."""
    return denoised(painter, written, lambda context: replace(context, joint_rotation=moved(painter, context)))


def moved(painter, context: Context):
    num_caption = context.caption_BCD.shape[1]
    image = image_positions(8, 8, shift=num_caption) + torch.tensor([0, 2, 2])
    positions = torch.cat((caption_positions(num_caption), image))[None]
    return rotation(positions, painter.dit.config.rotary.widths, torch.float32, torch.device("cpu"))


def denoised(painter, written, breaks=lambda context: context, schedule: Schedule | None = None) -> np.ndarray:
    """Draw with a broken conditional context or another schedule."""
    transformer = painter.dit._model.transformer
    pictures = []
    for each in written:
        prepared = painter.dit.prepare(painter.job(each))
        group = painter.dit.group([prepared])
        context = breaks(transformer.pack([prepared.caption_CD], 8, 8))
        group = replace(
            group, schedule=schedule or group.schedule, conditional=lambda x, t, c=context: transformer(x, t, c)
        )
        image = painter.dit.decode(painter.dit.denoise(group))
        pictures.append(((image * 0.5 + 0.5).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy())
    return np.stack(pictures)


def test_the_broken_path_without_a_break_is_the_engines(painter, written, drawn):
    assert np.array_equal(denoised(painter, written[:1]), drawn[:1])
    again = write_broken(painter, written[0], causal=True, gap=0)
    torch.testing.assert_close(again.hidden_TH, written[0].hidden_TH, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "break_it",
    [
        pytest.param(with_the_queries_of_a_neighbour, id="queries-of-another-picture"),
        pytest.param(with_the_mask_dropped, id="causal-mask-dropped"),
        pytest.param(with_grid_positions_shifted, id="grid-positions-shifted"),
        pytest.param(with_image_positions_shifted, id="image-positions-shifted"),
    ],
)
def test_a_real_break_is_noticed(painter, written, gallery, break_it):
    assert near(break_it(painter, written), gallery) < 0.5


@pytest.mark.parametrize(
    "size_px", [pytest.param(None, id="no-shift"), pytest.param((1024, 1024), id="of-1024-pixels")]
)
def test_a_wrong_schedule_shift_shows_in_the_pixels(painter, written, drawn, size_px):
    """Every picture is known by heart and every path to it nearly straight, so that it stays the nearest of all."""
    right = Schedule.plan(step_times(20, (128, 128)), [Guidance(4.0, (0.0, 1.0))], torch.float32, torch.device("cpu"))
    wrong = replace(right, times_N=step_times(20, size_px)[:-1])
    assert change(denoised(painter, written[:4], schedule=wrong), drawn[:4]) > 2 * SEED_CHANGE
