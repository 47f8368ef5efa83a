"""The output lengths of finished requests, by ranges of prompt length and of max_tokens (SOLA
section 4.3, items 3 and 4).

Where the paper leaves room: the ranges are powers of two, what is predicted is the mean of those
that were longer than the request already is, and a class with too few ends takes the ends of all.
"""

import numpy as np

from shared.columns import Ints
from shared.policy.seam import Ended, Floats

# A distribution of fewer ends than this says nothing.
MIN_ENDS = 10
# At so many ends all that a class has seen counts half: what is old fades.
FADE_ENDS = 2000
# Outputs are told apart by so many tokens, and beyond the last bin not at all.
BIN_TOKENS = 16
BINS = 512
CLASSES = 32  # powers of two that an int32 has

ALL = 0  # the row of every end, whatever its class


class LengthDistributions:
    """The number of outputs at least as long as each length, and their tokens in all, for each
    class.
    """

    def __init__(self) -> None:
        # [prompt class, max_tokens class]; ALL: not seen yet
        self._row_of = np.zeros((CLASSES, CLASSES), dtype=np.intp)
        self._ends = np.zeros((1, BINS))
        self._tokens = np.zeros((1, BINS))

    def observe(self, ended: Ended) -> None:
        prompt, most = (
            ended.prompt_tokens.bit_length() % CLASSES,
            ended.max_tokens.bit_length() % CLASSES,
        )
        if self._row_of[prompt, most] == ALL:
            self._row_of[prompt, most] = len(self._ends)
            self._ends = np.vstack((self._ends, np.zeros(BINS)))
            self._tokens = np.vstack((self._tokens, np.zeros(BINS)))
        to = min(ended.output_tokens // BIN_TOKENS, BINS - 1) + 1
        for row in (ALL, self._row_of[prompt, most]):
            self._ends[row, :to] += 1
            self._tokens[row, :to] += ended.output_tokens
            if self._ends[row, 0] >= FADE_ENDS:
                self._ends[row] /= 2
                self._tokens[row] /= 2

    def left(self, prompt_tokens: Ints, max_tokens: Ints, generated_tokens: Ints) -> Floats:
        """l_left: output tokens still to come, between 1 and what the request may still have; that,
        where nothing is known.

        Nothing is known before MIN_ENDS ends, nor of a request that is longer than all that ended.
        """
        row = self._row_of[_class(prompt_tokens), _class(max_tokens)]
        row = np.where(self._ends[row, 0] >= MIN_ENDS, row, ALL)
        at = np.minimum(generated_tokens // BIN_TOKENS, BINS - 1)
        ends = np.where(self._ends[row, 0] >= MIN_ENDS, self._ends[row, at], 0.0)
        most = np.maximum(max_tokens - generated_tokens, 1.0)
        expected = self._tokens[row, at] / np.maximum(ends, 1e-9) - generated_tokens
        left: Floats = np.where(ends > 0, np.clip(expected, 1.0, most), most)
        return left


def _class(tokens: Ints) -> Ints:
    """The position of the highest bit, as int.bit_length."""
    exponent: Ints = np.frexp(tokens)[1]
    return exponent % CLASSES
