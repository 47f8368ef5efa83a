"""Batches of documents: tokens laid end to end and cut into rows.

The targets of a row are its tokens shifted by one.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from loadgen.lab.training.corpus import Corpus

AT_ONCE = 2000  # documents tokenized together


def token_stream(corpus: Corpus, tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    documents = corpus.documents(seed)
    while True:
        for encoding in tokenizer.encode_batch_fast(
            list(islice(documents, AT_ONCE)), add_special_tokens=False
        ):
            yield encoding.ids


def batches(
    corpus: Corpus, tokenizer: Tokenizer, *, rows: int, tokens: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """An endless stream of (inputs, targets), int64 [rows, tokens].

    A row may begin in the middle of a document, where the row before it ended.
    """
    needed = rows * tokens + 1
    buffered: list[int] = []
    stream = token_stream(corpus, tokenizer, seed)
    while True:
        while len(buffered) < needed:
            buffered.extend(next(stream))
        flat = torch.from_numpy(np.array(buffered[:needed], dtype=np.int64))
        yield flat[:-1].view(rows, tokens), flat[1:].view(rows, tokens)
        buffered = buffered[needed - 1 :]
