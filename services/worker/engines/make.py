"""Makes the engine that a configuration asks for; only the one that is used is imported."""

import time

from services.worker.config import WorkerConfig
from services.worker.engine import Engine, EngineFacts, KvFacts
from services.worker.engines.sim.engine import SimEngine
from services.worker.engines.sim.script import load as load_script
from services.worker.engines.vllm.versions import NEEDED
from shared.errors import ConfigError
from shared.models import shipped as models
from shared.perf import profile_file as profiles
from shared.perf.profile_file import ProfileFile
from shared.policy.acceptance import Acceptance
from shared.prefix import CHAIN_TOKENS
from shared.text.tokenizer import Tokenizer

SIM_PROFILE = "a100-llama3-8b"
TORCH_PROFILE = "cpu-tiny"
BLOCK_TOKENS = 16


def make(cfg: WorkerConfig) -> tuple[Engine, Tokenizer]:
    """The engine and the tokenizer of its model. Raises ConfigError."""
    engine, tokenizer = _make(cfg)
    return engine.named(cfg.served_name) if cfg.served_name else engine, tokenizer


def _make(cfg: WorkerConfig) -> tuple[Engine, Tokenizer]:
    if cfg.draft_model and cfg.engine != "torch":
        raise ConfigError(
            f"draft_model is of the torch engine, not of {cfg.engine}: sim takes the cost of a "
            "draft (draft), vllm a speculative_config"
        )
    if cfg.engine == "sim":
        tokenizer = Tokenizer.builtin()
        profile = profiles.load(cfg.profile or SIM_PROFILE)
        facts, acceptance = sim_facts(cfg, tokenizer), Acceptance(cfg.acceptance)
        return SimEngine(
            facts,
            profile,
            wait=time.sleep,
            clock=time.monotonic,
            pace=cfg.pace,
            acceptance=acceptance,
            script=load_script(cfg.script) if cfg.script else None,
            prefix_caching=cfg.prefix_caching,
        ), tokenizer
    if cfg.engine == "torch":
        folder = models.folder(cfg.model or models.DEFAULT)
        draft = models.draft_folder(cfg.draft_model, cfg.model or models.DEFAULT)
        if cfg.profile:
            profiles.read(cfg.profile)  # planners read it as well: a fault is better reported here
        try:
            from services.worker.engines.draft_cost import measure_draft
            from services.worker.engines.torch.engine import TorchEngine
        except ImportError as error:
            raise ConfigError(
                "the torch engine needs torch and transformers: in a checkout of Slackline, "
                "pip install -e '.[torch]'"
            ) from error
        engine = TorchEngine(
            folder,
            profile=cfg.profile or TORCH_PROFILE,
            kv_blocks=cfg.kv_blocks,
            block_tokens=cfg.block_tokens or BLOCK_TOKENS,
            max_slots=cfg.max_slots,
            dtype=cfg.dtype or None,
            draft=draft,
            draft_kv_blocks=cfg.draft_kv_blocks,
            host_kv_tokens=cfg.host_kv_tokens,
        )
        if draft is not None and cfg.profile_s:
            engine.drafting(measure_draft(engine))
        return engine, Tokenizer.load(folder)
    if cfg.engine == "vllm":
        if cfg.host_kv_tokens:
            raise ConfigError("host_kv_tokens: engine vllm keeps no KV in the host's memory")
        folder = models.folder(cfg.model or models.DEFAULT)
        if cfg.profile:
            profiles.read(cfg.profile)
        try:
            from services.worker.engines.vllm.setup import build
        except ImportError as error:
            raise ConfigError(NEEDED) from error
        return build(cfg, folder), Tokenizer.load(folder)
    raise ConfigError(f"unknown engine {cfg.engine!r}: sim, torch or vllm")


def sim_facts(cfg: WorkerConfig, tokenizer: Tokenizer) -> EngineFacts:
    """The facts that a simulated replica announces. Its KV has the size that the profile states."""
    profile = profiles.read(cfg.profile or SIM_PROFILE)
    block_tokens = cfg.block_tokens or BLOCK_TOKENS
    return EngineFacts(
        engine="sim",
        model=cfg.model or f"sim-{profile.model}",  # its answers are not that model's
        profile=cfg.profile or SIM_PROFILE,
        kv_blocks=cfg.kv_blocks or profile.kv_capacity_tokens // block_tokens,
        block_tokens=block_tokens,
        context_tokens=cfg.context_tokens,
        max_slots=cfg.max_slots,
        vocabulary=tokenizer.vocabulary,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        end_of_thinking=tokenizer.end_of_thinking,
        draft=profile.draft if cfg.draft is None else cfg.draft,
        draft_kv_blocks=cfg.draft_kv_blocks,
        host_kv_blocks=cfg.host_kv_tokens // block_tokens,
        kv_load_s=cfg.pace * profile.token_load_s if cfg.host_kv_tokens else 0.0,
        kv=_sim_kv(cfg, profile),
    )


def _sim_kv(cfg: WorkerConfig, profile: ProfileFile) -> KvFacts | None:
    """Its KV moves in the stretches that its cache knows, at the speed of the link."""
    if not cfg.prefix_caching or not profile.kv_bytes_per_token:
        return None
    move_s = cfg.pace * 8 * profile.kv_bytes_per_token / (1e9 * cfg.kv_link_gbit_s)
    return KvFacts(CHAIN_TOKENS, 0, f"sim {profile.model}", move_s)
