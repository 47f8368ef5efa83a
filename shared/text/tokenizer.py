"""Text into tokens and back: a Hugging Face tokenizer, or the built-in one, byte by byte."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from shared.errors import ConfigError, PeerError
from shared.text import chat_prompt as chat
from shared.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from shared.text.thinking import ENDS_OF_THINKING, begin_of
from shared.text.tool_format import ToolFormat, of_template

BUILTIN_SPECIALS = {
    "<|bos|>": 256,
    "<|eos|>": 257,
    "<|pad|>": 258,
    "<|im_start|>": 259,
    "<|im_end|>": 260,
}
SPECIAL_MARK = "<|"  # every special token above begins with it
# the UTF-8 length of a text over that of its composed form (NFC), at most: Hangul, iota with marks
COMPOSED = 3
BUILTIN_ENDS = frozenset({BUILTIN_SPECIALS["<|eos|>"], BUILTIN_SPECIALS["<|im_end|>"]})


class TooManyTokens(PeerError):
    """A text has more tokens than its reader takes."""

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(f"the text has {tokens} tokens; at most {most} are taken", param="prompt")
        self.tokens = tokens


class Tokenizer:
    """An immutable tokenizer, for several threads (encoding releases the interpreter)."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        render: chat.Render,
        tool_format: ToolFormat = ToolFormat.JSON,
        plain: bool = False,
    ) -> None:
        self.inner = inner
        self.tool_format = tool_format
        self.eos_token_ids = eos_token_ids
        # the number of ids: all are below it
        self.vocabulary = 1 + max(inner.get_vocab(with_added_tokens=True).values())
        self._render = render
        self._plain = plain  # every token is a byte: the library would take 150 us
        self._table = _byte_table(inner, self.vocabulary)
        self._longest_bytes = _longest_bytes(inner, self._table)
        added = {
            token.content: token_id for token_id, token in inner.get_added_tokens_decoder().items()
        }
        # the name of the token that ends thinking; empty: the model has none
        self.thinking_end = next((name for name in ENDS_OF_THINKING if name in added), "")
        self.end_of_thinking = added.get(self.thinking_end)
        self.begin_of_thinking = added.get(begin_of(self.thinking_end))
        self._specials = {
            token_id: added.content.encode()
            for token_id, added in inner.get_added_tokens_decoder().items()
            if added.special
        }

    @staticmethod
    def builtin() -> "Tokenizer":
        """The built-in one: ids 0-255 are bytes, then BUILTIN_SPECIALS. Always the same object."""
        return _builtin()

    @staticmethod
    def load(folder: str | Path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder, always the same object. Raises ConfigError."""
        return _load(str(Path(folder).resolve()))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones by their names. Broken characters show as U+FFFD."""
        # `decode` holds the interpreter until it is done
        text: str
        (text,) = self.inner.decode_batch([list(tokens)], skip_special_tokens=False)
        return text

    def name(self, token: int) -> str:
        """The name of a token in the vocabulary; empty for an id without one."""
        return self.inner.id_to_token(token) or ""

    def encode(self, text: str, *, rendered: bool = False, most: int = sys.maxsize) -> list[int]:
        """The token ids of a text. A prompt gets the tokens that the model puts around it (bos); a
        `rendered` chat already has them. A special token's name in the text is that token. Raises
        PeerError for text that is not Unicode (lone surrogates), TooManyTokens above `most`.
        """
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise PeerError(
                "the text holds lone surrogates, which are no characters", param="prompt"
            ) from error
        if self._plain and SPECIAL_MARK not in text:
            if len(raw) > most:
                raise TooManyTokens(len(raw), most)
            return list(raw)
        # `encode` holds the interpreter until it is done: for a second with a megabyte
        (encoded,) = self.inner.encode_batch_fast([text], add_special_tokens=not rendered)
        if len(encoded) > most:  # a list of 8 million would hold the interpreter for 0.2 s
            raise TooManyTokens(len(encoded), most)
        ids: list[int] = encoded.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """The fewest tokens that a text so long can have; 0 if tokens may have any length."""
        if self._longest_bytes is None:
            return 0
        return -(-len(text.encode(errors="surrogatepass")) // self._longest_bytes)

    def render(
        self, messages: object, tools: chat.Tools = (), variables: Mapping[str, Any] | None = None
    ) -> str:
        """One prompt from chat messages and the tools that the answer may call; it ends where the
        assistant's turn begins. `variables` are the template's, by name. Raises PeerError.
        """
        wanted = variables or {}
        if taken := sorted(wanted.keys() & chat.OURS):
            raise PeerError(
                f"chat_template_kwargs cannot set {', '.join(taken)}", param="chat_template_kwargs"
            )
        return chat.rendered(self._render, chat.checked(messages), tools, wanted)

    def shows(self, token: int, *, specials: bool) -> bool:
        """Tells whether the text of an output has the name of this added token."""
        return specials or token not in self._specials

    def piece(self, token: int) -> bytes:
        """The token's bytes: a special token's name, nothing for an unknown id."""
        if self._table is not None and token < len(self._table) and self._table[token]:
            return self._table[token]
        text: str = self.inner.decode([token], skip_special_tokens=False)
        return text.encode()

    def detokenizer(self, *, specials: bool = False) -> Detokenizer:
        """A reader of one output. `specials`: it shows special tokens, save those that end it."""
        shown = self._specials.keys() - self.eos_token_ids if specials else frozenset[int]()
        if self._table is None:
            silent = frozenset(self._specials.keys() - shown)
            return WindowDetokenizer(_decoder(self.inner, specials=specials), silent)
        return ByteDetokenizer(self._table_with_specials if shown else self._table)

    @cached_property
    def _table_with_specials(self) -> list[bytes]:
        assert self._table is not None
        shown = self._specials.keys() - self.eos_token_ids
        return [self._specials[n] if n in shown else b for n, b in enumerate(self._table)]


@cache
def _builtin() -> Tokenizer:
    # BPE without merges, its alphabet the 256 bytes: a text's one encoding is its UTF-8.
    vocabulary = {symbol: byte for byte, symbol in _byte_symbols().items()}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in BUILTIN_SPECIALS]
    )
    return Tokenizer(inner, eos_token_ids=BUILTIN_ENDS, render=chat.marked, plain=True)


@cache
def _load(folder: str) -> Tokenizer:
    path = Path(folder)
    try:
        inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for a missing or broken file
        raise ConfigError(f"no usable tokenizer.json in {folder}: {error}") from error
    inner.no_truncation()
    inner.no_padding()
    config = _read(path / "tokenizer_config.json")
    names = {
        name: _content(config[name])
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if config.get(name)
    }
    ends = {
        token_id
        for source in (_read(path / "generation_config.json"), _read(path / "config.json"))
        for token_id in _as_list(source.get("eos_token_id"))
    }
    if "eos_token" in names and (eos := inner.token_to_id(names["eos_token"])) is not None:
        ends.add(eos)
    template = _template(path, config)
    if template:
        render = chat.from_template(template, names)
    else:
        render = chat.marked if inner.token_to_id("<|im_start|>") is not None else chat.labelled
    return Tokenizer(
        inner, eos_token_ids=frozenset(ends), render=render, tool_format=of_template(template)
    )


def _template(path: Path, config: Mapping[str, Any]) -> str:
    """The folder's chat template, from either of the two places for one; empty if there is none."""
    file = path / "chat_template.jinja"
    template = file.read_text() if file.exists() else config.get("chat_template")
    if isinstance(template, list):  # several templates, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template or ""


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no such file. Raises ConfigError."""
    if not path.exists():
        return {}
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return value


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _as_list(value: Any) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _decoder(inner: tokenizers.Tokenizer, *, specials: bool = False) -> Callable[[list[int]], str]:
    def decode(ids: list[int]) -> str:
        text: str = inner.decode(ids, skip_special_tokens=not specials)
        return text

    return decode


def _byte_symbols() -> dict[int, str]:
    """Byte -> the printable character for it in byte-level vocabularies (the alphabet of GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + n) for n, byte in enumerate(others)
    }


def _byte_table(inner: tokenizers.Tokenizer, vocabulary: int) -> list[bytes] | None:
    """The bytes of each token, none for special ones. None unless decoding is only byte-level."""
    if not isinstance(inner.decoder, decoders.ByteLevel):
        return None
    byte_of = {symbol: byte for byte, symbol in _byte_symbols().items()}
    table = [b""] * vocabulary
    for token, token_id in inner.get_vocab(with_added_tokens=False).items():
        known = [byte_of.get(symbol) for symbol in token]
        table[token_id] = (
            bytes(byte for byte in known if byte is not None)
            if None not in known
            else token.encode()
        )
    for token_id, added in inner.get_added_tokens_decoder().items():
        table[token_id] = b"" if added.special else added.content.encode()
    return table


def _longest_bytes(inner: tokenizers.Tokenizer, table: list[bytes] | None) -> int | None:
    """The most bytes of a text that one token can stand for. None without a bound: some bytes have
    no token, an added token takes the white space beside it, or a normalizer may drop text.
    """
    added = inner.get_added_tokens_decoder().values()
    composes = isinstance(inner.normalizer, normalizers.NFC)
    if (
        table is None
        or len({piece for piece in table if len(piece) == 1}) < 256
        or any(token.lstrip or token.rstrip for token in added)
        or not (inner.normalizer is None or composes)
    ):
        return None
    longest = max(len(piece) for piece in (*table, *(token.content.encode() for token in added)))
    return longest * COMPOSED if composes else longest
