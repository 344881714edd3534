"""Renders what is in deploy/ and reads configurations with the router's own check."""

import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

import jsonschema
import kubernetes_validate
import yaml

try:  # Needs Python 3.10.
    import helm_python as helm
except ImportError:
    helm = None

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/sdk"))

from patience import LIMIT_S  # noqa: E402, F401

DEPLOY = ROOT / "deploy"
SCHEMAS = pathlib.Path(__file__).parent / "schemas"
CHART = DEPLOY / "helm/warmroute"
TARGET = ROOT / os.environ.get("CARGO_TARGET_DIR", "target")
WARMROUTE = pathlib.Path(os.environ.get("WARMROUTE", TARGET / "debug/warmroute"))
# The oldest version that is supported upstream, and the newest schema.
VERSIONS = ("1.34", "1.37")
# Kinds that the schemas of Kubernetes' own API do not have.
CUSTOM = {"ServiceMonitor", "PrometheusRule"}
# Kinds of the Gateway API, whose schemas are in schemas/.
GATEWAY = {"InferencePool", "HTTPRoute"}
NAMESPACE = "llm"
ENVIRONMENT = {
    "ADMIN_TOKEN": "0123456789abcdef" * 4,
    "PEERS_SECRET": "0123456789abcdef" * 4,
    # One that repeats itself is refused.
    "WARMROUTE_STATE_KEY": "9f3c1e7a55b2d8046c1f0e93a7b4d2865d3a1c9e8f7b6a504132e5d4c3b2a190",
    "PEERS_NAME": f"warmroute-peers.{NAMESPACE}.svc.cluster.local.",
}


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


def effective(path):
    """The settings that the router reads from a file, defaults included."""
    environment = {**os.environ, **ENVIRONMENT}
    run = subprocess.run([WARMROUTE, "check", "--config", path], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return yaml.safe_load(run.stdout)


def effective_text(text):
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "config.yaml"
        path.write_text(text)
        return effective(path)


def kustomize(*components):
    """The objects of the base, with the named components, as an overlay gets them."""
    kubectl = pathlib.Path(sysconfig.get_path("scripts")) / "kubectl"
    with tempfile.TemporaryDirectory(dir=DEPLOY / "kubernetes") as overlay:
        lines = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": NAMESPACE,
            "resources": ["../base"],
            "components": [f"../components/{name}" for name in components],
        }
        (pathlib.Path(overlay) / "kustomization.yaml").write_text(yaml.safe_dump(lines))
        run = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return list(yaml.safe_load_all(run.stdout))


def chart(values=None):
    """The objects of the chart, and its notes."""
    with helm.Chart.load(CHART) as loaded:
        files = loaded.render(values or {}, name="warmroute", namespace=NAMESPACE)
    notes = next(text for name, text in files.items() if name.endswith("NOTES.txt"))
    documents = (it for name, text in files.items() if name.endswith(".yaml") for it in yaml.safe_load_all(text))
    return [it for it in documents if it], notes


def problems(objects):
    """What the schemas of Kubernetes' API say against the objects, for each version."""
    found = []
    for each in (it for it in objects if it["kind"] in GATEWAY):
        schema = json.loads((SCHEMAS / f"{each['kind']}.json").read_text())
        errors = jsonschema.Draft7Validator(schema).iter_errors(each)
        found += [f"{each['kind']} {each['metadata']['name']}: {error.message}" for error in errors]
    for version in VERSIONS:
        for each in (it for it in objects if it["kind"] not in CUSTOM | GATEWAY):
            try:
                kubernetes_validate.validate(each, version, strict=True)
            except Exception as error:  # noqa: BLE001, the library has several of its own.
                found.append(f"{version} {each['kind']} {each['metadata']['name']}: {error}")
    return found
