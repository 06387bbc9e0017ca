"""One forward of the transformer, and the Q-Former, against the authors' modules; weights through the production loader.

Axes: B rows, C caption tokens, H LLM width, L image rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mammoth_dit.fast.engine import FastEngine
from mammoth_dit.fast.layout import UnitShape
from mammoth_dit.fast.modulation import vectors_NVD
from mammoth_dit.fast.rows import Angles, stream_of
from mammoth_dit.fast.step import Inputs
from mammoth_dit.model.config import RefinerConfig
from mammoth_dit.model.embeddings import patchify, unpatchify
from mammoth_dit.model.qformer import QFormer, choose_num_heads, propose_num_heads
from mammoth_dit.model.transformer import DiffusionTransformer
from mammoth_dit.model.weights import load, load_module
from mammoth_dit.selection import pad

pytestmark = pytest.mark.golden


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def transformer(case, dtype: torch.dtype) -> DiffusionTransformer:
    loaded = load(case.checkpoint, dtype=dtype, parts=("transformer",)).transformer
    assert loaded is not None
    return loaded


def valid(case, name: str, mask: str, row: int) -> Tensor | None:
    """The unpadded rows [n, H] of one batch row, or None when the case has none."""
    if name not in case.io:
        return None
    num_rows = int(case.io[mask][row].sum())
    return case.io[name][row, :num_rows] if num_rows else None


def captions(case, model: DiffusionTransformer, num: int | None = None) -> list[Tensor]:
    rows = []
    for row in range(len(case.io["inputs/latents"][:num])):
        text = valid(case, "inputs/padded_text_hidden_states", "inputs/text_attention_mask", row)
        image = valid(case, "inputs/padded_ar_image_hidden_states", "inputs/ar_image_attention_mask", row)
        text = case.io["inputs/padded_text_hidden_states"][row, :0] if text is None else text
        rows.append(model.caption(text.to(model.dtype), None if image is None else image.to(model.dtype)))
    return rows


def inputs(case, model: DiffusionTransformer) -> tuple[Tensor, Tensor, int, int]:
    x, t_B = case.io["inputs/latents"].to(model.dtype), case.io["inputs/timestep"].to(model.dtype)
    return x, t_B, x.shape[2] // model.patch_size, x.shape[3] // model.patch_size


def outputs(case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Velocities of one padded batch, and of every row alone."""
    with torch.inference_mode():
        model = transformer(case, dtype)
        x, t_B, num_rows, num_columns = inputs(case, model)
        rows = captions(case, model)
        batch = model(x, t_B, model.pack(rows, num_rows, num_columns))
        alone = [
            model(x[row, None], t_B[row, None], model.pack([caption], num_rows, num_columns))
            for row, caption in enumerate(rows)
        ]
        return batch, torch.cat(alone)


def fast_outputs(case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same from the fast path: rows of one bucket in one unit, and every row alone."""
    with torch.inference_mode():
        model = load(case.checkpoint, dtype=dtype, parts=("transformer",))
        engine = FastEngine(model)
        x, t_B, num_rows, num_columns = inputs(case, model.transformer)
        grid, heads = (num_rows, num_columns), engine.network.weights.heads
        angles = Angles(engine.config.rotary, heads, dtype, torch.device("cpu"))
        streams = [
            stream_of(caption, grid, angles, width=engine.network.weights.width, multiple=64)
            for caption in captions(case, model.transformer)
        ]
        vectors_BVD = vectors_NVD(model.transformer, t_B)
        tokens_BnF = patchify(x, model.transformer.patch_size)

        def velocity(rows: list[int]) -> Tensor:
            inside = [streams[row] for row in rows]
            stacked = Inputs(
                x_BnF=tokens_BnF[rows],
                captions=[torch.stack([stream.caption_CP for stream in inside])],
                angles=[torch.stack([stream.angles for stream in inside])],
                masks=[torch.stack([stream.mask for stream in inside])],
                vectors_BVD=vectors_BVD[rows],
                dt_B11=torch.ones(len(inside), 1, 1),
                scale_B11=torch.ones(len(inside), 1, 1),
            )
            shape = UnitShape(*grid, inside[0].caption_CP.shape[0], 0, guided=False, batch=len(inside))
            cpu = torch.device("cpu")
            [out_BnF] = engine.network.velocities(stacked, shape, shape.rows_T(cpu), shape.image_rows_T(cpu))
            return unpatchify(out_BnF, model.transformer.patch_size, *grid)

        together = torch.empty_like(x)
        buckets = [stream.caption_CP.shape[0] for stream in streams]
        for each in sorted(set(buckets)):
            rows = [row for row, bucket in enumerate(buckets) if bucket == each]
            together[rows] = velocity(rows)
        return together, torch.cat([velocity([row]) for row in range(len(x))])


@pytest.mark.parametrize("path", [outputs, fast_outputs], ids=["plain", "fast"])
def test_a_padded_batch_and_every_row_alone_reproduce_the_velocity(forward_case, path):
    batch, alone = path(forward_case, torch.float32)
    close(batch, forward_case.io["expected/out"])
    close(alone, forward_case.io["expected/out"])


@pytest.mark.parametrize("path", [outputs, fast_outputs], ids=["plain", "fast"])
def test_bfloat16_follows_the_rounding_rules(forward_case, path):
    expected = forward_case.io["expected/bf16/out"].float()
    for actual in path(forward_case, torch.bfloat16):
        assert actual.dtype == torch.bfloat16
        error = actual.float() - expected
        assert error.abs().max() <= 0.08
        assert error.norm() <= 2e-2 * expected.norm()


def test_every_intermediate_of_a_row(forward_case):
    prefix = "expected/row0/"
    expected = {key.removeprefix(prefix): value for key, value in forward_case.io.items() if key.startswith(prefix)}
    model = transformer(forward_case, torch.float32)
    seen: dict[str, Tensor] = {}

    def keep(name: str):
        return lambda module, args, output: seen.__setitem__(name, output)

    embed = model.time_caption_embed
    named = {"temb": embed.timestep_embedder, "caption_embed": embed.caption_embedder, "norm_out": model.norm_out}
    named |= {f"after_layer_{index}": layer for index, layer in enumerate(model.layers)}
    named |= {} if embed.image_embedder is None else {"image_embed": embed.image_embedder}
    for name, module in named.items():
        module.register_forward_hook(keep(name))
    for name in ("context_refiner", "noise_refiner"):
        for block in getattr(model, name):
            block.register_forward_hook(keep(f"after_{name}"))
    with torch.inference_mode():
        x, t_B, num_rows, num_columns = inputs(forward_case, model)
        context = model.pack(captions(forward_case, model, num=1), num_rows, num_columns)
        model(x[:1], t_B[:1], context)
    rotation = context.joint_rotation
    seen["rotary_joint_cos"], seen["rotary_joint_sin"] = (
        x.repeat_interleave(2, -1) for x in (rotation.cos, rotation.sin)
    )
    assert expected
    for name, tensor in expected.items():
        close(seen[name], tensor)


def qformer(case, folder: Path) -> QFormer:
    facts = case.facts
    argument = facts["num_heads_argument"]
    proposed = propose_num_heads(facts["out_hidden"]) if argument is None else argument
    num_heads = choose_num_heads(facts["out_hidden"], proposed)
    assert num_heads == facts["num_heads_used"]
    config = RefinerConfig(
        num_queries=facts["num_queries"],
        num_layers=facts["num_layers"],
        num_heads=None,
        norm_eps=facts.get("norm_eps", 1e-5),
        nested=False,
    )
    with torch.device("meta"):
        module = QFormer(facts["input_hidden"], facts["out_hidden"], config, num_heads)
    return load_module(case.checkpoint_in(folder), module, facts["weight_prefix"], dtype=torch.float32)


def test_a_qformer_gives_its_queries_for_any_number_of_rows(qformer_case, tmp_path):
    model = qformer(qformer_case, tmp_path)
    rows_BLH, keep_BL = (
        qformer_case.io["inputs/padded_image_hidden_states"],
        qformer_case.io["inputs/valid_mask"].bool(),
    )
    expected = qformer_case.io["expected/out"]
    with torch.inference_mode():
        close(model(rows_BLH, keep_BL), expected)
        valid_rows = [rows_BLH[row : row + 1, : int(keep_BL[row].sum())] for row in range(len(rows_BLH))]
        close(torch.cat([model(rows) for rows in valid_rows]), expected)
        masks = [torch.ones(rows.shape[:2], dtype=torch.bool) for rows in valid_rows]
        close(model(*pad(valid_rows, masks)), expected)


def test_a_qformer_chooses_its_heads_as_the_authors_class(qformer_case):
    for example in qformer_case.facts["head_choice_examples"]:
        assert choose_num_heads(example["hidden"], example["proposed"]) == example["chosen"], example
