"""The model cards: every figure in them comes from the runs and from measures on the folders as
saved.
"""

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from loadgen.training import folder, measures
from loadgen.training.byte_pairs import CONTEXT_TOKENS, IM_END, SIZE
from loadgen.training.corpus import HELD_OUT, SEEN_AT_LEAST, Corpus
from loadgen.training.measures import ANSWER_TOKENS, CHAIN, DEPTHS, Acceptance, Endings, Loss
from loadgen.training.network import SHAPES
from loadgen.training.train import Plan, Progress

TARGET, DRAFT = SHAPES
PROMPTS = (
    "What is a river?",
    "What does it mean to wander?",
    "Use the word remember in a sentence.",
    "What is the opposite of hot?",
    "Why is the sky blue?",
    "Tell me about the horse.",
    "Write a haiku about snow.",
    "Who are you?",
)
TEMPERATURE = 0.5  # of the samples
CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---

# {name}

{name} is {what}: a Llama decoder of {parameters:.2f} million parameters ({layers} layers, hidden size {hidden}, {heads} heads,
{kv_heads} of keys and values, tied embeddings) with a byte-level BPE vocabulary of {vocabulary} tokens and a context of {context},
stored in bfloat16 ({megabytes:.1f} MB). It exists so that Slackline's fleet says real words on any laptop. {target} and {draft} have
the very same tokenizer and a ChatML template; nothing is put around a prompt.

## Data

- Dialogues made by a seeded program from WordNet 3.0 (Debian package {wordnet}; the WordNet licence: use, change and distribution for
  any purpose, with the notice below): definitions, examples, other words, opposites, kinds and parts of {words} words that were tagged
  at least {tagged} times in Princeton's texts, the commoner the oftener.
- Prose: the paragraphs of {pages} pages of SQLite's documentation (Debian package {sqlite}; public domain), as running text, and as
  texts to shorten to their first sentence.
- Small talk and the forms of the questions, written for this project (its licence).

One in {held_out} words and pages was held out.

## Training

AdamW on {lesson}: {steps} steps of {batch} tokens, {millions:.1f} million tokens in {minutes:.0f} minutes on {hardware}; {rows}.
Learning rate {peak:g} after a warm-up of {warm:.0%}, falling linearly to zero from {fall:.0%} on. Smoothed training loss at the end:
{loss:.3f}.{note}

## Loss

| on | nats per token | bits per byte | tokens |
|---|---:|---:|---:|
{losses}

At temperature 1, {ended:.0%} of {answers} answers ended by themselves within {limit} tokens; their mean is {mean:.0f} tokens.

## The draft's acceptance

Greedy: the share of places in {target}'s answers from which the draft's first k tokens are all the target's, and how many of {chain}
drafted tokens a verification accepts on average. Sampled: the mean of sum(min(p, q)) along answers at temperature 1, the expected
acceptance of the usual rejection rule.

| prompts about | {depths} | of {chain}, greedy | sampled |
|---|{columns}
{acceptance}

## Samples

At temperature {temperature}, the first drawn of each:

{samples}

## To make it again

    apt-get install wordnet-base sqlite3-doc
    python -m loadgen.training --out DIR

Text and initial weights follow from fixed seeds; the number of steps follows from the time given and the machine, so the weights differ
a little. `--help` says how to train for longer or from unpacked packages.

## Limits

It is a toy. It speaks like its texts and knows nothing: definitions of common words are sometimes right, of rare words wrong, and it
answers any question by explaining words that it finds in it. It knows English only, keeps no thread over a long talk, and must not be
relied on for anything.

## Notice

WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved. THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS" AND PRINCETON
UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES, EXPRESS OR IMPLIED. BY WAY OF EXAMPLE, BUT NOT LIMITATION, PRINCETON UNIVERSITY MAKES
NO REPRESENTATIONS OR WARRANTIES OF MERCHANTABILITY OR FITNESS FOR ANY PARTICULAR PURPOSE OR THAT THE USE OF THE LICENSED SOFTWARE,
DATABASE OR DOCUMENTATION WILL NOT INFRINGE ANY THIRD PARTY PATENTS, COPYRIGHTS, TRADEMARKS OR OTHER RIGHTS.
"""


@dataclass(frozen=True, slots=True)
class Results:
    """Of one model: losses by what they were taken on, endings and samples."""

    losses: dict[str, Loss]
    endings: Endings
    samples: list[tuple[str, str]]
    parameters: int
    megabytes: float


def measure(
    path: Path, tokenizer: Tokenizer, seen: Corpus, held: Corpus, *, documents: int
) -> Results:
    model = folder.read(path)
    texts = {
        "dialogues about words it was trained on, newly drawn": measures.dialogues(
            seen, 902, documents
        ),
        "dialogues about words and pages it was never trained on": measures.dialogues(
            held, 903, documents
        ),
        "prose of pages it was never trained on": measures.prose(held, 904, max(1, documents // 8)),
    }
    losses = {name: measures.loss(model, tokenizer, some) for name, some in texts.items()}
    prompts = measures.questions(measures.dialogues(seen, 905, max(1, documents // 4)))
    asked = [f"<|im_start|>user\n{question}{IM_END}\n{measures.ASSISTANT}" for question in PROMPTS]
    said = measures.answers(
        model, tokenizer, asked, tokens=ANSWER_TOKENS, temperature=TEMPERATURE, seed=7
    )
    samples = [
        (q, tokenizer.decode(answer).strip()) for q, (_, answer) in zip(PROMPTS, said, strict=True)
    ]
    size = sum(f.stat().st_size for f in path.iterdir()) / 1e6
    endings = measures.endings(model, tokenizer, prompts)
    return Results(losses, endings, samples, sum(p.numel() for p in model.parameters()), size)


def write(
    out: Path,
    results: dict[str, Results],
    runs: dict[str, tuple[Plan, Progress]],
    acceptance: dict[str, Acceptance],
    seen: Corpus,
    found: dict[str, Path],
    threads: int,
    note: str,
) -> None:
    """README.md in both folders. `note`: what else there is to say of how the target was
    trained.
    """
    for name, result in results.items():
        plan, progress = runs[name]
        shape = SHAPES[name]
        shorter = plan.row_tokens < plan.long_row_tokens
        text = CARD.format(
            name=name,
            target=TARGET,
            draft=DRAFT,
            what="a small language model"
            if name == TARGET
            else f"the draft model of {TARGET}, for speculative decoding",
            parameters=result.parameters / 1e6,
            layers=shape["num_hidden_layers"],
            hidden=shape["hidden_size"],
            heads=shape["num_attention_heads"],
            kv_heads=shape["num_key_value_heads"],
            vocabulary=SIZE,
            context=CONTEXT_TOKENS,
            megabytes=result.megabytes,
            wordnet=f"wordnet-base {version(found, 'wordnet-base')}".strip(),
            sqlite=f"sqlite3-doc {version(found, 'sqlite3-doc')}".strip(),
            words=seen.words,
            tagged=SEEN_AT_LEAST,
            pages=seen.page_count,
            held_out=HELD_OUT,
            lesson="the text"
            if name == TARGET
            else f"{TARGET}'s whole distribution (KL divergence, with a quarter of cross entropy on the text)",
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
                    on: (f"{x.nats_per_token:.3f}", f"{x.bits_per_byte:.3f}", str(x.tokens))
                    for on, x in result.losses.items()
                }
            ),
            ended=result.endings.share,
            answers=result.endings.answers,
            limit=ANSWER_TOKENS,
            mean=result.endings.mean_tokens,
            chain=CHAIN,
            depths=" | ".join(f"k = {k}" for k in range(1, 1 + DEPTHS)),
            columns="---:|" * (DEPTHS + 2),
            acceptance=rows(
                {
                    about: (
                        *(f"{share:.1%}" for share in x.by_depth),
                        f"{x.per_verification:.2f}",
                        f"{x.sampled:.1%}",
                    )
                    for about, x in acceptance.items()
                }
            ),
            temperature=TEMPERATURE,
            samples="\n\n".join(quoted(question, answer) for question, answer in result.samples),
        )
        (out / name / "README.md").write_text(text)


def rows(cells: dict[str, tuple[str, ...]]) -> str:
    """Of a Markdown table."""
    return "\n".join(f"| {head} | {' | '.join(rest)} |" for head, rest in cells.items())


def quoted(question: str, answer: str) -> str:
    return "\n".join(
        [f"> **{question}**", ">", *(f"> {line}".rstrip() for line in answer.splitlines())]
    )


def version(found: dict[str, Path], package: str) -> str:
    """Of a Debian package, from its changelog beside the other documentation; empty if it has
    none.
    """
    path = next(
        (
            p
            for up in found[package].parents
            if (p := up / "doc" / package / "changelog.Debian.gz").exists()
        ),
        None,
    )
    if path is None:
        return ""
    with gzip.open(path, "rt", errors="replace") as lines:
        return lines.readline().partition("(")[2].partition(")")[0]


def hardware(threads: int) -> str:
    """In general words."""
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
