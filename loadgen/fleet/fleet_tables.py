"""A fleet in a terminal: the tables of `slackline status` and `slackline top`."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from loadgen.load.report import percent, seconds
from loadgen.tables import with_columns
from shared.console.collector import FRESH_S
from shared.console.picture import Iteration, Picture, Quantiles, ReplicaPicture, RequestRow
from shared.vocabulary import Role, Slo

BLOCKS = " ▁▂▃▄▅▆▇█"
UP = "up"
STRIP = 20  # iterations in a terminal
GOOD, BAD = 0.99, 0.9  # of requests that met their SLO: green from, red below


def headline(picture: Picture) -> str:
    """The fleet's state in one line."""
    live = [r for r in picture.replicas if r.heard_s <= FRESH_S]
    models = ", ".join(sorted({r.model for r in live})) or "no model"
    pool = f", {picture.pool_requests} in the best-effort pool" if picture.pool_requests else ""
    return (
        f"{models} on {len(live)} of {len(picture.replicas)} replicas: "
        f"{sum(r.running for r in live)} decode, {sum(r.waiting for r in live)} wait for their "
        f"first token, {sum(r.best_effort for r in live)} best-effort{pool}"
    )


def tier_table(picture: Picture) -> Table:
    """Attainment over the window; p50 and p99 of each latency, and below them its bound."""
    latencies = ">TTFT p50 / p99|>TBT p50 / p99|>TTLT p50 / p99"
    out = _table(f"tier|>SLO met|{latencies}|missed by")
    for tier in picture.tiers:
        part, slo = (tier.met / tier.offered if tier.offered else None), tier.slo or Slo()
        out.add_row(
            Text(f"{tier.name}\nby {slo.definition}" if slo.tbt_s else tier.name),
            Text(f"{percent(part)}\nof {tier.offered}", style=_colour(part)),
            _beside(tier.ttft, slo.ttft_s),
            _beside(tier.tbt, slo.tbt_s),
            _beside(tier.ttlt, slo.ttlt_s),
            ", ".join(f"{name} {n}" for name, n in tier.missed.items()),
        )
    return out


def replica_table(picture: Picture) -> Table:
    """State and work of each replica."""
    several = len({replica.model for replica in picture.replicas}) > 1
    heads = "|>KV|>decode|>wait|>best-effort|>backlog|>tokens/s|>busy|state"
    out = _table(f"replica{'|model' if several else ''}{heads}")
    for replica in picture.replicas:
        state, (name, *held) = _state(replica), _holds(replica)
        out.add_row(
            name,
            *([Text(_short(replica.model, 24))] if several else []),
            *held,
            seconds(replica.backlog_s),
            f"{replica.tokens_s:.0f}",
            f"{100 * replica.busy:.0f} %",
            Text(state, style="" if state == UP else "bold red"),
        )
    return out


def strip_table(picture: Picture) -> Table:
    """Each replica with its last iterations: a block for each, as high as the iteration was long,
    and how their time compares with the predicted one.
    """
    out = _table("replica|>KV|>decode|>wait|>best|>tok/s|>ran/plan|>idle|last iterations")
    for replica in picture.replicas:
        recent, state = replica.iterations[-STRIP:], _state(replica)
        ran, idle = _timing(recent)
        out.add_row(
            *_holds(replica),
            f"{replica.tokens_s:.0f}",
            ran,
            idle,
            _strip(recent) if state == UP else Text(state, style="bold red"),
        )
    return out


def request_table(rows: Sequence[RequestRow]) -> Table:
    """Requests, least slack first. Tokens: of the prompt while it is computed, then of output."""
    out = _table("request|tier|at|>tokens|>age|>slack")
    for row in rows:
        late = row.slack_s is not None and row.slack_s < 0
        slack = "-" if row.slack_s is None else _signed(row.slack_s)
        out.add_row(
            Text(_short(row.key, 20)),
            Text(_short(row.tier, 16)),
            Text(_short(row.replica, 12)),
            f"{row.generated_tokens} out"
            if row.phase == "decode"
            else f"{row.computed_tokens}/{row.prompt_tokens}",
            seconds(row.age_s),
            Text("best-effort" if row.best_effort else slack, style="bold red" if late else ""),
        )
    return out


def _table(heads: str) -> Table:
    return with_columns(Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)), heads)


def _holds(replica: ReplicaPicture) -> list[str | Text]:
    """The name, the KV in use, and the numbers of requests: decoding, waiting, best-effort."""
    used = 1 - replica.kv_free_blocks / replica.kv_blocks if replica.kv_blocks else 0.0
    counts = (replica.running, replica.waiting, replica.best_effort)
    return [Text(replica.name), f"{100 * used:.0f} %", *map(str, counts)]


def _state(replica: ReplicaPicture) -> str:
    if replica.heard_s > FRESH_S:
        return f"silent for {replica.heard_s:.0f} s"
    if not replica.accepting:
        return "takes no requests"
    return UP if replica.role == Role.BOTH else f"{UP}, {replica.role}"


def _beside(found: Quantiles, bound_s: float | None) -> Text:
    """The quantiles, and below them the bound; red where half of them are over it."""
    owed = f"\nof {seconds(bound_s)}" if bound_s is not None else ""
    if found.p50_s is None:
        return Text(f"-{owed}", style="dim")
    over = bound_s is not None and found.p50_s > bound_s
    text = f"{seconds(found.p50_s)} / {seconds(found.p99_s)}{owed}"
    return Text(text, style="bold red" if over else "")


def _colour(part: float | None) -> str:
    if part is None:
        return "dim"
    return "green" if part >= GOOD else "bold red" if part < BAD else "yellow"


def _signed(value_s: float) -> str:
    return f"-{seconds(-value_s)}" if value_s < 0 else seconds(value_s)


def _short(name: str, most: int) -> str:
    """The name, its middle left out where it is longer than `most`."""
    head = most // 2 - 1
    return name if len(name) <= most else f"{name[:head]}…{name[head + 1 - most :]}"


def _strip(recent: Sequence[Iteration]) -> Text:
    """A block for each iteration, as high as it was long; yellow if it had prefill."""
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


def _timing(recent: Sequence[Iteration]) -> tuple[str, str]:
    """The time of these iterations over the predicted one, and the part of it that was idle."""
    known = [i for i in recent if i.predicted_s > 0]
    ran_s, idle_s = sum(i.exec_s for i in known), sum(i.idle_s for i in known)
    if ran_s <= 0:
        return "-", "-"
    predicted_s = sum(i.predicted_s for i in known)
    return f"{ran_s / predicted_s:.2f} x", f"{100 * idle_s / (ran_s + idle_s):.0f} %"
