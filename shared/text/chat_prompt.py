"""Checks chat messages and tools, and renders one prompt by the model's template, or plainly."""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ConfigError, PeerError

# in place of an image, a sound or a file
ONLY_TEXT = "only text is read; for anything else use a server with a multimodal model"
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]  # in OpenAI's form
# messages, tools, and variables of the template by their names
Render = Callable[[Messages, Tools, Mapping[str, Any]], str]
# the variables of a template that a request cannot set
OURS = frozenset({"messages", "tools", "add_generation_prompt"})
# CPU time of rendering. 8 MiB of the shortest messages take 0.6 s with a plain template; published
# ones walk all messages for each one, which would take hours.
RENDER_CPU_S = 2.0
# of a rendered text: twice those of the largest message, since a template may repeat its input
RENDERED_CHARACTERS = 16 * 1024 * 1024
STEPS = 64  # of a template between two looks at the clock: 0.1 ms, 20 ms if each copies 4 MB
HOW_TO_CALL = """\
You may call these functions:
{tools}
To call one, answer with nothing but a JSON object: {{"name": ..., "arguments": {{...}}}}. To call \
several, answer with a list of them."""


class _Work(threading.local):
    """The CPU time and the characters that this thread may still spend on a rendering."""

    until_s = math.inf  # in CPU time of the thread
    steps = 0

    def begin(self) -> None:
        self.until_s = time.thread_time() + RENDER_CPU_S

    def step(self) -> None:
        self.steps += 1
        if self.steps % STEPS == 0:
            self.check()

    def check(self) -> None:
        """Raises PeerError if the time is over."""
        if time.thread_time() > self.until_s:
            raise PeerError(
                f"the chat template takes more than {RENDER_CPU_S:g} s for these messages",
                param="messages",
            )


_work = _Work()


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that ends renderings that take too long: templates reach values through it."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        _work.step()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _work.step()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _work.step()
        return super().call(*args, **kwargs)


def rendered(render: Render, messages: Messages, tools: Tools, variables: Mapping[str, Any]) -> str:
    """The prompt. Raises PeerError, also beyond RENDER_CPU_S or RENDERED_CHARACTERS."""
    _work.begin()
    try:
        return render(messages, tools, variables)
    except PeerError:
        raise
    # a template may raise anything: it is not our code, and its input is a caller's
    except Exception as error:
        raise PeerError(
            f"the model's chat template refused these messages: {error}", param="messages"
        ) from error
    finally:
        _work.until_s = math.inf


def checked(messages: object) -> list[dict[str, Any]]:
    """The messages, text parts joined. Raises PeerError unless they are {role, content}s."""
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
    if role in ("assistant", "tool") and content in (None, []):  # the message has no text
        content = ""
    read = {**message, "content": _text(content, f"{param}.content")}
    if role == "assistant" and message.get("tool_calls"):
        read["tool_calls"] = _calls(message["tool_calls"], f"{param}.tool_calls")
    else:
        read.pop("tool_calls", None)  # null, or none
    return read


def _calls(calls: object, param: str) -> list[dict[str, Any]]:
    """The calls with arguments as objects: templates write the JSON. Arguments that were cut off
    become an empty object: clients repeat the history, and the call's result tells of it.
    """
    if not isinstance(calls, list):
        raise PeerError(f"{param} must be a list", param=param)
    read = []
    for n, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise PeerError(f"{param}[{n}] must have a function with a name", param=param)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {}
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _text(content: object, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise PeerError(f"{param} must be a string or a list of text parts", param=param)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise PeerError(f"{param} has a part that is no text: {ONLY_TEXT}", param=param)
        texts.append(part[kind])
    return "".join(texts)


def marked(messages: Messages, tools: Tools, _: Mapping[str, Any]) -> str:
    """The prompt for vocabularies with the markers: a turn per message, the last left open."""
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in told(messages, tools)]
    return "".join(turns) + "<|im_start|>assistant\n"


def labelled(messages: Messages, tools: Tools, _: Mapping[str, Any]) -> str:
    """The plain prompt for any other vocabulary."""
    turns = [f"{m['role']}: {m['content']}" for m in told(messages, tools)]
    return "\n".join([*turns, "assistant:"])


def told(messages: Messages, tools: Tools) -> Messages:
    """The messages for a model whose template knows no tools: the first message names the tools,
    calls are the JSON that it asks for, and their results are messages of the user.
    """
    if not tools and not any(m["role"] == "tool" or "tool_calls" in m for m in messages):
        return messages
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    said = HOW_TO_CALL.format(tools="\n".join(_json(tool.get("function")) for tool in tools))
    if plain[0]["role"] in ("system", "developer"):
        head = {**plain[0], "content": f"{plain[0]['content']}\n\n{said}"}
        return [head, *plain[1:]]
    return [{"role": "system", "content": said}, *plain]


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"The function returned: {message['content']}"}
    if "tool_calls" not in message:
        return message
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message["tool_calls"] or ()
    ]
    said = _json(calls[0] if len(calls) == 1 else calls)
    return {"role": "assistant", "content": message["content"] + said}


def _json(value: object, indent: int | None = None) -> str:
    _work.check()
    return json.dumps(value, ensure_ascii=False, indent=indent)


def from_template(source: str, variables: Mapping[str, str]) -> Render:
    """A renderer of a Jinja template, in a sandbox; it raises any error of the template. Raises
    ConfigError if the template does not compile.
    """

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: object, indent: int | None = None, **_: object) -> str:
        return _json(value, indent)

    def now(form: str) -> str:
        return datetime.now(UTC).strftime(form)

    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=refuse, strftime_now=now)
    try:
        template = environment.from_string(source)
        knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
    except TemplateError as error:
        raise ConfigError(f"the model's chat template is broken: {error}") from error

    def render(messages: Messages, tools: Tools, wanted: Mapping[str, Any]) -> str:
        shown = messages if knows_tools else told(messages, tools)
        pieces, characters = [], 0
        for piece in template.generate(
            messages=shown,
            tools=list(tools) or None,
            add_generation_prompt=True,
            **{**variables, **wanted},
        ):
            _work.step()
            pieces.append(piece)
            characters += len(piece)
            if characters > RENDERED_CHARACTERS:
                raise PeerError(
                    f"the rendered messages have more than {RENDERED_CHARACTERS} characters",
                    param="messages",
                )
        return "".join(pieces)

    return render
