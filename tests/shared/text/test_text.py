"""Tests of text to tokens and back: no text is lost, wherever it is split."""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from shared.errors import ConfigError, PeerError
from shared.models import shipped
from shared.text import chat_prompt
from shared.text.detokenizer import Detokenizer, WindowDetokenizer
from shared.text.tokenizer import BUILTIN_SPECIALS, Tokenizer

# Markers within a prompt are special tokens, as callers who render chats themselves expect.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(
    lambda text: "<|" not in text
)


def read(detokenizer: Detokenizer, tokens: list[int]) -> str:
    return "".join(detokenizer.feed(token) for token in tokens) + detokenizer.flush()


@given(texts)
def test_any_text_survives_the_builtin_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.builtin()
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert read(tokenizer.detokenizer(), tokens) == text


def test_special_and_unknown_tokens_have_no_text() -> None:
    tokenizer = Tokenizer.builtin()
    assert tokenizer.vocabulary == 261
    assert all(
        tokenizer.inner.token_to_id(name) == token for name, token in BUILTIN_SPECIALS.items()
    )
    assert read(tokenizer.detokenizer(), [104, *BUILTIN_SPECIALS.values(), 100_000, 105]) == "hi"


def test_a_lone_surrogate_is_the_senders_fault() -> None:
    with pytest.raises(PeerError):
        Tokenizer.builtin().encode("a\ud800b")


def byte_fallback(folder: Path) -> Tokenizer:
    """A vocabulary in the manner of SentencePiece: words that carry their space, and single bytes
    for all else.
    """
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "▁a",
        "n",
        "o",
        "t",
    ]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["</s>"])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return Tokenizer.load(folder)


def test_a_vocabulary_that_is_not_byte_level_reads_alike_in_pieces(tmp_path: Path) -> None:
    tokenizer = byte_fallback(tmp_path)
    assert tokenizer.eos_token_ids == {1}

    @given(
        st.lists(
            st.sampled_from(["▁the", "▁a", "n", "o", "t", "é", "日", "🙂", "▁", "</s>"]),
            max_size=30,
        )
    )
    def check(words: list[str]) -> None:
        tokens = []
        for word in words:
            known = tokenizer.inner.token_to_id(word)
            tokens += [known] if known is not None else [2 + byte for byte in word.encode()]
        assert read(tokenizer.detokenizer(), tokens) == tokenizer.inner.decode(tokens)

    check()


def test_endless_bad_bytes_are_neither_held_for_ever_nor_fatal(tmp_path: Path) -> None:
    tokenizer = byte_fallback(tmp_path)

    @given(st.lists(st.integers(0, 300), max_size=60))
    def check(tokens: list[int]) -> None:
        read(tokenizer.detokenizer(), tokens)

    check()
    detokenizer = tokenizer.detokenizer()
    said = "".join(detokenizer.feed(2 + 0xFF) for _ in range(100))
    assert 90 <= len(said) <= 100


def test_tokens_without_text_are_not_decoded_again_and_again() -> None:
    decoded: list[int] = []

    def decode(tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return "".join(chr(token) for token in tokens if token)

    detokenizer = WindowDetokenizer(decode, frozenset())
    assert read(detokenizer, [97, *[0] * 1000, 98, *[0] * 20, 99]) == "abc"
    assert max(decoded) < 20


def test_a_folder_is_read_once_and_a_missing_one_is_named(tmp_path: Path) -> None:
    Tokenizer.builtin().inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [257, 260]}))
    loaded = Tokenizer.load(tmp_path)
    assert Tokenizer.load(str(tmp_path)) is loaded
    assert loaded.eos_token_ids == Tokenizer.builtin().eos_token_ids
    assert loaded.render([{"role": "user", "content": "hi"}]) == Tokenizer.builtin().render(
        [{"role": "user", "content": "hi"}]
    )
    assert read(loaded.detokenizer(), loaded.encode("naïve 🙂")) == "naïve 🙂"
    with pytest.raises(ConfigError, match="nowhere"):
        Tokenizer.load(tmp_path / "nowhere")


def test_messages_render_as_marked_turns_with_the_assistants_left_open() -> None:
    tokenizer = Tokenizer.builtin()
    prompt = tokenizer.render(
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ]
    )
    assert (
        prompt == "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.encode(prompt, rendered=True).count(BUILTIN_SPECIALS["<|im_start|>"]) == 3


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([3], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
    ],
)
def test_bad_messages_are_refused_by_name(messages: object, param: str) -> None:
    with pytest.raises(PeerError) as refused:
        Tokenizer.builtin().render(messages)
    assert refused.value.param == param


TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m.role == 'system' %}{{ raise_exception('no system prompts here') }}{% endif %}
[{{ m.role }}] {{ m.content | trim }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def test_a_models_own_template_is_used_and_may_refuse(tmp_path: Path) -> None:
    Tokenizer.builtin().inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|bos|>", "chat_template": TEMPLATE})
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert (
        tokenizer.render([{"role": "user", "content": " hi "}]) == "<|bos|>[user] hi\n[assistant]"
    )
    with pytest.raises(PeerError, match="no system prompts"):
        tokenizer.render([{"role": "system", "content": "x"}])


def with_template(source: str) -> Tokenizer:
    render = chat_prompt.from_template(source, {})
    return Tokenizer(Tokenizer.builtin().inner, eos_token_ids=frozenset(), render=render)


WRITES_ALL = "{{ messages | tojson }}{{ tools | tojson }}{{ (x or '') | tojson }}"


@pytest.mark.parametrize("tokenizer", [Tokenizer.builtin(), with_template(WRITES_ALL)])
@pytest.mark.parametrize("where", ["tools", "variables", "arguments"])
def test_no_depth_that_can_be_decoded_breaks_the_rendering(
    tokenizer: Tokenizer, where: str
) -> None:
    """A value that is decoded with a little of the stack left is written with less."""
    rendered = 0
    for depth in range(sys.getrecursionlimit() - 150, sys.getrecursionlimit()):
        text = "[" * depth + "]" * depth
        said: dict[str, Any] = {"role": "assistant", "content": "x"}
        tools, variables = [], {}
        try:
            if where == "tools":
                tools = [{"function": msgspec.json.decode(text)}]
            elif where == "variables":
                variables = {"x": msgspec.json.decode(text)}
            else:
                said["tool_calls"] = [{"function": {"name": "f", "arguments": text}}]
        except RecursionError:  # such a message is refused
            break
        with suppress(PeerError):
            tokenizer.render([said], tools, variables)
            rendered += 1
    assert rendered > 0


# published templates look at all messages behind each one, or write all of them anew
AGAIN_FOR_EACH = """{% for m in messages %}{% set found = namespace(tool=false) %}
{% for n in messages[loop.index:] %}{% if n.role == 'tool' %}{% set found.tool = true %}{% endif %}
{% endfor %}{% endfor %}"""
LONGER_WITH_EACH = """{% set all = namespace(text='') %}{% for m in messages %}
{% set all.text = all.text + m.content %}{% endfor %}"""


@pytest.mark.parametrize("source", [AGAIN_FOR_EACH, LONGER_WITH_EACH])
def test_a_template_that_would_take_hours_is_ended(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_prompt, "RENDER_CPU_S", 0.1)
    tokenizer = with_template(source)
    assert tokenizer.render([{"role": "user", "content": "hi"}]).strip() == ""
    began_s = time.thread_time()
    with pytest.raises(PeerError, match="takes more than"):
        tokenizer.render([{"role": "user", "content": "x" * 1000}] * 20_000)
    assert time.thread_time() - began_s < 2.0


def test_a_template_that_repeats_what_it_is_given_ends_at_a_size() -> None:
    tokenizer = with_template("{% for m in messages %}{{ x }}{% endfor %}")
    messages = [{"role": "user", "content": ""}] * 1000
    assert len(tokenizer.render(messages, (), {"x": "x" * 16_000})) == 16_000_000
    with pytest.raises(PeerError, match="more than 16777216 characters"):
        tokenizer.render(messages, (), {"x": "x" * 17_000})


WORST = [
    *("a", "the", "7", " ", "\n ", "e\u0301\u0323", "\u0301", "\U0001f469\u200d"),
    *("<|im_start|>", "<|im"),
]


@pytest.mark.parametrize("model", ["", shipped.DEFAULT])
def test_the_work_of_reading_a_text_grows_with_its_length_alone(model: str) -> None:
    """Four times a text of one word, or of nothing but spaces or marks, may take ten times as long,
    on a busy machine. With work that is quadratic it would be sixteen times.
    """
    tokenizer = Tokenizer.load(shipped.folder(model)) if model else Tokenizer.builtin()

    def cpu_s(text: str) -> float:
        began_s = time.process_time()
        tokenizer.encode(text)
        return time.process_time() - began_s

    for piece in WORST:
        text = f"<|im_end|>{piece * (32_000 // len(piece))}"
        once_s = min(cpu_s(text) for _ in range(3))
        assert min(cpu_s(4 * text) for _ in range(3)) < 10 * once_s + 0.02, piece


def test_a_broken_template_stops_the_start(tmp_path: Path) -> None:
    Tokenizer.builtin().inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError):
        Tokenizer.load(tmp_path)


@given(st.lists(st.sampled_from(["\u1100\u1161\u11a8", "\u03b9\u0308\u0301", "<|eos|>", "x"])))
def test_a_text_never_has_fewer_tokens_than_its_bytes_say(parts: list[str]) -> None:
    for tokenizer in (Tokenizer.builtin(), Tokenizer.load(shipped.folder("slackline-5m"))):
        text = "".join(parts)
        assert bool(tokenizer.least_tokens(text)) == bool(text)
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
