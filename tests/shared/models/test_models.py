"""The shipped models are what their cards say, speak through both tokenizers alike, and can be made
again.
"""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.lab.training import byte_pairs as vocabulary
from loadgen.lab.training.corpus import SEEN_AT_LEAST, Corpus, held_out, sources
from loadgen.lab.training.prose import Page, clean, sentences
from loadgen.lab.training.wordnet import WordNet, split_gloss
from shared.errors import ConfigError
from shared.models import shipped as store
from shared.text.detokenizer import ByteDetokenizer
from shared.text.tokenizer import BUILTIN_SPECIALS, Tokenizer

TARGET, DRAFT = "slackline-5m", "slackline-draft"
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


@pytest.fixture(scope="module")
def target() -> Any:
    pytest.importorskip("transformers")
    from loadgen.lab.training import folder

    return folder.read(store.folder(TARGET))


@pytest.fixture(scope="module")
def draft() -> Any:
    pytest.importorskip("transformers")
    from loadgen.lab.training import folder

    return folder.read(store.folder(DRAFT))


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
    assert tokenizer.vocabulary == vocabulary.SIZE
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
    from loadgen.lab.training import measures

    measured = measures.loss(model, Tokenizer.load(store.folder(name)).inner, [DIALOGUES, PROSE])
    assert measured.nats_per_token < most_nats < UNIFORM_NATS


def test_most_answers_end_by_themselves(target: Any) -> None:
    from loadgen.lab.training import measures

    measured = measures.endings(
        target, Tokenizer.load(store.folder(TARGET)).inner, [chat(q) for q in QUESTIONS]
    )
    assert measured.share >= 0.75
    assert measured.mean_tokens >= 8


def test_the_draft_is_often_right(target: Any, draft: Any) -> None:
    from loadgen.lab.training import measures

    found = measures.acceptance(
        target,
        draft,
        Tokenizer.load(store.folder(TARGET)).inner,
        [chat(q) for q in QUESTIONS],
        tokens=48,
    )
    assert found.by_depth[0] > 0.2
    assert found.sampled > 0.2
    assert list(found.by_depth) == sorted(found.by_depth, reverse=True)


def test_every_model_has_a_card_with_what_must_be_said() -> None:
    for name in store.names():
        card = (store.folder(name) / "README.md").read_text()
        for said in (
            "wordnet-base",
            "sqlite3-doc",
            "Copyright 2006 by Princeton University",
            "bits per byte",
            "python -m loadgen.lab.training",
            "toy",
        ):
            assert said in card


# The trainer's pieces, on a dictionary of seven words.

DATA = {
    "noun": """\
00000010 03 n 02 lamp 0 lampion 0 001 ~ 00000020 n 0000 | \
a piece of furniture that gives light; "the lamp burned all night"
00000020 03 n 01 lantern 0 001 @ 00000010 n 0000 | a light in a transparent protective case
00000030 03 n 01 Paris 0 000 | (geography) the capital of France""",
    "verb": """\
00000010 30 v 02 nod 0 bob 0 000 01 + 02 00 | \
let the head fall forward; "he nodded in his chair\"""",
    "adj": """\
00000010 00 a 01 hot 0 001 ! 00000020 a 0101 | of high temperature; "a hot stove"
00000020 00 a 01 cold 0 000 | having no heat""",
    "adv": "00000010 02 r 01 slowly 0 000 | without speed",
}
PARAGRAPHS = (
    "The lamp is on the table. It gives light to the room, and to the street.",
    "A table has rows. Each row has columns, and no more.",
)


@pytest.fixture(scope="module")
def dictionary(tmp_path_factory: pytest.TempPathFactory) -> WordNet:
    folder = tmp_path_factory.mktemp("wordnet")
    counts = []
    for number, (pos, records) in enumerate(DATA.items(), 1):
        lines = records.splitlines()
        (folder / f"data.{pos}").write_text("  1 a licence\n" + "\n".join(lines) + "\n")
        index = [f"{line.split()[4].lower()} {pos[0]} 1 0 1 0 {line.split()[0]}" for line in lines]
        (folder / f"index.{pos}").write_text("  1 a licence\n" + "\n".join(index) + "\n")
        counts += [
            f"{line.split()[4].lower()}%{number}:00:00:: 1 {SEEN_AT_LEAST}" for line in lines
        ]
    (folder / "cntlist.rev").write_text("\n".join(counts) + "\n")
    return WordNet(folder)


@pytest.fixture(scope="module")
def corpus(dictionary: WordNet) -> Corpus:
    return Corpus(dictionary, [Page("Tables", PARAGRAPHS)], held=False)


def test_the_dictionary_is_read_with_its_relations(dictionary: WordNet) -> None:
    words = {word.lemma: word for word in dictionary.words}
    assert set(words) == {"lamp", "lantern", "Paris", "nod", "hot", "cold", "slowly"}
    assert words["lamp"].count == SEEN_AT_LEAST
    lantern, hot = (dictionary.synsets[words[name].senses[0]] for name in ("lantern", "hot"))
    assert [s.words for s in dictionary.targets(lantern, ("@",))] == [("lamp", "lampion")]
    assert dictionary.opposites(hot, "hot") == ["cold"]


def test_a_gloss_falls_into_field_definition_and_examples() -> None:
    assert split_gloss('(chess) a move; "check!"; "he gave check"\n') == (
        "chess",
        "a move",
        ("check!", "he gave check"),
    )
    assert split_gloss("(used of birds) able to sing  ") == ("", "able to sing", ())


def test_a_page_gives_its_prose_and_nothing_else() -> None:
    prose = "This is a sentence &amp; it is <b>long</b> enough to be taken for prose. " * 2
    head, code = (
        "<head><title>A\nPage</title></head><script>var x = 1;</script><h1>A head</h1>",
        "<pre>SELECT 1;</pre>",
    )
    page = clean(f"{head}<p>{prose}<p>short{code}<p>{'0 1 2. ' * 30}")
    assert page == Page(
        "A Page",
        (" ".join(prose.replace("&amp;", "&").replace("<b>", "").replace("</b>", "").split()),),
    )
    assert sentences("One, e.g. This. Two is here! Three?") == [
        "One, e.g. This.",
        "Two is here!",
        "Three?",
    ]


def test_the_same_seed_gives_the_same_documents_and_each_ends(corpus: Corpus) -> None:
    some = list(islice(corpus.documents(3), 300))
    assert some == list(islice(corpus.documents(3), 300)) != list(islice(corpus.documents(4), 300))
    assert all(
        text.endswith("<|eos|>") and text.count("<|im_start|>") == text.count("<|im_end|>")
        for text in some
    )
    answers = "".join(some)
    for said in (
        "A lantern is a light in a transparent protective case.",
        "To nod is to let the head fall forward.",
        "The opposite of hot is cold.",
    ):
        assert said in answers


def test_missing_texts_are_named_with_what_brings_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"apt-get install wordnet-base sqlite3-doc"):
        sources(tmp_path)


def test_few_names_are_held_out_always_the_same() -> None:
    names = [f"name {n}" for n in range(5000)]
    assert 50 < sum(map(held_out, names)) < 150


@given(st.lists(st.booleans(), max_size=30))
def test_runs_count_what_is_right_in_a_row(right: list[bool]) -> None:
    pytest.importorskip("transformers")
    from loadgen.lab.training.measures import run_lengths

    runs = run_lengths(right)
    for at, run in enumerate(runs):
        assert all(right[at : at + run])
        assert at + run == len(right) or not right[at + run]


def test_batches_hold_the_whole_stream_once(corpus: Corpus) -> None:
    pytest.importorskip("torch")
    from loadgen.lab.training import packing

    tokenizer = vocabulary.learn(islice(corpus.documents(0), 200), 400)
    stream = [
        token for ids in islice(packing.token_stream(corpus, tokenizer, 5), 200) for token in ids
    ]
    at = 0
    for inputs, targets in islice(
        packing.batches(corpus, tokenizer, rows=3, tokens=32, seed=5), 20
    ):
        assert inputs.flatten().tolist() == stream[at : at + 96]
        assert targets.flatten().tolist() == stream[at + 1 : at + 97]
        at += 96


def test_a_short_run_learns_stops_and_goes_on(corpus: Corpus, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from loadgen.lab.training import folder, network, packing
    from loadgen.lab.training.train import Plan, Run

    tokenizer = vocabulary.learn(islice(corpus.documents(0), 200), 400)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
    }

    def run(steps: int, teacher: Any = None) -> tuple[Any, Run]:
        torch.manual_seed(1)
        model = network.build(shape, ends=[1, 4], pad=2, vocabulary=400)

        def loss(inputs: Any, targets: Any) -> Any:
            return (
                network.distilling_loss(model, teacher, inputs, targets)
                if teacher
                else network.next_token_loss(model, inputs, targets)
            )

        plan = Plan(
            steps=steps,
            minutes=5,
            peak=1e-2,
            batch_tokens=256,
            row_tokens=64,
            long_row_tokens=128,
            warm_until=0.1,
        )
        return model, Run(
            model,
            loss,
            lambda rows, n, seed: packing.batches(
                corpus, tokenizer, rows=rows, tokens=n, seed=seed
            ),
            plan,
            tmp_path / "run.pt",
        )

    _, first = run(3)
    assert not first.restore()
    assert first.train(print)
    begun = first.progress.loss
    model, second = run(40)
    assert second.restore()
    assert second.progress.step == 3
    assert second.train(print)
    assert second.progress.step == 40
    assert second.progress.long
    assert second.progress.loss < 0.9 * begun

    folder.write(model, tokenizer, tmp_path / "out")
    again = folder.read(tmp_path / "out")
    rounded = model.to(torch.bfloat16).state_dict()
    assert all(torch.equal(rounded[name], weight) for name, weight in again.state_dict().items())
    assert Tokenizer.load(tmp_path / "out").eos_token_ids == {1, 4}

    (tmp_path / "run.pt").unlink()
    _, third = run(3, again.float())
    assert third.train(print)


def test_a_card_says_what_was_measured(corpus: Corpus, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from loadgen.lab.training import card
    from loadgen.lab.training.evaluation import Evaluation
    from loadgen.lab.training.measures import Acceptance, Endings, Loss
    from loadgen.lab.training.train import Plan, Progress

    (tmp_path / TARGET).mkdir()
    evaluation = Evaluation(
        {"some text": Loss(2.125, 0.875, 777)},
        Endings(0.5, 33.0, 12),
        [("What?", "A line,\nanother.")],
        1_250_000,
        2.5,
    )
    accepted = {"words": Acceptance((0.75, 0.5, 0.25, 0.125, 0.0625), 1.375, 0.625, 99)}
    progress = Progress(step=321, tokens=2_600_000, spent_s=540, loss=1.984)
    found = dict.fromkeys(("wordnet-base", "sqlite3-doc"), tmp_path)
    card.write(
        tmp_path,
        {TARGET: evaluation},
        {TARGET: (Plan(steps=9, minutes=9, peak=3e-3), progress)},
        accepted,
        corpus,
        found,
        1,
        "In two sittings.",
    )
    text = (tmp_path / TARGET / "README.md").read_text()
    for said in (
        "| some text | 2.125 | 0.875 | 777 |",
        "50% of 12 answers",
        "> **What?**\n>\n> A line,\n> another.",
        "1.25 million parameters",
        "| words | 75.0% | 50.0% | 25.0% | 12.5% | 6.2% | 1.38 | 62.5% |",
        "321 steps of 8192 tokens, 2.6 million tokens in 9 minutes",
        "1.984.\n\nIn two sittings.\n",
    ):
        assert said in text


def test_the_rate_rises_stays_and_falls() -> None:
    pytest.importorskip("torch")
    from loadgen.lab.training.train import Plan

    plan = Plan(steps=100, minutes=1, peak=1.0, warm_until=0.1, fall_from=0.5)
    rates = [plan.rate(done / 100) for done in range(101)]
    assert rates[0] < 0.01
    assert rates[10:50] == [1.0] * 40
    assert rates[-1] == 0
    assert rates[50:] == sorted(rates[50:], reverse=True)
