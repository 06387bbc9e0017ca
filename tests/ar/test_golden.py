"""The decoder, the logit pipeline and the engine against recorded outputs of the authors' classes, case by case.

B rows, L tokens, n steps, V logit columns, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mammoth_ar.conditioning import Grid, Knobs, Sampling, guided, shaped
from mammoth_ar.model.decoder import Decoder
from mammoth_ar.sequence import Rows, Sequence

pytestmark = pytest.mark.golden
ATOL = 2e-5  # the cases promise 1e-4


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=ATOL)


def causal(keep_BL: Tensor) -> Tensor:
    """Return the mask bool [B,L,L]: earlier tokens and itself, without padding."""
    num_tokens = keep_BL.shape[1]
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril() & keep_BL.bool()[:, None]


def padded_positions(keep_BL: Tensor) -> Tensor:
    return (keep_BL.long().cumsum(1) - 1).masked_fill(~keep_BL.bool(), 1)


def test_every_layer_of_a_teacher_forced_pass(case: Any) -> None:
    expected = case.group("tf")
    decoder = case.decoder()
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: outputs.append(out)) for layer in decoder.layers]
    mask = causal(torch.ones_like(expected["input_ids"]))
    hidden = decoder(expected["input_ids"], expected["position_ids"], mask)
    for hook in hooks:
        hook.remove()
    for output, layer in zip(outputs[:-1], expected["hidden_states"][1:-1], strict=True):
        close(output, layer)
    close(hidden.normed_BLH, expected["last_hidden_state"])
    close(decoder.logits(hidden.normed_BLH), expected["logits"])
    if "prenorm_last" in expected:
        close(outputs[-1], expected["prenorm_last"])
    is_gen = expected["input_ids"] >= decoder.config.gen_vocab_start_index
    assert torch.equal(is_gen, expected["gen_token_mask"].bool())


def test_a_left_padded_batch(case: Any) -> None:
    expected = case.group("pad")
    keep = expected["attention_mask"].bool()
    assert torch.equal(padded_positions(keep).expand(3, -1, -1), expected["position_ids"])
    decoder = case.decoder()
    hidden = decoder(expected["input_ids"], expected["position_ids"], causal(keep))
    close(hidden.normed_BLH[keep], expected["last_hidden_state"][keep])
    close(decoder.logits(hidden.normed_BLH)[keep], expected["logits"][keep])


def prompts(group: dict[str, Tensor], mask: str) -> list[list[int]]:
    return [ids[keep.bool()].tolist() for ids, keep in zip(group["prompt_ids"], group[mask], strict=True)]


def grid(case: Any) -> Grid:
    return Grid(case.description["grid"]["ar_height"], case.description["grid"]["ar_width"])


def generated(case: Any, group: dict[str, Tensor]) -> list[list[int]]:
    return group["generated_ids"][:, -grid(case).num_tokens :].tolist()


def step_logits(decoder: Decoder, text: list[int], tokens: list[int]) -> Tensor:
    """Return the raw logits [n,V] that choose each of `tokens` after `text`."""
    ids = torch.tensor([text + tokens[:-1]])
    hidden = decoder(ids, torch.arange(ids.shape[1])[None], causal(torch.ones_like(ids)))
    return decoder.logits(hidden.normed_BLH)[0, len(text) - 1 :]


@pytest.mark.parametrize(
    ("name", "mask", "alignment"),
    [
        pytest.param("gen", "attention_mask", "concat", id="gen"),
        pytest.param("gen_aligned", "attention_mask", "aligned", id="gen-aligned"),
        pytest.param("cfg", "attention_mask_used", "concat", id="cfg"),
    ],
)
def test_raw_logits_of_every_decode_step(case: Any, name: str, mask: str, alignment: Any) -> None:
    group = case.group("gen") | case.group(name)
    decoder = case.decoder(head_alignment=alignment)
    for row, text in enumerate(prompts(group, mask)):
        logits = step_logits(decoder, text, generated(case, group)[row])
        close(logits, group["step_logits"][:, row])
        start = len(text) - 1
        assert group["step_position_ids"][:, 0, row].tolist() == list(range(start, start + len(logits)))


def test_visual_logits_are_the_scope_of_all_logits(case: Any) -> None:
    for alignment in ("concat", "aligned"):
        decoder = case.decoder(head_alignment=alignment)
        x_BLH = torch.randn(2, 3, decoder.config.hidden_size, generator=torch.Generator().manual_seed(0))
        logits_BLV = decoder.logits(x_BLH)
        start, end = case.scope.visual_start, min(case.scope.visual_end, logits_BLV.shape[-1])
        close(decoder.visual_logits(x_BLH, start, end), logits_BLV[..., start:end])


def test_guided_scores_of_every_decode_step(case: Any) -> None:
    group = case.group("cfg")
    condition, uncondition = group["step_logits"].chunk(2, dim=1)
    knobs = Knobs.of([Sampling(0, ar_guidance=case.description["cfg_scale"])])
    close(guided(condition, uncondition, knobs), group["step_scores"])


def test_the_logit_pipeline(case: Any) -> None:
    group, settings = case.group("proc"), case.description["processors"]
    condition, uncondition = group["logits"].chunk(2)
    sampling = Sampling(
        0,
        ar_guidance=settings["cfg_scale"],
        temperature=settings["temperature"],
        top_k=settings["top_k"],
        top_p=settings["top_p"],
        repetition_penalty=settings["repetition_penalty"],
    )
    num_rows = len(condition)
    knobs = Knobs.of([sampling] * num_rows)
    visual = torch.arange(case.scope.visual_start, min(case.scope.visual_end, condition.shape[-1]))
    seen = torch.stack([torch.isin(visual, history) for history in group["history_ids"][:num_rows]])
    scores = shaped(guided(condition, uncondition, knobs)[:, visual], seen, knobs)
    expected = group["probs"][:num_rows]
    close(scores.softmax(-1), expected[:, visual])
    assert expected.sum(-1).sub(expected[:, visual].sum(-1)).abs().max() == 0
    assert torch.equal(scores.isfinite(), expected[:, visual] > 0)


def drive(engine: Any, sequences: list[Sequence]) -> list[tuple[list[Rows], list[int]]]:
    """Run all sequences together; return each one's rows and grid tokens."""
    runnings = [engine.admit(sequence) for sequence in sequences]
    rows: list[list[Rows]] = [[] for _ in runnings]
    for index, running in enumerate(runnings):
        while not running.is_prefilled:
            part = engine.prefill(running)
            rows[index] += [part] if isinstance(part, Rows) else []
    while not all(running.is_done for running in runnings):
        for index, part in enumerate(engine.decode(runnings)):
            assert isinstance(part, Rows), part
            rows[index].append(part)
    for running in runnings:
        engine.release(running)
    return [(parts, running.grid_ids) for parts, running in zip(rows, runnings, strict=True)]


def sequences(case: Any, group: dict[str, Tensor], *, guidance: float) -> list[Sequence]:
    """Return the conditional rows; the unconditional tail is as long as the recorded mask says."""
    sampling = Sampling(0, ar_guidance=guidance, temperature=0.0, top_k=0)
    texts = prompts(group, "attention_mask" if guidance == 1 else "attention_mask_used")
    num_rows = len(texts) if guidance == 1 else len(texts) // 2
    tails = [()] * num_rows if guidance == 1 else [tuple(tail) for tail in texts[num_rows:]]
    return [
        Sequence(tuple(text), grid(case), sampling, tail_ids=tail)
        for text, tail in zip(texts[:num_rows], tails, strict=True)
    ]


EXACTNESS = pytest.mark.parametrize("exactness", ["strict", "tolerant", "fast"])  # "fast" is exact by construction


@EXACTNESS
@pytest.mark.parametrize("alignment", ["concat", "aligned"])
@pytest.mark.parametrize("is_guided", [False, True], ids=["plain", "guided"])
def test_the_engine_writes_the_recorded_grids(case: Any, exactness: str, alignment: str, is_guided: bool) -> None:
    base = "cfg" if is_guided else "gen"
    group = case.group(base)
    if exactness == "fast" and (alignment == "aligned" or not is_guided):
        pytest.skip("the interpreter is slow: guided rows hold the others, and the head's rows are the plain path's")
    if alignment == "aligned" and case.decoder().config.gen_head_offset != case.facts["ids"]["gen_vocab_start_index"]:
        group = group | case.group(f"{base}_aligned")
    engine = case.engine(exactness=exactness, head_alignment=alignment, prefill_chunk_tokens=8)
    guidance = case.description["cfg_scale"] if is_guided else 1
    asked = sequences(case, group, guidance=guidance)
    tokens = [grid_ids for _, grid_ids in drive(engine, asked)]
    assert tokens == generated(case, group)[: len(asked)]


@EXACTNESS
def test_the_engine_delivers_the_recorded_condition_rows(case: Any, exactness: str) -> None:
    """Rows collected while decoding equal a second, teacher-forced pass; no row for the closing token."""
    cond, gen = case.group("cond"), case.group("gen")
    expected = cond.get("full_hidden_mean", cond["full_hidden_last"])
    engine = case.engine(exactness=exactness, prefill_chunk_tokens=8)
    asked = sequences(case, gen, guidance=1)
    outcome = drive(engine, asked)
    for row, (sequence, (parts, _)) in enumerate(zip(asked, outcome, strict=True)):
        keep = cond["attention_mask"][row].bool()
        close(torch.cat([part.hidden for part in parts]), expected[row][keep][:-1])
        ids = torch.cat([part.ids for part in parts]).tolist()
        assert ids == cond["full_token_ids"][row][keep].tolist()[:-1]
        serving = case.facts["cond.serving"][row]
        assert ids == serving["full_token_ids"]
        assert len(sequence.prompt_ids) == serving["answer_start_index"]


def test_teacher_forced_condition_rows_and_the_negative_prompt(case: Any) -> None:
    cond, decoder = case.group("cond"), case.decoder()
    runs: list[tuple[str, str, Callable[[Any], Tensor], str]] = [
        ("full_token_ids", "attention_mask", lambda hidden: hidden.normed_BLH, "full_hidden_last"),
        ("full_token_ids", "attention_mask", lambda hidden: hidden.condition_BLH, "full_hidden_mean"),
        ("negative_ids", "negative_mask", lambda hidden: hidden.condition_BLH, "negative_hidden"),
    ]
    for ids, mask, pick, name in runs:
        if name in cond:
            keep = cond[mask].bool()
            hidden = decoder(cond[ids], padded_positions(keep), causal(keep))
            close(pick(hidden)[keep], cond[name][keep])
    assert ("full_hidden_mean" in cond) == (decoder.config.family == "dev")


def test_the_engine_delivers_the_recorded_negative_rows_first(case: Any) -> None:
    cond = case.group("cond")
    engine = case.engine(prefill_chunk_tokens=5)
    for row, keep in enumerate(cond["negative_mask"].bool()):
        negative = tuple(cond["negative_ids"][row][keep].tolist())
        prompt = tuple(prompts(case.group("gen"), "attention_mask")[row])
        [(parts, _)] = drive(engine, [Sequence(prompt, Grid(1, 1), Sampling(0), negative_ids=negative)])
        kinds = [part.kind for part in parts]
        assert kinds == sorted(kinds, reverse=True)
        rows = torch.cat([part.hidden for part in parts if part.kind == "negative"])
        close(rows, cond["negative_hidden"][row][keep])
