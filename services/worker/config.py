"""The settings of a worker: section `worker`, or SLACKLINE_WORKER_<FIELD>."""

from typing import Annotated, Any

from msgspec import Meta

from shared.perf.draft import DraftCost
from shared.process.configuration import Connected, Constant
from shared.vocabulary import Count, Role, SlotCount

Seconds = Annotated[float, Meta(ge=0)]


class WorkerConfig(Connected, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replica: str = "r1"
    """The name of its replica. No two workers have the same."""
    pool: str = ""
    """The pool of the replica, for policies that have pools (`ascendra`: lp, hp)."""
    role: Role = Role.BOTH
    """both, prefill, decode, or auto: both or prefill as the load asks for (docs/apart.md)."""
    silo: list[str] = []
    """The tiers that it serves, as a silo; empty: all. Best-effort requests may be of any."""
    engine: str = "sim"
    """sim, torch or vllm."""
    model: str = ""
    """torch, vllm: a shipped model, or a folder. sim: the name to announce."""
    served_name: str = ""
    """The name under which clients ask for the model. Empty: that of its folder, or `model` (sim).
    """
    draft_model: str = ""
    """torch: its draft model, a shipped one or a folder. Empty: the shipped draft for the shipped
    model, and none for others. `none`: no drafts.
    """
    profile: str = ""
    """A shipped profile or a .json file. Empty: measured at the start (torch, vllm), or the
    engine's own (sim).
    """
    profile_s: Seconds = 4.0
    """The time in which a worker measures its engine; 0: it does not. Under a second is seldom
    enough.
    """
    pace: float = 1.0
    """sim: seconds of ours for a second of the profile."""
    draft: DraftCost | None = None
    """sim: the cost of its draft model as fractions of the target's times: a step, and what it
    reads of a prompt. One number is both; 0: it has none. Absent: as the profile states it.
    """
    acceptance: float = 0.7
    """sim: the mean probability that the draft's first token is accepted."""
    kv_blocks: Count = 0
    """0: what the profile states (sim), what fits (torch and vllm on CUDA), or 2048."""
    host_kv_tokens: Count = 0
    """sim, torch: tokens of KV that the host's memory keeps of what leaves the GPU."""
    block_tokens: Count = 0
    """0: 16, or 32 for vllm on a CPU."""
    dtype: str = ""
    """torch, vllm: float32 or bfloat16. Empty: float32 on a CPU, bfloat16 on CUDA."""
    vllm: dict[str, Any] = {}
    """vllm: further arguments of its engine, by vLLM's names."""
    adapters: dict[str, str] = {}
    """vllm: LoRA adapters, name to folder."""
    prefix_caching: bool = False
    """sim: prompts that begin alike share KV, as they always do with torch and vllm."""
    kv_listen: str = ""
    """host:port where others fetch its KV; port 0: any. Empty: KV stays."""
    kv_link_gbit_s: Annotated[float, Meta(gt=0)] = 100.0
    """sim: the speed at which KV comes."""
    script: str = ""
    """sim: a file of answers to give in place of pseudo words."""
    context_tokens: Count = 8192
    """sim: the longest prompt with its answer. A model has its own."""
    max_slots: SlotCount = 1024
    """Requests held at once, waiting ones included."""
    snapshot_acks: int = 1000
    """Acks between two snapshots at most; after each the log is trimmed."""
    drain_s: float = 10.0
    """The longest drain. The process ends within 5 s of it, whatever NATS does."""

    # ------------------------------------------------------------ constants

    # The time between two heartbeats.
    announce_s: Constant[float] = 0.5
    # An attempt that is over is reported again after this long, until it is settled.
    over_retry_s: Constant[float] = 1.0
    # Acks that wait to be stored. When it is full, the engine waits.
    log_queue: Constant[int] = 64
    # torch, vllm: an engine that gives no answer for this long, and for 20 times what its
    # iteration was predicted to take, is ended with its worker.
    silent_s: Constant[Seconds] = 30.0
    # torch, sim: blocks of the draft model's own KV; with fewer, fewer requests draft at one
    # time. 0: a quarter more than the model itself has, at least 64 more (torch), or no limit
    # (sim).
    draft_kv_blocks: Constant[Count] = 0
