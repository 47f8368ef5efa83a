"""Runs an admission process: python -m services.admission"""

from services.admission.config import AdmissionConfig
from services.admission.service import Admission
from shared.models import shipped as models
from shared.policy import registry
from shared.process.main import Process, run
from shared.process.reload import rules_of, tiers_in
from shared.text.tokenizer import Tokenizer


async def body(process: Process[AdmissionConfig]) -> None:
    cfg = process.cfg
    tokenizer = Tokenizer.load(models.folder(cfg.model)) if cfg.model else Tokenizer.builtin()
    admission = Admission(cfg, process.bus, process.clock, tokenizer, process.tracing, process.rng)
    process.export(admission.metrics)
    await admission.run(process.stop)


def check_router(cfg: AdmissionConfig) -> None:
    registry.router(cfg.policy, cfg.settings)


def check_model(cfg: AdmissionConfig) -> None:
    if cfg.model:
        models.folder(cfg.model)


if __name__ == "__main__":
    run("admission", AdmissionConfig, body, tiers_in, rules_of, check_router, check_model)
