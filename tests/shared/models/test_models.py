"""The shipped models are what their cards say, and speak through both tokenizers alike."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.models import shipped as store
from shared.text.detokenizer import ByteDetokenizer
from shared.text.tokenizer import BUILTIN_SPECIALS, Tokenizer

TARGET, DRAFT = "slackline-5m", "slackline-draft"
VOCABULARY = 2048
BYTES = 15_000_000  # of both, as they are committed
UNIFORM_NATS = 7.62  # ln 2048
# In the manner of the texts, and in none of them.
DIALOGUES = """\
<|im_start|>user
What is a kettle?<|im_end|>
<|im_start|>assistant
A kettle is a metal pot for heating water.<|im_end|>
<|im_start|>user
Use it in a sentence.<|im_end|>
<|im_start|>assistant
She put the kettle on the stove.<|im_end|>
<|eos|><|im_start|>user
What does slowly mean?<|im_end|>
<|im_start|>assistant
Slowly means without speed.<|im_end|>
<|eos|>"""
PROSE = """\
The database file is locked while the transaction is being written. Other connections can still \
read from the database, but they do not see the changes until the transaction commits. If the \
application crashes, then the changes are rolled back the next time that the database is opened.
"""
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


def test_the_tokenizer_is_byte_level_with_the_marks_of_the_builtin_one() -> None:
    tokenizer = Tokenizer.load(store.folder(TARGET))
    assert isinstance(tokenizer.detokenizer(), ByteDetokenizer)
    assert tokenizer.vocabulary == VOCABULARY
    assert all(tokenizer.inner.token_to_id(mark) is not None for mark in BUILTIN_SPECIALS)
    assert tokenizer.eos_token_ids == {
        tokenizer.inner.token_to_id(mark) for mark in ("<|eos|>", "<|im_end|>")
    }


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


@pytest.mark.parametrize(("name", "most_nats"), [(TARGET, 3.2), (DRAFT, 4.2)])
def test_text_it_never_read_is_far_from_random_to_it(
    name: str, most_nats: float, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue("target" if name == TARGET else "draft")
    nats, tokens = 0.0, 0
    for text in (DIALOGUES, PROSE):
        ids = Tokenizer.load(store.folder(name)).encode(text)
        nats -= sum(
            float(row.log_softmax(-1)[token])
            for row, token in zip(logits(model, ids[:1], ids[1:]), ids[1:], strict=True)
        )
        tokens += len(ids) - 1
    assert nats / tokens < most_nats < UNIFORM_NATS


def test_most_answers_end_by_themselves(target: Any) -> None:
    end = Tokenizer.load(store.folder(TARGET)).inner.token_to_id("<|im_end|>")
    answers = [answer(target, question, tokens=200, sampled=True) for question in QUESTIONS]
    assert sum(end in tokens for _, tokens in answers) / len(answers) >= 0.75
    assert sum(len(tokens) for _, tokens in answers) / len(answers) >= 8


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


def test_every_model_has_a_card_with_what_must_be_said() -> None:
    for name in store.names():
        card = (store.folder(name) / "README.md").read_text()
        for said in (
            "wordnet-base",
            "sqlite3-doc",
            "Copyright 2006 by Princeton University",
            "bits per byte",
            "How it was trained",
            "toy",
        ):
            assert said in card
