"""Do: learn the text vocabulary and render wordings to the very ids that the AR stage will read."""

from __future__ import annotations

import json
from pathlib import Path

from checkpoints.emoji.train import recipe
from checkpoints.emoji.train.tokens import learn_ranks, ranks_file, vision_file
from checkpoints.emoji.train.words import SEEN, UNSEEN, wordings
from mammoth_ar.conditioning import Grid
from mammoth_ar.model.config import LLMConfig
from mammoth_ar.prompt import PromptTemplate
from mammoth_ar.tokenizer import Tokenizer

__all__ = ["Renderer"]

GRID = Grid(recipe.SIDE_PX // 16, recipe.SIDE_PX // 16)
FRAME = (
    "system\nYou are a helpful image generator.\nuser\nassistant\n8*8"  # worth tokens of its own: it is in every prompt
)
FRAME_COUNT = 2000


class Renderer:
    """The production template over the learned tokenizer."""

    def __init__(self, folder: Path) -> None:
        llm = LLMConfig.parse(recipe.config())
        tokenizer = Tokenizer.open(folder, gen_vocab_start_index=llm.gen_vocab_start_index, family=llm.family)
        ids = recipe.config()["llm_config"]
        assert tokenizer.id("<|image_pad|>") == ids["image_token_id"]
        assert tokenizer.id("<|vision_start|>") == ids["vision_start_token_id"]
        assert tokenizer.scope().visual_start == recipe.VISUAL_START
        self._template = PromptTemplate.open(folder, tokenizer)

    @classmethod
    def learn(cls, names: list[str], folder: Path) -> Renderer:
        """Learn the ranks from the names, once in every wording, write both tokenizer files and open them."""
        texts = [text for name in names for text in (*wordings(name, SEEN[:4]), f" {name}")]
        texts += wordings("apple", SEEN + UNSEEN) * 20 + [FRAME] * FRAME_COUNT
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mammothu.tiktoken").write_text(ranks_file(learn_ranks(texts, recipe.NUM_RANKS)))
        (folder / "mammothu_vision_tokens.txt").write_text(vision_file(recipe.NUM_CODES))
        (folder / "t2i_generation_config.json").write_text(json.dumps(recipe.generation_config(), indent=1) + "\n")
        return cls(folder)

    def render(self, texts: list[str]) -> list[list[int]]:
        """Return the prompt ids of `texts`."""
        return [list(self._template.render(text, GRID).ids) for text in texts]
