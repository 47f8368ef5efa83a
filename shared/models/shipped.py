"""The models that ship with Slackline, by name, and any other model by its folder."""

from pathlib import Path

from shared.errors import ConfigError

FOLDER = Path(__file__).parent
DEFAULT = "slackline-5m"  # the model where none is named
DRAFTS = {"slackline-5m": "slackline-draft"}  # the draft model that was trained for each
NO_DRAFT = "none"


def names() -> list[str]:
    """The names of the shipped models, sorted."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def folder(name_or_path: str) -> Path:
    """A shipped model's folder by name, or any by path (with a slash, or a folder here). Raises
    ConfigError if it is not there. Whoever reads it judges its contents.
    """
    if name_or_path in names():
        return FOLDER / name_or_path
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if "/" in name_or_path:
        raise ConfigError(f"{name_or_path} is no folder of a model")
    raise ConfigError(
        f"no model named {name_or_path!r}; shipped are {', '.join(names())}; "
        "or give the path of a Hugging Face folder"
    )


def announced(name_or_path: str) -> str:
    """The way for other processes to a model: its name if it is shipped, or else its folder."""
    return name_or_path if name_or_path in names() else str(folder(name_or_path).resolve())


def draft_folder(name_or_path: str, model: str) -> Path | None:
    """The draft's folder. Empty: the one trained for `model`; `none`: none. Raises ConfigError."""
    if name_or_path == NO_DRAFT:
        return None
    wanted = name_or_path or DRAFTS.get(model, "")
    return folder(wanted) if wanted else None
