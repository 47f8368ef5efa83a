"""Answers that a simulated engine gives in place of pseudo words, to try an application."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.errors import ConfigError
from shared.text.tokenizer import Tokenizer


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`say` is the answer to prompts that hold the text `prompt`."""

    say: str
    prompt: str = ""


class Script:
    """The first rule counts whose text is in the rendered prompt. Each token is a byte."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        tokenizer = Tokenizer.builtin()
        end = min(tokenizer.eos_token_ids)
        self._rules = [(r.prompt.encode(), [*tokenizer.encode(r.say), end]) for r in rules]

    def answer(self, prompt: Sequence[int]) -> list[int] | None:
        """The tokens of the answer and its end; None: no rule is for this prompt."""
        text = bytes(token for token in prompt if token < 256)
        return next((said for asked, said in self._rules if asked in text), None)


def load(path: str) -> Script:
    """The script in a JSON file: a list of rules. Raises ConfigError."""
    try:
        return Script(msgspec.json.decode(Path(path).read_bytes(), type=list[Rule]))
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f'{path} is no script, such as [{{"prompt": "weather", "say": "Fine."}}]: {error}'
        ) from error
