"""The settings of a worker: section `worker`, or SLACKLINE_WORKER_<FIELD>."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.perf.draft import DraftCost
from shared.vocabulary import Count

Seconds = Annotated[float, Meta(ge=0)]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "nats://127.0.0.1:4222"
    creds: str = ""  # file of its seed (or JWT and seed) at NATS; empty: it logs in without
    tls_ca: str = ""  # file of the authority to trust at NATS; empty: those of the system
    replica: str = "r1"
    pool: str = ""  # of the replica, for policies that route by pool
    engine: str = "sim"  # sim | torch | vllm
    model: str = ""  # folder of a model (torch, vllm), or the name to announce (sim)
    # torch: its draft model, a shipped one or a folder; empty: the shipped draft for the shipped
    # model, and none for others; none: no drafts
    draft_model: str = ""
    # name or path; empty: measured at the start (torch, vllm), or the engine's own default (sim)
    profile: str = ""
    # time that a worker measures its engine; 0: not at all. Under a second is seldom enough for a
    # fit
    profile_s: Seconds = 4.0
    pace: float = 1.0  # sim: seconds of ours per second of the profile
    # sim: cost of its draft model: a step, and what it reads of a prompt, as fractions of the
    # target's times; one number is both; 0: it has none. None: as the profile states it
    draft: DraftCost | None = None
    # sim: mean probability that the draft's first token is accepted
    acceptance: float = 0.7
    kv_blocks: Count = 0  # 0: what the profile states (sim), what fits (vllm on CUDA), or 2048
    block_tokens: Count = 0  # 0: 16, or 32 for vllm on a CPU
    dtype: str = ""  # torch, vllm: float32 or bfloat16; empty: float32 on a CPU, bfloat16 on CUDA
    vllm: dict[str, Any] = {}  # vllm: further arguments of its engine, by vLLM's names
    adapters: dict[str, str] = {}  # vllm: LoRA adapters, name to folder
    script: str = ""  # sim: file of answers to give in place of pseudo words (docs/http.md)
    context_tokens: int = 8192  # sim; a model has its own
    max_slots: int = 1024  # requests held at once, waiting ones included
    announce_s: float = 0.5
    over_retry_s: float = 1.0  # an attempt that is over is reported again until it is settled
    snapshot_acks: int = 1000  # acks between snapshots, after each of which the log is trimmed
    log_queue: int = 64  # acks that wait to be stored; when it is full, the engine waits
    drain_s: float = 10.0
