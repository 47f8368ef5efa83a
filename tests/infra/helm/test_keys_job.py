"""Tests of the Job that keeps the keys in Secrets, against a server that holds Secrets."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.bus.nkey import login_of
from tests.infra.helm.api_server import TOKENS, Secrets, api_server
from tests.infra.helm.chart import CHART, Object

PREFIX, NAMESPACE, ACCOUNT = "f-keys-", "serving", "keys"
NAMES = ["authority", "server", "operator", "gateway", "admission", "planner", "relegation"]
NAMES += ["worker-m", "tenant-a", "tenant-b"]
WANTED: dict[str, Any] = {
    "prefix": PREFIX,
    "sets": {"m": ["f-m-0", "f-m-1"]},
    "tenants": ["a"],
    "hosts": ["nats"],
    "rotate": {},
    "earlier": "keep",
}
Run = Callable[..., subprocess.CompletedProcess[str]]


def objects() -> list[Object]:
    names = [PREFIX + name for name in NAMES]
    role = {"kind": "Role", "metadata": {"name": "r"}, "rules": [
        {"resources": ["secrets"], "resourceNames": names, "verbs": ["get", "patch"]}
    ]}  # fmt: skip
    binding = {"kind": "RoleBinding", "metadata": {"name": "b"}, "roleRef": {"name": "r"}}
    binding |= {"subjects": [{"name": ACCOUNT}]}
    secrets = [{"kind": "Secret", "metadata": {"name": name}} for name in names]
    return [role, binding, *secrets]


@pytest.fixture
def secrets() -> Secrets:
    return Secrets(objects())


@pytest.fixture
def job(tmp_path: Path, secrets: Secrets) -> Iterator[Run]:
    """Runs the script as its pod does: each time with an empty folder."""
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text(TOKENS + ACCOUNT)
    (account / "namespace").write_text(NAMESPACE)
    folder = tmp_path / "pod"

    def run(**changed: Any) -> subprocess.CompletedProcess[str]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        text = (CHART / "files" / "keys.py").read_text()
        text = text.replace("/var/run/secrets/kubernetes.io/serviceaccount", str(account))
        (folder / "keys.py").write_text(text.replace('Path("/keys")', f'Path("{folder}/keys")'))
        return subprocess.run(
            [sys.executable, str(folder / "keys.py"), json.dumps(WANTED | changed)],
            env=os.environ | {
                "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)
            },
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    with api_server(secrets, NAMESPACE, "127.0.0.1", account) as port:
        yield run


def users_in(secrets: Secrets) -> dict[str, str]:
    found: dict[str, str] = json.loads(secrets.data[f"{PREFIX}server"]["users.json"])
    return found


def public(secrets: Secrets, name: str, file: str = "user.nk") -> str:
    return login_of(secrets.data[PREFIX + name][file]).public


def test_each_user_has_a_secret_and_a_second_run_changes_nothing(
    job: Run, secrets: Secrets
) -> None:
    done = job()
    assert done.returncode == 0, done.stderr
    known = users_in(secrets)
    assert known.keys() == {
        "operator", "gateway", "admission", "planner", "relegation",
        "worker.f-m-0", "worker.f-m-1", "tenant.a",
    }  # fmt: skip
    assert public(secrets, "gateway") == known["gateway"]
    assert public(secrets, "tenant-a") == known["tenant.a"]
    assert public(secrets, "worker-m", "f-m-1.nk") == known["worker.f-m-1"]
    assert all(
        key in secrets.data[f"{PREFIX}server"]["nats.conf"].decode() for key in known.values()
    )
    assert "SU" not in done.stdout  # no seed is told
    before = dict(secrets.versions)
    assert job().returncode == 0
    assert secrets.versions == before


def test_what_is_not_wanted_any_more_is_revoked_and_what_is_new_gets_a_key(
    job: Run, secrets: Secrets
) -> None:
    job()
    before = users_in(secrets)
    assert job(tenants=["b"], sets={"m": ["f-m-0"]}).returncode == 0
    after = users_in(secrets)
    assert before.keys() - after.keys() == {"tenant.a", "worker.f-m-1"}
    assert after.keys() - before.keys() == {"tenant.b"}
    assert before.items() & after.items() == {
        (user, key) for user, key in after.items() if user != "tenant.b"
    }
    assert "f-m-1.nk" not in secrets.data[f"{PREFIX}worker-m"]


def test_a_secret_that_was_lost_gets_a_new_key(job: Run, secrets: Secrets) -> None:
    job()
    before = users_in(secrets)
    secrets.data[f"{PREFIX}gateway"] = {}
    assert job().returncode == 0
    after = users_in(secrets)
    assert {user for user in after if after[user] != before[user]} == {"gateway"}
    assert public(secrets, "gateway") == after["gateway"]
    assert before["gateway"] not in secrets.data[f"{PREFIX}server"]["nats.conf"].decode()


def test_keys_are_made_anew_once_and_those_before_go_when_told(job: Run, secrets: Secrets) -> None:
    job()
    before = users_in(secrets)
    for _ in range(2):
        assert job(rotate={"worker": "2"}).returncode == 0
        after = users_in(secrets)
        turned = {user for user in after if after[user] != before[user]}
        assert turned == {"worker.f-m-0", "worker.f-m-1"}
        config = secrets.data[f"{PREFIX}server"]["nats.conf"].decode()
        assert all(before[user] in config and after[user] in config for user in turned)
        assert public(secrets, "worker-m", "f-m-0.nk") == after["worker.f-m-0"]
    assert job(rotate={"worker": "2"}, earlier="drop").returncode == 0
    assert users_in(secrets) == after
    config = secrets.data[f"{PREFIX}server"]["nats.conf"].decode()
    assert not any(before[user] in config for user in turned)


def test_a_job_that_may_not_write_or_comes_second_fails(
    job: Run, secrets: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, asked = secrets.answer, list[str]()

    def between(account: str, verb: str, name: str, patch: Any) -> tuple[int, Any]:
        """Another pod writes the Secret of the server before this one does."""
        asked.append(name)
        if verb == "patch" and name == f"{PREFIX}server":
            secrets.versions[name] += 1
        return answer(account, verb, name, patch)

    monkeypatch.setattr(secrets, "answer", between)
    done = job()
    assert done.returncode != 0
    assert "409" in done.stderr
    assert asked[-1] == f"{PREFIX}server"  # the last one, so that the next run knows
    monkeypatch.undo()
    assert job().returncode == 0
    assert public(secrets, "planner") == users_in(secrets)["planner"]
    assert job(tenants=["c"]).returncode != 0  # there is no Secret for it
