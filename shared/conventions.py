"""Names that others already know: OpenTelemetry's GenAI and messaging conventions, vLLM's metrics; then our own.

Sources: OpenTelemetry semantic conventions (GenAI, messaging), vLLM's metrics page. Anything of ours begins with `slackline`.
"""

# Attributes of spans
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
REQUEST_TIER = "openai.request.service_tier"
RESPONSE_TIER = "openai.response.service_tier"
ERROR_TYPE = "error.type"
MESSAGING_SYSTEM = "messaging.system"
MESSAGING_DESTINATION = "messaging.destination.name"
REQUEST_KEY = "slackline.request.key"
ATTEMPT = "slackline.attempt"
REPLICA = "slackline.replica"
HOPS = "slackline.hops"
RELEGATED = "slackline.relegated"
SLO_MET = "slackline.slo_met"
SERVICE_CLASS = "slackline.service_class"
PLAN_SEQ = "slackline.plan.seq"

NATS = "nats"  # value of MESSAGING_SYSTEM
PROVIDER_NAME = "slackline"  # value of PROVIDER

# Metrics known to dashboards; labels as vLLM has them
VLLM_LABELS = ("model_name",)
REQUESTS_RUNNING = "vllm:num_requests_running"
REQUESTS_WAITING = "vllm:num_requests_waiting"
KV_CACHE_USAGE = "vllm:kv_cache_usage_perc"
TIME_TO_FIRST_TOKEN = "vllm:time_to_first_token_seconds"
INTER_TOKEN_LATENCY = "vllm:inter_token_latency_seconds"
TIME_PER_OUTPUT_TOKEN = "vllm:request_time_per_output_token_seconds"
QUEUE_TIME = "vllm:request_queue_time_seconds"
E2E_LATENCY = "vllm:e2e_request_latency_seconds"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"

# GenAI metrics under their Prometheus names, with the buckets the convention gives (seconds)
GEN_AI_REQUEST_DURATION = "gen_ai_server_request_duration_seconds"
GEN_AI_TIME_TO_FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
GEN_AI_TIME_PER_OUTPUT_TOKEN = "gen_ai_server_time_per_output_token_seconds"
DURATION_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

# Ours
REQUESTS = "slackline_requests_total"  # tier, verdict
SLO_VIOLATIONS = "slackline_slo_violation_total"  # tier, type
RELEGATIONS = "slackline_relegated_total"  # tier
OFFERS = "slackline_offers_total"  # answer
HOPS_PER_REQUEST = "slackline_hops"
SLACK = "slackline_slack_seconds"
PLAN_STEP = "slackline_plan_step_seconds"
ACK_STORED = "slackline_ack_stored_seconds"
BUBBLE = "slackline_engine_idle_seconds"  # between iterations, work being there
PROFILE_RESIDUAL = "slackline_profile_residual_ratio"
BAD_MESSAGES = "slackline_bad_messages_total"
CLOCK_OFFSET = "slackline_clock_offset_seconds"
CONTROL_BUCKETS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)
SLACK_BUCKETS_S = (-60.0, -10.0, -1.0, -0.1, 0.0, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0)
