"""`python -m loadgen.training --out DIR`: both models from nothing. Interrupted, it goes on from
where it was when called again.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor
from transformers.utils import logging

from loadgen.training import byte_pairs as vocabulary
from loadgen.training import card, folder, measures, network, packing
from loadgen.training.corpus import Corpus, sources
from loadgen.training.train import Loss, Plan, Progress, Run
from shared.errors import ConfigError

TARGET, DRAFT = network.SHAPES
INTERRUPTED = 130  # as shells say it
VOCABULARY_DOCUMENTS = 40_000
MINUTES = 95.0  # of both; the steps are what a quiet machine does in that time
PLANS = {
    TARGET: Plan(steps=9000, minutes=80, peak=3e-3),
    # So small that long rows cost it little, and that many steps do more for it than large ones.
    DRAFT: Plan(steps=15_000, minutes=15, peak=4e-3, batch_tokens=2048, row_tokens=1024),
}
console = Console(highlight=False, soft_wrap=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadgen.training", description="Makes the shipped models from nothing."
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="gets a folder for each model; shared/models to replace the shipped ones",
    )
    parser.add_argument(
        "--texts",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="root under which the Debian packages were unpacked; default: /",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "slackline-training",
        metavar="DIR",
        help="checkpoints; remove it to begin anew",
    )
    parser.add_argument(
        "--minutes",
        type=positive,
        default=MINUTES,
        metavar="N",
        help=f"of training, both models together; default: {MINUTES:.0f}",
    )
    parser.add_argument(
        "--note",
        default="",
        metavar="TEXT",
        help="for the cards: what else there is to say of how these were trained",
    )
    parser.add_argument("--threads", type=whole, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument(
        "--no-compile", action="store_true", help="half as fast, but needs no C++ compiler"
    )
    parser.add_argument(
        "--documents",
        type=whole,
        default=800,
        metavar="N",
        help="to measure the models on; default: 800",
    )
    return parser.parse_args()


def positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise ValueError
    return value


def whole(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError
    return value


def main() -> int:
    args = arguments()
    try:
        found = sources(args.texts)
    except ConfigError as error:
        print(f"python -m loadgen.training: {error}", file=sys.stderr)
        return 2
    logging.disable_progress_bar()
    network.keep_memory()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    seen, held = Corpus.read(found), Corpus.read(found, held=True)
    tokenizer = learned(seen, args.work / "tokenizer.json")
    compiling = not args.no_compile and any(
        shutil.which(name) for name in ("c++", "g++", "clang++")
    )

    runs: dict[str, tuple[Plan, Progress]] = {}
    for name, teacher in ((TARGET, None), (DRAFT, TARGET)):
        plan = replace(PLANS[name], minutes=PLANS[name].minutes * args.minutes / MINUTES)
        taught = folder.read(args.out / teacher).float() if teacher else None
        progress = trained(
            name, taught, seen, tokenizer, plan, args.work, args.out, compiling=compiling
        )
        if progress is None:
            return INTERRUPTED
        runs[name] = plan, progress
    report(
        args.out,
        runs,
        tokenizer,
        seen,
        held,
        found,
        threads=args.threads,
        documents=args.documents,
        note=args.note,
    )
    return 0


def learned(corpus: Corpus, path: Path) -> Tokenizer:
    if not path.exists():
        vocabulary.learn(islice(corpus.documents(0), VOCABULARY_DOCUMENTS)).save(str(path))
    return Tokenizer.from_file(str(path))


def trained(
    name: str,
    teacher: Any,
    corpus: Corpus,
    tokenizer: Tokenizer,
    plan: Plan,
    work: Path,
    out: Path,
    *,
    compiling: bool,
) -> Progress | None:
    """How far it came, its folder written; None if it was interrupted."""
    torch.manual_seed(plan.seed)
    ends = [vocabulary.number(tokenizer, mark) for mark in (vocabulary.EOS, vocabulary.IM_END)]
    model = network.build(
        network.SHAPES[name], ends=ends, pad=vocabulary.number(tokenizer, vocabulary.PAD)
    )
    if teacher is None:
        loss: Loss = partial(network.next_token_loss, model)
    else:
        loss = partial(network.distilling_loss, model, teacher)

    def batches(rows: int, tokens: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return packing.batches(corpus, tokenizer, rows=rows, tokens=tokens, seed=seed)

    run = Run(model, network.compiled(loss, wanted=compiling), batches, plan, work / f"{name}.pt")
    again = run.restore()
    console.print(
        f"{name}: {'on from' if again else 'at'} step {run.progress.step}, {plan.minutes:.0f} minutes at most, Ctrl-C keeps what is learned"
    )
    finished = run.train(lambda line: console.print(f"{name}: {line}"))
    folder.write(model, tokenizer, out / name)
    console.print(
        f"{name}: {'trained' if finished else 'interrupted'} at step {run.progress.step}, written to {out / name}"
    )
    return run.progress if finished else None


def report(
    out: Path,
    runs: dict[str, tuple[Plan, Progress]],
    tokenizer: Tokenizer,
    seen: Corpus,
    held: Corpus,
    found: dict[str, Path],
    *,
    threads: int,
    documents: int,
    note: str,
) -> None:
    """Measures both and writes their cards."""
    console.print("measuring")
    results = {
        name: card.measure(out / name, tokenizer, seen, held, documents=documents) for name in runs
    }
    target, draft = folder.read(out / TARGET), folder.read(out / DRAFT)
    asked = {"words it was trained on": seen, "words it was never trained on": held}
    acceptance = {
        name: measures.acceptance(
            target,
            draft,
            tokenizer,
            measures.questions(measures.dialogues(corpus, 906, max(1, documents // 4))),
        )
        for name, corpus in asked.items()
    }
    card.write(out, results, runs, acceptance, seen, found, threads, note)
    console.print(f"cards written to {', '.join(str(out / name / 'README.md') for name in runs)}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # outside the training itself, which sees to its checkpoint
        sys.exit(INTERRUPTED)
