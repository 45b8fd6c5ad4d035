"""Checks of the nodes, operators, secrets and volumes in Kubernetes that shapes.yaml and cluster.yaml
require."""

from collections.abc import Iterator, Sequence

from pydantic import Field

from flytune.doctor import volumes
from flytune.doctor.finding import Finding, fail, ok, warn
from flytune.hardware import Cluster, Shape
from flytune.schema import Strict
from flytune.sentences import counted, counted_of

OPERATOR = "pytorchjobs.kubeflow.org"
GANG_RESOURCES = {
    "kueue": "localqueues.kueue.x-k8s.io",
    "volcano": "podgroups.scheduling.volcano.sh",
    "coscheduling": "podgroups.scheduling.x-k8s.io",
}
"""Custom resources of the gang schedulers in cluster.yaml."""
ACCELERATOR_LABELS = (
    "k8s.amazonaws.com/accelerator",
    "cloud.google.com/gke-accelerator",
    "nvidia.com/gpu.product",
)
"""Node labels with the kind of GPU: Flyte's default, GKE's, and that of NVIDIA's feature discovery."""
DEVICES = {
    "K80": "nvidia-tesla-k80",
    "M60": "nvidia-tesla-m60",
    "P4": "nvidia-tesla-p4",
    "P100": "nvidia-tesla-p100",
    "V100": "nvidia-tesla-v100",
    "T4": "nvidia-tesla-t4",
    "L4-VWS": "nvidia-l4-vws",
    "RTX-PRO-6000": "nvidia-rtx-pro-6000",
    "L4": "nvidia-l4",
    "L40S": "nvidia-l40s",
    "A10G": "nvidia-a10g",
    "A100": "nvidia-tesla-a100",
    "A100-80GB": "nvidia-a100-80gb",
    "H100": "nvidia-h100",
    "H200": "nvidia-h200",
}
"""Values of the node label by Flyte's accelerators (flytekit.extras.accelerators)."""
_SCALED = (
    "no action is needed if node groups scale up from zero; else add nodes, or remove rows from shapes.yaml"
)
GPU = "nvidia.com/gpu"


class Node(Strict):
    """A node with the resources that pods may use."""

    name: str
    labels: dict[str, str] = Field(default={})
    taints: list[str] = Field(default=[])
    """Keys of the taints that repel pods."""
    cpu: float
    memory_gib: float
    disk_gib: float
    """Ephemeral storage."""
    resources: dict[str, float] = Field(default={})
    """Other resources by name."""


class Kubernetes(Strict):
    """The facts about a cluster."""

    address: str
    resources: list[str]
    """Names of the custom resource definitions."""
    nodes: list[Node]
    namespace: str
    secrets: dict[str, list[str] | None]
    """Keys of each existing secret that cluster.yaml names; None if access is denied."""
    storage: volumes.ClusterVolumes = volumes.ClusterVolumes()


def findings(kubernetes: Kubernetes, shapes: Sequence[Shape], cluster: Cluster) -> Iterator[Finding]:
    """Check operator, gang scheduler, secrets, volumes, and each of the shapes."""
    yield ok("kubernetes", f"{kubernetes.address}: {counted(len(kubernetes.nodes), 'node')}")
    yield _operator(kubernetes, [shape.name for shape in shapes if shape.nodes > 1])
    if cluster.gang_scheduling != "none":
        yield _gang(kubernetes, cluster.gang_scheduling)
    yield from _secrets(kubernetes, cluster)
    yield from volumes.findings(kubernetes.storage, kubernetes.namespace, shapes, cluster)
    without = [shape for shape in shapes if not any(matches(node, shape) for node in kubernetes.nodes)]
    for shape in shapes:
        if len(without) == 1 or shape not in without:
            yield nodes_for(kubernetes.nodes, shape, cluster)
    if len(without) > 1:
        labels = f"by their labels {' or '.join(ACCELERATOR_LABELS)}, and by node_labels in shapes.yaml"
        yield warn("shapes", f"no nodes ({labels}) for {', '.join(shape.name for shape in without)}", _SCALED)


def nodes_for(nodes: Sequence[Node], shape: Shape, cluster: Cluster) -> Finding:
    """Check that the shape's pods would find nodes."""
    what = f"shape {shape.name}"
    matching = [node for node in nodes if matches(node, shape)]
    if not matching:
        labels = " or ".join(ACCELERATOR_LABELS)
        missing = f"no node has {shape.accelerator} in its label {labels}" if shape.is_gpu else "no node"
        required = "".join(f", {key}={value}" for key, value in shape.node_labels.items())
        return warn(what, missing + required, _SCALED)
    large = [node for node in matching if not _lacking(node, shape, cluster)]
    if not large:
        lacks = ", ".join(_lacking(matching[0], shape, cluster))
        do = "lower the values in shapes.yaml, or use larger nodes"
        return fail(what, f"{matching[0].name} has too little {lacks}: pods would never be scheduled", do)
    device = device_label(shape)
    labelled = [
        node for node in large if device in (None, *(node.labels.get(label) for label in ACCELERATOR_LABELS))
    ]
    if not labelled:
        do = (
            "add this label (gpu-device-node-label in Flyte's plugins.k8s has its name), or map it to theirs "
            "with plugins.k8s.accelerator-devices, if your Flyte has it"
        )
        return warn(what, f"Flyte selects nodes labelled {device}, and {large[0].name} has another label", do)
    tolerated = [*([GPU] if shape.is_gpu else []), *(cluster.spot_taints if shape.spot else [])]
    schedulable = [node for node in labelled if not set(node.taints) - set(tolerated)]
    if not schedulable:
        taints = ", ".join(sorted(set(labelled[0].taints) - set(tolerated)))
        do = "add it to cluster.yaml's spot_taints, and set spot: true in shapes.yaml, or remove the taint"
        return warn(what, f"{labelled[0].name} repels its pods by the taint {taints}", do)
    if len(schedulable) < shape.nodes:
        return warn(what, counted_of(len(schedulable), shape.nodes, "node", "exists", "exist"), _SCALED)
    return ok(what, f"{len(schedulable)} {'node' if len(schedulable) == 1 else 'nodes'}")


def device_label(shape: Shape) -> str | None:
    """Return the value of the label by which Flyte selects nodes for the shape; None if Flyte has no such
    GPU."""
    return DEVICES.get(shape.accelerator)


def matches(node: Node, shape: Shape) -> bool:
    """Return whether the node's labels are those of the shape."""
    if any(node.labels.get(key) != value for key, value in shape.node_labels.items()):
        return False
    if not shape.is_gpu:
        return True
    wanted = shape.accelerator.lower().split("-")
    parts = (
        " ".join(node.labels.get(label, "") for label in ACCELERATOR_LABELS).lower().replace("-", " ").split()
    )
    # Labels are nvidia-tesla-a100, NVIDIA-A100-SXM4-80GB, nvidia-a100-80gb: they have the GPU's name, and
    # some its memory.
    sizes = [part for part in parts if part.endswith("gb")]
    return wanted[0] in parts and (not sizes or not wanted[1:] or wanted[1] in sizes)


def _lacking(node: Node, shape: Shape, cluster: Cluster) -> list[str]:
    network = shape.fabric.resource(cluster)
    disk = 0 if cluster.scratch_storage_class else shape.disk_gib
    needs = [
        ("cpu", "", shape.cpu, node.cpu),
        ("memory", " GiB", shape.memory_gib, node.memory_gib),
        ("ephemeral-storage", " GiB", disk, node.disk_gib),
        (GPU, "", shape.processes if shape.is_gpu else 0, node.resources.get(GPU, 0)),
        (network, "", shape.network_devices, node.resources.get(network, 0)),
    ]
    return [
        f"{name} ({has:.4g}{unit} of {required:.4g}{unit})"
        for name, unit, required, has in needs
        if has < required
    ]


def _operator(kubernetes: Kubernetes, several: Sequence[str]) -> Finding:
    what = "training operator"
    if OPERATOR in kubernetes.resources:
        return ok(what, f"{OPERATOR} is installed")
    if not several:
        return ok(what, f"{OPERATOR} is not installed, and no shape has more than one node")
    do = (
        "install Kubeflow's training operator and enable Flyte's pytorch plugin, or remove these rows from "
        "shapes.yaml"
    )
    return fail(what, f"{OPERATOR} is not installed; it is required by {', '.join(several)}", do)


def _gang(kubernetes: Kubernetes, name: str) -> Finding:
    what, resource = f"gang scheduling by {name}", GANG_RESOURCES[name]
    if resource in kubernetes.resources:
        return ok(what, f"{resource} is installed")
    return fail(
        what, f"{resource} is not installed", f"install {name}, or set gang_scheduling: none in cluster.yaml"
    )


def _secrets(kubernetes: Kubernetes, cluster: Cluster) -> Iterator[Finding]:
    for secret in cluster.secrets.all:
        what = f"secret for {secret.env_var}"
        if secret.group is None:
            yield ok(
                what, f"key {secret.key} without a group: a secret of Union, not of Kubernetes; not checked"
            )
        elif secret.group not in kubernetes.secrets:
            do = (
                f"`kubectl create secret generic {secret.group} -n {kubernetes.namespace} "
                f"--from-literal={secret.key}=...`"
            )
            yield fail(what, f"no secret {secret.group} in namespace {kubernetes.namespace}", do)
        elif (keys := kubernetes.secrets[secret.group]) is None:
            yield warn(
                what, f"{secret.group} cannot be read with this kubeconfig", "ask someone who has access"
            )
        elif secret.key not in keys:
            do = f"`kubectl edit secret {secret.group} -n {kubernetes.namespace}`, or correct cluster.yaml"
            yield fail(what, f"{secret.group} has no key {secret.key}", do)
        else:
            yield ok(what, f"{secret.group}/{secret.key} in {kubernetes.namespace} (value not shown)")
