"""OpenAI's list of models on the wire."""

from msgspec import UNSET, Struct, UnsetType, field


class Model(Struct, frozen=True, kw_only=True):
    id: str
    created: int  # unix seconds
    object: str = "model"
    owned_by: str = "slackline"
    # tokens of prompt and answer that a replica of it has, as vLLM tells them
    max_model_len: int | UnsetType = UNSET
    parent: str | UnsetType = UNSET  # the model that a LoRA adapter adapts


class ModelList(Struct, frozen=True, kw_only=True):
    data: list[Model] = field(default_factory=list)
    object: str = "list"
