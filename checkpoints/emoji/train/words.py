"""Decide what a picture is called and how people ask for it: Unicode names in a few wordings, some held back. Pure.

A word of a name asks for it too: `pizza` is the slice of pizza, `apple` the red or the green one, as the seed has it.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence

__all__ = ["SEEN", "UNSEEN", "is_drawn", "name_of", "shorter_names", "wordings"]

SEEN = (
    "{}", "{} emoji", "{a}", "{a} emoji", "picture of {a}", "a picture of {a}", "an emoji of {a}", "an image of {a}",
    "the {}", "draw {a}", "{} icon", "a photo of {a}", "generate {a}", "paint {a}", "a cute {}", "a render of {a}",
    "{} clipart", "a small {}", "make me {a}", "{}, 3d",
)  # fmt: skip
UNSEEN = ("a drawing of {a}", "please show me {a}", "{} sticker on white")
# Names of Unicode 15, which Python 3.11 does not know yet.
NEWER = {
    0x1F6DC: "wireless", 0x1FA75: "light blue heart", 0x1FA76: "grey heart", 0x1FA77: "pink heart", 0x1FA87: "maracas",
    0x1FA88: "flute", 0x1FAAD: "folding hand fan", 0x1FAAE: "hair pick", 0x1FAAF: "khanda", 0x1FABB: "hyacinth",
    0x1FABC: "jellyfish", 0x1FABD: "wing", 0x1FABF: "goose", 0x1FACE: "moose", 0x1FACF: "donkey", 0x1FADA: "ginger root",
    0x1FADB: "pea pod", 0x1FAE8: "shaking face", 0x1FAF7: "leftwards pushing hand", 0x1FAF8: "rightwards pushing hand",
}  # fmt: skip
VARIATION_SELECTOR = 0xFE0F
MIN_LETTERS, MAX_SHARED = 3, 12  # of a word that stands for a name: how long, and for how many names at most
EMPTY_WORDS = frozenset(["and", "for", "with", "without", "the", "sign", "symbol", "mark"])


def is_drawn(file_stem: str) -> bool:
    """Say whether a file named by code points (`1f34e`, `2764-fe0f`) shows one character: no sequence, no skin tone."""
    return len(_code_points(file_stem)) == 1


def name_of(file_stem: str) -> str:
    """Return the character's name in lower case, on every Python alike."""
    [code_point] = _code_points(file_stem)
    return NEWER.get(code_point) or unicodedata.name(chr(code_point)).lower()


def wordings(name: str, templates: tuple[str, ...] = SEEN) -> list[str]:
    """Return the ways to ask for `name`; {a} stands for the name with its article."""
    article = "an" if name[0] in "aeiou" else "a"
    return [template.format(name, a=f"{article} {name}") for template in templates]


def shorter_names(names: Sequence[str]) -> dict[str, list[str]]:
    """Return, for every name, its words that may stand for it: not too common, and not the name of another picture."""
    holders: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for word in dict.fromkeys(re.findall(r"[a-z]+", name)):
            holders[word].append(name)
    short: dict[str, list[str]] = {name: [] for name in names}
    for word, found in holders.items():
        if len(word) >= MIN_LETTERS and len(found) <= MAX_SHARED and word not in EMPTY_WORDS and word not in short:
            for name in found:
                short[name].append(word)
    return short


def _code_points(file_stem: str) -> list[int]:
    numbers = (int(part, 16) for part in file_stem.split("-"))
    return [number for number in numbers if number != VARIATION_SELECTOR]
