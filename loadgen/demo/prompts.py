"""Makes prompts of a given length from real text: the language reference that Python ships."""

from pydoc_data.topics import topics
from random import Random

from loadgen.load.mix import PlannedRequest
from shared.text.tokenizer import Tokenizer

INSTRUCTION = "Summarise this:\n\n"
MARK = "\x00"  # stands for the text in the rendered template; no template contains it


class Prompts:
    """Chat prompts of an exact number of tokens. They end where the assistant's answer begins."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._seed = seed
        self._text = tokenizer.encode(
            "\n\n".join(topics[name] for name in sorted(topics)), rendered=True
        )
        head, _, tail = tokenizer.render(
            [{"role": "user", "content": INSTRUCTION + MARK}]
        ).partition(MARK)
        self._head, self._tail = (
            tokenizer.encode(head, rendered=True),
            tokenizer.encode(tail, rendered=True),
        )

    def ids(self, planned: PlannedRequest) -> list[int]:
        """Exactly `prompt_tokens` token ids, the same for the same request of the same run."""
        room = planned.prompt_tokens - len(self._head) - len(self._tail)
        if room < 1:
            return (self._head + self._tail)[-planned.prompt_tokens :]
        begin = Random(f"{self._seed}/{planned.number}/prompt").randrange(len(self._text) - room)
        return [*self._head, *self._text[begin : begin + room], *self._tail]
