"""Tests of generated Markdown: prose is wrapped at 100 columns, and tables and code are not."""

from loadgen.markdown import COLUMNS, wrap


def test_prose_is_wrapped_and_tables_code_and_pictures_are_not() -> None:
    long = " ".join(["word"] * 40)
    kept = f"| {long} |\n| --- |", f"```sh\n{long}\n```", f"![{long}](picture.svg)", f"> {long}"
    assert wrap("\n\n".join(kept)) == "\n\n".join(kept)
    wrapped = wrap(f"{long}\n\n- {long}\n- `{long[:60]}`, `{long[:60]}` {long}")
    assert all(len(line) <= COLUMNS for line in wrapped.splitlines())
    assert wrapped.split() == f"{long} - {long} - `{long[:60]}`, `{long[:60]}` {long}".split()
    assert all(line.count("`") % 2 == 0 for line in wrapped.splitlines()), "code is in one line"
