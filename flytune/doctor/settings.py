"""Checks of Flyte's own settings, which are in the ConfigMaps of its chart."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from flytune import yaml_core
from flytune.doctor.finding import Finding, fail, ok, warn
from flytune.hardware import Shape
from flytune.hardware.shapes import GIB

LABEL = "app.kubernetes.io/name in (flyte-binary, flyteadmin)"
"""Label by which the charts flyte-binary and flyte-core mark their ConfigMaps."""
_WHAT = "flyte settings"
_PYTORCH = {
    "enabled-plugins": ["container", "sidecar", "K8S-ARRAY", "pytorch"],
    "default-for-task-types": {
        "container": "container",
        "sidecar": "sidecar",
        "container_array": "K8S-ARRAY",
        "pytorch": "pytorch",
    },
}


def merged(maps: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return one configuration of the YAML files in some ConfigMaps, as Flyte merges them: later names over
    earlier ones."""
    configuration: dict[str, Any] = {}
    for files in maps:
        for name in sorted(files):
            try:
                content = yaml_core.load(files[name])
            except yaml.YAMLError:
                continue
            if isinstance(content, dict):
                _merge(configuration, content)
    return configuration


def findings(configuration: dict[str, Any] | None, shapes: Sequence[Shape]) -> Iterator[Finding]:
    """Check the settings that runs depend on.

    Args:
        configuration: what `merged` returns; empty where no chart's ConfigMap is there, None where they may
            not be read.
    """
    if configuration is None:
        yield ok(_WHAT, "not checked: ConfigMaps cannot be read with this kubeconfig")
        return
    if not configuration:
        yield ok(_WHAT, "not checked: there are no ConfigMaps of the charts flyte-binary and flyte-core")
        return
    problems = [
        *_plugins(configuration, [shape.name for shape in shapes if shape.nodes > 1]),
        *_limits(configuration, shapes),
    ]
    yield from problems
    if not problems:
        yield ok(_WHAT, "plugins, limits of requests, and errors of several nodes are as runs need them")


def _merge(into: dict[str, Any], content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _section(configuration: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    section: Any = configuration
    for key in keys:
        section = section.get(key) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def _plugins(configuration: Mapping[str, Any], several: Sequence[str]) -> Iterator[Finding]:
    """Check what shapes of several nodes need; Flyte enables all plugins where none is named."""
    if not several:
        return
    rows = ", ".join(several)
    enabled = _section(configuration, "tasks", "task-plugins").get("enabled-plugins") or []
    if enabled and "pytorch" not in {str(name).strip().lower() for name in enabled}:
        do = _advice({"tasks": {"task-plugins": _PYTORCH}})
        yield fail(_WHAT, f"the plugin pytorch is not enabled; it starts the nodes of {rows}", do)
    if not _section(configuration, "plugins", "k8s").get("enable-distributed-error-aggregation"):
        do = _advice({"plugins": {"k8s": {"enable-distributed-error-aggregation": True}}})
        yield warn(_WHAT, f"the first error of several nodes ({rows}) is not the one that is shown", do)


def _limits(configuration: Mapping[str, Any], shapes: Sequence[Shape]) -> Iterator[Finding]:
    """Compare the limits of requests with what the shapes request; a limit that is absent or 0 is none."""
    from kubernetes.utils.quantity import parse_quantity

    limits = _section(configuration, "task_resources", "limits")
    requested = (
        ("cpu", "", 1, {shape.name: shape.cpu for shape in shapes}),
        ("memory", "Gi", GIB, {shape.name: shape.memory_gib for shape in shapes}),
        ("ephemeralStorage", "Gi", GIB, {shape.name: shape.disk_gib for shape in shapes}),
        ("gpu", "", 1, {shape.name: shape.processes for shape in shapes if shape.is_gpu}),
    )
    too_low, needed = [], {}
    for key, unit, size, by_shape in requested:
        try:
            limit = float(parse_quantity(str(limits.get(key) or 0))) / size
        except ValueError:
            continue
        above = [name for name, amount in by_shape.items() if amount > limit]
        if limit and above:
            too_low.append(f"{key} {limit:.4g}{unit} (below {', '.join(above)})")
            needed[key] = f"{max(by_shape.values())}{unit}"
    if too_low:
        problem = (
            f"task_resources.limits: {'; '.join(too_low)}: Flyte refuses or lowers what their pods request"
        )
        yield fail(_WHAT, problem, _advice({"task_resources": {"limits": needed}}))


def _advice(values: dict[str, Any]) -> str:
    flow = yaml.safe_dump(values, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return (
        f"merge into Flyte's configuration (chart flyte-binary: configuration.inline), and restart it: {flow}"
    )
