"""How good a model is: loss on what was held out, the draft's acceptance, answers that end. All on
the folders as saved.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from loadgen.training.byte_pairs import IM_END, IM_START, PAD, number
from loadgen.training.corpus import Corpus

DEPTHS = 5  # of a chain of draft tokens
CHAIN = 4  # draft tokens per verification
ANSWER_TOKENS = 200  # by when an answer should have ended
ASSISTANT = f"{IM_START}assistant\n"


@dataclass(frozen=True, slots=True)
class Loss:
    nats_per_token: float
    bits_per_byte: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Greedy: along what the target says at temperature 0, `by_depth[k]` is the share of places
    from where the draft's first k + 1 tokens are all the target's; `per_verification`: accepted of
    CHAIN drafted, one verification after the other.
    Sampled: the mean over places of what the target says at temperature 1 of sum(min(p, q)), the
    probability that a token drawn by the draft (q) passes the usual rejection rule of the target
    (p).
    """

    by_depth: tuple[float, ...]
    per_verification: float
    sampled: float
    places: int


@dataclass(frozen=True, slots=True)
class Endings:
    share: float  # of the answers that ended by themselves within ANSWER_TOKENS
    mean_tokens: float
    answers: int


@torch.inference_mode()
def loss(model: Any, tokenizer: Tokenizer, documents: Sequence[str]) -> Loss:
    """Each document alone, up to 2048 tokens of it, the first taken as given."""
    nats, tokens, read = 0.0, 0, 0
    for text in documents:
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False).ids[:2048]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        nats += float(nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
        read += len(tokenizer.decode(ids[0].tolist(), skip_special_tokens=False).encode())
    return Loss(nats / tokens, nats / read / math.log(2), tokens)


def dialogues(corpus: Corpus, seed: int, count: int) -> list[str]:
    return list(islice((d for d in corpus.documents(seed) if d.startswith(IM_START)), count))


def prose(corpus: Corpus, seed: int, count: int) -> list[str]:
    return list(islice((d for d in corpus.documents(seed) if not d.startswith(IM_START)), count))


def questions(documents: Sequence[str]) -> list[str]:
    """The dialogues up to where the assistant is to speak first."""
    return [d.partition(ASSISTANT)[0] + ASSISTANT for d in documents]


def answers(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, what the model says, its end included), by batches of 32; temperature 0 is
    greedy.
    """
    pad = number(tokenizer, PAD)
    torch.manual_seed(seed)
    for first in range(0, len(prompts), 32):
        batch = [
            tokenizer.encode(p, add_special_tokens=False).ids for p in prompts[first : first + 32]
        ]
        longest = max(map(len, batch))
        ids = torch.tensor([[pad] * (longest - len(b)) + b for b in batch])
        how = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        with torch.inference_mode():
            said = model.generate(
                ids,
                attention_mask=ids.ne(pad).long(),
                max_new_tokens=tokens,
                pad_token_id=pad,
                **how,
            )
        for prompt, row in zip(batch, said[:, longest:].tolist(), strict=True):
            yield prompt, row[: row.index(pad)] if pad in row else row


def endings(model: Any, tokenizer: Tokenizer, prompts: Sequence[str]) -> Endings:
    end = number(tokenizer, IM_END)
    said = [
        answer
        for _, answer in answers(
            model, tokenizer, prompts, tokens=ANSWER_TOKENS, temperature=1.0, seed=1
        )
    ]
    return Endings(
        sum(end in a for a in said) / len(said), sum(map(len, said)) / len(said), len(said)
    )


def acceptance(
    target: Any, draft: Any, tokenizer: Tokenizer, prompts: Sequence[str], *, tokens: int = 96
) -> Acceptance:
    by_depth, places = [0] * DEPTHS, 0
    accepted, verifications = 0, 0
    for prompt, answer in answers(
        target, tokenizer, prompts, tokens=tokens, temperature=0.0, seed=1
    ):
        # While a chain is accepted its context is the target's own text, so one pass over that text
        # tells every chain's fate.
        right = (_logits(draft, prompt, answer).argmax(-1) == torch.tensor(answer)).tolist()
        runs = run_lengths(right)
        places += len(runs)
        for depth in range(DEPTHS):
            by_depth[depth] += sum(run > depth for run in runs)
        at = 0
        while at < len(runs):
            taken = min(runs[at], CHAIN)
            accepted, verifications, at = accepted + taken, verifications + 1, at + taken + 1
    shared, drawn = 0.0, 0
    for prompt, answer in answers(
        target, tokenizer, prompts, tokens=tokens, temperature=1.0, seed=2
    ):
        p, q = (_logits(model, prompt, answer).softmax(-1) for model in (target, draft))
        shared += float(torch.minimum(p, q).sum())
        drawn += len(answer)
    return Acceptance(
        tuple(n / places for n in by_depth), accepted / verifications, shared / drawn, places
    )


def run_lengths(right: Sequence[bool]) -> list[int]:
    """From each place, how many are right in a row."""
    out, run = [0] * len(right), 0
    for at in range(len(right) - 1, -1, -1):
        run = run + 1 if right[at] else 0
        out[at] = run
    return out


@torch.inference_mode()
def _logits(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Before each token of the answer: float32 [answer, vocabulary]."""
    ids = torch.tensor([prompt + answer])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits
