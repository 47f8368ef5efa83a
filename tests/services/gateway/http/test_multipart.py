"""Tests of the gateway's reader of multipart forms, as uploads of files have, cut anywhere."""

from random import Random

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http.multipart import HEAD_LIMIT, Began, Form, boundary_of
from shared.errors import PeerError


def read(boundary: bytes, body: bytes, cuts: Random, longest: int) -> list[tuple[str, bytes]]:
    """The parts of a form that comes in pieces of up to `longest` bytes."""
    form, parts = Form(boundary), list[tuple[str, bytes]]()
    while body:
        size = cuts.randint(1, longest)
        for piece in form.feed(body[:size]):
            if isinstance(piece, Began):
                parts.append((piece.name, b""))
            else:
                parts[-1] = (parts[-1][0], parts[-1][1] + piece.data)
        body = body[size:]
    assert form.whole
    return parts


@given(
    content=st.binary(max_size=300) | st.sampled_from([b"\r\n--b", b"--b--\r\n", b"\r\n\r\n"]),
    seed=st.integers(0, 2**32),
    longest=st.integers(1, 400),
)
def test_a_form_is_read_alike_however_it_is_cut(content: bytes, seed: int, longest: int) -> None:
    request = httpx.Request(
        "POST", "http://x", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)}
    )
    body = request.read()
    boundary = boundary_of(request.headers["content-type"])
    parts = read(boundary, body, Random(seed), longest)
    assert parts == [("purpose", b"batch"), ("file", content)]


def test_a_name_of_a_file_is_read() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a b.jsonl"\r\n\r\nx'
    assert Form(b"b").feed(body)[0] == Began("file", "a b.jsonl")


def test_names_need_no_quotes() -> None:
    body = (
        b"--b\r\nContent-Type: text/plain; charset=utf-8\r\n"
        b"Content-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n"
        b"--b\r\nContent-Disposition: form-data; name=file; filename=a.jsonl; "
        b"filename*=utf-8''a.jsonl\r\n\r\n{}\n\r\n--b--\r\n"
    )
    began = [piece for piece in Form(b"b").feed(body) if isinstance(piece, Began)]
    assert began == [Began("purpose", None), Began("file", "a.jsonl")]


@pytest.mark.parametrize(
    "body",
    [
        b"no boundary at all, but more bytes than one has",
        b"--b\r\nContent-Type: text/plain\r\n\r\nx",
        b"--b\r\n" + b"x" * (HEAD_LIMIT + 1),
        b"--b\r\nContent-Disposition: form-data\r\n\r\nx",
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n' * 40,
    ],
)
def test_what_is_no_form_is_refused(body: bytes) -> None:
    head = b'\r\n--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
    body = head[2:] + head * 40 if body.count(b"name") > 1 else body
    with pytest.raises(PeerError):
        Form(b"b").feed(body)


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", "multipart/form-data; x=y"]
)
def test_another_type_is_refused(content_type: str) -> None:
    with pytest.raises(PeerError):
        boundary_of(content_type)


def test_a_boundary_in_quotes_is_read() -> None:
    assert boundary_of('Multipart/Form-Data; charset=x; Boundary="a b"') == b"a b"
