"""Test of the network policy in docs/pods.md: a NetworkPolicy of Kubernetes' models, with the connections
that pods need."""

import re

import yaml
from kubernetes import client

from flytune.hardware import Cluster, shape_named
from tasks.runtime import pods
from tests.support.kubernetes_models import model
from tests.support.paths import ROOT


def policy():
    blocks = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs" / "pods.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (found,) = [
        block for block in map(yaml.safe_load, blocks) if isinstance(block, dict) and block.get("kind")
    ]
    return found


def test_the_policy_is_one_that_kubernetes_takes():
    made = model("V1NetworkPolicy", policy(), "policy")
    assert client.ApiClient().sanitize_for_serialization(made) == policy()
    assert set(made.spec.policy_types) == {"Ingress", "Egress"}


def test_the_policy_allows_what_pods_use():
    spec = policy()["spec"]
    everybody = {"podSelector": {}}
    assert spec["podSelector"] == {}
    assert spec["ingress"] == [{"from": [everybody]}], (
        "torchrun, NCCL and gloo between the pods of a job, on any port"
    )
    ports = {port["port"] for rule in spec["egress"] for port in rule.get("ports", [])}
    assert {"to": [everybody]} in spec["egress"]
    assert ports == {53, 443, 8089, 9000}
    (block,) = [peer["ipBlock"] for rule in spec["egress"] for peer in rule["to"] if "ipBlock" in peer]
    assert "169.254.0.0/16" in block["except"], "the node's metadata"
    # The label that the page names for pods of shapes.
    assert "flytune-shape" in pods.pod_template(shape_named("h100-8"), Cluster()).labels
