"""Tests of the chart's objects, of examples and of values drawn at random: Helm renders and lints
them, Kubernetes' and the operators' schemas take them, and they fit together.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.admission.config import AdmissionConfig
from services.gateway.config import GatewayConfig
from services.planner.config import PlannerConfig
from services.relegation.config import RelegationConfig
from services.worker.config import WorkerConfig
from shared.process.configuration import load
from shared.process.stopping import GRACE_S
from shared.subjects import ID_PATTERN
from tests.infra.helm.chart import (
    CHART,
    EXAMPLES,
    FULL,
    ROOT,
    SMALL,
    TOOLS,
    Object,
    helm,
    named,
    pods,
    render,
    use_tools,
)

OPERATORS = {
    "ScaledObject": "keda/keda.sh/v1alpha1",
    "HTTPRoute": "gateway-api/gateway.networking.k8s.io/v1",
    "PodMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "ServiceMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "prometheus-operator/monitoring.coreos.com/v1",
}
CONFIGS: dict[str, Any] = {
    "admission": AdmissionConfig,
    "gateway": GatewayConfig,
    "planner": PlannerConfig,
    "relegation": RelegationConfig,
    "worker": WorkerConfig,
}
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
BESIDE = {"kube-root-ca.crt"}  # Kubernetes makes it in each namespace
every_example = pytest.mark.parametrize("values", EXAMPLES.values(), ids=EXAMPLES)


@every_example
def test_helm_has_no_objection(values: dict[str, Any]) -> None:
    report = helm().lint(str(CHART), values, strict=True)
    assert report["errors"] == []
    told = [one["error"] for one in report["messages"]]
    assert [error for error in told if error != "icon is recommended"] == []


@every_example
def test_kubernetes_takes_every_object(values: dict[str, Any]) -> None:
    objects = render(values)
    for version in ("1.31", "1.37"):
        _validate(objects, version)


def _validate(objects: list[Object], version: str) -> None:
    """Strictly: a field that Kubernetes does not know is an error."""
    use_tools()
    import kubernetes_validate

    for one in objects:
        if one["kind"] not in OPERATORS:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.slow
def test_checkov_objects_to_nothing_but_what_the_readme_argues(tmp_path: Path) -> None:
    for name, values in EXAMPLES.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(render(values)))
    command = [str(TOOLS / "bin" / "checkov"), "--framework", "kubernetes", "--directory", "."]
    done = subprocess.run(
        [*command, "--output", "json", "--quiet"],
        cwd=tmp_path, check=False, capture_output=True, text=True,
    )  # fmt: skip
    results = json.loads(done.stdout)["results"]
    failed = {check["check_id"] for check in results["failed_checks"]}
    rows = (CHART / "README.md").read_text().partition("| check | reason |")[2]
    assert failed == set(re.findall(r"CKV\w+", rows)), failed


@pytest.mark.slow
def test_the_operators_take_every_object_of_theirs(tmp_path: Path) -> None:
    """By their types, which know every field, and by their validators, which know every format."""
    modules = TOOLS / "js" / "node_modules"
    if not (modules / "@kubernetes-models").is_dir():
        pytest.skip("infra/helm/get.sh found no schemas of operators")
    objects = [one for values in EXAMPLES.values() for one in render(values)]
    theirs = [one for one in objects if one["kind"] in OPERATORS]
    assert {one["kind"] for one in theirs} == set(OPERATORS)
    lines = [
        f'import {{ {kind}, type I{kind} }} from "@kubernetes-models/{path}/{kind}";'
        for kind, path in OPERATORS.items()
    ]
    for n, one in enumerate(theirs):
        lines += [
            f"const o{n}: I{one['kind']} = {json.dumps(one)};",
            f"new {one['kind']}(o{n}).validate();",
        ]
    (tmp_path / "node_modules").symlink_to(modules)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    def checks(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "check.ts").write_text(text)
        node = str(TOOLS / "bin" / "node")
        compiler = [node, str(modules / "typescript" / "bin" / "tsc"), "--strict", "--skipLibCheck"]
        options = ["--module", "nodenext", "--target", "es2022", "check.ts"]
        for command in ([*compiler, *options], [node, "check.js"]):
            done = subprocess.run(
                command, cwd=tmp_path, check=False, capture_output=True, text=True
            )
            if done.returncode:
                break
        return done

    done = checks("\n".join(lines))
    assert done.returncode == 0, done.stdout + done.stderr
    assert checks("\n".join(lines).replace("minReplicaCount", "minReplicas")).returncode != 0
    assert checks("\n".join(lines).replace('"5s"', '"five"')).returncode != 0


def a_model(**other: Any) -> dict[str, Any]:
    one = {"name": "a", "engine": "sim", "replicas": {"from": 1, "to": 1}, "resources": SMALL}
    return one | other


def test_a_model_needs_little() -> None:
    assert pods(render({"models": [a_model()]}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"models": []},
        {"modells": []},
        {"models": [a_model(name="Llama")]},
        {"models": [a_model(engine="tgi")]},
        {"models": [a_model(engine="torch")]},  # without a folder
        {"models": [a_model(gpus=1)]},  # for sim
        {"models": [a_model(resources={"limits": {}})]},  # without memory
        {"models": [a_model(replicas={"from": 0, "to": 1})]},
        {"models": [a_model(replicas={"from": 1})]},
        {"models": [a_model(replicas={"from": 3, "to": 1})]},
        {"models": [a_model(), a_model()]},
        {"models": [a_model(replicas={"from": 1, "to": 100})], "nats": {"storeGB": 8}},
        {"nats": {"replicas": 2}},
        {"nats": {"external": "http://nats:4222"}},
        {"gateway": {"route": {"enabled": True}}},  # without a parent
        {"keys": {"rotate": {"gatewy": "1"}}},
        {"drain": {"gateway": 0}},
        {"config": {"tiers": {}}},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(helm().HelmError):
        render(wrong)


# some of which YAML takes for something else where they are not quoted
WORDS = ("no", "on", "null", "y", "n", "1", "1e3", "0x1")
names = st.sampled_from(WORDS) | st.from_regex(r"[a-z]([a-z0-9-]{0,18}[a-z0-9])?", fullmatch=True)
counts = st.integers(1, 6)


@st.composite
def models(draw: st.DrawFn, name: str) -> dict[str, Any]:
    least, more = draw(counts), draw(st.integers(0, 3))
    engine = draw(st.sampled_from(["sim", "torch", "vllm"]))
    model = a_model(name=name, engine=engine)
    model["replicas"] = {"from": least, "to": least + more}
    if engine != "sim":
        model["folder"] = draw(st.sampled_from(["slackline-5m", "Llama-3-8B", "a/b.c"]))
        model["gpus"] = draw(st.integers(0, 8))
        if draw(st.booleans()):
            model["volume"] = {"hostPath": {"path": "/srv/models"}}
    if engine == "vllm" and "volume" in model and draw(st.booleans()):
        model["adapters"] = {"one": "adapters/one"}
    if engine == "torch" and draw(st.booleans()):
        model["draft"] = draw(st.sampled_from(["none", "slackline-draft"]))
    return model


@st.composite
def drawn_values(draw: st.DrawFn) -> dict[str, Any]:
    chosen = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    drains = ("gateway", "admission", "planner", "relegation", "worker")
    return {
        "models": [draw(models(name)) for name in chosen],
        "gateway": {
            "withoutKeys": draw(st.booleans()),
            "keysSecret": draw(st.sampled_from(["", "1"])),
            "tlsSecret": draw(st.sampled_from(["", "no"])),
            "ingress": {"enabled": draw(st.booleans())},
            "replicas": draw(counts),
        },
        "drain": {service: draw(st.integers(1, 600)) for service in drains},
        "nats": {
            "replicas": draw(st.sampled_from([3, 5])),
            "storeGB": draw(st.integers(11, 200)),
            "exporter": draw(st.booleans()),
            "external": draw(st.sampled_from(["", "nats://a:4222,nats://b:4223"])),
        },
        "keys": {"create": draw(st.booleans()), "tenants": draw(st.lists(names, unique=True))},
        "scaling": {"by": draw(st.sampled_from(["keda", "hpa"]))},
        "network": {"policies": draw(st.booleans())},
        "monitoring": {"enabled": draw(st.booleans()), "dashboards": draw(st.booleans())},
        "otlp": draw(st.sampled_from(["", "http://collector:4318"])),
    }


@settings(phases=(Phase.reuse, Phase.generate))  # to shrink a failure would take minutes
@given(drawn_values(), names)
def test_whatever_the_values_the_objects_fit_together(values: dict[str, Any], name: str) -> None:
    objects = render(values, name, name)
    _validate(objects, "1.37")
    _check(objects, values)


@every_example
def test_the_examples_fit_together(values: dict[str, Any]) -> None:
    _check(render(values), values)


def _check(objects: list[Object], values: dict[str, Any]) -> None:
    found = named(objects)  # every name is unique
    templates = pods(objects)
    labels = [one["metadata"]["labels"] for one in templates.values()]
    given_by_the_user = {"1", "no", "slackline-http", "slackline-tls", "slackline-console"}
    own_nats = not values.get("nats", {}).get("external")
    created = values.get("keys", {}).get("create", True)
    for (kind, name), one in found.items():
        assert one["metadata"]["namespace"], name
        assert len(name) <= (52 if kind == "StatefulSet" else 63), name
        assert name[0].isalpha(), name  # which a Service needs
        for selector in _selectors(one):
            assert any(selector.items() <= given.items() for given in labels), (kind, name)
    for key, template in templates.items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsUser"] == 10001
        assert found["ServiceAccount", spec["serviceAccountName"]]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in found
            if "secret" in volume and volume["secret"]["secretName"] not in given_by_the_user:
                assert (("Secret", volume["secret"]["secretName"]) in found) == created, key
        claims = found[key]["spec"].get("volumeClaimTemplates", [])
        mountable = {*volumes, *(claim["metadata"]["name"] for claim in claims)}
        ports = {port["name"] for c in spec["containers"] for port in c.get("ports", [])}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= mountable
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
            assert len(paths) == len(set(paths))
            variables = [variable["name"] for variable in container.get("env", [])]
            assert len(variables) == len(set(variables)), variables
            assert all(isinstance(v.get("value", ""), str) for v in container.get("env", []))
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            for probe in (v for k, v in container.items() if k.endswith("Probe")):
                if "httpGet" in probe:
                    assert probe["httpGet"]["port"] in ports
        _check_grace(spec)
    workers = {
        f"{name}-{n}"
        for (kind, name), one in found.items()
        if kind == "StatefulSet" and "-worker-" in name
        for n in range(_most_replicas(one))
    }
    assert all(ID_PATTERN.fullmatch(replica) for replica in workers)
    streams = next(t for (_, name), t in templates.items() if "-streams-" in name)
    assert set(streams["spec"]["containers"][0]["command"][-1].split(",")) == workers
    assert own_nats == any(name.endswith("-nats") for kind, name in found if kind == "StatefulSet")


def _most_replicas(stateful_set: Object) -> int:
    keys = next(
        v for v in stateful_set["spec"]["template"]["spec"]["volumes"] if v["name"] == "keys"
    )
    return sum(item["key"].endswith(".nk") for item in keys["secret"]["items"])


def _selectors(one: Object) -> list[dict[str, str]]:
    """The labels of pods that the object chooses among the chart's own."""
    spec = one.get("spec", {})
    if one["kind"] == "Service":
        return [spec["selector"]]
    if one["kind"] == "NetworkPolicy":
        return [spec["podSelector"]["matchLabels"]]
    if one["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget", "PodMonitor"):
        return [spec["selector"]["matchLabels"]]
    return []


def _check_grace(spec: Object) -> None:
    """The grace has room for what comes before the drain, the drain, and the end after it."""
    for container in spec["containers"]:
        section = container["name"]
        if section not in CONFIGS:
            continue
        env = {v["name"]: v.get("value", "") for v in container["env"]}
        before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        assert before is None or before[0] == "sleep"
        waits_s = float(before[1]) if before else 0.0
        drain_s = float(env[f"SLACKLINE_{section.upper()}_DRAIN_S"])
        assert spec["terminationGracePeriodSeconds"] >= waits_s + drain_s + GRACE_S


@every_example
def test_every_service_knows_its_settings(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    objects = render(values)
    config = named(objects)["ConfigMap", "slackline-config"]["data"]["slackline.toml"]
    (tmp_path / "slackline.toml").write_text(config)
    seen = set()
    for template in pods(objects).values():
        for container in template["spec"]["containers"]:
            section = container["name"]
            if section in CONFIGS:
                env = {v["name"]: v.get("value", "r1") for v in container["env"]}
                env["SLACKLINE_CONFIG"] = str(tmp_path / "slackline.toml")
                load(CONFIGS[section], section, env)
                seen.add(section)
    assert seen == set(CONFIGS)


def test_the_values_of_the_page_are_right() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (values,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    found = named(render(yaml.safe_load(values.replace("REGISTRY", "registry.example"))))
    (worker,) = found["StatefulSet", "slackline-worker-llama"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert worker["image"] == "registry.example/slackline-vllm:0.1.0"


def test_what_the_chart_shares_with_compose_is_the_same() -> None:
    objects = named(render(FULL))
    config = named(render({}))["ConfigMap", "slackline-config"]["data"]["slackline.toml"]
    assert config.strip() == (ROOT / "infra" / "config" / "slackline.toml").read_text().strip()
    rules = yaml.safe_load((ROOT / "infra" / "prometheus" / "rules.yml").read_text())
    assert objects["PrometheusRule", "slackline-rules"]["spec"] == rules
    boards = {
        file: json.loads(board)
        for (kind, name), one in objects.items()
        if kind == "ConfigMap" and "-board-" in name
        for file, board in one["data"].items()
    }
    shipped = sorted((ROOT / "infra" / "grafana" / "dashboards").glob("*.json"))
    assert boards == {path.name: json.loads(path.read_text()) for path in shipped}
    nats = objects["ConfigMap", "slackline-nats"]["data"]["nats-server.conf"]
    assert nats.strip() == (ROOT / "infra" / "nats" / "nats-server.conf").read_text().strip()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["image"]["nats"] == COMPOSE["services"]["nats"]["image"]
    assert values["image"]["natsExporter"] == COMPOSE["services"]["nats-exporter"]["image"]


def test_the_links_of_the_chart_lead_to_files_of_ours() -> None:
    """Helm reads what a link in the chart leads to, so there is one source of each."""
    links = {
        path.name: os.readlink(path) for path in (CHART / "files").iterdir() if path.is_symlink()
    }
    assert set(links) == {"dashboards", "nats-server.conf", "rules.yml", "slackline.toml"}
    assert all((CHART / "files" / target).exists() for target in links.values())


def test_each_model_is_passed_to_its_workers_and_to_admission() -> None:
    found = named(render(FULL))

    def env_of(kind: str, name: str) -> dict[str, str]:
        spec = found[kind, name]["spec"]["template"]["spec"]
        return {v["name"]: v.get("value", "") for v in spec["containers"][0]["env"]}

    admission = env_of("Deployment", "slackline-admission")
    folder = "/models/llama/Llama-3-8B-Instruct"
    assert admission["SLACKLINE_ADMISSION_MODELS"] == f"{folder},slackline-5m"
    llama = env_of("StatefulSet", "slackline-worker-llama")
    assert llama["SLACKLINE_WORKER_MODEL"] == folder
    assert json.loads(llama["SLACKLINE_WORKER_ADAPTERS"]) == {"sql": "/models/llama/adapters/sql"}
    assert json.loads(llama["SLACKLINE_WORKER_VLLM"]) == {
        "max_model_len": 8192, "tensor_parallel_size": 2,
    }  # fmt: skip
    assert env_of("StatefulSet", "slackline-worker-small")["SLACKLINE_WORKER_DRAFT_MODEL"] == "none"
    stand_in = env_of("StatefulSet", "slackline-worker-stand-in")
    assert stand_in["SLACKLINE_WORKER_PACE"] == "0.2"
    assert stand_in["SLACKLINE_WORKER_KV_BLOCKS"] == "2000000"
    limits = found["StatefulSet", "slackline-worker-llama"]["spec"]["template"]["spec"]
    assert limits["containers"][0]["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 2}
    one = named(render({}))["Deployment", "slackline-admission"]["spec"]["template"]["spec"]
    env = {v["name"]: v.get("value") for v in one["containers"][0]["env"]}
    assert env["SLACKLINE_ADMISSION_MODEL"] == "slackline-5m"
    assert "SLACKLINE_ADMISSION_MODELS" not in env


def test_workers_with_roles_reach_each_other_and_nobody_else_does() -> None:
    found = named(render(FULL))
    spec = found["StatefulSet", "slackline-worker-small"]["spec"]["template"]["spec"]
    env = {v["name"]: v.get("value") for v in spec["containers"][0]["env"]}
    assert env["SLACKLINE_WORKER_ROLE"] == "prefill"
    assert env["SLACKLINE_WORKER_KV_LISTEN"] == "$(POD_IP):9470"
    policy = found["NetworkPolicy", "slackline-worker"]["spec"]
    [enters] = [rule for rule in policy["ingress"] if {"port": 9470} in rule["ports"]]
    [leaves] = [rule for rule in policy["egress"] if {"port": 9470} in rule.get("ports", ())]
    assert enters["from"] == leaves["to"] == [{"podSelector": policy["podSelector"]}]
    without = named(render({}))["NetworkPolicy", "slackline-worker"]["spec"]
    assert "9470" not in json.dumps(without)


@pytest.mark.parametrize("by", ["keda", "hpa"])
def test_a_model_with_a_range_is_scaled_by_the_signal_of_its_name(by: str) -> None:
    objects = render({**FULL, "scaling": {"by": by}})
    found = named(objects)
    kind = {"keda": "ScaledObject", "hpa": "HorizontalPodAutoscaler"}[by]
    scaled = {name for k, name in found if k == kind}
    assert scaled == {"slackline-worker-llama", "slackline-worker-stand-in"}
    assert "replicas" not in found["StatefulSet", "slackline-worker-llama"]["spec"]
    assert found["StatefulSet", "slackline-worker-small"]["spec"]["replicas"] == 2
    text = json.dumps(found[kind, "slackline-worker-llama"])
    assert "slackline_replicas_needed" in text
    label = {"keda": r"model_name=\"{}\"", "hpa": '"model_name": "{}"'}[by]
    assert label.format("Llama-3-8B-Instruct") in text


def test_the_job_of_the_keys_may_touch_the_secrets_of_the_keys_and_nothing_else() -> None:
    objects = render(FULL)
    roles = [one for one in objects if "Role" in one["kind"] and "rules" in one]
    assert [role["kind"] for role in roles] == ["Role"]
    (rule,) = roles[0]["rules"]
    assert (rule["resources"], rule["verbs"]) == (["secrets"], ["get", "patch"])
    secrets = {name for kind, name in named(objects) if kind == "Secret"}
    assert set(rule["resourceNames"]) == secrets
    assert all(re.fullmatch(r"slackline-keys-[a-z0-9-]+", name) for name in secrets)
