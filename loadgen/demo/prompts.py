"""Prompts of a wanted length out of real text: the reference of Python, which every Python brings
along.
"""

from pydoc_data.topics import topics
from random import Random

from loadgen.load.mix import PlannedRequest
from shared.text.tokenizer import Tokenizer

ASKED = "Summarise this:\n\n"
MARK = "\x00"  # where the text will be; no template has it


class Prompts:
    """Chat prompts that end where the assistant is to speak, cut to the token."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._seed = seed
        self._text = tokenizer.encode(
            "\n\n".join(topics[name] for name in sorted(topics)), rendered=True
        )
        head, _, tail = tokenizer.render([{"role": "user", "content": ASKED + MARK}]).partition(
            MARK
        )
        self._head, self._tail = (
            tokenizer.encode(head, rendered=True),
            tokenizer.encode(tail, rendered=True),
        )

    def ids(self, planned: PlannedRequest) -> list[int]:
        """Exactly `prompt_tokens` of them; the same for the same request of the same run."""
        room = planned.prompt_tokens - len(self._head) - len(self._tail)
        if room < 1:
            return (self._head + self._tail)[-planned.prompt_tokens :]
        begin = Random(f"{self._seed}/{planned.number}/prompt").randrange(len(self._text) - room)
        return [*self._head, *self._text[begin : begin + room], *self._tail]
