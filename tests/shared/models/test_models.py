"""Tests of the shipped models and their tokenizer: they are what their cards say."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.models import shipped as store
from shared.text.tokenizer import Tokenizer

TARGET, DRAFT = "slackline-5m", "slackline-draft"
BYTES = 15_000_000  # of both, as they are committed
QUESTIONS = """\
What is a house?
What does happy mean?
Tell me about the water.
Hello!
Who are you?
Why is the sky blue?
define walk
Use the word time in a sentence.
What is the opposite of good?
Write a haiku about snow.
How do I open a door?
What is a dog?
Give me another word for big.
What kinds of tree are there?
What is the difference between a cat and a dog?
Explain music.""".splitlines()


def chat(question: str) -> str:
    return Tokenizer.load(store.folder(TARGET)).render([{"role": "user", "content": question}])


def model_of(name: str) -> Any:
    """The model, loaded as a user loads it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        store.folder(name), dtype=torch.bfloat16, local_files_only=True
    ).eval()


def logits(model: Any, prompt: list[int], answer: list[int]) -> Any:
    """The logits before each token of the answer."""
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        ids = torch.tensor([prompt + answer])
        return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def answer(model: Any, question: str, *, tokens: int, sampled: bool) -> tuple[list[int], list[int]]:
    """The prompt, and at most so many tokens of an answer to it."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    prompt = Tokenizer.load(store.folder(TARGET)).encode(chat(question))
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0} if sampled else {"do_sample": False}
    with torch.inference_mode():
        generated = model.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, pad_token_id=2, **sampling
        )
    return prompt, generated[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def target() -> Any:
    return model_of(TARGET)


@pytest.fixture(scope="module")
def draft() -> Any:
    return model_of(DRAFT)


def test_two_models_ship_and_are_small_together() -> None:
    assert store.names() == [TARGET, DRAFT]
    assert (
        sum(f.stat().st_size for name in store.names() for f in store.folder(name).iterdir())
        <= BYTES
    )


def test_a_model_is_found_by_name_or_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.folder(TARGET).name == TARGET
    assert store.folder(str(tmp_path)) == tmp_path
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert store.folder("mine") == Path("mine")
    with pytest.raises(ConfigError, match=f"{TARGET}, {DRAFT}"):
        store.folder("gpt")
    with pytest.raises(ConfigError, match="no folder"):
        store.folder(str(tmp_path / "absent"))


def test_a_draft_model_is_the_named_one_the_one_trained_for_the_model_or_none(
    tmp_path: Path,
) -> None:
    assert store.draft_folder("", TARGET) == store.folder(DRAFT)
    assert store.draft_folder("", str(tmp_path)) is None, "nothing was trained for it"
    for model in (TARGET, str(tmp_path)):
        assert store.draft_folder("none", model) is None
        assert store.draft_folder(DRAFT, model) == store.folder(DRAFT)
        assert store.draft_folder(str(tmp_path), model) == tmp_path
    with pytest.raises(ConfigError, match="shipped are"):
        store.draft_folder("nothing", TARGET)


@pytest.mark.parametrize("name", [TARGET, DRAFT])
def test_every_weight_is_bfloat16(name: str) -> None:
    raw = (store.folder(name) / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert {entry["dtype"] for key, entry in header.items() if key != "__metadata__"} == {"BF16"}


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_both_have_the_very_same_tokenizer(file: str) -> None:
    assert (store.folder(TARGET) / file).read_bytes() == (store.folder(DRAFT) / file).read_bytes()


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(
        lambda text: "<|" not in text
    )
)
def test_any_text_survives(text: str) -> None:
    tokenizer = Tokenizer.load(store.folder(TARGET))
    reader = tokenizer.detokenizer()
    assert "".join(reader.feed(token) for token in tokenizer.encode(text)) + reader.flush() == text


@pytest.mark.parametrize("name", [TARGET, DRAFT])
def test_our_tokenizer_and_transformers_read_and_render_alike(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(store.folder(name)),
        Tokenizer.load(store.folder(name)),
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a\n lantern? "},
        {"role": "assistant", "content": "A lantern is a light."},
        {"role": "user", "content": "Grüße, 2 + 2 = <4>"},
    ]
    for some in (messages, messages[1:2]):
        text = ours.render(some)
        assert text == theirs.apply_chat_template(some, add_generation_prompt=True, tokenize=False)
        assert ours.encode(text, rendered=True) == ours.encode(text) == theirs(text).input_ids
    assert text == "<|im_start|>user\nWhat is a\n lantern? <|im_end|>\n<|im_start|>assistant\n"


def test_the_draft_is_often_right(target: Any, draft: Any) -> None:
    """Its first token is the target's, greedily; and a token that it draws would be accepted: the
    mean of sum(min(p, q)) over the answers.
    """
    right, drawn = [], []
    for question in QUESTIONS:
        prompt, greedy = answer(target, question, tokens=48, sampled=False)
        right += [
            int(row.argmax()) == token
            for row, token in zip(logits(draft, prompt, greedy), greedy, strict=True)
        ]
        prompt, sampled = answer(target, question, tokens=48, sampled=True)
        p, q = (logits(model, prompt, sampled).softmax(-1) for model in (target, draft))
        drawn += [float(shared) for shared in p.minimum(q).sum(-1)]
    assert sum(right) / len(right) > 0.2
    assert sum(drawn) / len(drawn) > 0.2
