"""OpenAI's list of models on the wire."""

from msgspec import Struct, field


class Model(Struct, frozen=True, kw_only=True):
    id: str
    created: int  # unix seconds
    object: str = "model"
    owned_by: str = "slackline"


class ModelList(Struct, frozen=True, kw_only=True):
    data: list[Model] = field(default_factory=list)
    object: str = "list"
