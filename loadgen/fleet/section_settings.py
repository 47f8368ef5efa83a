"""Asks every service for its settings (`python -m services.<name> --settings`), and makes of them
the JSON Schema of a configuration file.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import SlacklineError
from shared.process.configuration import FLEET_KEYS, SECTIONS
from shared.process.described import Described

WITHIN_S = 60.0  # a process that does not answer for so long is stuck


class File(Struct, frozen=True, kw_only=True):
    """One configuration, as all services see it."""

    sections: list[Described]
    schema: dict[str, Any]


def ask_services(environ: Mapping[str, str]) -> File:
    """Ask each service about the configuration of this environment. Raises SlacklineError."""
    with ThreadPoolExecutor(2) as pool:
        sections = list(pool.map(lambda name: _ask(name, environ), SECTIONS))
    return File(sections=sections, schema=_schema(sections))


def _ask(section: str, environ: Mapping[str, str]) -> Described:
    done = subprocess.run(
        [sys.executable, "-m", f"services.{section}", "--settings"],
        env={**os.environ, **environ},
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
    )
    if done.returncode:
        raise SlacklineError(f"{section}: {done.stderr.decode(errors='replace').strip()}")
    return msgspec.json.decode(done.stdout, type=Described)


def _schema(sections: list[Described]) -> dict[str, Any]:
    fleet = {
        name: {**each, "description": f"{each['description']} For all services that have it."}
        for section in reversed(sections)
        for name, each in section.schema["properties"].items()
        if name in FLEET_KEYS
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A configuration of Slackline",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{name: fleet[name] for name in FLEET_KEYS},
            **{
                section.section: {
                    **section.schema,
                    "description": f"The settings of {section.section}.",
                }
                for section in sections
            },
        },
        "$defs": {name: each for section in sections for name, each in section.definitions.items()},
    }
