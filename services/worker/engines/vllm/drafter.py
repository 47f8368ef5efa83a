"""Asks vLLM's proposers, which make drafts, at the beginning of the iteration that verifies them.

vLLM proposes at a step's end, for every request, before the next plan is known. Here the engine
asks before its step, only for requests that the plan lets draft, and as deep as it says. A draft
model first reads the tokens that it lacks; its KV lies in the request's blocks. A step without
drafts costs nothing. Each vLLM process that has a part of the model calls these functions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


class Unread(NamedTuple):
    """A request's part for the proposer: `tokens`, two or more, from `start` on; all `blocks`."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


def keep_back(worker: Any) -> None:
    """From now on vLLM makes no drafts at the end of a step."""
    worker.model_runner.propose_draft_token_ids = lambda *_: []


def draft(worker: Any, unread: Sequence[Unread], depth: int) -> list[list[int]]:
    """Up to `depth` drafts for each request. The shortest come first, as some backends want."""
    runner = worker.model_runner
    if runner.speculative_config.method == "ngram":
        return _found(runner.drafter, unread, depth)
    with torch.inference_mode():
        return _drafted(runner.drafter, unread, depth)


def _found(drafter: Any, unread: Sequence[Unread], depth: int) -> list[list[int]]:
    """The tokens that followed the same n-gram in the whole of each request."""
    lengths = np.array([len(one.tokens) for one in unread], dtype=np.int32)
    texts = np.zeros((len(unread), lengths.max()), dtype=np.int32)
    for row, one in zip(texts, unread, strict=True):
        row[: len(one.tokens)] = one.tokens
    # one new token each: the proposer searches for requests that have some
    drafts: list[list[int]] = drafter.propose(depth, [[0]] * len(unread), lengths, texts)
    return drafts


def _drafted(drafter: Any, unread: Sequence[Unread], depth: int) -> list[list[int]]:
    """The draft model's greedy tokens, in as few passes as its buffers have room for."""
    room: int = drafter.max_num_tokens
    drafts, together, width = list[list[int]](), list[Unread](), 0
    for one in unread:
        while len(one.tokens) > room:
            _propose(drafter, [one._replace(tokens=one.tokens[:room])], 0)
            # the last that it has read once more, for a pass has two tokens of a request at least
            one = one._replace(tokens=one.tokens[room - 1 :], start=one.start + room - 1)
        if width + len(one.tokens) > room:
            drafts += _propose(drafter, together, depth)
            together, width = [], 0
        together.append(one)
        width += len(one.tokens)
    return drafts + _propose(drafter, together, depth)


def _propose(drafter: Any, unread: Sequence[Unread], depth: int) -> list[list[int]]:
    """One call of vLLM's proposer: the newest token is the target's, the others are computed."""
    counts = np.array([len(one.tokens) - 1 for one in unread], dtype=np.int32)
    bounds = np.zeros(len(unread) + 1, dtype=np.int32)
    np.cumsum(counts, out=bounds[1:])
    lengths = counts + np.array([one.start for one in unread], dtype=np.int32)
    # always as wide as this, since vLLM compiles a kernel for each width
    blocks = np.zeros((len(unread), -(-drafter.max_model_len // drafter.block_size)), np.int32)
    for row, one in zip(blocks, unread, strict=True):
        row[: len(one.blocks)] = one.blocks

    def moved(values: Any, dtype: type = np.int32) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=dtype)).to(drafter.device)

    drafts: torch.Tensor = drafter.propose(
        num_speculative_tokens=depth,
        target_token_ids=moved([token for one in unread for token in one.tokens[:-1]]),
        target_positions=moved(
            [one.start + n for one in unread for n in range(len(one.tokens) - 1)], np.int64
        ),
        target_hidden_states=None,  # a draft model needs none
        next_token_ids=moved([one.tokens[-1] for one in unread]),
        token_indices_to_sample=None,
        common_attn_metadata=CommonAttentionMetadata(
            query_start_loc=moved(bounds),
            query_start_loc_cpu=torch.from_numpy(bounds),
            seq_lens=moved(lengths),
            num_reqs=len(unread),
            num_actual_tokens=int(bounds[-1]),
            max_query_len=int(counts.max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=moved(blocks),
            slot_mapping=moved([], np.int64),  # the proposer makes its own
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths + 1),  # with the newest token
        ),
        sampling_metadata=None,  # its drafts are greedy
    )
    return drafts.tolist()
