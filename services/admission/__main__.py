"""Runs an admission process: python -m services.admission"""

from services.admission.config import AdmissionConfig
from services.admission.service import Admission
from services.admission.tokenizers import Tokenizers, folders_in
from shared.policy import registry
from shared.process.main import Process, run
from shared.process.reload import rules_of, tiers_in
from shared.text.tokenizer import Tokenizer


async def body(process: Process[AdmissionConfig]) -> None:
    cfg = process.cfg
    folders = folders_in(cfg.model, cfg.models)
    tokenizers = Tokenizers(
        {name: Tokenizer.load(folder) for name, folder in folders.items()},
        [folder.resolve().parent for folder in folders.values()],
    )
    admission = Admission(cfg, process.bus, process.clock, tokenizers, process.tracing, process.rng)
    process.export(admission.metrics)
    await admission.run(process.stop)


def check_router(cfg: AdmissionConfig) -> None:
    registry.router(cfg.policy, cfg.settings)


def check_models(cfg: AdmissionConfig) -> None:
    folders_in(cfg.model, cfg.models)


if __name__ == "__main__":
    run("admission", AdmissionConfig, body, tiers_in, rules_of, check_router, check_models)
