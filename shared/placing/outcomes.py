"""The metrics of what became of requests, by outcome, so that attainment can be read as a share of
what was *offered*. A request is offered if it ended, or each time it was refused for want of
capacity. It is not offered if its client cancelled it before anything was late, if no engine could
serve it, or if its tenant was over its own limit. Each offered request has either met its SLO or
is one violation.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from shared.core.record.verdict import GOOD_ENDS
from shared.rules.tiers import Tier
from shared.schemas import Record
from shared.store.usage import tokens_used
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Family, Histogram, Registry
from shared.telemetry.telemetry import TraceParent
from shared.vocabulary import FinishReason, Missed

MET, REFUSED, LIMITED = "met", "refused", "limited"
KINDS = (Missed.TTFT.value, Missed.TBT.value, Missed.TTLT.value, Missed.END.value, REFUSED)
NO_ROOM = "slow_down"  # the code of a refusal for want of capacity
RATE_LIMITED = "rate_limit_exceeded"  # its tenant is over its own limit: no fault of the fleet
OTHER = "other"  # in place of a tier that does not exist
TENANT_LIMIT = 64  # tenants that are counted by name
MODEL_LIMIT = 16  # models counted by name, since a worker may announce another each time
# finish reasons as vLLM names them
OF_VLLM = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


class Outcomes:
    """The counts of one process. `models` and `tiers`: the fleet's, which may change. Their counts
    are shown from 0 on, since a rate is computed from an earlier number.
    """

    def __init__(
        self,
        metrics: Registry,
        models: Callable[[], Collection[str]],
        tiers: Callable[[], Mapping[str, Tier]] = dict,
    ) -> None:
        self._models, self._tiers = models, tiers
        self._begun: set[tuple[str, str]] = set()  # tiers and models that are shown
        made, tier = metrics, ("tier",)
        of_model, few = ("model_name", "tier"), {"model_name": MODEL_LIMIT}

        def per_model(name: str, text: str, bounds: Sequence[float]) -> Family[Histogram]:
            return made.histogram(name, text, bounds, of_model, few)

        self._requests = made.counter(
            names.REQUESTS, "Requests ended, by verdict.", ("verdict", *of_model), few
        )
        self._offered = made.counter(
            names.OFFERED,
            "Requests whose outcome is known, those refused for room included.",
            of_model,
            few,
        )
        self._violations = made.counter(
            names.SLO_VIOLATIONS,
            "Offered requests that did not meet their SLO, by the bound that was broken.",
            ("type", *of_model),
            few,
        )
        self._relegations = made.counter(
            names.RELEGATIONS, "Requests that were best-effort at some time.", of_model, few
        )
        self._refusals = made.counter(
            names.REFUSALS,
            "Requests refused at the door: nothing of them is stored.",
            ("tier", "code"),
        )
        self._tenants = made.counter(
            names.TENANT_REQUESTS,
            "Requests ended or refused, by tenant and verdict.",
            ("tenant", "verdict"),
            {"tenant": TENANT_LIMIT},
        )
        self._tenants_relegated = made.counter(
            names.TENANT_RELEGATIONS,
            "Requests that were best-effort at some time, by tenant.",
            ("tenant",),
            {"tenant": TENANT_LIMIT},
        )
        self._prompt_tokens = made.counter(
            names.TENANT_PROMPT_TOKENS,
            "Tokens of prompts of ended requests that have any output.",
            ("tenant",),
            {"tenant": TENANT_LIMIT},
        )
        self._output_tokens = made.counter(
            names.TENANT_OUTPUT_TOKENS,
            "Output tokens of ended requests.",
            ("tenant",),
            {"tenant": TENANT_LIMIT},
        )
        self._objectives = made.gauge(
            names.TIER_OBJECTIVE,
            "The share of the offered requests of a tier that is to meet its SLO.",
            tier,
        )
        made.before_scrape(self._show_objectives)
        self._good = made.counter(
            names.GOODPUT_REQUESTS, "Requests that met their SLO.", of_model, few
        )
        self._good_tokens = made.counter(
            names.GOODPUT_TOKENS, "Output tokens of requests that met their SLO.", of_model, few
        )
        self._hops = made.histogram(
            names.HOPS,
            "Places that a request had beyond its first: declined, moved or lost there.",
            names.HOPS_BUCKETS,
            tier,
        )
        self._task_left = made.histogram(
            names.TASK_LEFT,
            "Time left to the task when one of its rounds ended; below 0: it is late.",
            names.SLACK_BUCKETS_S,
            tier,
        )
        self._ttlt = made.histogram(
            names.TTLT, "Arrival to last token.", names.DURATION_BUCKETS_S, tier
        )
        self._ttft = per_model(
            names.TIME_TO_FIRST_TOKEN, "Arrival to first token.", names.TTFT_BUCKETS_S
        )
        self._tpot = per_model(
            names.TIME_PER_OUTPUT_TOKEN,
            "Mean time per output token of a request, after its first.",
            names.TPOT_BUCKETS_S,
        )
        tokens = names.TOKENS_BUCKETS
        self._e2e = per_model(names.E2E_LATENCY, "Arrival to end.", names.DURATION_BUCKETS_S)
        self._prompt = per_model(names.REQUEST_PROMPT_TOKENS, "Prompt of a request.", tokens)
        self._output = per_model(names.REQUEST_GENERATION_TOKENS, "Output of a request.", tokens)
        # vLLM shows the longest of n outputs; here each choice is a request of its own
        made.alias(names.REQUEST_LONGEST, self._output)
        self._asked = per_model(names.REQUEST_MAX_TOKENS_ASKED, "The longest output.", tokens)
        self._success = made.counter(
            names.REQUEST_SUCCESS,
            "Requests ended, as vLLM counts.",
            ("model_name", "finished_reason"),
            few,
        )
        made.before_scrape(self._begin)
        for name in self._tiers():
            self._refusals.labels(name, NO_ROOM)

    def _begin(self) -> None:
        """Show the counts of the tiers at each model."""
        for model in sorted(self._models())[:MODEL_LIMIT]:
            for name in self._tiers():
                if (name, model) in self._begun:
                    continue
                self._begun.add((name, model))
                for counter in (self._offered, self._relegations, self._good, self._good_tokens):
                    counter.labels(model, name)
                for verdict in (MET, "missed"):
                    self._requests.labels(verdict, model, name)
                for kind in KINDS:
                    self._violations.labels(kind, model, name)

    def _model(self, record: Record | None = None) -> str:
        """The model of a request, or the only one of the fleet; empty: it is not known."""
        if record is not None and record.model:
            return record.model
        known = self._models()
        return next(iter(known)) if len(known) == 1 else ""

    def _show_objectives(self) -> None:
        for name, tier in self._tiers().items():
            self._objectives.labels(name).set(tier.objective)

    def refused(self, tenant: str, tier: str, code: str, record: Record | None = None) -> None:
        """A request was refused before it was stored. Tenant and tier are the client's words.
        `record`: what would have been stored; None: the request was not read.
        """
        tier, model = tier if tier in self._tiers() else OTHER, self._model(record)
        self._refusals.labels(tier, code).add()
        if code == RATE_LIMITED:
            self._tenants.labels(tenant, LIMITED).add()
        if code == NO_ROOM:
            self._offered.labels(model, tier).add()
            self._violations.labels(REFUSED, model, tier).add()
            self._tenants.labels(tenant, REFUSED).add()

    def ended(self, record: Record) -> None:
        verdict, tier, model = record.verdict, record.tier, self._model(record)
        tenant = record.key.partition(".")[0]
        assert verdict is not None
        finished = verdict.finish_reason in GOOD_ENDS
        told = MET if verdict.slo_met else "missed" if finished else verdict.finish_reason.value
        self._requests.labels(told, model, tier).add()
        self._tenants.labels(tenant, told).add()
        prompt_tokens, output_tokens = tokens_used(verdict)
        self._prompt_tokens.labels(tenant).add(prompt_tokens)
        self._output_tokens.labels(tenant).add(output_tokens)
        if verdict.slo_met:
            self._offered.labels(model, tier).add()
            self._good.labels(model, tier).add()
            self._good_tokens.labels(model, tier).add(verdict.output_tokens)
        elif broke := violation(record):
            self._offered.labels(model, tier).add()
            self._violations.labels(broke, model, tier).add()
        if verdict.relegated:
            self._relegations.labels(model, tier).add()
            self._tenants_relegated.labels(tenant).add()
        self._hops.labels(tier).observe(max(verdict.attempts - 1, 0))
        self._success.labels(model, OF_VLLM.get(verdict.finish_reason, "error")).add()
        trace_id = kept_trace(record.traceparent)
        if verdict.ttft_s is not None:
            self._ttft.labels(model, tier).observe(verdict.ttft_s, 1, trace_id)
        if not finished:
            return
        if verdict.mean_tpot_s is not None:
            self._tpot.labels(model, tier).observe(verdict.mean_tpot_s, 1, trace_id)
        if verdict.ttlt_s is not None:
            self._ttlt.labels(tier).observe(verdict.ttlt_s, 1, trace_id)
        if verdict.task_left_s is not None:
            self._task_left.labels(tier).observe(verdict.task_left_s, 1, trace_id)
        lasted_s = verdict.ended_unix_s - record.arrived_unix_s
        self._e2e.labels(model, tier).observe(lasted_s, 1, trace_id)
        self._prompt.labels(model, tier).observe(verdict.prompt_tokens)
        self._output.labels(model, tier).observe(verdict.output_tokens)
        self._asked.labels(model, tier).observe(record.max_tokens)


def violation(record: Record) -> str:
    """The kind of violation of a request that did not meet its SLO; empty if it was not offered."""
    verdict = record.verdict
    assert verdict is not None
    if verdict.finish_reason is FinishReason.INVALID:
        return ""
    if verdict.finish_reason is not FinishReason.CANCELLED:
        return verdict.missed.value
    slo, measure = record.judged_slo, record.resume.measure
    if not measure.tokens and verdict.ended_unix_s > slo.first_due_unix_s(record.arrived_unix_s):
        return Missed.TTFT.value
    if measure.late_tokens or verdict.ended_unix_s > measure.next_due_unix_s:
        return Missed.TBT.value
    if verdict.ended_unix_s > slo.last_due_unix_s(record.arrived_unix_s):
        return Missed.TTLT.value
    return ""


def kept_trace(traceparent: str) -> str:
    """The trace's id if the trace is recorded, else empty."""
    parent = TraceParent.parse(traceparent)
    return f"{parent.trace_id:032x}" if parent is not None and parent.sampled else ""
