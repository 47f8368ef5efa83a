"""The model cards. Their figures come from the training runs and from the models as saved."""

import gzip
import os
from pathlib import Path

from loadgen.lab.training.byte_pairs import CONTEXT_TOKENS, SIZE
from loadgen.lab.training.corpus import HELD_OUT, SEEN_AT_LEAST, Corpus
from loadgen.lab.training.evaluation import TEMPERATURE, Evaluation
from loadgen.lab.training.measures import ANSWER_TOKENS, CHAIN, DEPTHS, Acceptance
from loadgen.lab.training.network import SHAPES
from loadgen.lab.training.train import Plan, Progress
from loadgen.markdown import wrap

TARGET, DRAFT = SHAPES
CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---

# {name}

{name} is {role}: a Llama decoder of {parameters:.2f} million parameters ({layers} layers, hidden
size {hidden}, {heads} heads, {kv_heads} of keys and values, tied embeddings) with a byte-level BPE
vocabulary of {vocabulary} tokens and a context of {context}, stored in bfloat16
({megabytes:.1f} MB). It lets Slackline's fleet answer with real words on any laptop. {target} and
{draft} share a tokenizer and a ChatML template; neither adds tokens around a prompt.

## Data

- Dialogues made by a seeded program from WordNet 3.0 (Debian package {wordnet}; the WordNet
  licence: use, change and distribution for any purpose, with the notice below): definitions,
  examples, other words, opposites, kinds and parts of {words} words that were tagged at least
  {tagged} times in Princeton's texts. More common words occur more often.
- Prose: the paragraphs of {pages} pages of SQLite's documentation (Debian package {sqlite}; public
  domain), as running text, and as texts to shorten to their first sentence.
- Small talk and the forms of the questions, written for this project (its licence).

One in {held_out} words and pages was held out.

## Training

AdamW on {lesson}: {steps} steps of {batch} tokens, {millions:.1f} million tokens in {minutes:.0f}
minutes on {hardware}; {rows}. The learning rate is {peak:g} after a warm-up of {warm:.0%}, and
falls linearly to zero from {fall:.0%} on. The smoothed training loss at the end is
{loss:.3f}.{note}

## Loss

| on | nats per token | bits per byte | tokens |
|---|---:|---:|---:|
{losses}

At temperature 1, {ended:.0%} of {answers} answers ended by themselves within {limit} tokens; their
mean is {mean:.0f} tokens.

## The draft's acceptance

Greedy: the share of positions in {target}'s answers at which the first k tokens of the draft all
equal the target's, and the mean number of {chain} drafted tokens that a verification accepts.
Sampled: the mean of sum(min(p, q)) along answers at temperature 1, which is the expected acceptance
of the usual rejection rule.

| prompts about | {depths} | of {chain}, greedy | sampled |
|---|{columns}
{acceptance}

## Samples

The first sample of each question at temperature {temperature}:

{samples}

## How to train it again

    apt-get install wordnet-base sqlite3-doc
    python -m loadgen.lab.training --out DIR

Fixed seeds determine the texts and the initial weights. The number of steps depends on the time
given and on the machine, so the weights differ a little. `--help` says how to train for longer or
from unpacked packages.

## Limits

It is a toy. It imitates its texts and knows nothing: its definitions of common words are sometimes
right, those of rare words wrong, and it answers every question by explaining words of the question.
It knows only English, loses the thread of a long conversation, and must not be relied on.

## Notice

WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved. THIS SOFTWARE AND DATABASE
IS PROVIDED "AS IS" AND PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES, EXPRESS OR
IMPLIED. BY WAY OF EXAMPLE, BUT NOT LIMITATION, PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR
WARRANTIES OF MERCHANTABILITY OR FITNESS FOR ANY PARTICULAR PURPOSE OR THAT THE USE OF THE LICENSED
SOFTWARE, DATABASE OR DOCUMENTATION WILL NOT INFRINGE ANY THIRD PARTY PATENTS, COPYRIGHTS,
TRADEMARKS OR OTHER RIGHTS.
"""


def write(
    out: Path,
    evaluations: dict[str, Evaluation],
    runs: dict[str, tuple[Plan, Progress]],
    acceptance: dict[str, Acceptance],
    seen: Corpus,
    sources: dict[str, Path],
    threads: int,
    note: str,
) -> None:
    """Writes README.md into the folder of each model. `note` adds to the target's training."""
    for name, evaluation in evaluations.items():
        plan, progress = runs[name]
        shape = SHAPES[name]
        shorter = plan.row_tokens < plan.long_row_tokens
        text = CARD.format(
            name=name,
            target=TARGET,
            draft=DRAFT,
            role="a small language model"
            if name == TARGET
            else f"the draft model of {TARGET}, for speculative decoding",
            parameters=evaluation.parameters / 1e6,
            layers=shape["num_hidden_layers"],
            hidden=shape["hidden_size"],
            heads=shape["num_attention_heads"],
            kv_heads=shape["num_key_value_heads"],
            vocabulary=SIZE,
            context=CONTEXT_TOKENS,
            megabytes=evaluation.megabytes,
            wordnet=f"wordnet-base {version(sources, 'wordnet-base')}".strip(),
            sqlite=f"sqlite3-doc {version(sources, 'sqlite3-doc')}".strip(),
            words=seen.words,
            tagged=SEEN_AT_LEAST,
            pages=seen.page_count,
            held_out=HELD_OUT,
            lesson="the text"
            if name == TARGET
            else f"{TARGET}'s whole distribution "
            "(KL divergence, with a quarter of cross entropy on the text)",
            steps=progress.step,
            batch=plan.batch_tokens,
            note=f"\n\n{note}" if note and name == TARGET else "",
            millions=progress.tokens / 1e6,
            minutes=progress.spent_s / 60,
            hardware=hardware(threads),
            rows=f"rows of {plan.row_tokens} tokens"
            + (
                f", of {plan.long_row_tokens} for the last {1 - plan.long_from:.0%}"
                if shorter
                else ""
            ),
            peak=plan.peak,
            warm=plan.warm_until,
            fall=plan.fall_from,
            loss=progress.loss,
            losses=rows(
                {
                    texts: (
                        f"{loss.nats_per_token:.3f}",
                        f"{loss.bits_per_byte:.3f}",
                        str(loss.tokens),
                    )
                    for texts, loss in evaluation.losses.items()
                }
            ),
            ended=evaluation.endings.share,
            answers=evaluation.endings.answers,
            limit=ANSWER_TOKENS,
            mean=evaluation.endings.mean_tokens,
            chain=CHAIN,
            depths=" | ".join(f"k = {k}" for k in range(1, 1 + DEPTHS)),
            columns="---:|" * (DEPTHS + 2),
            acceptance=rows(
                {
                    prompts: (
                        *(f"{share:.1%}" for share in accepted.by_depth),
                        f"{accepted.per_verification:.2f}",
                        f"{accepted.sampled:.1%}",
                    )
                    for prompts, accepted in acceptance.items()
                }
            ),
            temperature=TEMPERATURE,
            samples="\n\n".join(quoted(*sample) for sample in evaluation.samples),
        )
        (out / name / "README.md").write_text(wrap(text.rstrip("\n")) + "\n")


def rows(cells: dict[str, tuple[str, ...]]) -> str:
    """The rows of a Markdown table."""
    return "\n".join(f"| {first} | {' | '.join(rest)} |" for first, rest in cells.items())


def quoted(question: str, answer: str) -> str:
    return "\n".join(
        [f"> **{question}**", ">", *(f"> {line}".rstrip() for line in answer.splitlines())]
    )


def version(sources: dict[str, Path], package: str) -> str:
    """The version of a Debian package, from its changelog; empty if it has none."""
    path = next(
        (
            p
            for parent in sources[package].parents
            if (p := parent / "doc" / package / "changelog.Debian.gz").exists()
        ),
        None,
    )
    if path is None:
        return ""
    with gzip.open(path, "rt", errors="replace") as lines:
        return lines.readline().partition("(")[2].partition(")")[0]


def hardware(threads: int) -> str:
    """A general description of this machine's CPU."""
    cores = (
        f"{threads} of a CPU's cores"
        if threads < (os.cpu_count() or 1)
        else "one CPU core"
        if threads == 1
        else f"{threads} CPU cores"
    )
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    return f"{cores} with bfloat16 matrix units" if "amx_bf16" in flags else cores
