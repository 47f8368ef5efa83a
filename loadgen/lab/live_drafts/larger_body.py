"""The shipped model in the body of a larger one: the same tokens at the cost of the larger body.

    python -m loadgen.lab.live_drafts.larger_body --body llama-3-8b FOLDER

A GPU computes the shipped model in no time, and no larger model ships. So its weights are laid into
matrices of a larger model's shapes, between numbers that change nothing. What drafts bring, and how
long passes take, can then be measured together, with the tokens and the acceptance of the shipped
pair (python -m loadgen.lab.live_drafts --model FOLDER --draft-model slackline-draft).
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import ConfigError
from shared.models import shipped as models

COPIED = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
)  # fmt: skip
FILE = "model-{:05d}-of-{:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Body:
    """The shape of a Llama model, without its vocabulary, which stays the shipped model's."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int  # size
    intermediate: int


BODIES = {
    "llama-3.2-1b": Body(16, 2048, 32, 8, 64, 8192),
    "llama-3.2-3b": Body(28, 3072, 24, 8, 128, 8192),
    "llama-3-8b": Body(32, 4096, 32, 8, 128, 14336),
}


class Enlarged:
    """The shipped model's weights in a body.

    A token's vector has zeros behind the shipped model's dimensions, and no layer writes there. So
    a norm's mean is smaller by the ratio of the sizes, for which its weight makes up. A larger head
    has the same angles: dimension i of the rotation becomes i * (larger / smaller). Layers beyond
    the shipped model's write nothing. All else is random, so that a GPU computes with numbers.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], own: Body, body: Body, device: torch.device
    ) -> None:
        """Raises ConfigError for a body in which the model does not fit."""
        fits = (
            own.layers <= body.layers
            and own.hidden <= body.hidden
            and own.kv_heads <= body.kv_heads
            and own.heads // own.kv_heads <= body.heads // body.kv_heads
            and body.head % own.head == 0
            and own.intermediate <= body.intermediate
        )
        if not fits:
            raise ConfigError(f"{own} does not fit in {body}")
        self._weights, self._own, self._body, self._device = weights, own, body, device
        self._dtype = next(iter(weights.values())).dtype
        self._random = torch.Generator(device).manual_seed(0)
        wide, narrow = torch.arange(body.head), torch.arange(own.head)
        # the two halves of a head turn together
        turned = (narrow % (own.head // 2)) * (body.head // own.head)
        turned += (narrow // (own.head // 2)) * (body.head // 2)
        group, larger = own.heads // own.kv_heads, body.heads // body.kv_heads
        places = [n // group * larger + n % group for n in range(own.heads)]
        self._of_queries = torch.cat([wide[turned] + n * body.head for n in places])
        self._of_keys = torch.cat([wide[turned] + n * body.head for n in range(own.kv_heads)])
        self._of_values = torch.cat([narrow + n * body.head for n in range(own.kv_heads)])
        self._of_sums = torch.cat([narrow + n * body.head for n in places])
        self._asking = torch.cat([wide + n * body.head for n in places])

    def outside(self) -> dict[str, Tensor]:
        """The embedding, and the last norm."""
        table = self._weights["model.embed_tokens.weight"]
        wide = torch.zeros(len(table), self._body.hidden, dtype=self._dtype, device=self._device)
        wide[:, : self._own.hidden] = table.to(self._device)
        return {
            "model.embed_tokens.weight": wide,
            "model.norm.weight": self._norm("model.norm.weight"),
        }

    def layer(self, n: int) -> dict[str, Tensor]:
        body, hidden = self._body, torch.arange(self._own.hidden)
        inner, name = torch.arange(self._own.intermediate), f"model.layers.{n}."
        queries, keys = body.heads * body.head, body.kv_heads * body.head
        # scores are divided by the root of the head's size
        sharper = math.sqrt(body.head / self._own.head)
        shapes = (
            ("self_attn.q_proj", (queries, body.hidden), self._of_queries, hidden, sharper),
            ("self_attn.k_proj", (keys, body.hidden), self._of_keys, hidden, 1.0),
            ("self_attn.v_proj", (keys, body.hidden), self._of_values, hidden, 1.0),
            ("self_attn.o_proj", (body.hidden, queries), hidden, self._of_sums, 1.0),
            ("mlp.gate_proj", (body.intermediate, body.hidden), inner, hidden, 1.0),
            ("mlp.up_proj", (body.intermediate, body.hidden), inner, hidden, 1.0),
            ("mlp.down_proj", (body.hidden, body.intermediate), hidden, inner, 1.0),
        )
        found = {
            f"{name}{each}.weight": self._norm(f"{name}{each}.weight")
            for each in ("input_layernorm", "post_attention_layernorm")
        }
        for each, shape, rows, columns, factor in shapes:
            key, writes = f"{name}{each}.weight", each in ("self_attn.o_proj", "mlp.down_proj")
            wide = torch.zeros(shape, dtype=self._dtype, device=self._device)
            # what is written behind the shipped model's dimensions must be zero
            if not writes:
                wide.normal_(0.0, 1 / math.sqrt(shape[1]), generator=self._random)
            if each == "self_attn.q_proj":
                wide[self._asking.to(self._device)] = 0.0  # a score sums over a whole head
            if key in self._weights:
                own = self._weights[key].to(self._device) * factor
                wide[rows[:, None].to(self._device), columns.to(self._device)] = own
            found[key] = wide
        return found

    def _norm(self, name: str) -> Tensor:
        wide = torch.ones(self._body.hidden, dtype=self._dtype, device=self._device)
        if name in self._weights:
            ratio = self._own.hidden / self._body.hidden
            wide[: self._own.hidden] = self._weights[name].to(self._device) * math.sqrt(ratio)
        return wide


def enlarge(model: str, body: Body, folder: Path) -> None:
    """Writes `model`, a shipped one or a folder, in that body to `folder`. Raises ConfigError."""
    source = models.folder(model)
    config = json.loads((source / "config.json").read_bytes())
    own = Body(
        config["num_hidden_layers"],
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["intermediate_size"],
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    enlarged = Enlarged(load_file(source / "model.safetensors"), own, body, device)
    folder.mkdir(parents=True, exist_ok=True)
    files, sizes = dict[str, str](), 0
    for n in range(body.layers + 1):
        weights = enlarged.layer(n) if n < body.layers else enlarged.outside()
        file = FILE.format(n + 1, body.layers + 1)
        save_file(weights, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(weights, file)
        sizes += sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": sizes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config |= {
        "num_hidden_layers": body.layers,
        "hidden_size": body.hidden,
        "num_attention_heads": body.heads,
        "num_key_value_heads": body.kv_heads,
        "head_dim": body.head,
        "intermediate_size": body.intermediate,
        "rms_norm_eps": config["rms_norm_eps"] * own.hidden / body.hidden,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in COPIED:
        if (source / name).is_file():
            shutil.copy(source / name, folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadgen.lab.live_drafts.larger_body",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument(
        "--body", choices=BODIES, default="llama-3-8b", help="(default: %(default)s)"
    )
    parser.add_argument("folder", type=Path, help="where the model is written")
    args = parser.parse_args()
    try:
        enlarge(models.DEFAULT, BODIES[args.body], args.folder)
    except ConfigError as error:
        parser.error(str(error))
    print(f"{models.DEFAULT} in the body of {args.body} is in {args.folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
