"""The tokenizer of both models: byte-level BPE, learned from the corpus, with ChatML marks."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shared.text.tokenizer import BUILTIN_SPECIALS

SIZE = 2048
BOS, EOS, PAD, IM_START, IM_END = BUILTIN_SPECIALS  # ids 0 to 4, in this order
CONTEXT_TOKENS = 4096
# The template adds no beginning mark, since the training documents have none.
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def learn(documents: Iterable[str], size: int = SIZE) -> Tokenizer:
    """Learns a tokenizer. It encodes any text, by bytes; each mark is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [BOS, EOS, PAD, IM_START, IM_END]
    bare = (_unmarked(text, marks) for text in documents)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=marks,
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(bare, trainer)
    return tokenizer


def _unmarked(text: str, marks: list[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "\n")
    return text


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the files of the tokenizer to the folder of a model."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "extra_special_tokens": [IM_START, IM_END],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def number(tokenizer: Tokenizer, mark: str) -> int:
    """The token id of a mark that every vocabulary made here has."""
    token_id: int | None = tokenizer.token_to_id(mark)
    assert token_id is not None
    return token_id
