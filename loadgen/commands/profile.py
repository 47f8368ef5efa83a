"""`slackline profile list|show|fit`: the iteration-time models, and a new one from measurements."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadgen.lab.profile_fit import COLUMNS, DRAFTS, FITTED, fit_form, read_timings
from loadgen.load.report import percent
from loadgen.tables import print_table
from shared.errors import ConfigError
from shared.perf import profile_file as store
from shared.perf.profile_file import FitError, ProfileFile
from shared.perf.shape import BatchShape

CONTEXT_TOKENS = 1024  # cached tokens of each decode in the shapes below


def decodes(n: int) -> BatchShape:
    return BatchShape(decodes=n, decode_context=n * CONTEXT_TOKENS)


# (name, shape) of batches that a replica runs: the extremes and the middle.
TYPICAL: tuple[tuple[str, BatchShape], ...] = (
    *((f"{n} decode{'s' * (n > 1)} on {CONTEXT_TOKENS} cached", decodes(n)) for n in (1, 32, 128)),
    *((f"a prefill chunk of {n}", BatchShape().with_chunk(n, 0)) for n in (256, 512, 1024, 2048)),
    ("32 decodes and a chunk of 256", decodes(32).with_chunk(256, 0)),
    ("32 decodes and a chunk of 512 on 4096 cached", decodes(32).with_chunk(512, 4096)),
    ("128 decodes and a chunk of 512", decodes(128).with_chunk(512, 0)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|fit")
    for_list = actions.add_parser("list", help="list the shipped profiles")
    for_show = actions.add_parser("show", help="show a profile and its times of typical batches")
    for_show.add_argument("name", metavar="NAME", help="name of a shipped profile, or a .json file")
    for_fit = actions.add_parser("fit", help="fit a profile to measured iterations")
    for_fit.add_argument(
        "timings",
        type=Path,
        metavar="FILE",
        help=f"CSV with a line for each iteration; columns: {', '.join(COLUMNS)}; "
        f"{DRAFTS}, if there are any",
    )
    for_fit.add_argument("--name", required=True, metavar="N", help="name of the new profile")
    for_fit.add_argument("--gpu", required=True, metavar="G", help="GPU that was measured")
    for_fit.add_argument("--model", required=True, metavar="M", help="model that was measured")
    for_fit.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="number of GPUs that share an iteration (default: 1)",
    )
    for_fit.add_argument(
        "--kv-capacity-tokens",
        type=int,
        required=True,
        metavar="K",
        help="number of cached tokens that one GPU can hold",
    )
    for_fit.add_argument(
        "--overhead",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds to add to every iteration, if the timings are kernel times (default: 0)",
    )
    for_fit.add_argument(
        "--form",
        default=next(iter(FITTED)),
        metavar="NAME",
        help=f"form of the model: {', '.join(FITTED)} (default: the first)",
    )
    for_fit.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the profile to FILE (.json) instead of printing it",
    )
    for action in (for_list, for_show):
        action.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    out = Console(width=None if sys.stdout.isatty() else 140)
    if args.action == "list":
        files = [store.read(name) for name in store.names()]
        if args.json:
            print(msgspec.json.encode([facts(file) for file in files]).decode())
        else:
            print_table(out, list_table(files))
    elif args.action == "show":
        file = store.read(args.name)
        took = typical(file)
        if args.json:
            print(
                msgspec.json.encode(
                    {**facts(file), "coefficients": file.coefficients, "typical": took}
                ).decode()
            )
        else:
            show(file, took, out)
    else:
        _fit(args, out)
    return 0


def facts(file: ProfileFile) -> dict[str, Any]:
    """The contents of a profile without its coefficients."""
    contents: dict[str, Any] = msgspec.to_builtins(file)
    form = contents.pop("coefficients")["form"]
    return {**contents, "form": form}


def typical(file: ProfileFile) -> list[dict[str, Any]]:
    profile = file.profile()
    return [
        {"what": what, **shape._asdict(), "batch_s": profile.batch_s(shape)}
        for what, shape in TYPICAL
    ]


def list_table(files: list[ProfileFile]) -> Table:
    out = Table(box=SIMPLE_HEAD)
    for name in ("profile", "GPU", "model", "TP", "form", "error", "KV tokens", "overhead"):
        figure = name in ("TP", "error", "KV tokens", "overhead")
        out.add_column(
            name, justify="right" if figure else "left", no_wrap=name != "model", overflow="fold"
        )
    for file in files:
        out.add_row(
            *map(escape, (file.name, file.gpu, file.model)),
            str(file.tensor_parallel),
            facts(file)["form"],
            mean_error(file.error),
            f"{file.kv_capacity_tokens:,}",
            milliseconds(file.overhead_s),
        )
    return out


def show(file: ProfileFile, took: list[dict[str, Any]], out: Console) -> None:
    error = file.error
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    kinds = [("95 % within", error.p95), ("worst", error.worst)]
    kinds += [
        ("decode-only", error.mape_decode_only),
        ("mixed", error.mape_mixed),
        ("prefill-only", error.mape_prefill_only),
    ]
    for name, text in (
        ("profile", file.name),
        (
            "GPU",
            f"{file.gpu}, {file.tensor_parallel} together"
            if file.tensor_parallel > 1
            else file.gpu,
        ),
        ("model", file.model),
        ("form", facts(file)["form"]),
        (
            "KV capacity",
            f"{file.kv_capacity_tokens:,} tokens"
            + f", {file.kv_bytes_per_token:,} bytes each" * (file.kv_bytes_per_token > 0),
        ),
        (
            "overhead",
            f"{milliseconds(file.overhead_s)} per iteration, added to the time of the form",
        ),
        (
            "mean error",
            mean_error(error)
            + "".join(f"; {kind} {percent(value)}" for kind, value in kinds if value is not None),
        ),
        ("against", error.against),
        ("provenance", file.provenance),
    ):
        table.add_row(name, escape(text))
    out.print(table, highlight=False)
    batches = Table(box=SIMPLE_HEAD)
    batches.add_column("an iteration of")
    batches.add_column("takes", justify="right")
    batches.add_column("tokens/s", justify="right")
    for batch in took:
        tokens = batch["prefill_tokens"] + batch["decodes"]
        batches.add_row(
            batch["what"], milliseconds(batch["batch_s"]), f"{tokens / batch['batch_s']:,.0f}"
        )
    out.print(batches)


def mean_error(error: FitError) -> str:
    return "not stated" if error.mape is None else percent(error.mape)


def milliseconds(value_s: float) -> str:
    return f"{1000 * value_s:.1f} ms"


def _fit(args: argparse.Namespace, out: Console) -> None:
    if args.out is not None and (args.out.suffix != ".json" or not args.out.parent.is_dir()):
        raise ConfigError(f"--out {args.out}: expected a .json file in a folder that exists")
    timings = read_timings(args.timings)
    form, fit_error = fit_form(args.form, timings, args.timings.name)
    file = ProfileFile(
        name=args.name,
        gpu=args.gpu,
        model=args.model,
        tensor_parallel=args.tensor_parallel,
        kv_capacity_tokens=args.kv_capacity_tokens,
        kv_bytes_per_token=0,
        overhead_s=args.overhead,
        error=fit_error,
        provenance=f"Fitted by `slackline profile fit` to {len(timings)} iterations "
        f"of {args.timings.name}.",
        coefficients=form,
    )
    try:
        text = msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"
        # decoding applies the checks that reading the file will apply
        msgspec.json.decode(text, type=ProfileFile)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"these values make no valid profile: {error}") from error
    if args.out is None:
        print(text.decode(), end="")
        return
    try:
        args.out.write_bytes(text)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {args.out}: {error.strerror}") from error
    out.print(
        f"wrote {args.out}: mean error {mean_error(fit_error)} on {fit_error.against}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
