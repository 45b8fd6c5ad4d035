"""What Kubernetes has, held against shapes.yaml and cluster.yaml."""

from collections.abc import Iterator, Sequence

from pydantic import Field

from flytune.doctor.finding import Finding, fail, ok, warn
from flytune.hardware.cluster import Cluster
from flytune.hardware.shapes import Shape
from flytune.schema import Strict

OPERATOR = "pytorchjobs.kubeflow.org"
GANGS = {
    "kueue": "localqueues.kueue.x-k8s.io",
    "volcano": "podgroups.scheduling.volcano.sh",
    "coscheduling": "podgroups.scheduling.x-k8s.io",
}
"""By cluster.yaml's gang_scheduling, the resource that it brings."""
ACCELERATOR_LABELS = ("k8s.amazonaws.com/accelerator", "cloud.google.com/gke-accelerator", "nvidia.com/gpu.product")
"""Flyte's default, GKE's, and that of NVIDIA's feature discovery."""
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
"""What Flyte's accelerators (flytekit.extras.accelerators) say in a node's label."""
_SCALED = "nothing to do where node groups grow from zero; else add nodes, or take rows out of shapes.yaml"
GPU = "nvidia.com/gpu"


class Node(Strict):
    """A node, as its pods may use it."""

    name: str
    labels: dict[str, str] = Field(default={})
    taints: list[str] = Field(default=[])
    """Keys of those that keep pods off."""
    cpu: float
    memory_gib: float
    disk_gib: float
    """Ephemeral storage."""
    resources: dict[str, float] = Field(default={})
    """The others, by name."""


class Kubernetes(Strict):
    """What was found."""

    address: str
    resources: list[str]
    """Names of the custom resource definitions."""
    nodes: list[Node]
    namespace: str
    secrets: dict[str, list[str] | None]
    """Keys of each secret that cluster.yaml names and that is there; None where it may not be read."""


def findings(found: Kubernetes, shapes: Sequence[Shape], cluster: Cluster) -> Iterator[Finding]:
    """Operator, gang scheduler, secrets, and each row of shapes.yaml."""
    yield ok("kubernetes", f"{found.address}: {len(found.nodes)} nodes")
    yield _operator(found, [shape.name for shape in shapes if shape.nodes > 1])
    if cluster.gang_scheduling != "none":
        yield _gang(found, cluster.gang_scheduling)
    yield from _secrets(found, cluster)
    without = [shape for shape in shapes if not any(is_meant(node, shape) for node in found.nodes)]
    for shape in shapes:
        if len(without) == 1 or shape not in without:
            yield machines(found.nodes, shape, cluster)
    if len(without) > 1:
        labels = f"by their labels {' or '.join(ACCELERATOR_LABELS)}, and by the rows' node_labels"
        yield warn("shapes", f"no nodes ({labels}) for {', '.join(shape.name for shape in without)}", _SCALED)


def machines(nodes: Sequence[Node], shape: Shape, cluster: Cluster) -> Finding:
    """Whether the row's pods would find nodes."""
    what = f"shape {shape.name}"
    fitting = [node for node in nodes if is_meant(node, shape)]
    if not fitting:
        labels = " or ".join(ACCELERATOR_LABELS)
        looked = f"no node has {shape.accelerator} in its label {labels}" if shape.is_gpu else "no node"
        asked = "".join(f", {key}={value}" for key, value in shape.node_labels.items())
        return warn(what, looked + asked, _SCALED)
    large = [node for node in fitting if not _lacking(node, shape, cluster)]
    if not large:
        lacks = ", ".join(_lacking(fitting[0], shape, cluster))
        return fail(
            what, f"{fitting[0].name} lacks {lacks}: its pods would wait for ever", "lower the row, or take larger nodes"
        )
    labelled = [node for node in large if asked_for(shape) in (None, *(node.labels.get(label) for label in ACCELERATOR_LABELS))]
    if not labelled:
        do = (
            "label them so (gpu-device-node-label in Flyte's plugins.k8s names the label), or map that to what they have by "
            "plugins.k8s.accelerator-devices, where your Flyte has it"
        )
        return warn(what, f"Flyte asks for nodes labelled {asked_for(shape)}, and {large[0].name} is labelled otherwise", do)
    large = labelled
    tolerated = [*([GPU] if shape.is_gpu else []), *(cluster.spot_taints if shape.spot else [])]
    open_to_it = [node for node in large if not set(node.taints) - set(tolerated)]
    if not open_to_it:
        taints = ", ".join(sorted(set(large[0].taints) - set(tolerated)))
        do = "name it in cluster.yaml's spot_taints, and set spot: true on the row, or take the taint off"
        return warn(what, f"{large[0].name} keeps its pods off by the taint {taints}", do)
    if len(open_to_it) < shape.nodes:
        return warn(what, f"{len(open_to_it)} of its {shape.nodes} nodes are there", _SCALED)
    return ok(what, f"{len(open_to_it)} nodes")


def asked_for(shape: Shape) -> str | None:
    """The value of the label by which Flyte chooses nodes for the row; None where it knows no such GPU."""
    return DEVICES.get(shape.accelerator)


def is_meant(node: Node, shape: Shape) -> bool:
    """Whether labels say that it is of the row's kind."""
    if any(node.labels.get(key) != value for key, value in shape.node_labels.items()):
        return False
    if not shape.is_gpu:
        return True
    wanted = shape.accelerator.lower().split("-")
    told = " ".join(node.labels.get(label, "") for label in ACCELERATOR_LABELS).lower().replace("-", " ").split()
    # Labels say nvidia-tesla-a100, NVIDIA-A100-SXM4-80GB, nvidia-a100-80gb: the GPU's name must stand there, its memory may.
    sizes = [part for part in told if part.endswith("gb")]
    return wanted[0] in told and (not sizes or not wanted[1:] or wanted[1] in sizes)


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
    return [f"{name} ({has:.4g}{unit} of {asked:.4g}{unit})" for name, unit, asked, has in needs if has < asked]


def _operator(found: Kubernetes, several: Sequence[str]) -> Finding:
    what = "training operator"
    if OPERATOR in found.resources:
        return ok(what, f"{OPERATOR} is there (that Flyte's pytorch plugin is enabled is not checked)")
    if not several:
        return ok(what, f"{OPERATOR} is not there, and no shape has more than one node")
    do = "install Kubeflow's training operator and enable Flyte's pytorch plugin, or take those rows out of shapes.yaml"
    return fail(what, f"{OPERATOR} is not there; it starts {', '.join(several)}", do)


def _gang(found: Kubernetes, name: str) -> Finding:
    what = f"gang scheduling by {name}"
    if GANGS[name] in found.resources:
        return ok(what, f"{GANGS[name]} is there")
    return fail(what, f"{GANGS[name]} is not there", f"install {name}, or write gang_scheduling: none into cluster.yaml")


def _secrets(found: Kubernetes, cluster: Cluster) -> Iterator[Finding]:
    for one in (*cluster.secrets.hub, *cluster.secrets.tracking, *cluster.secrets.notify):
        what = f"secret for {one.env_var}"
        if one.group is None:
            yield ok(what, f"key {one.key} without a group: Union's, which Kubernetes does not show; not checked")
        elif one.group not in found.secrets:
            do = f"`kubectl create secret generic {one.group} -n {found.namespace} --from-literal={one.key}=...`"
            yield fail(what, f"no secret {one.group} in namespace {found.namespace}", do)
        elif (keys := found.secrets[one.group]) is None:
            yield warn(what, f"{one.group} may not be read with this kubeconfig", "ask who may")
        elif one.key not in keys:
            do = f"`kubectl edit secret {one.group} -n {found.namespace}`, or mend cluster.yaml"
            yield fail(what, f"{one.group} has no key {one.key}", do)
        else:
            yield ok(what, f"{one.group}/{one.key} in {found.namespace} (not shown)")
