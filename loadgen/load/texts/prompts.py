"""The prompts of a plan as token ids, printable bytes 32..126, random by seed."""

from collections.abc import Sequence
from random import Random

from loadgen.load.mix import PlannedRequest
from shared.prefix import Piece

PRINTABLE = bytes(32 + value % 95 for value in range(256))


def prompt_ids(seed: int, number: int, tokens: int) -> list[int]:
    """The prompt of the request with this number, which has nothing in common with others."""
    return list(Random(f"{seed}/{number}/prompt").randbytes(tokens).translate(PRINTABLE))


class Prompts:
    """Prompts that begin alike where the plan says so. An answer that is a piece of later prompts
    is taken as it came.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._answers: dict[int, list[int]] = {}  # by the piece's id

    def ids(self, planned: PlannedRequest) -> list[int]:
        ids: list[int] = []
        for piece in planned.pieces:
            ids += self._piece(piece)
        return ids + prompt_ids(self._seed, planned.number, planned.prompt_tokens - len(ids))

    def answered(self, planned: PlannedRequest, tokens: Sequence[int]) -> None:
        """More of the request's answer has come."""
        if planned.answer is not None:
            self._answers.setdefault(planned.answer, []).extend(tokens)

    def _piece(self, piece: Piece) -> list[int]:
        came = self._answers.get(piece.id, [])[: piece.tokens]
        # whole words, since the bytes of a longer draw begin with those of a shorter one
        words = -(-piece.tokens // 4)
        drawn = Random(f"{self._seed}/piece/{piece.id}").randbytes(4 * words)
        return came + list(drawn[len(came) : piece.tokens].translate(PRINTABLE))
