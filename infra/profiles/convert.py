"""Converts a folder of fits to the shipped GPU profiles.

    python infra/profiles/convert.py SOURCE [DESTINATION]

SOURCE holds <gpu>_<model>-tp<n>.json files, with several forms each, and the predictor that
QoServe's authors published. Only figures are taken from them; the words are ours.
cpu-tiny.json is written by hand, and kernel_tables.py makes those of newer GPUs.
"""

import json
import sys
from pathlib import Path
from typing import Any

FORM = "token_table_plus_attention"
# The fits are kernel times. Launch, sampling and bookkeeping of a lean engine take at least this.
OVERHEAD_S = 0.001
DESTINATION = Path(__file__).resolve().parents[2] / "shared" / "perf" / "profiles"

AGAINST = (
    "1,800 held-out synthetic batches (16 to 4,096 prefill tokens in 1 to 3 requests on up to 8k "
    "cached, 0 to 256 decodes on up to 8k), "
    "timed by summing per-operator kernel profiles, not by a running engine"
)
GEMM = {
    "a100-llama3-8b": "Matrix products and norms as measured on an A100 by Vidur",
    "a100-llama2-7b": "Matrix products and norms as measured on an A100 by Vidur",
    "h100-llama2-7b": "Matrix products and norms as measured on an H100 by Vidur",
    "a100-llama3-70b-tp4": "Matrix products and all-reduce (lower envelope) "
    "as measured on A100s by Vidur",
}
ATTENTION = {
    "a100-llama3-8b": "attention from a kernel model fitted to 248 published values, "
    "about 2 % off for prefill chunks and 4 % for decodes.",
    "a100-llama2-7b": "decode attention fitted to 33 published values, about 7 % off; "
    "prefill attention as for Llama-3-8B.",
    "h100-llama2-7b": "prefill attention measured without context; context and decodes by "
    "analysis: within 20 %.",
    "a100-llama3-70b-tp4": "attention scaled by heads from the 8B model, not measured.",
}
MODELS = {"llama3-8b": "Llama-3-8B", "llama2-7b": "Llama-2-7B", "llama3-70b": "Llama-3-70B"}
FILES = {
    "a100-llama3-8b": "a100_llama3-8b-tp1.json",
    "a100-llama2-7b": "a100_llama2-7b-tp1.json",
    "h100-llama2-7b": "h100_llama2-7b-tp1.json",
    "a100-llama3-70b-tp4": "a100_llama3-70b-tp4.json",
}
QOSERVE = "a100_llama3-8b-tp1_qoserve_artifact.json"


def facts(name: str, source: dict[str, Any]) -> dict[str, Any]:
    """The fields of a profile other than its fit."""
    model, tensor_parallel = source["model"].rsplit("-tp", 1)
    return {
        "name": name,
        "gpu": f"{source['device'].upper()}-80GB",
        "model": MODELS[model],
        "tensor_parallel": int(tensor_parallel),
        "kv_capacity_tokens": source["kv_capacity_tokens"],
        "kv_bytes_per_token": source["kv_bytes_per_token_per_gpu"],
    }


def table(name: str, source: dict[str, Any]) -> dict[str, Any]:
    fit = source["fits"][FORM]
    test = fit["test"]
    return facts(name, source) | {
        "overhead_s": OVERHEAD_S,
        "error": {
            "against": AGAINST,
            "mape": test["MAPE"],
            "p95": test["p95"],
            "worst": test["max"],
            "mape_decode_only": test["MAPE_decode_only"],
            "mape_mixed": test["MAPE_mixed"],
            "mape_prefill_only": test["MAPE_prefill_only"],
        },
        "provenance": f"{GEMM[name]}; {ATTENTION[name]} "
        "Kernel time, output projection included; the overhead is ours.",
        "coefficients": {
            "form": FORM,
            "table_tokens": fit["table_tokens"],
            "table_seconds": fit["table_seconds"],
            "attention": fit["coef"],
        },
    }


def stratified(name: str, source: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    def stratum(fit: dict[str, float], up_to_tokens: int | None) -> dict[str, Any]:
        return {
            "up_to_tokens": up_to_tokens,
            "intercept_s": fit["intercept"],
            "token_s": fit["batch_num_tokens"],
            "prefill_token_s": fit["batch_num_prefill_tokens"],
            "decode_token_s": fit["batch_num_decode_tokens"],
            "decode_context_s": fit["batch_decode_context"],
            "prefill_context_s": fit["batch_prefill_context"],
        }

    models = source["models"]
    return facts(name, sizes) | {
        "overhead_s": 0.0,
        "error": {
            "against": "not stated by its authors, who trained it on a running engine "
            "on an A100 with FlashInfer"
        },
        "provenance": "The predictor published with QoServe's artifact "
        "(branch niyama_asplos2026 of microsoft/sarathi-serve): coefficients "
        "only, engine overhead included. KV sizes are those of a100-llama3-8b.",
        "coefficients": {
            "form": "stratified_linear",
            "strata": [stratum(models["tokens<=512"], 512), stratum(models["tokens>512"], None)],
        },
    }


def main(folder: Path, destination: Path) -> None:
    sources = {name: json.loads((folder / file).read_text()) for name, file in FILES.items()}
    profiles = [table(name, source) for name, source in sources.items()]
    profiles.append(
        stratified(
            "a100-llama3-8b-qoserve",
            json.loads((folder / QOSERVE).read_text()),
            sources["a100-llama3-8b"],
        )
    )
    for profile in profiles:
        path = destination / f"{profile['name']}.json"
        path.write_text(json.dumps(profile, indent=1) + "\n")
        print(path.name)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else DESTINATION)
