"""Tells from a chat template the form in which a model writes its tool calls."""

from enum import StrEnum


class ToolFormat(StrEnum):
    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": ...}</tool_call> (Hermes, Qwen)
    MISTRAL = "mistral"  # [TOOL_CALLS] and a list of calls, or name and arguments of each
    JSON = "json"  # the whole answer is one call or a list of them (Llama 3, and any other model)


MARKS = {"<tool_call>": ToolFormat.HERMES, "[TOOL_CALLS]": ToolFormat.MISTRAL}


def of_template(source: str) -> ToolFormat:
    """The format that a template shows; JSON if the template knows no tools."""
    return next((form for mark, form in MARKS.items() if mark in source), ToolFormat.JSON)
