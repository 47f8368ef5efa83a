"""The models that ship with Slackline, and any other by its folder."""

from pathlib import Path

from shared.errors import ConfigError

FOLDER = Path(__file__).parent
DEFAULT = "slackline-5m"  # where nobody names another


def names() -> list[str]:
    """The shipped models, sorted."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def folder(name_or_path: str) -> Path:
    """A shipped model's folder by name, or any by path: what holds a slash or is a folder here.

    Raises: ConfigError if there is no such model; what is in a folder is for its reader to judge.
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
