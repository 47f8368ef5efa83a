"""The meaning of each field of a struct: the string below it in the source."""

import ast
import inspect
from textwrap import dedent
from typing import Any

from msgspec import Struct


def field_docs(kind: type[Struct]) -> dict[str, str]:
    """The strings below the fields, also those of base classes."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Struct) and base is not Struct:
            found |= _of_class(base)
    return found


def _of_class(kind: type[Any]) -> dict[str, str]:
    tree = ast.parse(dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[field.target.id] = " ".join(below.value.value.split())
    return found
