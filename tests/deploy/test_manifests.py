"""What is in deploy/ can be rendered, fits the schemas of Kubernetes' API, and its parts agree."""

import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import unittest

import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
WARMROUTE = ROOT / "target/debug/warmroute"
# Versions that are supported upstream, and the newest schema.
VERSIONS = ("1.34", "1.37")
SECRETS = {name: "0123456789abcdef" * 4 for name in ("ADMIN_TOKEN", "PEERS_SECRET", "WARMROUTE_STATE_KEY")}


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(s|m)", text).groups()
    return int(number) * {"s": 1, "m": 60}[unit]


def effective(path):
    """The settings that the router reads from a file, defaults included."""
    environment = {**os.environ, **SECRETS, "PEERS_NAME": "warmroute-peers.default.svc.cluster.local."}
    # Different keys: one that repeats itself is refused.
    environment["WARMROUTE_STATE_KEY"] = "9f3c1e7a55b2d8046c1f0e93a7b4d2865d3a1c9e8f7b6a504132e5d4c3b2a190"
    run = subprocess.run([WARMROUTE, "check", "--config", path], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return yaml.safe_load(run.stdout)


class Kubernetes(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        kubectl = pathlib.Path(sysconfig.get_path("scripts")) / "kubectl"
        run = subprocess.run([kubectl, "kustomize", DEPLOY / "kubernetes/base"], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        cls.objects = list(yaml.safe_load_all(run.stdout))
        cls.settings = effective(DEPLOY / "kubernetes/base/config.yaml")

    def one(self, kind, name="warmroute"):
        found = [it for it in self.objects if it["kind"] == kind and it["metadata"]["name"].startswith(name)]
        return found[0]

    def pod(self):
        return self.one("Deployment")["spec"]["template"]["spec"]

    def test_every_object_fits_its_schema(self):
        self.assertGreaterEqual(len(self.objects), 7)
        for version in VERSIONS:
            for each in self.objects:
                with self.subTest(version=version, kind=each["kind"]):
                    kubernetes_validate.validate(each, version, strict=True)

    def test_the_grace_period_is_the_drain_and_five_seconds(self):
        api = self.settings["api"]
        drain = seconds(api["drain_delay"]) + seconds(api["drain_timeout"])
        self.assertEqual(self.pod()["terminationGracePeriodSeconds"], drain + 5)
        self.assertNotIn("lifecycle", self.pod()["containers"][0])

    def test_ports_are_those_that_the_router_listens_on(self):
        ports = {it["name"]: it["containerPort"] for it in self.pod()["containers"][0]["ports"]}
        listens = {"http": "api", "admin": "admin", "peers": "peers"}
        for name, part in listens.items():
            self.assertEqual(ports[name], int(self.settings[part]["listen"].rsplit(":", 1)[1]), name)
        for service in (it for it in self.objects if it["kind"] == "Service"):
            for port in service["spec"]["ports"]:
                self.assertIn(port["targetPort"], ports)
        for rule in self.one("NetworkPolicy")["spec"]["ingress"]:
            for port in rule["ports"]:
                self.assertIn(port["port"], ports)

    def test_replicas_find_each_other_also_when_not_ready(self):
        peers = self.one("Service", "warmroute-peers")["spec"]
        self.assertEqual(peers["clusterIP"], "None")
        self.assertTrue(peers["publishNotReadyAddresses"])

    def test_selectors_match_the_pods(self):
        labels = self.one("Deployment")["spec"]["template"]["metadata"]["labels"].items()
        selectors = [it["spec"]["selector"] for it in self.objects if it["kind"] == "Service"]
        selectors += [self.one(kind)["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
        selectors.append(self.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"])
        for selector in selectors:
            self.assertTrue(selector)
            self.assertLessEqual(selector.items(), labels)

    def test_the_pod_may_do_nothing_that_it_does_not_need(self):
        pod, container = self.pod(), self.pod()["containers"][0]["securityContext"]
        self.assertTrue(pod["securityContext"]["runAsNonRoot"])
        self.assertFalse(pod["automountServiceAccountToken"])
        self.assertTrue(container["readOnlyRootFilesystem"])
        self.assertFalse(container["allowPrivilegeEscalation"])
        self.assertEqual(container["capabilities"], {"drop": ["ALL"]})

    def test_operators_pages_need_a_token(self):
        self.assertTrue(self.settings["admin"]["token"])


class Elsewhere(unittest.TestCase):
    def test_compose_mounts_a_configuration_that_is_right(self):
        compose = yaml.safe_load((DEPLOY / "compose/docker-compose.yaml").read_text())
        settings = effective(DEPLOY / "compose/config.yaml")
        services = compose["services"]
        for worker in settings["workers"]:
            host = re.fullmatch(r"http://([^:]+):8000", worker["url"]).group(1)
            self.assertIn(host, services)
        for peer in settings["peers"]["discovery"][0]["static"]:
            self.assertIn((peer if isinstance(peer, str) else peer["url"]).split(":")[0], services)
        api = settings["api"]
        drain = seconds(api["drain_delay"]) + seconds(api["drain_timeout"])
        for name in ("router-1", "router-2"):
            self.assertEqual(seconds(services[name]["stop_grace_period"]), drain + 5)

    def test_the_unit_waits_for_the_drain(self):
        unit = (DEPLOY / "systemd/warmroute.service").read_text()
        api = effective(ROOT / "config.yaml")["api"]
        drain = seconds(api["drain_delay"]) + seconds(api["drain_timeout"])
        self.assertIn(f"\nTimeoutStopSec={drain + 5}\n", unit)

    @unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not installed")
    def test_systemd_knows_every_line_of_the_unit(self):
        unit = DEPLOY / "systemd/warmroute.service"
        run = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
        problems = [line for line in run.stderr.splitlines() if "warmroute" in line and "is not executable" not in line]
        self.assertEqual(problems, [])


if __name__ == "__main__":
    unittest.main()
