"""Measures of a model: its loss on texts, the acceptance of the draft, and answers that end."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from loadgen.lab.training.byte_pairs import IM_END, IM_START, PAD, number
from loadgen.lab.training.corpus import Corpus

DEPTHS = 5  # lengths of a chain of draft tokens, from 1
CHAIN = 4  # draft tokens per verification
ANSWER_TOKENS = 200  # the most tokens of an answer
ASSISTANT = f"{IM_START}assistant\n"


@dataclass(frozen=True, slots=True)
class Loss:
    nats_per_token: float
    bits_per_byte: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The acceptance of the draft's tokens by the target.

    Greedy, along answers of the target at temperature 0: `by_depth[k]` is the share of positions at
    which the draft's first k + 1 tokens all equal the target's. `per_verification` is the mean
    number of accepted tokens, of CHAIN drafted, over successive verifications.
    Sampled, along answers of the target at temperature 1: the mean over positions of
    sum(min(p, q)). That is the probability that a token drawn by the draft (q) passes the usual
    rejection rule of the target (p).
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
    """The loss over the documents, each alone and cut to 2048 tokens. The first token is given."""
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
    """The dialogues up to the assistant's first answer."""
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
    """(prompt, answer with its end mark), in batches of 32. Temperature 0 is greedy."""
    pad = number(tokenizer, PAD)
    torch.manual_seed(seed)
    for first in range(0, len(prompts), 32):
        batch = [
            tokenizer.encode(p, add_special_tokens=False).ids for p in prompts[first : first + 32]
        ]
        longest = max(map(len, batch))
        ids = torch.tensor([[pad] * (longest - len(b)) + b for b in batch])
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        with torch.inference_mode():
            generated = model.generate(
                ids,
                attention_mask=ids.ne(pad).long(),
                max_new_tokens=tokens,
                pad_token_id=pad,
                **sampling,
            )
        for prompt, row in zip(batch, generated[:, longest:].tolist(), strict=True):
            yield prompt, row[: row.index(pad)] if pad in row else row


def endings(model: Any, tokenizer: Tokenizer, prompts: Sequence[str]) -> Endings:
    end = number(tokenizer, IM_END)
    drawn = [
        answer
        for _, answer in answers(
            model, tokenizer, prompts, tokens=ANSWER_TOKENS, temperature=1.0, seed=1
        )
    ]
    return Endings(
        sum(end in answer for answer in drawn) / len(drawn),
        sum(map(len, drawn)) / len(drawn),
        len(drawn),
    )


def acceptance(
    target: Any, draft: Any, tokenizer: Tokenizer, prompts: Sequence[str], *, tokens: int = 96
) -> Acceptance:
    by_depth, places = [0] * DEPTHS, 0
    accepted, verifications = 0, 0
    for prompt, answer in answers(
        target, tokenizer, prompts, tokens=tokens, temperature=0.0, seed=1
    ):
        # While the tokens of a chain are accepted, its context is the target's own text. One pass
        # over that text therefore decides every chain.
        equal = (_logits(draft, prompt, answer).argmax(-1) == torch.tensor(answer)).tolist()
        runs = run_lengths(equal)
        places += len(runs)
        for depth in range(DEPTHS):
            by_depth[depth] += sum(run > depth for run in runs)
        at = 0
        while at < len(runs):
            taken = min(runs[at], CHAIN)
            accepted += taken
            verifications += 1
            at += taken + 1
    overlap, drawn = 0.0, 0
    for prompt, answer in answers(
        target, tokenizer, prompts, tokens=tokens, temperature=1.0, seed=2
    ):
        p, q = (_logits(model, prompt, answer).softmax(-1) for model in (target, draft))
        overlap += float(torch.minimum(p, q).sum())
        drawn += len(answer)
    return Acceptance(
        tuple(n / places for n in by_depth), accepted / verifications, overlap / drawn, places
    )


def run_lengths(equal: Sequence[bool]) -> list[int]:
    """The length of the run of true values that begins at each position."""
    out, run = [0] * len(equal), 0
    for at in range(len(equal) - 1, -1, -1):
        run = run + 1 if equal[at] else 0
        out[at] = run
    return out


@torch.inference_mode()
def _logits(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """The logits before each token of the answer: float32 [answer, vocabulary]."""
    ids = torch.tensor([prompt + answer])
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits
