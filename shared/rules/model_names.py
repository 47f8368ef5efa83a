"""The names by which clients may ask for models: aliases, and the model where none is named."""

from typing import Annotated

from msgspec import Meta, Struct

ModelName = Annotated[str, Meta(min_length=1, max_length=128)]
Aliases = dict[ModelName, ModelName]


class ModelNames(Struct, frozen=True, kw_only=True):
    """`aliases`: further names, each with the model or the LoRA adapter that it stands for."""

    default: str = ""  # empty: a request must name its model if there are several
    aliases: Aliases = {}

    def meant(self, name: str | None) -> str | None:
        """The model or adapter that a request means; None: whichever the fleet has."""
        name = name or self.default or None
        return None if name is None else self.aliases.get(name, name)
