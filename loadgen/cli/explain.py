"""`slackline explain`: says why a request was late: the share of each cause, and its steps. Of a
trace or a minute it lists the requests, those that were latest first. With --scale it says how many
replicas are needed.
"""

import argparse
import asyncio
import datetime as dt
import textwrap

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadgen.access import access_of, add_access_arguments
from loadgen.cli import explain_scale
from loadgen.cli.options.common import awaiting_admission, check_id
from loadgen.cli.options.option import add_options
from loadgen.load.connection import connecting
from loadgen.tables import print_json, print_line, print_table, with_columns
from shared import subjects
from shared.bus.api import RefusedError
from shared.bus.users import OPERATOR, Role, User
from shared.core.record.explanation import WORDS, in_seconds, others
from shared.errors import ConfigError
from shared.request_timeline import Happened, Happening
from shared.schemas import Explain, Explanation, FindEnded, FoundEnded
from shared.subjects import DEFAULT_TENANT, ID_PATTERN

ANSWER_S = 5.0
# a gateway's answer has the id of its request behind one of these
PREFIXES = ("chatcmpl-", "cmpl-", "resp_")
NO_BREAK = "\N{NO-BREAK SPACE}"
STEPS = {
    Happened.DECLINED: "{replica} declined it",
    Happened.HELD: "{replica} has it",
    Happened.BEGAN: "its first iteration on {replica}",
    Happened.FIRST_TOKEN: "its first token",
    Happened.PREEMPTED: "{replica} preempted it",
    Happened.RELEGATED: "relegated",
    Happened.PROMOTED: "promoted: its SLO can be met again",
    Happened.DRAWN: "out of the pool, for {replica}",
    Happened.LEFT: "left {replica}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request_id",
        nargs="?",
        metavar="REQUEST_ID",
        help="id of the request, also as TENANT.ID, or the id of an HTTP answer",
    )
    add_options(
        parser,
        """
        --trace ID: instead, the ended requests of a trace; a single one is explained
        --minute HH:MM: instead, the ended requests that came in the last such minute, by the
            clock here; a date may come before it, as in ISO 8601
        --scale: instead, how many replicas are needed, and why
        --tenant TENANT: tenant of the request (default: default; for the operator that of
            TENANT.ID)
        --operator: the key that --creds names is the operator's: name other tenants, too
        --json: print one JSON object
        """,
    )
    add_access_arguments(parser, "the tenant, or of the operator")


def run(args: argparse.Namespace) -> int:
    if args.scale:
        if (args.request_id, args.trace, args.minute) != (None, None, None):
            raise ConfigError("--scale stands alone: it is not about a request")
        return explain_scale.run(args)
    operator = args.operator or not args.creds
    if (args.request_id, args.trace, args.minute).count(None) != 2:
        raise ConfigError("name one of REQUEST_ID, --trace and --minute")
    if args.request_id is None:
        return _list(args, operator=operator)
    tenant, ids = meant(args.request_id, args.tenant, operator=operator)
    found = asyncio.run(_asked(args, tenant, ids, operator=operator))
    if args.json:
        print_json(found)
    else:
        show(found, Console(soft_wrap=False))
    return 0


def meant(name: str, tenant: str | None, *, operator: bool) -> tuple[str, list[str]]:
    """The tenant of a request, and the ids that it may have, the likeliest first.

    `name`: what a user has at hand: an id, TENANT.ID of logs and tables, or the id of an answer.
    `tenant`: the tenant as whom the user asks; None: TENANT for the operator, else the default one.
    Raises ConfigError if TENANT is another tenant, or `name` holds no valid id.
    """
    before, dot, request_id = name.rpartition(".")
    own = tenant
    if own is None:
        own = before if dot and operator else DEFAULT_TENANT
    stripped = [request_id.removeprefix(each) for each in PREFIXES if request_id.startswith(each)]
    ids = [each for each in (request_id, *stripped) if ID_PATTERN.fullmatch(each)]
    check_id("--tenant", tenant)
    check_id("REQUEST_ID", ids[0] if ids else "")
    check_id("REQUEST_ID", before if dot else None)
    if dot and before != own:
        raise ConfigError(
            f"{name} is of the tenant {before}, and you ask as {own}: --tenant {before} asks as "
            "that tenant"
        )
    return own, ids


def _list(args: argparse.Namespace, *, operator: bool) -> int:
    """Find the ended requests of a trace or a minute; explain a trace's only one."""
    check_id("--tenant", args.tenant)
    check_id("--trace", args.trace)
    everybody = operator and args.trace
    tenant = args.tenant or ("" if everybody else DEFAULT_TENANT)
    now = dt.datetime.now().astimezone()
    minute_unix_s = None if args.minute is None else instant_of(args.minute, now)
    question = FindEnded(tenant=tenant, trace_id=args.trace or "", minute_unix_s=minute_unix_s)
    found = asyncio.run(_found(args, question, operator=operator))
    if args.trace and len(found.rows) == 1:
        (row,) = found.rows
        args.request_id, args.tenant, args.trace = row.request_id, row.tenant, None
        return run(args)
    if args.json:
        print_json(found)
    else:
        show_rows(found, Console(soft_wrap=False))
    return 0


def instant_of(text: str, now: dt.datetime) -> float:
    """The Unix time of a minute: `14:05` is the last one of that name. Raises ConfigError."""
    try:
        if "T" in text:
            return dt.datetime.fromisoformat(text).timestamp()
        at = dt.datetime.combine(now, dt.time.fromisoformat(text)).astimezone()
    except ValueError as error:
        raise ConfigError(f"--minute {text}: write it as 14:05") from error
    return (at if at <= now else at - dt.timedelta(days=1)).timestamp()


async def _found(args: argparse.Namespace, question: FindEnded, *, operator: bool) -> FoundEnded:
    user = OPERATOR if operator else User(Role.TENANT, question.tenant)
    subject = subjects.HISTORY_ALL if operator else subjects.history(question.tenant)
    async with connecting(access_of(args), "slackline-explain", user) as bus:
        with awaiting_admission(args.url):
            return await bus.request(subject, question, FoundEnded, timeout_s=ANSWER_S)


async def _asked(
    args: argparse.Namespace, tenant: str, ids: list[str], *, operator: bool
) -> Explanation:
    user = OPERATOR if operator else User(Role.TENANT, tenant)
    subject = subjects.EXPLAIN_ALL if operator else subjects.explain(tenant)
    async with connecting(access_of(args), "slackline-explain", user) as bus:

        async def ask(request_id: str) -> Explanation:
            question = Explain(tenant=tenant, request_id=request_id)
            return await bus.request(subject, question, Explanation, timeout_s=ANSWER_S)

        *firsts, last = ids
        with awaiting_admission(args.url):
            for request_id in firsts:
                try:
                    return await ask(request_id)
                except RefusedError as error:
                    if error.code != "not_found":
                        raise
            return await ask(last)


def show(found: Explanation, console: Console) -> None:
    """The answer in one sentence, then the shares, then the steps."""
    width = min(console.width, 100)
    for text in (f"{found.request_id}: {found.answer}", _facts(found)):
        filled = textwrap.fill(text, width, break_on_hyphens=False).replace(NO_BREAK, " ")
        console.print(escape(filled))
    if found.shares:
        print_table(console, _shares(found))
    for neighbour in found.neighbours:
        whose = f"{neighbour.tenant}/{neighbour.tier}" if neighbour.tenant else "others"
        requests = f"{neighbour.requests} request{'' if neighbour.requests == 1 else 's'}"
        line = f"  beside it: {in_seconds(neighbour.seconds)} of prefills of {whose}, {requests}"
        console.print(escape(line))
    print_table(console, _steps(found))


def show_rows(found: FoundEnded, console: Console) -> None:
    """A line for each request, and how many were late."""
    late = sum(not row.slo_met for row in found.rows)
    more = f", and {found.left_out} others" if found.left_out else ""
    requests = f"{len(found.rows)} request{'' if len(found.rows) == 1 else 's'}"
    print_line(console, f"{requests}, {late} without their SLO{more}")
    if not found.rows:
        return
    out = with_columns(
        Table(box=SIMPLE_HEAD, padding=(0, 1)), "request|tier|came|end|>late by|because"
    )
    for row in found.rows:
        missed = row.first_missed
        late_by, cause = "", ""
        if missed is not None:
            late_by = "it never came"
            if missed.came_s is not None:
                late_by = in_seconds(missed.came_s - missed.due_s)
            cause = WORDS.get(missed.cause, missed.cause.value)
        out.add_row(
            f"{row.tenant}.{row.request_id}",
            row.tier,
            f"{dt.datetime.fromtimestamp(row.arrived_unix_s, dt.UTC).astimezone():%H:%M:%S}",
            row.finish_reason.value,
            late_by,
            cause,
        )
    print_table(console, out)


def _shares(found: Explanation) -> Table:
    out = Table(box=SIMPLE_HEAD, padding=(0, 1))
    out.add_column("where its time went", no_wrap=True)
    until = {share.cause: share for share in found.shares_until_missed}
    columns = ["until it was late"] if until else []
    ended = "whole life" if found.verdict is not None else "so far"
    for column in (*columns, ended):
        out.add_column(column, justify="right")
        out.add_column("", justify="right")
    for share in found.shares:
        cells = [WORDS[share.cause]]
        if until:
            before = until.get(share.cause)
            cells += ["", ""] if before is None else _cells(before.seconds, before.share)
        out.add_row(*cells, *_cells(share.seconds, share.share))
    total_s = sum(share.seconds for share in found.shares)
    until_s = sum(share.seconds for share in until.values())
    out.add_section()
    out.add_row("all", *([in_seconds(until_s), ""] if until else []), in_seconds(total_s), "")
    return out


def _cells(seconds: float, share: float) -> list[str]:
    return [in_seconds(seconds), f"{100 * share:.0f} %"]


def _facts(found: Explanation) -> str:
    """The request and its SLO. No item is broken at the end of a line."""
    bounds = [
        f"{name} {in_seconds(bound_s)}"
        for name, bound_s in (
            ("TTFT", found.slo.ttft_s),
            ("TBT", found.slo.tbt_s),
            ("TTLT", found.slo.ttlt_s),
            ("task's TTLT", found.slo.task_ttlt_s),
        )
        if bound_s is not None
    ]
    state = found.verdict.finish_reason.value if found.verdict else found.state
    first, *rest = bounds or ["none"]
    request = [
        f"{found.tenant}/{found.tier}",
        *([found.model] if found.model else []),
        f"{found.prompt_tokens:,} tokens of prompt",
        f"{found.output_tokens:,} of answer",
        state,
    ]
    return "; ".join(
        ", ".join(item.replace(" ", NO_BREAK) for item in items)
        for items in (request, [f"SLO: {first}", *rest])
    )


def _steps(found: Explanation) -> Table:
    out = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    out.add_column(justify="right", no_wrap=True)
    out.add_column()
    out.add_row("0 ms", "it arrived")
    for step in found.happenings:
        out.add_row(_after(found, step.at_unix_s), escape(_step(step)))
    if found.left_out:
        out.add_row("", f"({found.left_out} steps in the middle are left out)")
    if found.verdict is not None:
        ended = f"it ended: {found.verdict.finish_reason.value}"
        out.add_row(_after(found, found.verdict.ended_unix_s), ended)
    return out


def _step(step: Happening) -> str:
    words = STEPS[step.what].format(replica=step.replica)
    if step.what is Happened.RELEGATED:
        words += f" on {step.replica}" if step.replica else ", into the pool"
    if step.why:
        words += f": {step.why}"
    if step.neighbours:
        words += f"; ahead of it were prefills of {others(step.neighbours)}"
    return words


def _after(found: Explanation, at_unix_s: float) -> str:
    return in_seconds(max(0.0, at_unix_s - found.arrived_unix_s))
