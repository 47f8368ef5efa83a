"""Tests of mistakes in a command's words: one clear line, exit code 2, and nothing has run."""

from io import StringIO
from pathlib import Path

import pytest

from loadgen.cli.main import main
from tests.loadgen.cli.command import refused

LOAD = "--workload mix --duration 8 --tiers demo-3"
RIGHT = {
    "simulate": f"{LOAD} --rate 4 --policy fcfs",
    "bound": f"{LOAD} --rate 4",
    "capacity": f"{LOAD} --rate 8",
    "search": LOAD,
    "compare": f"{LOAD} --policies fcfs:chunk_tokens=512,edf",
    "load": "--workload mix --rate 1",
    "submit": "hello",
}
GRID = "--policy fcfs --grid chunk_tokens=1,2"
MISTAKES = [
    ("simulate", "--policy lifo", "no policy is called"),
    ("simulate", "--profile b900", "no profile named"),
    ("simulate", "--set chunk", "expected KEY=VALUE"),
    ("simulate", "--set chunks=4", "no setting"),
    ("simulate", "--set chunk_tokens=4 --set chunk_tokens=5", "given twice"),
    ("simulate", "--replicas 0", "--replicas must be 1 or more"),
    ("simulate", "--rate -1", "--rate must be above 0"),
    ("simulate", "--rate nan", "--rate must be above 0"),
    ("simulate", "--rate 1e12", "8e+12 requests would arrive, and a plan has at most 5,000,000:"),
    ("simulate", "--rate 9000 --bursts 1:999,1:1", "lower --rate or --duration"),
    ("simulate", "--duration 0", "--duration must be above 0"),
    ("simulate", "--context 0", "--context must be 1 or more"),
    ("simulate", "--check -1", "--check"),
    ("simulate", "--wait -1", "--wait must be 0 or more"),
    ("simulate", "--arrivals trace", "needs --trace"),
    ("simulate", "--arrivals gamma:x", "gamma:CV"),
    ("simulate", "--bursts 5", "bursts"),
    ("simulate", "--important 2", "--important"),
    ("simulate", "--tiers nobody", "neither a built-in set"),
    ("simulate", "--tiers nowhere.toml", "cannot read nowhere.toml"),
    ("simulate", "--workload poetry", "not built in"),
    ("simulate", "--definition p99", "--definition"),
    ("simulate", "--latency some", "--latency"),
    ("simulate", "--trace nowhere.csv", "not allowed with"),
    ("bound", "--policy lifo", "no policy is called"),
    ("bound", "--replicas 0", "--replicas must be 1 or more"),
    ("capacity", "--violations 1", "--violations is a fraction"),
    ("capacity", "--violations -0.1", "--violations is a fraction"),
    ("capacity", "--precision 0", "--precision is a fraction"),
    ("capacity", "--rate 0", "--rate must be above 0"),
    ("search", "--policy fcfs", "say what to try"),
    ("search", "--policy fcfs --grid chunk=1,2", "no setting chunk"),
    ("search", "--policy fcfs --grid chunk_tokens=1,two", "chunk_tokens"),
    ("search", "--policy ascendra --grid subgroup=2L1H,0L3H", "subgroup"),
    ("search", f"{GRID} --set chunk_tokens=1", "given twice"),
    ("search", f"{GRID} --rate 2 --violations 0.1", "not both"),
    ("search", f"{GRID} --violations 2", "--violations is a fraction"),
    ("search", f"{GRID} --jobs 0", "--jobs must be 1 or more"),
    ("search", f"{GRID} --rate 0", "--rate must be above 0"),
    ("compare", "a.json --rate 4", "not both"),
    ("compare", "--rate 4 --policies edf,,fcfs", "one of the names is empty"),
    ("compare", "--rate 4 --policies edf,fcfs,edf", "`edf` is there twice"),
    ("compare", "--rate 4 --policies edf:chunk_tokens", "expected each KEY=VALUE"),
    ("compare", "--rate 4 --policies edf:chunks=1", "no setting"),
    ("compare", "--rate 4 --plots /dev/null/plots", "cannot make the folder"),
    ("compare", "--rate 4 --html /dev/null/page.html", "--html"),
    ("compare", "--rates 4,x", "expected different rates"),
    ("compare", "--rates 4,4", "expected different rates"),
    ("compare", "--rates 4 --rate 4", "either --rate or --rates"),
    ("compare", "", "--rate is needed"),
    ("load", "--http ftp://x", "--http"),
    ("load", "--wait -1", "--wait must be 0 or more"),
    ("submit", "--max-tokens 0", "--max-tokens must be 1 to 1000000"),
    ("submit", "--temperature 9", "--temperature must be 0 to 2"),
    ("submit", "--temperature nan", "--temperature must be 0 to 2"),
    ("submit", "--seed 99999999999999999999", "--seed must be a whole number"),
    ("submit", "--tier a.b", "--tier"),
    ("submit", "--nonsense", "unrecognized arguments: --nonsense"),
]


@pytest.mark.parametrize(("command", "words", "says"), MISTAKES)
def test_one_word_that_is_wrong_is_told_in_one_line(
    command: str, words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, command, *RIGHT[command].split(), *words.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "required: COMMAND"),
        ("nonsense", "invalid choice"),
        ("--nope", "slackline: the following arguments are required: COMMAND (--help says more)"),
        ("status --nope", "slackline status: unrecognized arguments: --nope (--help says more)"),
        ("key a b c", "slackline key: unrecognized arguments: c"),
        ("config", "required: check|fields|schema "),
        ("completion", "required: bash|zsh|fish "),
        ("completion tcsh", "bash"),
        ("profile", "required: list|show|running|fit "),
        ("profile show b900", "no profile named 'b900'"),
        ("load", "required"),
        ("load --rate x --workload mix", "--rate"),
        ("load --workload mix", "--rate is needed"),
        ("load --trace nowhere.csv --rate 1", "nowhere.csv"),
        ("chat --max-tokens 0", "--max-tokens must be 1 to 1000000"),
        ("compare", "give reports of `slackline load --out`, or --policies"),
        (f"compare {LOAD} --rate 4", "or --policies"),
        ("compare --policies edf", "with a --trace or --workload"),
        ("compare a.json --json", "reports are JSON already"),
        ("compare absent.json", "absent.json"),
        ("advise --trace none.csv --target 1.5", "--target"),
        ("advise --trace none.csv --profile z900", "no profile named 'z900'"),
        ("advise --trace none.csv --tiers nowhere.toml", "nowhere.toml"),
        ("advise --trace none.csv --jobs 0", "--jobs"),
    ],
)
def test_words_that_make_no_sense_together_are_told_in_one_line(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, *words.split())


@pytest.mark.parametrize(("prompt", "read"), [("   ", ""), ("-", " \n")])
def test_an_empty_prompt_is_refused(
    prompt: str, read: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(read))
    assert refused(capsys, "submit", prompt) == "slackline submit: the prompt is empty\n"


@pytest.mark.parametrize("text", ["# A page", '{"name": "x"}'])
def test_a_file_that_is_no_report_is_told_as_that(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    said = refused(capsys, "compare", str(file))
    assert f"{file} is no report of `slackline load --out`" in said


@pytest.mark.parametrize("option", ["--creds", "--tls-ca"])
@pytest.mark.parametrize("text", ["# A page\n", None])
@pytest.mark.parametrize("command", ["submit hello", "chat", "load --workload mix --rate 1"])
def test_a_key_or_an_authority_that_is_none_is_told_with_its_file(
    command: str, option: str, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.md"
    if text is not None:
        file.write_text(text)
    way = (option, str(file), "--url", "nats://127.0.0.1:1")
    said = refused(capsys, *command.split(), *way)
    assert f"{option}: " in said and str(file) in said and "slackline up" not in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no column prompt_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n", "holds no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n0,ten,5\n", "line 2, column prompt_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n0,9000,5\n", "no request fits"),
    ],
)
def test_a_bad_trace_is_one_clear_line_that_says_where(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text(text)
    for name, why in (("bad.csv", says), ("absent.csv", "cannot be read")):
        said = refused(capsys, "simulate", "--trace", str(tmp_path / name), "--rate", "1")
        assert why in said


@pytest.mark.parametrize("out", ["file/report.json", "."])
def test_a_report_of_the_bench_that_cannot_be_written_is_told_before_anything_is_measured(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / out
    said = refused(capsys, "bench", "--only", "planning", "--quick", "--out", str(path))
    assert said.startswith(
        ("slackline bench: --out: cannot make", f"slackline bench: --out {path}: it")
    )


def test_with_no_server_there_the_error_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "hello", "--url", "nats://127.0.0.1:1"]) == 1
    assert "slackline up" in capsys.readouterr().err
