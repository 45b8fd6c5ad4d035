"""Manifests of docs/serve.md: what Kubernetes takes, with a server that has the fetched artifact."""

import re

import pytest
import yaml
from kubernetes import client

from tests.support.kubernetes_models import model
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
MANIFESTS = {
    manifest["kind"]: manifest
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for manifest in yaml.safe_load_all(block)
}
OF_KSERVE = {"minReplicas"}
"""Fields of a predictor beside those of a pod (KServe 0.21.0, V1beta1PredictorSpec)."""


def pod(kind):
    spec = MANIFESTS[kind]["spec"]
    if kind == "Deployment":
        return spec["template"]["spec"]
    return {key: value for key, value in spec["predictor"].items() if key not in OF_KSERVE}


@pytest.mark.parametrize("kind", ["Deployment", "Service"])
def test_kubernetes_takes_the_manifests(kind):
    made = model(f"V1{kind}", MANIFESTS[kind], kind)
    assert client.ApiClient().sanitize_for_serialization(made) == MANIFESTS[kind]


def test_the_predictor_is_a_pod():
    made = model("V1PodSpec", pod("InferenceService"), "predictor")
    assert client.ApiClient().sanitize_for_serialization(made) == pod("InferenceService")
    assert set(MANIFESTS["InferenceService"]) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(MANIFESTS["InferenceService"]["spec"]) == {"predictor"}


@pytest.mark.parametrize("kind", ["Deployment", "InferenceService"])
def test_the_server_has_what_was_fetched(kind):
    (fetch,), (server,) = pod(kind)["initContainers"], pod(kind)["containers"]
    assert fetch["command"][-1] == server["args"][1] == "/artifact/model"
    assert fetch["volumeMounts"][0] in server["volumeMounts"]
    assert server["ports"][0]["containerPort"] == server["readinessProbe"]["httpGet"]["port"]
    assert {mount["name"] for mount in server["volumeMounts"]} <= {
        one["name"] for one in pod(kind)["volumes"]
    }


def test_the_service_leads_to_the_deployment():
    deployment, service = MANIFESTS["Deployment"]["spec"], MANIFESTS["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == labels == deployment["selector"]["matchLabels"]
