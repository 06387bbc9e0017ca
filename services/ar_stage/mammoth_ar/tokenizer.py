"""Translate: text to token ids and back, over the two tokenizer files of a checkpoint.

`mammothu.tiktoken` holds the BPE ranks, `mammothu_vision_tokens.txt` the last special tokens. No id is written down
here: special tokens count on from the number of ranks, the margin fills up to the generation vocabulary, so that a small
vocabulary is no special case. Nothing touches the network.

**Source** MammothModa2 `tokenization_mammothu.py` (the loader needs remote code, which is off) and the Qwen split pattern.
Known difference: user text is never read as special tokens; upstream allows all of them.
"""

from __future__ import annotations

import base64
import binascii
import re
import unicodedata
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import tiktoken

from mammoth_ar.conditioning import Scope
from mammoth_ar.model.config import Family
from mammoth_serving.files import CheckpointError, read_bytes, read_text

__all__ = ["END_OF_LINE", "Tokenizer"]

RANKS_NAME = "mammothu.tiktoken"
VISION_NAME = "mammothu_vision_tokens.txt"
END_OF_LINE = "<|endofline|>"
VISUAL_TOKEN = "<|visual token {:06d}|>"
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_EXTRAS = 181
QWEN_SPECIALS = (
    *(f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start",
                                 "box_end", "quad_start", "quad_end", "vision_start", "vision_end", "vision_pad",
                                 "image_pad", "video_pad")),
    "<tool_call>",
    "</tool_call>",
    *(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")),
)  # fmt: skip
DEV_SPECIALS = ("<tool_response>", "</tool_response>", "<think>", "</think>")
GEN_EXTRAS = (END_OF_LINE, "<|endoffile|>", "<|gen_placeholder|>", "<|useless token|>", "<|beginoftext|>")


class Tokenizer:
    """Encodes NFC-normalised text. Ids below `num_ranks` are text, the others are special tokens."""

    def __init__(self, ranks: dict[bytes, int], specials: dict[str, int]) -> None:
        self.num_ranks = len(ranks)
        self._ids = specials
        self._encoding = tiktoken.Encoding(
            "mammothu", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        self._special = re.compile("|".join(re.escape(name) for name in sorted(specials, key=len, reverse=True)))

    @classmethod
    def open(cls, path: Path, *, gen_vocab_start_index: int, family: Family) -> Tokenizer:
        """Read the two files in the folder `path`; CheckpointError when one is absent or does not fit the vocabulary."""
        ranks = _read_ranks(path / RANKS_NAME)
        vision = [line.strip() for line in read_text(path / VISION_NAME).splitlines() if line.strip()]
        names = special_names(len(ranks), gen_vocab_start_index, family, vision)
        specials = {name: len(ranks) + offset for offset, name in enumerate(names)}
        if len(specials) != len(names):
            raise CheckpointError(f"{path / VISION_NAME}: a special token is listed twice")
        return cls(ranks, specials)

    def id(self, special: str) -> int:
        """Return the id of a special token; CheckpointError when the checkpoint has none of that name."""
        if special not in self._ids:
            raise CheckpointError(f"{VISION_NAME}: the special token {special} is missing")
        return self._ids[special]

    def encode(self, text: str) -> list[int]:
        """Encode text in which nothing counts as a special token."""
        ids: list[int] = self._encoding.encode_ordinary(unicodedata.normalize("NFC", text))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._encoding.decode(list(ids))
        return text

    def split(self, text: str) -> list[str]:
        """Cut `text` at its special tokens, which are pieces of their own; empty pieces are left out."""
        cuts = [0, *(edge for match in self._special.finditer(text) for edge in match.span()), len(text)]
        return [text[a:b] for a, b in pairwise(cuts) if a < b]

    def is_special(self, piece: str) -> bool:
        return piece in self._ids

    def markers_in(self, text: str) -> list[str]:
        """Return the special tokens of the form <|...|> spelled out in `text`, which admission refuses."""
        pieces = self.split(unicodedata.normalize("NFC", text))
        return [piece for piece in pieces if piece.startswith("<|") and self.is_special(piece)]

    def scope(self) -> Scope:
        """Return the ids of a grid as the special tokens' names tell, for checkpoints whose files do not say."""
        start = self.id(VISUAL_TOKEN.format(0))
        num_codes = sum(name.startswith("<|visual token ") for name in self._ids)
        return Scope(self.id(END_OF_LINE), start, start + num_codes)


def special_names(num_ranks: int, gen_vocab_start_index: int, family: Family, vision: list[str]) -> list[str]:
    """Return the special tokens in the order of their ids, which start at `num_ranks`."""
    names = [*QWEN_SPECIALS, *(DEV_SPECIALS if family == "dev" else ())]
    names += [f"<|extra_{index}|>" for index in range(NUM_EXTRAS)]
    num_margin = gen_vocab_start_index - num_ranks - len(names)
    if num_margin < 0:
        raise CheckpointError(
            f"config.json: gen_vocab_start_index: {gen_vocab_start_index} lies below the {num_ranks + len(names)} ids of the text vocabulary"
        )
    return [*names, *(f"<|extra_margin_{index}|>" for index in range(num_margin)), *GEN_EXTRAS, *vision]


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as err:
            raise CheckpointError(f"{path}: line {number} is no base64 token and rank") from err
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path}: ranks do not count from 0 without gaps")
    if absent := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{path}: {len(absent)} of the 256 single bytes have no rank, such as {absent[0]:#04x}")
    return ranks
