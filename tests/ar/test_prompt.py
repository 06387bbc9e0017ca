"""Token ids of prompts: special tokens by rule, the grid's numbers by template, user text as nothing but text."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mammoth_ar.conditioning import Grid, Scope
from mammoth_ar.model.config import LLMConfig
from mammoth_ar.prompt import PromptTemplate, violations
from mammoth_ar.testing import make_checkpoint, open_tokenizer
from mammoth_ar.tokenizer import Tokenizer, special_names
from mammoth_serving.checkpoint import Checkpoint, CheckpointError
from mammoth_serving.tiny import FAMILIES, Family
from mammoth_wire.errors import InvalidRequest

GRID = Grid(height=12, width=34)
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt and t2i_generate %}<|im_start|>assistant\n"
    "<|image start|>{{ ar_height }}*{{ ar_width }}<|image token|>{% endif %}"
)
HEAD = "<|im_start|>system\nYou are a helpful image generator.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return open_tokenizer(checkpoint)


@pytest.fixture
def template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> PromptTemplate:
    return PromptTemplate.open(checkpoint.path, tokenizer)


def test_without_a_template_the_prompt_is_the_reference_string_width_first(
    template: PromptTemplate, tokenizer: Tokenizer
) -> None:
    prompt = template.render("a cat", GRID)
    tail = "<|im_start|>assistant\n<|image start|>34*12<|image token|>"
    assert tokenizer.decode(prompt.ids) == HEAD.format("a cat") + tail
    assert tokenizer.decode(prompt.tail_ids) == tail
    assert prompt.ids[-len(prompt.tail_ids) :] == prompt.tail_ids


def test_a_negative_prompt_has_no_assistant_turn(template: PromptTemplate, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(template.render_negative("blurry")) == HEAD.format("blurry")


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "named"])
def test_the_checkpoints_template_decides_the_order(tmp_path: Path, tokenizer: Tokenizer, place: str) -> None:
    if place == "chat_template.jinja":
        (tmp_path / place).write_text(TEMPLATE)
    else:
        found = TEMPLATE if place != "named" else [{"name": "default", "template": TEMPLATE}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
    prompt = PromptTemplate.open(tmp_path, tokenizer).render("a cat", GRID)
    assert tokenizer.decode(prompt.tail_ids) == "<|im_start|>assistant\n<|image start|>12*34<|image token|>"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        pytest.param("{{ messages[0].content }}", "exactly once", id="forgets-the-user"),
        pytest.param("{% if %}", "chat template", id="no-template"),
        pytest.param("{{ raise_exception('no such role') }}", "no such role", id="raises"),
        pytest.param(
            "{{ messages.__class__.__mro__ }}{{ messages.clear() }}", "chat template", id="leaves-the-sandbox"
        ),
        pytest.param("{{ 1 / 0 }}", "division by zero", id="divides-by-zero"),
        pytest.param("{% for i in range(10 ** 9) %}a{% endfor %}", "Range too big", id="counts-too-far"),
        pytest.param("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion", id="calls-itself"),
        pytest.param("{{ '{1}'.format(1) }}", "chat template", id="lacks-an-argument"),
        pytest.param("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "chat template", id="too-deep"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_start(tokenizer: Tokenizer, source: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        PromptTemplate(source, tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        pytest.param("chat_template.jinja", b"\xff", "not UTF-8", id="template-no-text"),
        pytest.param("chat_template.jinja", None, "Is a directory", id="template-a-folder"),
        pytest.param("tokenizer_config.json", b"\xff", "not JSON", id="config-no-text"),
        pytest.param("tokenizer_config.json", b"[" * 200_000, "not JSON", id="config-too-deep"),
        pytest.param("tokenizer_config.json", b"[]", "an object is expected, not list", id="config-a-list"),
        pytest.param("tokenizer_config.json", None, "Is a directory", id="config-a-folder"),
        pytest.param(
            "tokenizer_config.json", b'{"chat_template": ["a"]}', "an object is expected, not str", id="a-list-of-texts"
        ),
        pytest.param(
            "tokenizer_config.json",
            b'{"chat_template": [{"name": [1]}, {"name": "default", "template": 5}]}',
            "a string is expected, not int",
            id="a-template-that-is-no-text",
        ),
    ],
)
def test_an_unreadable_template_file_is_named(
    tmp_path: Path, tokenizer: Tokenizer, name: str, content: bytes | None, text: str
) -> None:
    (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}: .*{text}"):
        PromptTemplate.open(tmp_path, tokenizer)


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a <|visual token 000003|> b", "<|endofline|><|image start|>"], ids=["turn", "code", "two"]
)
def test_a_prompt_that_spells_a_special_token_is_refused(
    template: PromptTemplate, tokenizer: Tokenizer, text: str
) -> None:
    assert violations(tokenizer, "prompt", text)
    with pytest.raises(InvalidRequest) as refused:
        template.render(text, GRID)
    assert [field for field, _ in refused.value.violations] == ["prompt"]
    with pytest.raises(InvalidRequest, match="negative_prompt"):
        template.render_negative(text)


@pytest.mark.parametrize(
    "text",
    [
        "<|not a token|>", "<think>", "<tool_call>", "{{ messages }}", "{% raw %}", "<|im_", "|>", " \n two lines \n",
        "\ue000\ue001user text\ue001\ue000", "日本語 🐘", "",
    ],
)  # fmt: skip
def test_any_other_text_is_only_text(template: PromptTemplate, tokenizer: Tokenizer, text: str) -> None:
    plain, prompt = Counter(template.render("x", GRID).ids), template.render(text, GRID)
    specials = {token: count for token, count in Counter(prompt.ids).items() if token >= tokenizer.num_ranks}
    assert specials == {token: count for token, count in plain.items() if token >= tokenizer.num_ranks}
    assert HEAD.format(text) in tokenizer.decode(prompt.ids)


def test_text_is_normalised(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9") == list("é".encode())


def test_special_ids_follow_the_ranks_and_the_margin_fills_up(checkpoint: Checkpoint, tokenizer: Tokenizer) -> None:
    llm, start = checkpoint.config["llm_config"], LLMConfig.parse(checkpoint.config).gen_vocab_start_index
    assert tokenizer.id("<|endoftext|>") == tokenizer.num_ranks == 256
    assert tokenizer.id("<|vision_start|>") == llm["vision_start_token_id"]
    assert tokenizer.id("<|image_pad|>") == llm["image_token_id"]
    assert tokenizer.id("<|endofline|>") == start
    assert tokenizer.scope() == Scope.parse(checkpoint.generation)


@pytest.mark.parametrize(
    ("family", "index", "name"),
    [
        pytest.param("preview", 151664, "<|file_sep|>", id="preview-last-qwen"),
        pytest.param("preview", 151665, "<|extra_0|>", id="preview-extra"),
        pytest.param("preview", 151846, "<|extra_margin_0|>", id="preview-margin"),
        pytest.param("dev", 151665, "<tool_response>", id="dev-tools"),
        pytest.param("dev", 151668, "</think>", id="dev-think"),
        pytest.param("dev", 151849, "<|extra_180|>", id="dev-extra"),
        pytest.param("dev", 151850, "<|extra_margin_0|>", id="dev-margin"),
        pytest.param("dev", 152064, "<|endofline|>", id="dev-end-of-line"),
        pytest.param("preview", 152068, "<|beginoftext|>", id="preview-last-extra"),
        pytest.param("preview", 152069, "<|image token|>", id="preview-vision-file"),
    ],
)
def test_released_vocabularies_are_numbered_as_published(family: Family, index: int, name: str) -> None:
    names = special_names(151643, 152064, family, ["<|image token|>"])
    assert names[index - 151643] == name


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        pytest.param("mammothu.tiktoken", "IQ== x\n", "line 1", id="rank-is-no-number"),
        pytest.param("mammothu.tiktoken", "!!! 0\n", "line 1", id="token-is-no-base64"),
        pytest.param("mammothu.tiktoken", "IQ== 1\n", "without gaps", id="rank-missing"),
        pytest.param("mammothu.tiktoken", "", "256 of the 256 single bytes", id="no-ranks"),
        pytest.param("mammothu.tiktoken", "IQ== 0\n", "255 of the 256 single bytes have no rank", id="bytes-missing"),
        pytest.param("mammothu_vision_tokens.txt", b"\xff\xfe", "not UTF-8", id="vision-no-text"),
        pytest.param("mammothu_vision_tokens.txt", "<|a|>\n<|a|>\n", "listed twice", id="token-twice"),
        pytest.param("mammothu.tiktoken", None, "No such file", id="file-missing"),
    ],
)
def test_a_damaged_tokenizer_file_is_named(tmp_path: Path, name: str, content: str | bytes | None, text: str) -> None:
    path = make_checkpoint(tmp_path).path
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(CheckpointError, match=f"{name}: .*{text}"):
        Tokenizer.open(path, gen_vocab_start_index=512, family="preview")


def test_a_generation_vocabulary_inside_the_text_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gen_vocab_start_index"):
        Tokenizer.open(make_checkpoint(tmp_path).path, gen_vocab_start_index=300, family="preview")


def test_a_missing_special_token_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match="no such"):
        tokenizer.id("<|no such|>")
