"""An independent judge of prefix caches: the same trace through this simulator and through that of
Dynamo (`ai-dynamo-runtime`, its mocker of vLLM), with one timing.

The timing of the mocker is compiled in, so this simulator takes it: the polynomial of its
`perf_model.rs`. Both schedule as vLLM does in chunks.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from loadgen.lab.judge import replay
from loadgen.load.mix import plan_requests
from loadgen.load.trace import Trace
from loadgen.load.workload import Rows
from loadgen.simulator.deployment import Deployment, EngineFacts, ReplicaFacts
from loadgen.simulator.misjudged import BatchTime
from loadgen.simulator.simulation import simulate
from loadgen.simulator.traffic import Traffic
from shared.errors import ConfigError
from shared.perf import profile_file as profiles
from shared.perf.shape import BatchShape
from shared.prefix import CHAIN_TOKENS
from shared.routing.routings import RouterName
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Role, Slo

PYTHON = Path(".venv-judge/bin/python")
PROFILE = "a100-llama3-8b"  # what planners think of the engine; the policy `vllm` does not ask
CONTEXT_TOKENS = 131_072
LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
# Our router weighs times against the time to the first token. Nothing else here looks at an SLO.
ALL = TierSet(name="all", default="all", tiers={"all": Tier(slo=Slo(ttft_s=1.0))})


class Load(Struct, frozen=True, kw_only=True):
    """`times`: the trace's arrivals come so many times as fast. `prefill`: so many replicas compute
    prompts only and the others outputs only, over links of `link_gbit_s`; 0: each does both.
    """

    replicas: int
    kv_tokens: int
    times: float = 1.0
    prefill: int = 0
    link_gbit_s: float = 0.0


class Found(Struct, frozen=True, kw_only=True):
    """`cached_fraction`: of the prompt tokens, found when they were first computed."""

    cached_fraction: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    ttlt_mean_s: float


def polynomial_s(kv_tokens: int) -> BatchTime:
    """The seconds of an iteration in the mocker: a prefill's by its tokens, and decodes' by the
    share of the KV that their contexts have.
    """

    def batch_s(shape: BatchShape) -> float:
        tokens, ms = shape.prefill_tokens, 0.0
        if tokens:
            ms += 4.209989e-07 * tokens * tokens + 1.518344e-02 * tokens + 1.650142e01
        if shape.decodes:
            share = min(1.0, shape.decode_context / kv_tokens)
            ms += max(1.0, -25.74 * share * share + 54.01 * share + 5.74)
        return ms / 1000

    return batch_s


def ours(trace: Trace, load: Load, router: RouterName = "round_robin", lag_s: float = 0.0) -> Found:
    arrivals = [(row.arrival_s or 0.0) / load.times for row in trace.rows]
    deployment = Deployment(
        "vllm",
        PROFILE,
        load.replicas,
        {"router": router, **{name: str(value) for name, value in LIMITS.items()}},
        facts=ReplicaFacts(
            kv_blocks=load.kv_tokens // ReplicaFacts().block_tokens, context_tokens=CONTEXT_TOKENS
        ),
        draft=0.0,
        engine=EngineFacts(PROFILE, 0.0, batch_s=polynomial_s(load.kv_tokens)),
        prefixes_late_s=lag_s,
        roles=[Role.PREFILL] * load.prefill + [Role.DECODE] * (load.prefill > 0),
        link_gbit_s=load.link_gbit_s,
    )
    requests = plan_requests(arrivals, Rows(trace, in_order=True), ALL, seed=1)
    verdicts = [v for v in simulate(Traffic(requests, ALL), deployment).verdicts if v is not None]
    assert len(verdicts) == len(requests)
    ttft_s = np.array([v.ttft_s for v in verdicts], dtype=float)
    return Found(
        cached_fraction=sum(v.cached_tokens for v in verdicts)
        / sum(v.prompt_tokens for v in verdicts),
        ttft_mean_s=float(ttft_s.mean()),
        ttft_p50_s=float(np.percentile(ttft_s, 50)),
        ttft_p99_s=float(np.percentile(ttft_s, 99)),
        tpot_mean_s=float(np.mean([v.mean_tpot_s for v in verdicts if v.mean_tpot_s is not None])),
        ttlt_mean_s=float(np.mean([v.ttlt_s for v in verdicts if v.ttlt_s is not None])),
    )


def theirs(
    trace: Trace, load: Load, folder: Path, router: str = "round_robin", lag_s: float = 0.0
) -> Found:
    """Replays in Dynamo's simulator. Raises ConfigError where it is not installed."""
    if not PYTHON.is_file():
        raise ConfigError(f"the judge is not installed ({PYTHON} is missing): make judge")
    lines = folder / "trace.jsonl"
    lines.write_text("".join(as_lines(trace, load.times)))
    asked: dict[str, Any] = {
        "trace": str(lines),
        "id_tokens": trace.id_tokens,
        "block_tokens": CHAIN_TOKENS,
        "kv_blocks": load.kv_tokens // CHAIN_TOKENS,
        "replicas": load.replicas,
        "router": router,
        "lag_ms": 1000 * lag_s,
        "prefill": load.prefill,
        "link": {
            "kv_bytes_per_token": profiles.read(PROFILE).kv_bytes_per_token,
            "kv_transfer_bandwidth": load.link_gbit_s / 8,  # in GB/s
        },
        **LIMITS,
    }
    ran = subprocess.run(
        [PYTHON, replay.__file__], input=json.dumps(asked), capture_output=True, text=True
    )
    if ran.returncode:
        raise ConfigError(f"the judge failed: {ran.stderr.strip()[-2000:]}")
    return msgspec.json.decode(ran.stdout.splitlines()[-1], type=Found)


def as_lines(trace: Trace, times: float) -> Sequence[str]:
    """The trace as Mooncake's JSON lines."""
    return [
        json.dumps(
            {
                "timestamp": 1000 * (row.arrival_s or 0.0) / times,
                "input_length": row.prompt_tokens,
                "output_length": row.output_tokens,
                "hash_ids": row.ids,
            }
        )
        + "\n"
        for row in trace.rows
    ]
