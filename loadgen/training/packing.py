"""Documents to batches: tokens laid end to end and cut into rows, each row's targets one token
on.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from loadgen.training.corpus import Corpus

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
    """Without end: inputs and targets, int64 [rows, tokens]. A row may begin within a document, as
    its predecessor ended.
    """
    wanted = rows * tokens + 1
    held: list[int] = []
    stream = token_stream(corpus, tokenizer, seed)
    while True:
        while len(held) < wanted:
            held.extend(next(stream))
        flat = torch.from_numpy(np.array(held[:wanted], dtype=np.int64))
        yield flat[:-1].view(rows, tokens), flat[1:].view(rows, tokens)
        held = held[wanted - 1 :]
