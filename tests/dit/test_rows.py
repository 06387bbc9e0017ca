"""Batched equals alone, row by row: rounding is near 1e-15 here, a leak shows above 1e-3."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from mammoth_dit import tiny
from mammoth_dit.engine import Engine
from mammoth_dit.jobs import Job, Picture, synthetic_job
from mammoth_dit.model.layers import attend
from mammoth_dit.model.weights import load
from mammoth_serving.checkpoint import Checkpoint
from mammoth_serving.tiny import tiny_config
from mammoth_wire.params import Diffusion


def jobs(engine) -> list[Job]:
    return [
        engine.job("short", num_text=1, num_image=3, seed=1),
        engine.job("long", num_text=9, num_image=40, seed=2, guidance=9.0, cfg_range=(0.3, 0.7)),
        engine.job("unguided", num_text=4, seed=3, guidance=1.0),
        engine.job("negative", num_text=0, seed=4, num_negative=6, guidance=2.5),
    ]


def latents(engine, company: list[Job]) -> Tensor:
    return engine.denoise(engine.group([engine.prepare(job) for job in company]))


@pytest.mark.parametrize("place", range(4))
def test_a_row_cannot_see_its_neighbours(strict, place):
    company = jobs(strict)
    alone = latents(strict, [company[place]])
    torch.testing.assert_close(latents(strict, company)[place, None], alone, rtol=0, atol=1e-10)


def test_rows_of_different_seeds_differ(strict):
    together = latents(strict, [strict.job("a", seed=1), strict.job("b", seed=2)])
    assert (together[0] - together[1]).abs().max() > 1e-3


def test_a_missing_mask_would_be_noticed(strict, monkeypatch):
    company = jobs(strict)
    alone = latents(strict, company[:1])
    monkeypatch.setattr("mammoth_dit.model.blocks.attend", lambda q, k, v, keep: attend(q, k, v, None))
    assert (latents(strict, company)[:1] - alone).abs().max() > 1e-3


def test_strict_bits_do_not_depend_on_company_place_or_order(strict):
    company = jobs(strict)
    alone = {job.id: strict.sample([job])[0].rgb_sha256 for job in company}
    for order in (company, company[::-1], company[1:3]):
        for job, outcome in zip(order, strict.sample(order), strict=True):
            assert isinstance(outcome, Picture)
            assert outcome.rgb_sha256 == alone[job.id]


def test_every_outcome_finds_its_job_when_keys_are_mixed(tolerant):  # the engine regroups what it is given
    mixed = [
        tolerant.job("a", size_px=(32, 32)),
        tolerant.job("b", size_px=(48, 32)),
        tolerant.job("c", size_px=(32, 32), steps=2),
        tolerant.job("d", size_px=(32, 32), seed=2),
    ]
    outcomes = tolerant.sample(mixed)
    assert [outcome.rgb.shape for outcome in outcomes] == [(32, 32, 3), (48, 32, 3), (32, 32, 3), (32, 32, 3)]
    for job, outcome in zip(mixed, outcomes, strict=True):
        assert outcome.rgb_sha256 == tolerant.sample([job])[0].rgb_sha256


CHANGES = {
    "unequal axes": {"gen_axes_dim_rope": [2, 4, 6]},
    "one key head": {"gen_dit_config": {"num_kv_heads": 1}},
    "a key head a query head": {"gen_dit_config": {"num_kv_heads": 4}},
    "wider feed-forward": {"gen_dit_config": {"ffn_dim_multiplier": 1.3, "multiple_of": 24}},
    "single pixels as patches": {"gen_dit_config": {"patch_size": 1}},
    "no refiner blocks": {"gen_dit_config": {"num_refiner_layers": 0}},
    "another width": {"gen_dit_config": {"hidden_size": 60, "num_attention_heads": 6}, "gen_axes_dim_rope": [4, 2, 4]},
    "no refiner": {"gen_image_condition_refiner_config": None},
    "another refiner": {"gen_image_condition_refiner_config": {"num_queries": 3, "num_layers": 1, "num_heads": 4}},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
def test_no_number_of_the_tiny_config_is_special(changes, tmp_path):
    config = tiny_config("preview")
    config["gen_dit_config"].pop("axes_dim_rope")
    for key, value in changes.items():
        config[key] = config[key] | value if key == "gen_dit_config" else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    tiny.write(tmp_path)
    engine = Engine(load(Checkpoint.open(tmp_path), dtype=torch.float64))
    company = [synthetic(engine, num_text, num_image=7 - num_text) for num_text in (0, 2, 5)]
    together = latents(engine, company)
    for row, job in enumerate(company):
        torch.testing.assert_close(together[row, None], latents(engine, [job]), rtol=0, atol=1e-10)
    assert all(isinstance(outcome, Picture) for outcome in engine.sample(company[:1]))


def synthetic(engine: Engine, num_text: int, num_image: int) -> Job:
    params = Diffusion(32, 48, guidance=3.0, cfg_range=(0.0, 1.0), steps=2)
    width, gen_id = engine.config.llm_width, engine.config.tokens.gen_vocab_start
    job = synthetic_job(params, llm_width=width, gen_id=gen_id, num_text=num_text, num_image=num_image)
    generator = torch.Generator().manual_seed(num_text)
    rows = torch.randn(job.hidden_TH.shape, generator=generator, dtype=torch.float64)
    return dataclasses.replace(job, hidden_TH=rows, seed=num_text)
