"""The router finds its workers by an API server that others wrote: kmock, an independent mock of Kubernetes.

What discovery does when the API fails is held by tests/it/kubernetes; this is a check on that fake.
"""

import asyncio
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

try:
    import kmock
except ImportError:
    kmock = None

from manifests import LIMIT_S, WARMROUTE

NAMESPACE = "llm"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
POOLS = f"/apis/inference.networking.k8s.io/v1/namespaces/{NAMESPACE}/inferencepools"


def pod(name, address, version, ready="True"):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "labels": {"app": "vllm"},
        },
        "spec": {"containers": [{"name": "vllm", "ports": [{"name": "http", "containerPort": 9}]}]},
        "status": {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": ready}]},
    }


class Router:
    """A process of the router that follows one entry of `discovery`."""

    def __init__(self, folder, api, entry):
        context = {"cluster": "mock", "user": "mock", "namespace": NAMESPACE}
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "mock",
                    "contexts": [{"name": "mock", "context": context}],
                    "clusters": [{"name": "mock", "cluster": {"server": str(api).rstrip("/")}}],
                    "users": [{"name": "mock", "user": {}}],
                }
            )
        )
        config = {
            "api": {"listen": "127.0.0.1:0", "drain_delay": "0s"},
            "admin": {"listen": "127.0.0.1:0"},
            "discovery": [{"kubernetes": {**entry, "kubeconfig": str(kubeconfig)}}],
            "fleet": {"health": {"interval": "5s"}},
            "log": {"format": "json"},
        }
        (folder / "config.yaml").write_text(json.dumps(config))
        command = [WARMROUTE, "serve", "--config", folder / "config.yaml"]
        self.log = open(folder / "log", "w+")
        self.process = subprocess.Popen(command, stderr=self.log)
        self.admin = None

    def address(self):
        """Of the operators' pages, once the log names it."""
        self.log.seek(0)
        for line in self.log:
            fields = json.loads(line) if line.endswith("\n") else {}
            if fields.get("message") == "listening":
                return fields["admin"]
        assert self.process.poll() is None, (self.log.seek(0), self.log.read())
        return None

    def workers(self):
        self.admin = self.admin or self.address()
        if self.admin is None:
            return None
        with urllib.request.urlopen(f"http://{self.admin}/fleet", timeout=LIMIT_S) as answer:
            rows = json.load(answer)["workers"]
        return {(row["name"], row["address"]) for row in rows if not row["is_draining"]}

    async def has(self, *expected):
        deadline = time.monotonic() + LIMIT_S
        while True:
            found = await asyncio.to_thread(self.workers)
            if found == set(expected):
                return
            assert time.monotonic() < deadline, f"{found} instead of {expected}"
            await asyncio.sleep(0.05)

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


@unittest.skipIf(kmock is None, "kmock needs Python 3.11")
class Kmock(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.api = await self.enterAsyncContext(kmock.KubernetesEmulator())
        self.server = await self.enterAsyncContext(kmock.Server(self.api))
        for resource in ("v1/pods", "discovery.k8s.io/v1/endpointslices", "inference.networking.k8s.io/v1/inferencepools"):
            self.api.resources[resource] = {}

    def router(self, entry):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        router = Router(pathlib.Path(folder.name), self.server.url, entry)
        self.addCleanup(router.stop)
        return router

    async def send(self, method, path, body=None):
        async with self.server.client.request(method, path, json=body) as answer:
            assert answer.status < 300, await answer.text()

    async def test_pods_join_drain_and_leave(self):
        await self.send("POST", PODS, pod("a", "127.1.0.1", 1))
        await self.send("POST", PODS, pod("b", "127.1.0.2", 2))
        router = self.router({"pods": {"selector": "app=vllm", "port": "http"}})
        a, b, c = (("a", "127.1.0.1:9"), ("b", "127.1.0.2:9"), ("c", "127.1.0.3:9"))
        await router.has(a, b)
        await self.send("POST", PODS, pod("c", "127.1.0.3", 3))
        await router.has(a, b, c)
        await self.send("PATCH", f"{PODS}/a", pod("a", "127.1.0.1", 4, ready="False"))
        await router.has(b, c)
        await self.send("DELETE", f"{PODS}/b")
        await router.has(c)
        await self.send("PATCH", f"{PODS}/a", pod("a", "127.1.0.1", 5))
        await router.has(a, c)

    async def test_endpoints_of_a_service_are_workers(self):
        def slice_of(version, *conditions):
            endpoints = [
                {
                    "addresses": [f"127.1.0.{number}"],
                    "conditions": each,
                    "targetRef": {"kind": "Pod", "name": f"pod-{number}", "uid": f"uid-{number}"},
                }
                for number, each in enumerate(conditions, 1)
            ]
            return {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": "vllm-1",
                    "namespace": NAMESPACE,
                    "uid": "uid-slice",
                    "resourceVersion": str(version),
                    "labels": {"kubernetes.io/service-name": "vllm"},
                },
                "addressType": "IPv4",
                "endpoints": endpoints,
                "ports": [{"name": "http", "port": 9}],
            }

        await self.send("POST", SLICES, slice_of(1, {"ready": True}, {"ready": True}))
        router = self.router({"service": {"name": "vllm"}})
        await router.has(("pod-1", "127.1.0.1:9"), ("pod-2", "127.1.0.2:9"))
        terminating = {"ready": False, "serving": True, "terminating": True}
        await self.send("PATCH", f"{SLICES}/vllm-1", slice_of(2, {"ready": True}, terminating))
        await router.has(("pod-1", "127.1.0.1:9"))

    async def test_pods_of_an_inference_pool_are_workers(self):
        pool = {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "metadata": {"name": "pool", "namespace": NAMESPACE, "uid": "uid-pool", "resourceVersion": "1"},
            "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 9}, {"number": 10}]},
        }
        await self.send("POST", PODS, pod("a", "127.1.0.1", 1))
        router = self.router({"inference_pool": {"name": "pool"}})
        await self.send("POST", POOLS, pool)
        await router.has(("a:9", "127.1.0.1:9"), ("a:10", "127.1.0.1:10"))


if __name__ == "__main__":
    sys.exit(unittest.main())
