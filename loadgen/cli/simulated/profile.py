"""`slackline profile list|show|running|fit`: the iteration-time models, those of a running fleet,
and a new one from measurements.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadgen.access import access_of, add_access_arguments
from loadgen.cli.options.option import add_options
from loadgen.load.connection import connecting
from loadgen.load.heartbeats import Heartbeats
from loadgen.load.report import percent
from loadgen.tables import output, print_json, print_table, with_columns
from loadgen.trials.profile_fit import COLUMNS, DRAFTS, FITTED, fit_form, read_timings
from loadgen.writing import json_of, write
from shared.bus.users import OPERATOR
from shared.core.announced import file_of
from shared.errors import ConfigError
from shared.perf import profile_file as store
from shared.perf.profile_file import FitError, ProfileFile
from shared.perf.shape import BatchShape
from shared.vocabulary import ReplicaId

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
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|running|fit")
    for_list = actions.add_parser("list", help="list the shipped profiles")
    for_show = actions.add_parser("show", help="show a profile and its times of typical batches")
    for_show.add_argument("name", metavar="NAME", help="name of a shipped profile, or a .json file")
    for_running = actions.add_parser(
        "running", help="show the profile with which a worker of a running fleet began"
    )
    add_options(
        for_running,
        """
        --replica R: whose profile (default: the first by name)
        --out FILE: write the profile to FILE (.json), too
        """,
    )
    add_access_arguments(for_running, "the operator")
    for_fit = actions.add_parser("fit", help="fit a profile to measured iterations")
    for_fit.add_argument(
        "timings",
        type=Path,
        metavar="FILE",
        help=f"CSV with a line for each iteration; columns: {', '.join(COLUMNS)}; "
        f"{DRAFTS}, if there are any",
    )
    add_options(
        for_fit,
        f"""
        --name N (required): name of the new profile
        --gpu G (required): GPU that was measured
        --model M (required): model that was measured
        --tensor-parallel N = 1: number of GPUs that share an iteration
        --kv-capacity-tokens K (required int): number of cached tokens that one GPU can hold
        --overhead S = 0.0: seconds to add to every iteration, if the timings are kernel times
        --form NAME = {next(iter(FITTED))}: form of the model: {", ".join(FITTED)} (default: the
            first)
        --out FILE: write the profile to FILE (.json) instead of printing it
        """,
    )
    for action in (for_list, for_show, for_running):
        add_options(action, "--json: print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    out = output(140)
    if args.action == "list":
        files = [store.read(name) for name in store.names()]
        if args.json:
            print_json([facts(file) for file in files])
        else:
            print_table(out, list_table(files))
    elif args.action == "show":
        _present(store.read(args.name), args, out)
    elif args.action == "running":
        check_out(args.out)
        replica, file = asyncio.run(_running(args))
        if args.out is not None:
            write(args.out, encoded(file))
        _present(file, args, out)
        if args.out is not None and not args.json:
            _say(out, f"wrote {args.out}, the profile of {replica}")
    else:
        _fit(args, out)
    return 0


def _present(file: ProfileFile, args: argparse.Namespace, out: Console) -> None:
    took = typical(file)
    if args.json:
        found = {**facts(file), "coefficients": file.coefficients, "typical": took}
        print_json(found)
    else:
        show(file, took, out)


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
    out = with_columns(Table(box=SIMPLE_HEAD), "profile|GPU|model|>TP|>error|>KV tokens")
    for file in files:
        out.add_row(
            *map(escape, (file.name, file.gpu, file.model)),
            str(file.tensor_parallel),
            mean_error(file.error),
            f"{file.kv_capacity_tokens:,}",
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
    out.print(table)
    batches = with_columns(Table(box=SIMPLE_HEAD), "an iteration of|>takes|>tokens/s")
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


async def _running(args: argparse.Namespace) -> tuple[ReplicaId, ProfileFile]:
    """The replica that was asked for, and its worker's profile. Raises ConfigError without it."""
    heartbeats = Heartbeats()
    async with connecting(access_of(args), "slackline-profile", OPERATOR) as bus:
        await heartbeats.listen(bus)
        workers = await heartbeats.workers()
    replica = ReplicaId(args.replica or min(workers))
    if replica not in workers:
        raise ConfigError(f"--replica {replica}: the workers are of {', '.join(sorted(workers))}")
    return replica, file_of(workers[replica])


def _fit(args: argparse.Namespace, out: Console) -> None:
    check_out(args.out)
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
        text = encoded(file)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"these values make no valid profile: {error}") from error
    if args.out is None:
        print(text.decode(), end="")
        return
    write(args.out, text)
    _say(out, f"wrote {args.out}: mean error {mean_error(fit_error)} on {fit_error.against}")


def check_out(path: Path | None) -> None:
    """Raises ConfigError for a path at which no profile can be written."""
    if path is not None and (path.suffix != ".json" or not path.parent.is_dir()):
        raise ConfigError(f"--out {path}: expected a .json file in a folder that exists")


def encoded(file: ProfileFile) -> bytes:
    """The contents of a profile's file. Raises msgspec.MsgspecError if reading them would."""
    text = json_of(file)
    msgspec.json.decode(text, type=ProfileFile)
    return text


def _say(out: Console, line: str) -> None:
    out.print(line, markup=False, soft_wrap=True)
