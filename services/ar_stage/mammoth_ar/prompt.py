"""Decide what the LLM reads: the text-to-image prompt and the negative prompt as token ids.

A checkpoint's chat template is followed when there is one (it alone knows the order of the grid's numbers), in jinja's
sandbox; without one the prompt is the string of the reference server, width first. The template is rendered around a
placeholder and cut at its special tokens before the user's text goes in, so that no prompt can spell a special token.

**Source** MammothModa2 `processing_mammothmoda2.py`; vLLM-Omni `mammoth_moda2` prompt builder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mammoth_ar.conditioning import Grid
from mammoth_ar.tokenizer import Tokenizer
from mammoth_serving.files import CheckpointError, as_object, read_object, read_text
from mammoth_wire.errors import InvalidRequest

__all__ = ["Prompt", "PromptTemplate", "violations"]

SYSTEM_TEXT = "You are a helpful image generator."
TURN_START = "<|im_start|>"
USER_TEXT = "\ue000\ue001user text\ue001\ue000"  # private use: no template has it, and a prompt that does is only text
DEFAULT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "<|image start|>{{ ar_width }}*{{ ar_height }}<|image token|>{% endif %}"
)
TEMPLATE_ERRORS = (  # a template is a program: these are what its expressions raise in the sandbox, or when compiled
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """`tail_ids` are the tokens from the last turn on, which is all that the unconditional row sees."""

    ids: tuple[int, ...]
    tail_ids: tuple[int, ...]


def violations(tokenizer: Tokenizer, field: str, text: str) -> list[tuple[str, str]]:
    """Return (field, reason) when `text` spells a special token such as <|im_end|>, else nothing."""
    found = tokenizer.markers_in(text)
    return [(field, f"the special token {found[0]} is not allowed in a prompt")] if found else []


class PromptTemplate:
    """Renders prompts for one checkpoint."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Compile `source`. Raises CheckpointError when it is no template or leaves the user's text out."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise
        self._tokenizer = tokenizer
        try:
            self._template = environment.from_string(source)
        except TEMPLATE_ERRORS as err:
            raise _unusable(err) from err
        self._pieces(Grid(1, 1))
        self._pieces(None)

    @classmethod
    def open(cls, path: Path, tokenizer: Tokenizer) -> PromptTemplate:
        """Take the chat template of the checkpoint in `path`, or the reference server's string."""
        return cls(_template_source(path) or DEFAULT_TEMPLATE, tokenizer)

    def render(self, text: str, grid: Grid, *, field: str = "prompt") -> Prompt:
        """Return the prompt of `text` for `grid`. Raises InvalidRequest naming `field` when it spells a special token."""
        ids = self._encode(self._pieces(grid), text, field)
        turn = self._tokenizer.id(TURN_START)
        last_turn = len(ids) - 1 - ids[::-1].index(turn) if turn in ids else 0
        return Prompt(tuple(ids), tuple(ids[last_turn:]))

    def render_negative(self, text: str, *, field: str = "negative_prompt") -> tuple[int, ...]:
        """Return the negative prompt's ids: the same system turn, no assistant turn."""
        return tuple(self._encode(self._pieces(None), text, field))

    def _pieces(self, grid: Grid | None) -> list[str]:
        """Return the rendered template, cut at special tokens, the placeholder in the user's place."""
        messages = [{"role": "system", "content": SYSTEM_TEXT}, {"role": "user", "content": USER_TEXT}]
        variables: dict[str, Any] = {"ar_height": grid.height, "ar_width": grid.width} if grid else {}
        generates = grid is not None
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=generates, t2i_generate=generates, **variables
            )
        except TEMPLATE_ERRORS as err:
            raise _unusable(err) from err
        if text.count(USER_TEXT) != 1:
            raise CheckpointError("chat template: it does not hold the user's text exactly once")
        return self._tokenizer.split(text)

    def _encode(self, pieces: list[str], text: str, field: str) -> list[int]:
        if found := violations(self._tokenizer, field, text):
            raise InvalidRequest(found)
        ids: list[int] = []
        for piece in pieces:
            if self._tokenizer.is_special(piece):
                ids.append(self._tokenizer.id(piece))
            else:
                ids += self._tokenizer.encode(piece.replace(USER_TEXT, text))
        return ids


def _template_source(path: Path) -> str | None:
    template = path / "chat_template.jinja"
    if template.exists():
        return read_text(template)
    config = path / "tokenizer_config.json"
    if not config.exists():
        return None
    found = read_object(config).get("chat_template")
    if isinstance(found, list):
        named = [as_object(entry, f"{config}: chat_template") for entry in found]
        found = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    if found is not None and not isinstance(found, str):
        raise CheckpointError(f"{config}: chat_template: a string is expected, not {type(found).__name__}")
    return found


def _unusable(err: BaseException) -> CheckpointError:
    return CheckpointError(f"chat template: {str(err) or type(err).__name__}")


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
