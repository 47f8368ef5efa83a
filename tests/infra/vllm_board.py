"""The queries of vLLM's own Grafana board, which must work on our metrics (test_boards.py): those
of its board of 2025 and of the one before, which had `time_per_output_token`.

`vllm:num_requests_swapped` of vLLM's first engine is left out: nothing is swapped here, nor in
vLLM's present engine.
"""

MODEL = '{model_name="$model_name"}'
QUANTILES = tuple(
    f"histogram_quantile({q}, sum by(le) (rate(NAME_bucket{MODEL}[$__rate_interval])))"
    for q in (0.99, 0.95, 0.9, 0.5)
)
MEAN = f"rate(NAME_sum{MODEL}[$__rate_interval]) / rate(NAME_count{MODEL}[$__rate_interval])"
LATENCY = (*QUANTILES, MEAN)
HEATMAP = (f"sum by(le) (increase(NAME_bucket{MODEL}[$__rate_interval]))",)
TIME = (f"rate(NAME_sum{MODEL}[$__rate_interval])",)
READ = {
    "vllm:e2e_request_latency_seconds": LATENCY,
    "vllm:time_to_first_token_seconds": LATENCY,
    "vllm:inter_token_latency_seconds": LATENCY,
    "vllm:time_per_output_token_seconds": LATENCY,
    "vllm:prompt_tokens_total": (f"rate(NAME{MODEL}[$__rate_interval])",),
    "vllm:generation_tokens_total": (f"rate(NAME{MODEL}[$__rate_interval])",),
    "vllm:num_requests_running": (f"NAME{MODEL}",),
    "vllm:num_requests_waiting": (f"NAME{MODEL}",),
    "vllm:kv_cache_usage_perc": (f"NAME{MODEL}",),
    "vllm:request_prompt_tokens": HEATMAP,
    "vllm:request_generation_tokens": HEATMAP,
    "vllm:request_success_total": (
        f"sum by(finished_reason) (increase(NAME{MODEL}[$__rate_interval]))",
    ),
    "vllm:request_queue_time_seconds": TIME,
    "vllm:request_prefill_time_seconds": TIME,
    "vllm:request_decode_time_seconds": TIME,
    "vllm:request_max_num_generation_tokens": TIME,
}
EXPRS = tuple(one.replace("NAME", name) for name, reads in READ.items() for one in reads)
VARIABLE = "model_name"  # label_values(model_name)
