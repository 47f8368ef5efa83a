"""Sets up vLLM to be planned from outside. Only workers whose engine is vLLM import it."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from services.worker.config import WorkerConfig
from services.worker.engine import EngineFacts
from services.worker.engines.torch.drafting import check_tokenizers
from services.worker.engines.vllm.versions import NEEDED, SUPPORTED, VLLM_NEWEST, VLLM_OLDEST
from shared import features
from shared.errors import ConfigError
from shared.perf.draft import DRAFT
from shared.text.tokenizer import Tokenizer

PROFILE, CPU_PROFILE = "h100-llama3-8b", "cpu-tiny"  # start values where nothing is measured
CPU_KV_BLOCKS = 2048
BLOCK_TOKENS, CPU_BLOCK_TOKENS = 16, 32  # vLLM's attention on a CPU has blocks of multiples of 32
MAX_BATCHED_TOKENS = 8192  # per iteration; what a plan has beyond it waits
ENVIRONMENT = {
    # the engine core runs in this process, so that its scheduler is called directly
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": "1",  # seconds of the engine's
}
CPU_ENVIRONMENT = {
    # two workers on a machine must not share a core and leave another idle
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; kv_blocks says how much of it is used
    "NUMBA_NUM_THREADS": "1",  # n-gram drafts with more threads than cores take 300 ms
}
# Arguments of vLLM's that Slackline sets itself, and what to set instead.
OURS = {
    "model": "model",
    "scheduler_cls": "nothing: plans come from Slackline",
    "async_scheduling": "nothing: a plan is made of what the iteration before it did",
    "scheduling_policy": "the planner's policy",
    "max_num_seqs": "max_slots",
    "num_gpu_blocks_override": "kv_blocks",
    "block_size": "block_tokens",
    "dtype": "dtype",
    "lora_modules": "adapters",
    "enable_lora": "adapters",
    "max_loras": "adapters",
    "pipeline_parallel_size": "nothing: an iteration is one step of the whole model",
    "data_parallel_size": "a worker for each replica",
    "kv_transfer_config": "kv_listen: KV moves between workers by Slackline's own way",
    "prefix_caching_hash_algo": "nothing: blocks have the same names at all replicas",
    "served_model_name": "the name of the model's folder",
    "watermark": "nothing: every block that is free may be planned",
    "reasoning_parser": "nothing: a grammar holds from the first token",
    "enable_chunked_prefill": "nothing: chunks are the plan's",
    "scheduler_reserve_full_isl": "nothing: who begins is the plan's",
}


def check_version() -> None:
    """Raises ConfigError unless a supported version of vLLM is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if Version(VLLM_OLDEST) <= Version(found) < Version(VLLM_NEWEST):
            return
        raise ConfigError(f"the vllm engine supports {SUPPORTED}; this is {name} {found}")
    raise ConfigError(NEEDED)


def build(cfg: WorkerConfig, folder: Path) -> Any:
    """The engine of a worker. ConfigError: vLLM refuses the settings, or we cannot plan for it."""
    check_version()
    cpu = not torch.cuda.is_available()
    for name, value in (ENVIRONMENT | (CPU_ENVIRONMENT if cpu else {})).items():
        os.environ.setdefault(name, value)
    if "speculative_config" in cfg.vllm:
        # vLLM has two model runners. Only this one proposes when asked.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    try:
        from vllm import __version__
        from vllm.engine.arg_utils import EngineArgs
        from vllm.exceptions import VLLMError
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.llm_engine import LLMEngine

        from services.worker.engines.draft_cost import measure_draft
        from services.worker.engines.vllm.drafter import keep_back
        from services.worker.engines.vllm.engine import VllmEngine, longest
        from services.worker.engines.vllm.generators import keep_generators
        from services.worker.engines.vllm.scheduler import PlannedScheduler
    except Exception as error:  # libraries that do not fit each other raise anything
        raise ConfigError(
            f"vLLM is installed but does not load ({type(error).__name__}: {error}): install it "
            "afresh"
        ) from error

    for name in cfg.vllm:
        if name in OURS:
            raise ConfigError(f"vLLM's argument {name} is not taken: use {OURS[name]}")
    tokenizer = Tokenizer.load(folder)
    block_tokens = cfg.block_tokens or (CPU_BLOCK_TOKENS if cpu else BLOCK_TOKENS)
    arguments: dict[str, Any] = {
        "max_num_batched_tokens": max(MAX_BATCHED_TOKENS, cfg.max_slots),
        "enable_prefix_caching": True,
        "enforce_eager": cpu,
        "disable_log_stats": True,
        # else the first request's schema chooses the compiler of all later ones
        "structured_outputs_config": {"backend": "xgrammar"},
        **cfg.vllm,
        "model": str(folder),
        "dtype": cfg.dtype or ("float32" if cpu else "bfloat16"),
        "max_num_seqs": cfg.max_slots,
        "block_size": block_tokens,
        "scheduler_cls": PlannedScheduler,
        "async_scheduling": False,
        "scheduler_reserve_full_isl": False,  # a request may begin where its first chunk fits
    }
    if cfg.kv_blocks or cpu:
        # vLLM keeps one for itself
        arguments["num_gpu_blocks_override"] = (cfg.kv_blocks or CPU_KV_BLOCKS) + 1
    if arguments.get("tensor_parallel_size", 1) == 1:
        arguments.setdefault("distributed_executor_backend", "uni")
    if cpu and Version(__version__) < Version("0.32"):
        # its other sampler forgets seeds unless every row of a batch has one
        arguments.setdefault("use_fp64_gumbel", True)
    if cfg.adapters:
        # All of them may be in one iteration. On a CPU, a request without one is computed with the
        # last slot, which must stay empty.
        arguments |= {"enable_lora": True, "max_loras": len(cfg.adapters) + 1}
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    except (VLLMError, TypeError, ValueError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"vLLM cannot be set up so: {error}") from error
    config, scheduler = engine.vllm_config, engine.engine_core.engine_core.scheduler
    if cpu:
        engine.engine_core.engine_core.model_executor.collective_rpc(keep_generators)
    _refuse_what_cannot_be_planned(config, scheduler)
    _check_draft_model(config.speculative_config, tokenizer, folder)
    if scheduler.num_spec_tokens:
        engine.engine_core.engine_core.model_executor.collective_rpc(keep_back)
    # Blocks beyond the books' count: vLLM keeps those that it took for rejected drafts.
    drafts = scheduler.num_spec_tokens + scheduler.num_lookahead_tokens
    kv_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - cfg.max_slots * -(
        -drafts // block_tokens
    )
    if kv_blocks <= 0:
        raise ConfigError(
            "KV has no room beside the drafts of max_slots requests: fewer max_slots, or more "
            "kv_blocks"
        )
    facts = EngineFacts(
        engine="vllm",
        model=folder.resolve().name,
        profile=cfg.profile or (CPU_PROFILE if cpu else PROFILE),
        kv_blocks=kv_blocks,
        block_tokens=config.cache_config.block_size,
        context_tokens=min(
            config.model_config.max_model_len, kv_blocks * config.cache_config.block_size
        ),
        max_slots=cfg.max_slots,
        vocabulary=config.model_config.get_vocab_size(),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        end_of_thinking=tokenizer.end_of_thinking,
        # vLLM does not verify drafts under these two.
        features=features.ALL
        - ({features.MIN_P, features.LOGIT_BIAS} if scheduler.num_spec_tokens else set()),
        draft=DRAFT if scheduler.num_spec_tokens else 0.0,
        draft_context_tokens=longest(config) if scheduler.num_spec_tokens else 0,
        longest_chain=scheduler.num_spec_tokens,
        adapters=tuple(cfg.adapters),
    )
    adapters = {
        name: LoRARequest(name, n, path)
        for n, (name, path) in enumerate(cfg.adapters.items(), start=1)
    }
    # checked here: an adapter that cannot be read would end the first iteration that needs it
    for name, adapter in adapters.items():
        try:
            engine.add_lora(adapter)
        except (VLLMError, ValueError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"adapter {name} cannot be loaded from {adapter.lora_path}: {error}"
            ) from error
    vllm = VllmEngine(engine, facts, adapters)
    if scheduler.num_spec_tokens and cfg.profile_s:
        vllm.drafting(measure_draft(vllm, scheduler.num_spec_tokens))
    return vllm


def _refuse_what_cannot_be_planned(config: Any, scheduler: Any) -> None:
    """Refuses a model unless a request's KV is a number of equal blocks and nothing else."""
    if (
        len(scheduler.kv_cache_config.kv_cache_groups) != 1
        or scheduler.kv_cache_config.has_mamba_layers
    ):
        raise ConfigError(
            "models with several kinds of KV cache (sliding windows beside full attention, Mamba) "
            "cannot be planned yet"
        )
    if config.model_config.is_multimodal_model or config.model_config.is_encoder_decoder:
        raise ConfigError("models that take more than text cannot be planned yet")
    drafts = config.speculative_config
    if drafts is None:
        return
    if drafts.method not in ("draft_model", "ngram"):
        raise ConfigError(f"drafts by {drafts.method} cannot be planned yet: draft_model or ngram")
    if drafts.parallel_drafting or drafts.draft_sample_method != "greedy":
        raise ConfigError("drafts that are made in parallel or sampled cannot be planned yet")
    if getattr(drafts, "use_heterogeneous_vocab", False):  # not in every version
        raise ConfigError(
            "drafts from another vocabulary (use_heterogeneous_vocab) cannot be planned yet: use a "
            "draft model with the model's own tokenizer"
        )


def _check_draft_model(drafts: Any, tokenizer: Tokenizer, target: Path) -> None:
    """Raises ConfigError for a draft model with another tokenizer: vLLM compares only sizes."""
    if drafts is None or drafts.method != "draft_model":
        return
    draft = Path(drafts.draft_model_config.model)
    if not draft.is_dir():
        raise ConfigError(
            f"the draft model {draft} is not a folder, so its tokenizer cannot be compared: "
            "download it, and name its folder in speculative_config"
        )
    check_tokenizers(tokenizer, target, draft)
