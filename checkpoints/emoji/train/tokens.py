"""Decide the text vocabulary: byte-pair ranks learned from the wordings, and the lines of both tokenizer files. Pure."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import regex

from mammoth_ar.tokenizer import SPLIT_PATTERN

__all__ = ["learn_ranks", "ranks_file", "vision_file"]


def learn_ranks(texts: Iterable[str], num_ranks: int) -> list[bytes]:
    """Return tokens in rank order: the 256 bytes, then merges, the most frequent pair first, ties to the lower bytes."""
    counts = Counter(piece.encode() for text in texts for piece in regex.findall(SPLIT_PATTERN, text))
    words = [([bytes([byte]) for byte in word], count) for word, count in counts.items()]
    ranks = [bytes([byte]) for byte in range(256)]
    while len(ranks) < num_ranks:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words:
            for pair in pairwise(word):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        ranks.append(best[0] + best[1])
        words = [(_merged(word, best), count) for word, count in words if len(word) > 1]
    return ranks


def ranks_file(ranks: list[bytes]) -> str:
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks))


def vision_file(num_codes: int) -> str:
    names = ["<|image token|>", "<|image start|>", "<|image end|>"]
    return "\n".join([*names, *(f"<|visual token {code:06d}|>" for code in range(num_codes))]) + "\n"


def _merged(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    merged: list[bytes] = []
    rest = iter(range(len(word)))
    for index in rest:
        if index + 1 < len(word) and (word[index], word[index + 1]) == pair:
            merged.append(pair[0] + pair[1])
            next(rest)
        else:
            merged.append(word[index])
    return merged
