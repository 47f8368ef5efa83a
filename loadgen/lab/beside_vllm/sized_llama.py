"""A Llama of such a size that its iterations on a CPU take as long as a GPU's.

It has a configuration and a tokenizer, and no weights.
"""

import json
import shutil
from pathlib import Path

from shared.models import shipped as models

NAME = "random-24m"
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 576, 6, 9, 3, 1536
CONTEXT_TOKENS = 4096
ARGUMENTS = {"load_format": "dummy"}  # vLLM draws random weights from its own seed


def make(folder: Path) -> Path:
    """Writes the model to a folder under `folder`, and returns its path."""
    path = folder / NAME
    path.mkdir(parents=True, exist_ok=True)
    ours = models.folder(models.DEFAULT)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ours / name, path / name)
    config = json.loads((ours / "config.json").read_text())
    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT_TOKENS,
    }
    (path / "config.json").write_text(json.dumps(config | sizes, indent=2))
    return path
