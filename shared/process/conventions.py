"""The names of span attributes and metrics: those of OpenTelemetry's conventions and of vLLM first,
then our own.

Sources: OpenTelemetry semantic conventions (GenAI, messaging), vLLM's metrics page. Every name of
our own begins with `slackline`.
"""

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

NATS = "nats"  # value of MESSAGING_SYSTEM
PROVIDER_NAME = "slackline"  # value of PROVIDER

# Metrics that dashboards know, with vLLM's labels
TIME_TO_FIRST_TOKEN = "vllm:time_to_first_token_seconds"
E2E_LATENCY = "vllm:e2e_request_latency_seconds"
PROMPT_TOKENS = "vllm:prompt_tokens_total"  # label model_name, as in the next ones
GENERATION_TOKENS = "vllm:generation_tokens_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"  # verifications
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
REQUESTS_RUNNING = "vllm:num_requests_running"
REQUESTS_WAITING = "vllm:num_requests_waiting"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"  # a fraction from 0 to 1, in spite of its name

# GenAI metrics under their Prometheus names, with the buckets of the convention (seconds)
DURATION_BUCKETS_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
TTFT_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)

# Our own; the comment names the labels
REQUESTS = "slackline_requests_total"  # tier, verdict
SLO_VIOLATIONS = "slackline_slo_violation_total"  # tier, type
RELEGATIONS = "slackline_relegated_total"  # tier
REFUSALS = "slackline_refused_total"  # code
CLOCK_OFFSET = "slackline_clock_offset_seconds"
BUILD_INFO = "slackline_build_info"
FIT_ERROR = "slackline_profile_fit_error_ratio"  # regime
RESIDUAL = "slackline_profile_residual_ratio"  # replica
BIAS = "slackline_profile_bias_ratio"  # replica
GAMMA = "slackline_profile_gamma_ratio"  # replica, regime
ITERATION = "slackline_iteration_seconds"
OUTSIDE = "slackline_outside_model_seconds"
BUBBLE = "slackline_bubble_seconds"
COMPUTED_TOKENS = "slackline_computed_tokens_total"
CACHED_TOKENS = "slackline_cached_tokens_total"
HELD_REQUESTS = "slackline_held_requests"
KV_FREE_BLOCKS = "slackline_kv_free_blocks"
PLANS = "slackline_plans_total"  # replica
ACKS = "slackline_acks_total"  # replica
RESYNCS = "slackline_resyncs_total"  # replica
PLAN_STEP = "slackline_plan_step_seconds"  # replica

# Our own buckets: an iteration takes 5 to 100 ms; the gap between two, and a step of the planner,
# should take less than 1 ms.
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
)
STEP_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
