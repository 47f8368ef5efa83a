"""A client's access to a NATS server (address and key files), and the options that name it.

`slackline up` notes its operator's access in the user's own state folder while it runs. So commands
of the same user on the same machine find the access, and need no key to be named.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from shared.errors import ConfigError

DEFAULT_URL = "nats://127.0.0.1:4222"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Access:
    """Access to a NATS server: URL, a user's seed file, the authority's (either may be empty)."""

    url: str
    creds: str = ""
    tls_ca: str = ""


def add_access_arguments(parser: argparse.ArgumentParser, user: str) -> None:
    """The options of a command that connects to NATS as `user`."""
    parser.add_argument(
        "--url",
        default=os.environ.get("SLACKLINE_URL") or _usual_url(),
        help="URL of the NATS server (default: SLACKLINE_URL, else that of your `slackline up`, "
        f"else {DEFAULT_URL})",
    )
    parser.add_argument(
        "--creds",
        default=os.environ.get("SLACKLINE_CREDS", ""),
        metavar="FILE",
        help=f"key of {user} at the NATS server (default: SLACKLINE_CREDS, else that of the "
        "operator of your `slackline up`)",
    )
    parser.add_argument(
        "--tls-ca",
        default=os.environ.get("SLACKLINE_TLS_CA", ""),
        metavar="FILE",
        help="authority to trust at the NATS server (default: SLACKLINE_TLS_CA, else the system's)",
    )


def access_of(args: argparse.Namespace) -> Access:
    """The access that the options name, or that a running `slackline up` noted. Raises ConfigError
    for files that are not there, or hold something else.
    """
    if args.creds or args.tls_ca:
        _check(args.creds, args.tls_ca)
        return Access(args.url, args.creds, args.tls_ca)
    return _noted(args.url) or Access(args.url)


def _check(creds: str, tls_ca: str) -> None:
    # `slackline --help` and the like need neither NATS nor cryptography
    from shared.bus.nats_client import trusting
    from shared.bus.nkey import read_login

    try:
        if creds:
            read_login(creds)
    except ConfigError as error:
        raise ConfigError(f"--creds: {error}") from error
    try:
        if tls_ca:
            trusting(tls_ca)
    except ConfigError as error:
        raise ConfigError(f"--tls-ca: {error}") from error


@contextlib.contextmanager
def noted(access: Access) -> Iterator[None]:
    """Notes the access to our server while the context lasts, if the folder can be written."""
    file = _note(access.url)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_text(
            json.dumps({
                "pid": os.getpid(),
                "url": access.url,
                "creds": access.creds,
                "tls_ca": access.tls_ca,
            })
        )  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def running() -> list[str]:
    """The URL of each `slackline up` that this user runs."""
    ways = (_read(file) for file in sorted(_notes().glob("up-*.json")))
    return [way.url for way in ways if way is not None]


def _usual_url() -> str:
    """The URL of this user's running `slackline up`, if there is exactly one."""
    urls = running()
    return urls[0] if len(urls) == 1 else DEFAULT_URL


def _noted(url: str) -> Access | None:
    """The access that a running `slackline up` of this user noted; None: there is none."""
    try:
        file = _note(url) if urlsplit(url).hostname in LOOPBACK else None
    except ValueError:
        return None
    way = _read(file) if file else None
    return way and replace(way, url=url)


def _read(note: Path) -> Access | None:
    """The access in a note; None if the `slackline up` that wrote it has ended."""
    try:
        told = json.loads(note.read_text())
        os.kill(told["pid"], 0)  # one that was killed left its note
        return Access(told["url"], told["creds"], told["tls_ca"])
    except (OSError, ValueError, KeyError):
        return None


def _note(url: str) -> Path:
    return _notes() / f"up-{urlsplit(url).port}.json"


def _notes() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "slackline"
