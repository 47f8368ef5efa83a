"""Renders the chart with Helm itself, for its tests: the objects that a cluster would be given."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "infra" / "helm" / "slackline"
TOOLS = ROOT / "var" / "helm"  # infra/helm/get.sh
NAME, NAMESPACE = "slackline", "serving"
Object = dict[str, Any]
SMALL = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
# With every part that a value adds to the chart.
FULL: dict[str, Any] = {
    "models": [
        {
            "name": "llama",
            "engine": "vllm",
            "folder": "Llama-3-8B-Instruct",
            "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
            "gpus": 2,
            "replicas": {"from": 1, "to": 4},
            "pool": "hp",
            "adapters": {"sql": "adapters/sql"},
            "vllm": {"max_model_len": 8192},
            "resources": {"limits": {"memory": "64Gi"}, "requests": {"cpu": "8", "memory": "64Gi"}},
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
        {
            "name": "small",
            "engine": "torch",
            "folder": "slackline-5m",
            "draft": "none",
            "role": "prefill",
            "kvPort": 9470,
            "replicas": {"from": 2, "to": 2},
            "resources": SMALL,
        },
        {
            "name": "stand-in",
            "engine": "sim",
            "tokenizer": "slackline-5m",
            "replicas": {"from": 1, "to": 3},
            "resources": SMALL,
            "settings": {"pace": 0.2, "kv_blocks": 2_000_000},
        },
    ],
    "policy": {"name": "sarathi", "settings": {"chunk_tokens": "256"}},
    "image": {"registry": "registry.example/team", "tag": "1", "pullSecrets": ["pull"]},
    "gateway": {
        "tlsSecret": "slackline-tls",
        "consoleKeysSecret": "slackline-console",
        "service": {"annotations": {"a": "b"}},
        "ingress": {"enabled": True, "className": "nginx", "annotations": {"a": "b"}},
        "route": {"enabled": True, "parents": [{"name": "public", "namespace": "gateways"}]},
    },
    "nats": {"exporter": True, "storageClass": "fast", "hosts": ["nats.example.com"]},
    "keys": {"tenants": ["default", "acme"], "rotate": {"gateway": "2"}},
    "monitoring": {"enabled": True, "dashboards": True, "labels": {"release": "prometheus"}},
    "otlp": "http://otel-collector.monitoring.svc:4318",
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "system", "operator": "Exists"}],
}
EXTERNAL: dict[str, Any] = {
    "nats": {"external": "tls://nats-a.example:4222,tls://nats-b.example:4333"},
    "gateway": {"withoutKeys": True},
    "models": [
        {"name": "s", "engine": "sim", "replicas": {"from": 1, "to": 2}, "resources": SMALL}
    ],
    "scaling": {"by": "hpa"},
    "network": {"policies": True},
}
EXAMPLES: dict[str, dict[str, Any]] = {"default": {}, "full": FULL, "external": EXTERNAL}


@cache
def helm() -> Any:
    """The module of helm-python-sdk; skips the test where there is none."""
    use_tools()
    module = pytest.importorskip("helm_python", reason="infra/helm/get.sh has not been run")
    module.disable_logging()
    return module


def use_tools() -> None:
    """Let packages of var/helm be imported after our own."""
    folders = [str(folder) for folder in TOOLS.glob("lib/python*/site-packages")]
    sys.path += [folder for folder in folders if folder not in sys.path]


@cache
def chart() -> Any:
    return helm().Chart.load(str(CHART))


def render(values: dict[str, Any], name: str = NAME, namespace: str = NAMESPACE) -> list[Object]:
    """The objects of these values. Raises HelmError where the schema or a template refuses them."""
    chart().validate_schema(values)
    texts = chart().render(values, name=name, namespace=namespace)
    manifests = [text for path, text in texts.items() if path.endswith(".yaml")]
    # libyaml takes a tenth of the time
    return [one for text in manifests for one in yaml.load_all(text, yaml.CSafeLoader) if one]


def named(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """The objects by kind and name; raises AssertionError where two are the same."""
    found: dict[tuple[str, str], Object] = {}
    for one in objects:
        key = (one["kind"], one["metadata"]["name"])
        assert key not in found, key
        found[key] = one
    return found


def pods(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """The pod templates of workloads, by the kind and name of these."""
    return {
        (one["kind"], one["metadata"]["name"]): one["spec"]["template"]
        for one in objects
        if one["kind"] in ("Deployment", "StatefulSet", "Job")
    }
