"""python -m services.admission"""

from services.admission.config import AdmissionConfig
from services.admission.service import Admission
from shared.models import shipped as models
from shared.process.main import Process, run
from shared.text.tokenizer import Tokenizer


async def body(process: Process[AdmissionConfig]) -> None:
    cfg = process.cfg
    tokenizer = Tokenizer.load(models.folder(cfg.model)) if cfg.model else Tokenizer.builtin()
    admission = Admission(cfg, process.bus, process.clock, tokenizer, process.tracing, process.rng)
    process.export(admission.metrics)
    await admission.run(process.stop)


if __name__ == "__main__":
    run("admission", AdmissionConfig, body)
