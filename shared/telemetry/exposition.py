"""Writes metrics in Prometheus' text format 0.0.4 or, with exemplars, OpenMetrics 1.0, as asked."""

from collections.abc import Mapping, Sequence

from shared.telemetry.instruments import (
    AnyFamily,
    Counter,
    Exemplar,
    Gauge,
    Histogram,
    Registry,
    number,
)

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPEN_METRICS_END = "# EOF\n"


def exposition(registries: Sequence[Registry], accept: str) -> tuple[str, str]:
    """The content type and the text. `accept`: the scraper's header of that name."""
    is_open = wants_open_metrics(accept)
    families = [family for registry in registries for family in registry.families()]
    lines = [line for family in families for line in _lines(family, is_open=is_open)]
    text = "".join(f"{line}\n" for line in lines)
    return (OPEN_METRICS, text + OPEN_METRICS_END) if is_open else (PROMETHEUS, text)


def wants_open_metrics(accept: str) -> bool:
    return "application/openmetrics-text" in accept.lower()


def _lines(family: AnyFamily, *, is_open: bool) -> list[str]:
    kind = family.kind
    # in OpenMetrics a counter's family is named without the ending of its samples
    head = family.name.removesuffix("_total") if is_open and kind == "counter" else family.name
    lines = [f"# HELP {head} {family.text}", f"# TYPE {head} {kind}"]
    children: Mapping[tuple[str, ...], Counter | Gauge | Histogram] = family.children
    for values, child in sorted(children.items()):
        own = [
            f'{label}="{_escaped(value)}"'
            for label, value in zip(family.label_names, values, strict=True)
        ]
        for suffix, extra, value, exemplar in child.samples():
            inside = ",".join([*own, extra] if extra else own)
            labels = f"{{{inside}}}" if inside else ""
            tail = _exemplar(exemplar) if is_open and exemplar is not None else ""
            lines.append(f"{family.name}{suffix}{labels} {number(value)}{tail}")
    return lines


def _exemplar(exemplar: Exemplar) -> str:
    return f' # {{trace_id="{exemplar.trace_id}"}} {number(exemplar.value)}'


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
