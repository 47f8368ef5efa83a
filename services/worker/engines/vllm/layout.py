"""The layout of KV, as a digest of all that the meaning of a block's bytes depends on: replicas
with the same one can use each other's.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SAMPLES, SAMPLE_BYTES = 64, 256  # of each file of weights
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "architectures"}


def layout_of(config: Any, shapes: object, adapters: Mapping[str, str]) -> str:
    """`config`: vLLM's; `shapes`: of the layers in each of its processes. Other weights have
    another digest, unless their files are as long and differ at none of SAMPLES places (in memory
    vLLM may have packed them). All adapters count: a block's name tells only its adapter's name.
    """
    model = config.model_config
    known = {
        key: value
        for key, value in sorted(model.hf_config.to_dict().items())
        if key not in _NOT_THE_MODEL
    }
    told = ["vllm", sys.byteorder, shapes, known, str(model.dtype), model.quantization]
    digest = hashlib.blake2b(json.dumps(told, default=str).encode(), digest_size=16)
    _add_weights(digest, Path(model.model))
    for name, place in sorted(adapters.items()):
        digest.update(name.encode())
        digest.update((Path(place) / "adapter_config.json").read_bytes())
        _add_weights(digest, Path(place))
    return digest.hexdigest()


def _add_weights(digest: Any, folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        if file.suffix not in _WEIGHTS:
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as source:
            for n in range(SAMPLES):
                source.seek(n * max(0, size - SAMPLE_BYTES) // max(1, SAMPLES - 1))
                digest.update(source.read(SAMPLE_BYTES))
