"""Which rows condition a picture, and how they are laid out.

L rows, H width.
"""

from __future__ import annotations

import pytest
import torch

from mammoth_dit.model.config import TokenIds
from mammoth_dit.selection import count_rows, pad, select

TOKENS = TokenIds(gen_vocab_start=200, visual=frozenset({188, 189, 190, 191}))


@pytest.mark.parametrize(
    ("ids", "answer_start", "text", "image"),
    [
        pytest.param([10, 11, 200, 201], 2, [0, 1], [2, 3], id="plain"),
        pytest.param([10, 188, 190, 11, 200], 4, [0, 3], [4], id="visual markers are no text"),
        pytest.param([10, 205, 11, 200], 3, [0, 2], [3], id="a generation id in the question is dropped"),
        pytest.param([10, 200, 15, 201], 1, [0], [1, 3], id="a text id in the answer is dropped"),
        pytest.param([10, 199, 200], 1, [0], [2], id="the threshold itself is a generation id"),
        pytest.param([200, 201], 0, [], [0, 1], id="no question"),
        pytest.param([10, 11], 2, [0, 1], [], id="no answer"),
    ],
)
def test_rows_are_selected_by_place_and_id(ids, answer_start, text, image):
    hidden = torch.arange(len(ids) * 3.0).view(-1, 3)
    rows = select(hidden, torch.tensor(ids), answer_start, TOKENS)
    assert torch.equal(rows.text_LH, hidden[text])
    assert torch.equal(rows.image_LH, hidden[image])
    assert count_rows(ids, answer_start, TOKENS) == (len(text), len(image))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_rows_keep_the_dtype_they_came_in(dtype, ids_dtype):  # F11
    rows = select(torch.ones(3, 2, dtype=dtype), torch.tensor([1, 200, 201], dtype=ids_dtype), 1, TOKENS)
    assert rows.text_LH.dtype == rows.image_LH.dtype == dtype
    padded, _ = pad([rows.text_LH[None], rows.image_LH[None]], [torch.ones(1, 1).bool(), torch.ones(1, 2).bool()])
    assert padded.dtype == dtype


def ones(length: int, width: int = 2, lead: int = 1) -> torch.Tensor:
    return torch.ones(lead, length, width)


def mask(length: int) -> torch.Tensor:
    return torch.ones(1, length, dtype=torch.bool)


def test_padding_is_zeros_on_the_right_and_not_kept():
    rows, keep = pad([ones(1), ones(3)], [mask(1), mask(3)])
    assert rows[:, :, 0].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert keep.tolist() == [[True, False, False], [True, True, True]]


def test_one_item_comes_back_as_it_is():
    rows, keep = ones(3), mask(3)
    padded = pad([rows], [keep])
    assert padded[0] is rows
    assert padded[1] is keep


@pytest.mark.parametrize(
    ("rows", "masks", "message"),
    [
        pytest.param([], [], "counts", id="nothing"),
        pytest.param([ones(2)], [mask(2), mask(2)], "counts", id="counts differ"),
        pytest.param([ones(2)[0]], [mask(2)], r"\[1, L", id="wrong rank"),
        pytest.param([ones(2, lead=2)], [mask(2)], r"\[1, L", id="two rows in one item"),
        pytest.param([ones(2), ones(2, width=3)], [mask(2), mask(2)], r"\[1, L, 2\]", id="widths differ"),
        pytest.param([ones(2)], [mask(3)], r"\[1, L", id="lengths differ"),
        pytest.param([ones(2)], [torch.tensor([[False, True]])], "hole", id="padding first"),
    ],
)
def test_a_list_that_cannot_be_padded_is_refused(rows, masks, message):
    with pytest.raises(ValueError, match=message):
        pad(rows, masks)
