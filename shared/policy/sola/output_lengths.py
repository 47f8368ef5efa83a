"""The output lengths of finished requests, by ranges of prompt length and of max_tokens (SOLA
section 4.3, items 3 and 4).

Where the paper leaves room: the ranges are powers of two, the prediction is the mean of the outputs
that were longer than the request's already is, and a class with too few ends takes those of all.
"""

import numpy as np

from shared.columns import Ints
from shared.policy.seam import Ended, Floats

# A distribution of fewer ends than this says nothing.
MIN_ENDS = 10
# At this many ends all earlier ends of a class count half, so that old ones fade.
FADE_ENDS = 2000
# The width of a bin of outputs; outputs beyond the last bin count as one length.
BIN_TOKENS = 16
BINS = 512
CLASSES = 32  # powers of two that an int32 has

ALL = 0  # the row of every end, whatever its class


class LengthDistributions:
    """For each class and length, the outputs that were at least that long, and their tokens."""

    def __init__(self) -> None:
        # the row of each class, [prompt class, max_tokens class]; ALL: not seen yet
        self._row_of = np.zeros((CLASSES, CLASSES), dtype=np.intp)
        # the row whose mean a class takes: its own, or ALL before MIN_ENDS ends
        self._taken = np.zeros((CLASSES, CLASSES), dtype=np.intp)
        self._ends = np.zeros((1, BINS))
        self._tokens = np.zeros((1, BINS))
        # [row, bin] the mean tokens of the outputs that were at least as long; inf: not known
        self._mean = np.full((1, BINS), np.inf)

    def observe(self, ended: Ended) -> None:
        prompt = ended.prompt_tokens.bit_length() % CLASSES
        most = ended.max_tokens.bit_length() % CLASSES
        if self._row_of[prompt, most] == ALL:
            self._row_of[prompt, most] = len(self._ends)
            self._ends = np.vstack((self._ends, np.zeros(BINS)))
            self._tokens = np.vstack((self._tokens, np.zeros(BINS)))
            self._mean = np.vstack((self._mean, np.full(BINS, np.inf)))
        to = min(ended.output_tokens // BIN_TOKENS, BINS - 1) + 1
        own = self._row_of[prompt, most]
        for row in (ALL, own):
            ends, tokens = self._ends[row], self._tokens[row]
            ends[:to] += 1
            tokens[:to] += ended.output_tokens
            if ends[0] >= FADE_ENDS:
                ends /= 2
                tokens /= 2
            if ends[0] >= MIN_ENDS:
                self._mean[row] = np.where(ends > 0, tokens / np.maximum(ends, 1e-9), np.inf)
        if self._ends[own, 0] >= MIN_ENDS:
            self._taken[prompt, most] = own

    def left(self, prompt_tokens: Ints, max_tokens: Ints, generated_tokens: Ints) -> Floats:
        """l_left: output tokens still to come, from 1 to the most that the request may have. It is
        the most where nothing is known: before MIN_ENDS ends, and for a request that is longer than
        all that ended.
        """
        row = self._taken[_class(prompt_tokens), _class(max_tokens)]
        at = np.minimum(generated_tokens // BIN_TOKENS, BINS - 1)
        most = np.maximum(max_tokens - generated_tokens, 1.0)
        left: Floats = np.minimum(np.maximum(self._mean[row, at] - generated_tokens, 1.0), most)
        return left


def _class(tokens: Ints) -> Ints:
    """The position of the highest bit, as int.bit_length."""
    exponent: Ints = np.frexp(tokens)[1]
    return exponent % CLASSES
