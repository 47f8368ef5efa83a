"""The names of span attributes and metrics: OpenTelemetry's, vLLM's, then ours (`slackline...`)."""

# Attributes of spans
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
REQUEST_TIER = "openai.request.service_tier"
RESPONSE_TIER = "openai.response.service_tier"
ERROR_TYPE = "error.type"
MESSAGING_SYSTEM = "messaging.system"
REQUEST_KEY = "slackline.request.key"
ATTEMPT = "slackline.attempt"
REPLICA = "slackline.replica"
RELEGATED = "slackline.relegated"
SLO_MET = "slackline.slo_met"
SERVICE_CLASS = "slackline.service_class"
REASON = "slackline.reason"
BEHIND = "slackline.behind"  # the requests whose prefills came first
ANSWER = "slackline.answer"  # the sentence of `slackline explain`
MISSED_TOKEN = "slackline.missed.token"
MISSED_BOUND = "slackline.missed.bound"
MISSED_CAUSE = "slackline.missed.cause"
PLAN_SEQ = "slackline.plan.seq"
BATCH = "slackline.iteration.batch"  # requests in it
BATCH_TOKENS = "slackline.iteration.tokens"
CHUNK = "slackline.iteration.chunk"  # tokens of this request in it
PREDICTED = "slackline.iteration.predicted_s"
MEASURED = "slackline.iteration.measured_s"
IDLE = "slackline.iteration.idle_s"  # the engine waited for its plan

NATS = "nats"  # value of MESSAGING_SYSTEM
PROVIDER_NAME = "slackline"  # value of PROVIDER

# Metrics that vLLM's dashboards know, with its label `model_name`. Ours have further labels:
# `replica` on a worker, `tier` where the end of a request is counted.
TIME_TO_FIRST_TOKEN = "vllm:time_to_first_token_seconds"
INTER_TOKEN_LATENCY = "vllm:inter_token_latency_seconds"
OLD_INTER_TOKEN_LATENCY = "vllm:time_per_output_token_seconds"  # its name until vLLM 0.11
TIME_PER_OUTPUT_TOKEN = "vllm:request_time_per_output_token_seconds"
E2E_LATENCY = "vllm:e2e_request_latency_seconds"
QUEUE_TIME = "vllm:request_queue_time_seconds"
PREFILL_TIME = "vllm:request_prefill_time_seconds"
DECODE_TIME = "vllm:request_decode_time_seconds"
INFERENCE_TIME = "vllm:request_inference_time_seconds"
REQUEST_PROMPT_TOKENS = "vllm:request_prompt_tokens"
REQUEST_GENERATION_TOKENS = "vllm:request_generation_tokens"
REQUEST_LONGEST = "vllm:request_max_num_generation_tokens"
REQUEST_MAX_TOKENS_ASKED = "vllm:request_params_max_tokens"
REQUEST_SUCCESS = "vllm:request_success_total"  # finished_reason
PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
ITERATION_TOKENS = "vllm:iteration_tokens_total"  # a histogram, in spite of its name
PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"  # verifications
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"  # position, from 0
REQUESTS_RUNNING = "vllm:num_requests_running"
REQUESTS_WAITING = "vllm:num_requests_waiting"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"  # a fraction from 0 to 1, in spite of its name

# Metrics of OpenTelemetry's GenAI convention, by OTLP, and their buckets (seconds)
GEN_AI_DURATION = "gen_ai.server.request.duration"
GEN_AI_TTFT = "gen_ai.server.time_to_first_token"
GEN_AI_TPOT = "gen_ai.server.time_per_output_token"
RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_DURATION_BUCKETS_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
GEN_AI_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
GEN_AI_TPOT_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip

# Buckets of ours for times that callers wait, up to a day, which a batch may take.
LONG_S = (20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0, 7200.0, 14400.0, 28800.0, 86400.0)
TTFT_BUCKETS_S = (*GEN_AI_TTFT_BUCKETS_S, *LONG_S)
DURATION_BUCKETS_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, *LONG_S,
)  # fmt: skip
TPOT_BUCKETS_S = (0.005, *GEN_AI_TPOT_BUCKETS_S, 5.0, 10.0, 40.0, 160.0, 640.0, 7200.0, 86400.0)
TOKENS_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip

# The names that Prometheus' clients give to the numbers of a process
PROCESS_CPU = "process_cpu_seconds_total"
PROCESS_RESIDENT = "process_resident_memory_bytes"
PROCESS_VIRTUAL = "process_virtual_memory_bytes"
PROCESS_START = "process_start_time_seconds"
PROCESS_OPEN_FILES = "process_open_fds"
PROCESS_MOST_FILES = "process_max_fds"

# Our own; the comment names the labels
REQUESTS = "slackline_requests_total"  # tier, verdict
OFFERED = "slackline_offered_total"  # tier
SLO_VIOLATIONS = "slackline_slo_violation_total"  # tier, type
RELEGATIONS = "slackline_relegated_total"  # tier
REFUSALS = "slackline_refused_total"  # tier, code
TENANT_REQUESTS = "slackline_tenant_requests_total"  # tenant, verdict
TENANT_RELEGATIONS = "slackline_tenant_relegated_total"  # tenant
TENANT_PROMPT_TOKENS = "slackline_tenant_prompt_tokens_total"  # tenant
TENANT_OUTPUT_TOKENS = "slackline_tenant_output_tokens_total"  # tenant
TIER_OBJECTIVE = "slackline_tier_objective"  # tier
GOODPUT_REQUESTS = "slackline_goodput_requests_total"  # tier
GOODPUT_TOKENS = "slackline_goodput_tokens_total"  # tier
TTLT = "slackline_time_to_last_token_seconds"  # tier
TASK_LEFT = "slackline_task_left_seconds"  # tier
HOPS = "slackline_hops"  # tier
OFFERS = "slackline_offers_total"  # answer
OFFER_TIME = "slackline_offer_seconds"
REPLICAS = "slackline_replicas"
REPLICAS_LOST = "slackline_replicas_lost_total"
REPLICAS_NEEDED = "slackline_replicas_needed"  # model_name, tier
POOL_REQUESTS = "slackline_backlog_requests"
POOL_TOKENS = "slackline_backlog_tokens"
POOL_WAIT = "slackline_backlog_seconds"
CLOCK_OFFSET = "slackline_clock_offset_seconds"
HOST_CLOCK_AHEAD = "slackline_host_clock_ahead_seconds"
LAST_SWEEP = "slackline_last_sweep_timestamp_seconds"
STREAM_BYTES = "slackline_stream_bytes"  # stream
STREAM_LIMIT = "slackline_stream_limit_bytes"  # stream
CERTIFICATE_END = "slackline_certificate_end_timestamp_seconds"  # certificate
BUILD_INFO = "slackline_build_info"
FIT_ERROR = "slackline_profile_fit_error_ratio"  # regime
RESIDUAL = "slackline_profile_residual_ratio"  # replica
BIAS = "slackline_profile_bias_ratio"  # replica
GAMMA = "slackline_profile_gamma_ratio"  # replica, regime
ITERATION = "slackline_iteration_seconds"  # replica, as in all of a worker's
PREDICTED_ITERATION = "slackline_predicted_iteration_seconds"
OUTSIDE = "slackline_outside_model_seconds"
BUBBLE = "slackline_bubble_seconds"
CHUNK_TOKENS = "slackline_chunk_tokens"
COMPUTED_TOKENS = "slackline_computed_tokens_total"
CACHED_TOKENS = "slackline_cached_tokens_total"
HELD_REQUESTS = "slackline_held_requests"
KV_FREE_BLOCKS = "slackline_kv_free_blocks"
KV_FETCHED = "slackline_kv_fetched_tokens_total"
KV_FETCH_TIME = "slackline_kv_fetch_seconds_total"
PLANS = "slackline_plans_total"  # replica
PREFIX_EXPECTED = "slackline_prefix_expected_tokens_total"  # replica
PREFIX_FOUND = "slackline_prefix_found_tokens_total"  # replica
PREFIXES_LACKING = "slackline_prefixes_lacking"
ACKS = "slackline_acks_total"  # replica
RESYNCS = "slackline_resyncs_total"  # replica
PLAN_STEP = "slackline_plan_step_seconds"  # replica
PLAN_AHEAD = "slackline_plan_ahead_seconds"  # replica
ACK_LATENCY = "slackline_ack_latency_seconds"  # replica
LEAD = "slackline_lead_seconds"  # replica
SLACK = "slackline_slack_seconds"  # replica
BEST_EFFORT_HELD = "slackline_best_effort_held"  # replica

# An iteration takes 5 to 100 ms; the gap between two, and a planner's step, less than 1.
ITERATION_BUCKETS_S = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.0,
    5.0,
    *LONG_S,
)
STEP_BUCKETS_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0,
    2.0, 5.0, *LONG_S,
)  # fmt: skip
HOPS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
# below 0 a token is late
SLACK_BUCKETS_S = (
    -600.0, -60.0, -10.0, -1.0, -0.1, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0,
    600.0, 3600.0, 86400.0,
)  # fmt: skip
