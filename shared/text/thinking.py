"""The tokens that mark a model's thinking, and what the end of a prompt tells of it."""

from collections.abc import Sequence

# the tokens that end thinking: of most models, and of Magistral
ENDS_OF_THINKING = ("</think>", "[/THINK]")
# A chat template that does not want thinking closes it within so many tokens of the prompt's end
# (Qwen3: `</think>`, line ends). One that wants it may open it there.
TEMPLATE_END_TOKENS = 4


def begin_of(end: str) -> str:
    """The name of the token that begins what `end` ends."""
    return end.replace("/", "")


def ended(prompt: Sequence[int], end: int | None) -> bool:
    """Tells whether the prompt has thinking behind it, or the model has none (`end` None)."""
    return end in (None, *prompt[-TEMPLATE_END_TOKENS:])
