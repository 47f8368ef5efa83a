"""Turns chat messages into one prompt: they are checked, then rendered by the model's own template,
or plainly.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ConfigError, PeerError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

Render = Callable[[Sequence[Mapping[str, Any]]], str]


def checked(messages: object) -> list[dict[str, Any]]:
    """The messages; content that was given as text parts is joined into one string.

    Raises: PeerError that names the offending field, for anything other than a list of {role,
        content}.
    """
    if not isinstance(messages, list) or not messages:
        raise PeerError("messages must be a non-empty list", param="messages")
    return [_checked_one(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_one(message: object, param: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not all(isinstance(name, str) for name in message):
        raise PeerError(f"{param} must be an object", param=param)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise PeerError(
            f"{param}.role must be one of {', '.join(sorted(ROLES))}", param=f"{param}.role"
        )
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return {**message, "content": ""}
    return {**message, "content": _text(content, f"{param}.content")}


def _text(content: object, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise PeerError(f"{param} must be a string or a list of text parts", param=param)
    texts = []
    for part in content:
        if (
            not isinstance(part, dict)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise PeerError(
                f"{param} may hold text parts only: this model reads nothing else", param=param
            )
        texts.append(part["text"])
    return "".join(texts)


def marked(messages: Sequence[Mapping[str, Any]]) -> str:
    """The plain rendering for vocabularies with the markers: one marked turn per message, and the
    assistant's turn left open.
    """
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def labelled(messages: Sequence[Mapping[str, Any]]) -> str:
    """The plain rendering for any other vocabulary."""
    return "\n".join([*(f"{m['role']}: {m['content']}" for m in messages), "assistant:"])


def from_template(source: str, variables: Mapping[str, str]) -> Render:
    """A renderer from a model's Jinja template, in a sandbox, with the names that published
    templates expect.

    Raises: ConfigError if the template does not compile. The renderer raises PeerError where the
        template refuses.
    """

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: object, indent: int | None = None, **_: object) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def now(form: str) -> str:
        return datetime.now(UTC).strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=refuse, strftime_now=now)
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(f"the model's chat template is broken: {error}") from error

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=True, **variables)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise PeerError(
                f"the model's chat template refused these messages: {error}", param="messages"
            ) from error

    return render
