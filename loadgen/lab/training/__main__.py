"""`python -m loadgen.lab.training --out DIR`: trains both models from scratch.

An interrupted training continues where it stopped when the command is run again.
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

from loadgen.lab.training import byte_pairs as vocabulary
from loadgen.lab.training import card, folder, measures, network, packing
from loadgen.lab.training.corpus import Corpus, sources
from loadgen.lab.training.evaluation import evaluate
from loadgen.lab.training.train import Loss, Plan, Progress, Run
from shared.errors import ConfigError

TARGET, DRAFT = network.SHAPES
INTERRUPTED = 130  # the exit status of shells
VOCABULARY_DOCUMENTS = 40_000
MINUTES = 95.0  # of both models; an idle machine does the steps below in that time
PLANS = {
    TARGET: Plan(steps=9000, minutes=80, peak=3e-3),
    # The draft is so small that long rows cost little, and many steps help more than large batches.
    DRAFT: Plan(steps=15_000, minutes=15, peak=4e-3, batch_tokens=2048, row_tokens=1024),
}
console = Console(highlight=False, soft_wrap=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadgen.lab.training", description="Trains the shipped models from scratch."
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder to write a folder for each model to; shared/models replaces the shipped ones",
    )
    parser.add_argument(
        "--texts",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="root under which the Debian packages are installed or unpacked (default: /)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "slackline-training",
        metavar="DIR",
        help="folder for checkpoints; remove it to begin anew "
        "(default: slackline-training in the folder for temporary files)",
    )
    parser.add_argument(
        "--minutes",
        type=positive,
        default=MINUTES,
        metavar="N",
        help=f"minutes of training of both models together (default: {MINUTES:.0f})",
    )
    parser.add_argument(
        "--note",
        default="",
        metavar="TEXT",
        help="a further remark on the training, for the card",
    )
    parser.add_argument(
        "--threads",
        type=whole,
        default=os.cpu_count() or 1,
        metavar="N",
        help="number of threads (default: the number of cores)",
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="do not compile the model: half as fast, but needs no C++ compiler",
    )
    parser.add_argument(
        "--documents",
        type=whole,
        default=800,
        metavar="N",
        help="number of documents to evaluate the models on (default: 800)",
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
        texts = sources(args.texts)
    except ConfigError as error:
        print(f"python -m loadgen.lab.training: {error}", file=sys.stderr)
        return 2
    logging.disable_progress_bar()
    network.keep_memory()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    seen, held = Corpus.read(texts), Corpus.read(texts, held=True)
    tokenizer = make_tokenizer(seen, args.work / "tokenizer.json")
    compiling = not args.no_compile and any(
        shutil.which(name) for name in ("c++", "g++", "clang++")
    )

    runs: dict[str, tuple[Plan, Progress]] = {}
    for name, teacher in ((TARGET, None), (DRAFT, TARGET)):
        plan = replace(PLANS[name], minutes=PLANS[name].minutes * args.minutes / MINUTES)
        teaching = folder.read(args.out / teacher).float() if teacher else None
        progress = train(
            name, teaching, seen, tokenizer, plan, args.work, args.out, compiling=compiling
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
        texts,
        threads=args.threads,
        documents=args.documents,
        note=args.note,
    )
    return 0


def make_tokenizer(corpus: Corpus, path: Path) -> Tokenizer:
    """The tokenizer in the file, or a new one that is saved there."""
    if not path.exists():
        vocabulary.learn(islice(corpus.documents(0), VOCABULARY_DOCUMENTS)).save(str(path))
    return Tokenizer.from_file(str(path))


def train(
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
    """Trains one model and writes its folder. Returns its progress; None: interrupted."""
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
    resumed = run.restore()
    console.print(
        f"{name}: {'resumes' if resumed else 'begins'} at step {run.progress.step}, for at most "
        f"{plan.minutes:.0f} minutes; Ctrl-C saves the progress and stops"
    )
    finished = run.train(lambda line: console.print(f"{name}: {line}"))
    folder.write(model, tokenizer, out / name)
    console.print(
        f"{name}: {'finished' if finished else 'interrupted'} at step {run.progress.step}, "
        f"written to {out / name}"
    )
    return run.progress if finished else None


def report(
    out: Path,
    runs: dict[str, tuple[Plan, Progress]],
    tokenizer: Tokenizer,
    seen: Corpus,
    held: Corpus,
    texts: dict[str, Path],
    *,
    threads: int,
    documents: int,
    note: str,
) -> None:
    """Evaluates both models and writes their cards."""
    console.print("evaluating")
    evaluations = {
        name: evaluate(out / name, tokenizer, seen, held, documents=documents) for name in runs
    }
    target, draft = folder.read(out / TARGET), folder.read(out / DRAFT)
    corpora = {"words it was trained on": seen, "words it was never trained on": held}
    acceptance = {
        name: measures.acceptance(
            target,
            draft,
            tokenizer,
            measures.questions(measures.dialogues(corpus, 906, max(1, documents // 4))),
        )
        for name, corpus in corpora.items()
    }
    card.write(out, evaluations, runs, acceptance, seen, texts, threads, note)
    console.print(f"cards written to {', '.join(str(out / name / 'README.md') for name in runs)}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # outside the training itself, which saves its own checkpoint
        sys.exit(INTERRUPTED)
