"""A fleet in a terminal: the tables of `slackline status` and `slackline top`."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from loadgen.load.report import percent, promise, seconds
from shared.console.collector import FRESH_S
from shared.console.picture import Iteration, Picture, Quantiles, ReplicaPicture, RequestRow

BLOCKS = " ▁▂▃▄▅▆▇█"
STRIP = 24  # iterations in a terminal
GOOD, BAD = 0.99, 0.9  # of requests that met their SLO: green from, red below


def headline(picture: Picture) -> str:
    """The fleet in one line."""
    live = [r for r in picture.replicas if r.heard_s <= FRESH_S]
    models = ", ".join(sorted({r.model for r in live})) or "no model"
    pool = f", {picture.pool_requests} in the best-effort pool" if picture.pool_requests else ""
    return (
        f"{models} on {len(live)} of {len(picture.replicas)} replicas: "
        f"{sum(r.running for r in live)} decode, {sum(r.waiting for r in live)} wait for their "
        f"first token, {sum(r.best_effort for r in live)} best-effort{pool}"
    )


def tier_table(picture: Picture) -> Table:
    """Attainment over the window, and latencies beside what is owed."""
    out = _table()
    out.add_column("tier")
    for name in ("SLO met", "of", "missed by", "TTFT p50 / p99", "TBT p50 / p99", "TTLT p99"):
        out.add_column(name, justify="left" if name == "missed by" else "right")
    out.add_column("owed")
    for tier in picture.tiers:
        part = tier.met / tier.offered if tier.offered else None
        missed = ", ".join(f"{name} {n}" for name, n in tier.missed.items())
        out.add_row(
            Text(tier.name),
            Text(percent(part), style=_colour(part)),
            str(tier.offered),
            missed,
            _pair(tier.ttft),
            _pair(tier.tbt),
            seconds(tier.ttlt.p99_s),
            promise(tier.slo),
        )
    return out


def replica_table(picture: Picture) -> Table:
    """State and work of each replica."""
    out = _table()
    out.add_column("replica")
    for name in ("KV", "decode", "wait", "best-effort", "backlog", "tokens/s", "busy"):
        out.add_column(name, justify="right")
    out.add_column("state")
    for replica in picture.replicas:
        used = 1 - replica.kv_free_blocks / replica.kv_blocks if replica.kv_blocks else 0.0
        out.add_row(
            Text(replica.name),
            f"{100 * used:.0f} %",
            str(replica.running),
            str(replica.waiting),
            str(replica.best_effort),
            seconds(replica.backlog_s),
            f"{replica.tokens_s:.0f}",
            f"{100 * replica.busy:.0f} %",
            Text(_state(replica), style="" if _state(replica) == "up" else "bold red"),
        )
    return out


def strips(picture: Picture) -> Table:
    """The last iterations of each replica: their time, and where prefill ran."""
    out = Table(box=None, show_header=False, pad_edge=False)
    out.add_column(no_wrap=True)
    out.add_column(no_wrap=True)
    out.add_column(no_wrap=True, justify="right")
    for replica in picture.replicas:
        recent = replica.iterations[-STRIP:]
        out.add_row(Text(replica.name), _strip(recent), _timing(recent))
    return out


def request_table(rows: Sequence[RequestRow]) -> Table:
    """Requests, those with the least slack first."""
    out = _table()
    out.add_column("request", overflow="fold")
    out.add_column("tier", overflow="fold")
    out.add_column("at")
    out.add_column("phase")
    for name in ("age", "prompt", "output", "slack"):
        out.add_column(name, justify="right")
    for row in rows:
        late = row.slack_s is not None and row.slack_s < 0
        slack = "-" if row.slack_s is None else _signed(row.slack_s)
        out.add_row(
            Text(_short(row.key)),
            Text(row.tier),
            Text(row.replica),
            "best-effort" if row.best_effort else row.phase,
            seconds(row.age_s),
            f"{row.computed_tokens}/{row.prompt_tokens}",
            str(row.generated_tokens),
            Text(slack, style="bold red" if late else ""),
        )
    return out


def _table() -> Table:
    return Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _state(replica: ReplicaPicture) -> str:
    if replica.heard_s > FRESH_S:
        return f"silent for {replica.heard_s:.0f} s"
    return "up" if replica.accepting else "takes no requests"


def _pair(found: Quantiles) -> str:
    if found.p50_s is None:
        return "-"
    return f"{seconds(found.p50_s)} / {seconds(found.p99_s)}"


def _colour(part: float | None) -> str:
    if part is None:
        return "dim"
    return "green" if part >= GOOD else "bold red" if part < BAD else "yellow"


def _signed(value_s: float) -> str:
    return f"-{seconds(-value_s)}" if value_s < 0 else seconds(value_s)


def _short(key: str) -> str:
    """The key, its middle left out where it is long."""
    return key if len(key) <= 24 else f"{key[:14]}…{key[-9:]}"


def _strip(recent: Sequence[Iteration]) -> Text:
    """A block for each iteration, as high as it was long; with prefill in yellow."""
    longest = max((i.exec_s for i in recent), default=0.0)
    out = Text(" " * (STRIP - len(recent)))
    for iteration in recent:
        level = round(8 * iteration.exec_s / longest) if longest else 0
        style = (
            "yellow"
            if iteration.prefill_tokens
            else "magenta"
            if iteration.draft_tokens
            else "blue"
        )
        out.append(BLOCKS[max(level, 1)], style=style)
    return out


def _timing(recent: Sequence[Iteration]) -> str:
    """The mean time of these iterations beside the predicted one, and the idle time."""
    known = [i for i in recent if i.predicted_s > 0]
    if not known:
        return "no iteration"
    ran_s, idle_s = sum(i.exec_s for i in known), sum(i.idle_s for i in known)
    predicted_s = sum(i.predicted_s for i in known)
    return (
        f"{1000 * ran_s / len(known):5.1f} ms each, {1000 * predicted_s / len(known):5.1f} "
        f"predicted, idle {100 * idle_s / (ran_s + idle_s):3.0f} %"
    )
