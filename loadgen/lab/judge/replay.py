"""Replays a trace in Dynamo's simulator. Runs in the judge's own environment, which has nothing of
this project: reads a JSON object from the standard input, and writes one.
"""

import importlib
import json
import sys
from typing import Any

KEPT = {
    "cached_fraction": "first_admission_prefix_cache_reused_ratio",
    "ttft_mean_s": "mean_ttft_ms",
    "ttft_p50_s": "median_ttft_ms",
    "ttft_p99_s": "p99_ttft_ms",
    "tpot_mean_s": "mean_tpot_ms",
    "ttlt_mean_s": "mean_e2e_latency_ms",
}


def replay(asked: dict[str, Any]) -> dict[str, float]:
    dynamo = importlib.import_module("dynamo._core")
    engine = {
        "backend": "vllm",
        "block_size": asked["block_tokens"],
        "num_gpu_blocks": asked["kv_blocks"],
        "max_num_seqs": asked["max_num_seqs"],
        "max_num_batched_tokens": asked["max_num_batched_tokens"],
        "emit_kv_events": True,
    }
    link, prefill = asked["link"], asked["prefill"]

    def of(worker_type: str) -> dict[str, Any]:
        return {"engine": engine | link | {"worker_type": worker_type}}

    apart = {
        "prefill_engine_args": of("prefill"),
        "decode_engine_args": of("decode"),
        "num_prefill_workers": prefill,
        "num_decode_workers": asked["replicas"] - prefill,
    }
    together = {"extra_engine_args": {"engine": engine}, "num_workers": asked["replicas"]}
    done = dynamo.run_mocker_trace_replay(
        [asked["trace"]],
        trace_block_size=asked["id_tokens"],
        router_mode=asked["router"],
        **(apart if prefill else together),
        **({"kv_event_lag_ms": asked["lag_ms"]} if asked.get("lag_ms") else {}),
    )
    found = done.metrics if hasattr(done, "metrics") else done.summary
    found = found() if callable(found) else found
    return {
        name: found[theirs] / (1000 if theirs.endswith("_ms") else 1)
        for name, theirs in KEPT.items()
    }


if __name__ == "__main__":
    print(json.dumps(replay(json.load(sys.stdin))))
