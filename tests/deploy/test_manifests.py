"""What is in deploy/ can be rendered, fits the schemas of Kubernetes' API, and its parts agree."""

import contextlib
import re
import shutil
import subprocess
import tempfile
import unittest

import yaml

try:
    import compose_spec
except ImportError:
    compose_spec = None

from manifests import CHART, DEPLOY, NAMESPACE, ROOT, chart, effective, effective_text, helm, kustomize, problems, seconds

# Rights for the discovery of engines through the API.
DISCOVERY = [("", "pods"), ("discovery.k8s.io", "endpointslices"), ("inference.networking.k8s.io", "inferencepools")]
COMPONENTS = ("discovery", "service-monitor", "engine-autoscaling", "tls")
EVERYTHING = {
    "kubernetesDiscovery": {"enabled": True, "namespaces": ["llm", "other"]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}, "runbookUrl": "https://docs.test/troubleshooting.html"},
    "grafanaDashboards": {"enabled": True},
    "autoscaling": {"enabled": True},
    "engineAutoscaling": {"enabled": True},
    "restartOnConfigChange": True,
    "podLabels": {"team": "inference"},
    "podAnnotations": {"example.com/a": "b"},
    "extraEnv": [{"name": "A", "value": "b"}],
    "tls": {"secretName": "warmroute-tls"},
    "extraVolumes": [{"name": "more", "secret": {"secretName": "more"}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/etc/more", "readOnly": True}],
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "infra", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}},
    "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
}


@contextlib.contextmanager
def certificates():
    """A certificate that is its own CA, as files: what cert-manager's Secret has."""
    with tempfile.TemporaryDirectory() as directory:
        files = {name: f"{directory}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
        command += ["-subj", "/CN=warmroute", "-addext", "subjectAltName=DNS:warmroute.llm", "-keyout", files["tls.key"]]
        subprocess.run([*command, "-out", files["tls.crt"]], check=True, capture_output=True)
        shutil.copy(files["tls.crt"], files["ca.crt"])
        yield files


class Objects:
    """What holds for the manifests of three replicas, however they were rendered."""

    objects = []

    def find(self, kind, name):
        return next(it for it in self.objects if (it["kind"], it["metadata"]["name"]) == (kind, name))

    def pod(self):
        return self.find("Deployment", "warmroute")["spec"]["template"]["spec"]

    def settings(self):
        maps = [it for it in self.objects if it["kind"] == "ConfigMap" and "config.yaml" in it["data"]]
        self.assertEqual(len(maps), 1)
        return effective_text(maps[0]["data"]["config.yaml"])

    def test_every_object_fits_its_schema(self):
        self.assertGreaterEqual(len(self.objects), 7)
        self.assertEqual(problems(self.objects), [])

    def test_the_pod_mounts_the_configuration_that_there_is(self):
        volume = self.pod()["volumes"][0]["configMap"]["name"]
        self.assertIn(volume, [it["metadata"]["name"] for it in self.objects if it["kind"] == "ConfigMap"])
        mount = self.pod()["containers"][0]["volumeMounts"][0]
        # A file that is mounted by subPath never changes.
        self.assertEqual(mount, {"name": "config", "mountPath": "/etc/warmroute", "readOnly": True})
        self.assertEqual(self.pod()["containers"][0]["args"], ["serve", "--config", "/etc/warmroute/config.yaml"])

    def test_the_grace_period_is_the_drain_and_five_seconds(self):
        api = self.settings()["api"]
        drain = seconds(api["drain_delay"]) + seconds(api["drain_timeout"])
        self.assertEqual(self.pod()["terminationGracePeriodSeconds"], drain + 5)
        self.assertNotIn("lifecycle", self.pod()["containers"][0])

    def test_a_node_knows_of_the_drain_before_the_listener_closes(self):
        # The kubelet must see /readyz fail at least once, and the endpoints must reach the other nodes.
        probe = self.pod()["containers"][0]["readinessProbe"]
        unnoticed = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
        self.assertLess(unnoticed, seconds(self.settings()["api"]["drain_delay"]))

    def test_no_replica_leaves_before_its_successor_is_ready(self):
        deployment = self.find("Deployment", "warmroute")["spec"]
        self.assertEqual(deployment["strategy"]["rollingUpdate"], {"maxSurge": 1, "maxUnavailable": 0})
        self.assertEqual(deployment.get("replicas", 3), 3)

    def test_ports_are_those_that_the_router_listens_on(self):
        ports = {it["name"]: it["containerPort"] for it in self.pod()["containers"][0]["ports"]}
        settings = self.settings()
        for name, part in {"http": "api", "admin": "admin", "peers": "peers"}.items():
            self.assertEqual(ports[name], int(settings[part]["listen"].rsplit(":", 1)[1]), name)
        for service in (it for it in self.objects if it["kind"] == "Service"):
            for port in service["spec"]["ports"]:
                self.assertIn(port["targetPort"], ports)
        for rule in self.find("NetworkPolicy", "warmroute")["spec"]["ingress"]:
            for port in rule["ports"]:
                self.assertIn(port["port"], ports)

    def test_probes_ask_the_admin_port(self):
        container = self.pod()["containers"][0]
        for probe, path in {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}.items():
            get = container[f"{probe}Probe"]["httpGet"]
            self.assertEqual((get["path"], get["port"], get.get("scheme", "HTTP")), (path, "admin", "HTTP"))

    def test_replicas_find_each_other_also_when_not_ready(self):
        peers = self.find("Service", "warmroute-peers")["spec"]
        self.assertEqual(peers["clusterIP"], "None")
        self.assertTrue(peers["publishNotReadyAddresses"])
        dns = self.settings()["peers"]["discovery"][0]["dns"]
        self.assertEqual(dns["name"], f"warmroute-peers.{NAMESPACE}.svc.cluster.local.")
        self.assertEqual(dns["port"], peers["ports"][0]["port"])

    def test_the_admin_port_is_for_prometheus_alone(self):
        rules = self.find("NetworkPolicy", "warmroute")["spec"]["ingress"]
        admin = [rule for rule in rules if {"port": "admin"} in rule["ports"]]
        self.assertEqual([sorted(rule) for rule in admin], [["from", "ports"]])
        peers = [rule for rule in rules if {"port": "peers"} in rule["ports"]]
        self.assertEqual([sorted(rule) for rule in peers], [["from", "ports"]])
        for service in (it for it in self.objects if it["kind"] == "Service"):
            targets = [port["targetPort"] for port in service["spec"]["ports"]]
            if "admin" in targets:
                self.assertEqual((service["spec"]["clusterIP"], targets), ("None", ["admin"]))

    def test_selectors_match_the_pods(self):
        labels = self.find("Deployment", "warmroute")["spec"]["template"]["metadata"]["labels"].items()
        selectors = [it["spec"]["selector"] for it in self.objects if it["kind"] == "Service"]
        selectors += [self.find(kind, "warmroute")["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
        selectors.append(self.find("NetworkPolicy", "warmroute")["spec"]["podSelector"]["matchLabels"])
        selectors += [it["labelSelector"]["matchLabels"] for it in self.pod()["topologySpreadConstraints"]]
        for selector in selectors:
            self.assertTrue(selector)
            self.assertLessEqual(selector.items(), labels)

    def test_the_pod_may_do_nothing_that_it_does_not_need(self):
        pod, container = self.pod(), self.pod()["containers"][0]["securityContext"]
        self.assertTrue(pod["securityContext"]["runAsNonRoot"])
        self.assertEqual(pod["securityContext"]["runAsUser"], 65532)
        self.assertEqual(pod["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
        self.assertTrue(container["readOnlyRootFilesystem"])
        self.assertFalse(container["allowPrivilegeEscalation"])
        self.assertEqual(container["capabilities"], {"drop": ["ALL"]})
        self.assertFalse(any("emptyDir" in volume or "hostPath" in volume for volume in pod["volumes"]))
        self.assertIn("limits", self.pod()["containers"][0]["resources"])

    def test_operators_pages_need_a_token(self):
        self.assertTrue(self.settings()["admin"]["token"])

    def test_the_service_account_has_exactly_the_rights_of_its_discovery(self):
        account = self.find("ServiceAccount", "warmroute")
        self.assertFalse(account["automountServiceAccountToken"])
        roles = [it for it in self.objects if it["kind"] == "Role"]
        self.assertEqual(self.pod()["automountServiceAccountToken"], bool(roles))
        self.assertFalse([it for it in self.objects if it["kind"].startswith("Cluster")])
        for role in roles:
            rights = [(group, it) for rule in role["rules"] for group in rule["apiGroups"] for it in rule["resources"]]
            self.assertEqual(rights, DISCOVERY)
            self.assertTrue(all(rule["verbs"] == ["get", "list", "watch"] for rule in role["rules"]))
        for binding in (it for it in self.objects if it["kind"] == "RoleBinding"):
            self.assertEqual(binding["subjects"], [{"kind": "ServiceAccount", "name": "warmroute", "namespace": NAMESPACE}])
            self.assertIn(binding["roleRef"]["name"], [role["metadata"]["name"] for role in roles])


class Monitored:
    """What holds with the components, or with all that the chart can turn on."""

    def test_the_service_monitor_selects_the_admin_port(self):
        monitor = self.find("ServiceMonitor", "warmroute")["spec"]
        labels = self.find("Service", "warmroute-metrics")["metadata"]["labels"]
        self.assertLessEqual(monitor["selector"]["matchLabels"].items(), labels.items())
        for name in ("warmroute", "warmroute-peers"):
            other = self.find("Service", name)["metadata"]["labels"]
            self.assertFalse(monitor["selector"]["matchLabels"].items() <= other.items(), name)
        endpoint = monitor["endpoints"][0]
        ports = self.find("Service", "warmroute-metrics")["spec"]["ports"]
        self.assertEqual((endpoint["port"], endpoint["path"]), (ports[0]["name"], "/metrics"))
        # Or each pod would be scraped twice.
        annotations = self.find("Deployment", "warmroute")["spec"]["template"]["metadata"].get("annotations", {})
        self.assertFalse([key for key in annotations if key.startswith("prometheus.io/")])

    def test_engines_are_scaled_by_queued_tokens(self):
        scaler = self.find("HorizontalPodAutoscaler", "warmroute-engines")["spec"]
        self.assertEqual(scaler["metrics"][0]["external"]["metric"]["name"], "llm_queued_tokens")
        rule = (ROOT / "docs/kubernetes.md").read_text()
        self.assertIn("as: llm_queued_tokens", rule)
        self.assertIn("warmroute_worker_queued_tokens", rule)
        self.assertIn("| `warmroute_worker_queued_tokens` |", (ROOT / "docs/metrics.md").read_text())


class Base(Objects, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.objects = kustomize()


class BaseWithComponents(Objects, Monitored, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.objects = kustomize(*COMPONENTS)


class Picks:
    """What holds for the picker of an InferencePool."""

    def test_the_pool_names_the_service_and_the_port_of_the_picker(self):
        ref = self.find("InferencePool", "vllm")["spec"]["endpointPickerRef"]
        ports = {it["port"]: it["targetPort"] for it in self.find("Service", ref["name"])["spec"]["ports"]}
        containers = {it["name"]: it["containerPort"] for it in self.pod()["containers"][0]["ports"]}
        listen = self.settings()["endpoint_picker"]["listen"]
        self.assertEqual(containers[ports[ref["port"]["number"]]], int(listen.rsplit(":", 1)[1]))
        rules = self.find("NetworkPolicy", "warmroute")["spec"]["ingress"]
        self.assertIn([{"port": "picker"}], [rule["ports"] for rule in rules])

    def test_the_router_finds_the_engines_of_that_pool_and_the_route_leads_to_it(self):
        pool = self.find("InferencePool", "vllm")["metadata"]
        self.assertEqual(self.settings()["discovery"][0]["kubernetes"]["inference_pool"], {"name": pool["name"]})
        backend = self.find("HTTPRoute", "vllm")["spec"]["rules"][0]["backendRefs"][0]
        self.assertEqual((backend["kind"], backend["name"]), ("InferencePool", pool["name"]))

    def test_gateways_get_the_tls_that_they_expect(self):
        self.assertTrue(self.settings()["endpoint_picker"]["tls"]["self_signed"])

    def test_a_pool_that_the_api_would_refuse_is_seen(self):
        for change in ({"targetPorts": []}, {"targetPorts": [{"number": 0}]}, {"targetPortNumber": 8000}, {"endpointPickerRef": {"name": "warmroute"}}):
            pool = self.find("InferencePool", "vllm")
            self.assertTrue(problems([{**pool, "spec": {**pool["spec"], **change}}]), change)


class EndpointPicker(Objects, Picks, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.objects = kustomize("endpoint-picker")


@unittest.skipUnless(helm, "helm-python-sdk needs Python 3.10")
class ChartAsEndpointPicker(Objects, Picks, unittest.TestCase):
    values = {
        "config": {"discovery": [{"kubernetes": {"inference_pool": {"name": "vllm"}}}]},
        "kubernetesDiscovery": {"enabled": True},
        "endpointPicker": {"enabled": True, "route": {"gateway": "inference-gateway"}},
        "ports": {"picker": 9102},
    }

    @classmethod
    def setUpClass(cls):
        cls.objects, _ = chart(cls.values)

    def test_the_pool_and_the_route_are_made_only_where_they_are_asked_for(self):
        enabled = {"enabled": True, "inferencePool": {"create": False}}
        objects, _ = chart({**self.values, "endpointPicker": enabled})
        self.assertFalse({"InferencePool", "HTTPRoute"} & {it["kind"] for it in objects})

    def test_a_certificate_of_ones_own_is_kept(self):
        tls = {"certificate": "/etc/warmroute-tls/tls.crt", "key": "/etc/warmroute-tls/tls.key"}
        config = {**self.values["config"], "endpoint_picker": {"tls": tls}}
        objects, _ = chart({**self.values, "config": config})
        text = next(it for it in objects if it["kind"] == "ConfigMap")["data"]["config.yaml"]
        self.assertEqual(yaml.safe_load(text)["endpoint_picker"], {"listen": ":9102", "tls": tls})

    def test_a_picker_without_the_engines_of_its_pool_is_refused(self):
        # Nor may the pool be one of another namespace: its picker must be in its own.
        elsewhere = {"kubernetes": {"inference_pool": {"name": "vllm"}, "namespace": "other"}}
        rights = {"enabled": True, "namespaces": ["llm", "other"]}
        for config in ({}, {"discovery": [elsewhere]}):
            with self.assertRaisesRegex(helm.HelmRenderError, "set config.discovery to .*inference_pool: {name: vllm}"):
                chart({**self.values, "config": config, "kubernetesDiscovery": rights})


@unittest.skipUnless(helm, "helm-python-sdk needs Python 3.10")
class Chart(Objects, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.objects, cls.notes = chart()

    def test_helm_has_nothing_against_it(self):
        report = helm.lint(CHART, strict=True)
        serious = [it for it in report["messages"] if it["severity"] > 1]
        self.assertEqual((report["errors"], serious), ([], []))

    def test_rules_and_dashboards_are_made_only_where_they_are_asked_for(self):
        self.assertEqual([it for it in self.objects if it["kind"] == "PrometheusRule"], [])
        self.assertEqual([it for it in self.objects if it["metadata"]["name"].endswith("dashboards")], [])
        objects, _ = chart({"prometheusRule": {"enabled": True}})
        rules = [it for it in objects if it["metadata"]["name"] == "warmroute-alerts"][0]
        # Without an address the name of the file.
        self.assertEqual(rules["spec"]["groups"][0]["rules"][0]["annotations"]["runbook_url"], "docs/troubleshooting.md#warmrouteabsent")

    def test_the_notes_name_every_variable_of_the_configuration(self):
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        needed = set(re.findall(r"\$\{(\w+)\}", yaml.safe_dump(values["config"]) + str(self.settings())))
        needed |= {"PEERS_SECRET"}
        for name in needed:
            self.assertIn(f"--from-literal={name}=", self.notes)

    def test_what_the_chart_writes_itself_is_refused(self):
        written = [("api", "drain_delay"), ("admin", "listen"), ("peers", "listen"), ("peers", "discovery"), ("endpoint_picker", "listen")]
        for key, value in written:
            with self.assertRaisesRegex(helm.HelmRenderError, f"config.{key}.{value} is written by the chart"):
                chart({"config": {key: {value: "1s"}}})

    def test_a_misspelt_value_is_refused(self):
        for values in ({"replcas": 2}, {"drain": {"delay": 1}}, {"replicas": "three"}, {"drain": {"marginSeconds": 0}}):
            with self.assertRaises(helm.HelmValuesError):
                chart(values)

    def test_a_section_whose_keys_are_all_commented_out_is_named(self):
        with self.assertRaisesRegex(helm.HelmValuesError, "/config/api.*null"):
            chart({"config": {"api": None}})

    def test_every_value_is_in_the_schema(self):
        text = (CHART / "values.yaml").read_text()
        schema = yaml.safe_load((CHART / "values.schema.json").read_text())
        values = yaml.safe_load(text)
        self.assertEqual(set(schema["properties"]) - {"global"}, set(values))
        for key, value in values.items():
            described = schema["properties"][key].get("properties")
            if described:
                self.assertLessEqual(set(value), set(described), key)

    def test_grace_periods_follow_the_drain(self):
        objects, _ = chart({"drain": {"delaySeconds": 10, "timeoutSeconds": 600, "marginSeconds": 15}})
        deployment = next(it for it in objects if it["kind"] == "Deployment")
        self.assertEqual(deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], 625)
        config = next(it for it in objects if it["kind"] == "ConfigMap")["data"]["config.yaml"]
        self.assertEqual(yaml.safe_load(config)["api"]["drain_timeout"], "600s")

    def test_probes_services_and_metrics_follow_tls(self):
        with certificates() as files:
            tls = {"certificate": files["tls.crt"], "key": files["tls.key"]}
            admin = {**tls, "client_ca": files["ca.crt"], "client_auth": "optional"}
            names = {"read": ["grafana.example.com"], "operate": []}
            config = {"api": {"tls": tls}, "admin": {"tls": admin, "client_names": names}, "peers": {"tls": {**tls, "client_ca": files["ca.crt"]}}}
            objects, notes = chart({"config": config, "serviceMonitor": {"enabled": True}, "tls": {"secretName": "warmroute-tls"}})
            self.assertEqual(problems(objects), [])
            found = {(it["kind"], it["metadata"]["name"]): it for it in objects}
            settings = effective_text(found["ConfigMap", "warmroute"]["data"]["config.yaml"])
        self.assertEqual(settings["peers"]["secret"], "")
        pod = found["Deployment", "warmroute"]["spec"]["template"]["spec"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            self.assertEqual(pod["containers"][0][probe]["httpGet"]["scheme"], "HTTPS")
        self.assertIn({"name": "tls", "mountPath": "/etc/warmroute-tls", "readOnly": True}, pod["containers"][0]["volumeMounts"])
        self.assertIn({"name": "tls", "secret": {"secretName": "warmroute-tls"}}, pod["volumes"])
        port = found["Service", "warmroute"]["spec"]["ports"][0]
        self.assertEqual((port["name"], port["appProtocol"]), ("https", "https"))
        self.assertEqual(found["ServiceMonitor", "warmroute"]["spec"]["endpoints"][0]["scheme"], "https")
        self.assertIn("https://warmroute", notes)

    def test_probes_without_a_certificate_are_let_in(self):
        with self.assertRaisesRegex(helm.HelmRenderError, "client_auth must be optional"):
            chart({"config": {"admin": {"tls": {"client_ca": "/ca.crt"}}}})

    def test_discovery_by_the_api_needs_its_rights(self):
        engines = {"config": {"discovery": [{"kubernetes": {"pods": {"selector": "app=vllm", "port": 8000}, "namespace": "engines"}}]}}
        with self.assertRaisesRegex(helm.HelmRenderError, "set kubernetesDiscovery.enabled"):
            chart(engines)
        with self.assertRaisesRegex(helm.HelmRenderError, "the namespace engines"):
            chart({**engines, "kubernetesDiscovery": {"enabled": True}})
        objects, _ = chart({**engines, "kubernetesDiscovery": {"enabled": True, "namespaces": ["engines"]}})
        role = next(it for it in objects if it["kind"] == "Role")
        self.assertEqual(role["metadata"]["namespace"], "engines")
        config = next(it for it in objects if it["kind"] == "ConfigMap")["data"]["config.yaml"]
        try:
            effective_text(config)
        except AssertionError as error:
            # A binary without the feature names it.
            self.assertIn("`kubernetes`", str(error))

    def test_its_version_is_the_routers(self):
        version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE).group(1)
        described = yaml.safe_load((CHART / "Chart.yaml").read_text())
        self.assertEqual((described["version"], described["appVersion"]), (version, version))


@unittest.skipUnless(helm, "helm-python-sdk needs Python 3.10")
class ChartWithEverything(Objects, Monitored, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.objects, _ = chart(EVERYTHING)

    def test_rules_and_dashboards_are_the_files_and_alerts_link_to_the_address_that_was_given(self):
        rules = [it for it in self.objects if it["kind"] == "PrometheusRule"]
        self.assertEqual([it["metadata"]["name"] for it in rules], ["warmroute-recording", "warmroute-alerts"])
        for it, name in zip(rules, ("recording", "alerts")):
            self.assertEqual(it["metadata"]["labels"]["release"], "prometheus")
            text = (DEPLOY / f"observability/prometheus/{name}.yaml").read_text()
            text = text.replace("runbook_url: docs/troubleshooting.md", "runbook_url: https://docs.test/troubleshooting.html")
            self.assertEqual(it["spec"], yaml.safe_load(text))
        self.assertIn("https://docs.test/troubleshooting.html#warmrouteabsent", str(rules))
        dashboards = self.find("ConfigMap", "warmroute-dashboards")
        self.assertEqual(dashboards["metadata"]["labels"]["grafana_dashboard"], "1")
        files = {path.name: path.read_text() for path in (DEPLOY / "observability/dashboards").glob("*.json")}
        self.assertEqual(dashboards["data"], files)

    def test_each_namespace_of_engines_has_its_role(self):
        roles = [it["metadata"]["namespace"] for it in self.objects if it["kind"] == "Role"]
        self.assertEqual(roles, ["llm", "other"])

    def test_a_changed_configuration_changes_the_pods_if_that_is_asked_for(self):
        def checksum(values):
            objects, _ = chart(values)
            deployment = next(it for it in objects if it["kind"] == "Deployment")
            return deployment["spec"]["template"]["metadata"]["annotations"].get("checksum/config")

        changed = {"config": {"log": {"level": "debug"}}}
        self.assertIsNone(checksum(changed))
        self.assertNotEqual(checksum({"restartOnConfigChange": True}), checksum({"restartOnConfigChange": True, **changed}))


@unittest.skipUnless(helm, "helm-python-sdk needs Python 3.10")
class TheTwoAgree(unittest.TestCase):
    """The chart with its default values, and the kustomize base."""

    def both(self, kind, name="warmroute"):
        found = []
        for objects in (kustomize(), chart()[0]):
            found.append(next(it for it in objects if it["kind"] == kind and it["metadata"]["name"].startswith(name)))
        return found

    def test_in_the_pod(self):
        pods = [it["spec"]["template"]["spec"] for it in self.both("Deployment")]
        for key in ("terminationGracePeriodSeconds", "securityContext", "automountServiceAccountToken"):
            self.assertEqual(pods[0][key], pods[1][key], key)
        containers = [pod["containers"][0] for pod in pods]
        for container in containers:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                container[probe]["httpGet"].setdefault("scheme", "HTTP")
        for key in ("args", "envFrom", "ports", "startupProbe", "livenessProbe", "readinessProbe", "resources", "securityContext", "volumeMounts"):
            self.assertEqual(containers[0][key], containers[1][key], key)

    def test_in_the_strategy_and_the_budget(self):
        for key in ("replicas", "strategy"):
            base, rendered = (it["spec"][key] for it in self.both("Deployment"))
            self.assertEqual(base, rendered, key)
        base, rendered = (it["spec"]["maxUnavailable"] for it in self.both("PodDisruptionBudget"))
        self.assertEqual(base, rendered)

    def test_in_the_services_and_the_network_policy(self):
        for name in ("warmroute", "warmroute-peers"):
            base, rendered = (it["spec"]["ports"] for it in self.both("Service", name))
            self.assertEqual(base, rendered, name)
        ports = [[rule["ports"] for rule in it["spec"]["ingress"]] for it in self.both("NetworkPolicy")]
        self.assertEqual(ports[0], ports[1])

    def test_in_the_configuration(self):
        base, rendered = (effective_text(it["data"]["config.yaml"]) for it in self.both("ConfigMap"))
        self.assertEqual(base, rendered)


class Elsewhere(unittest.TestCase):
    @unittest.skipUnless(compose_spec, "compose-spec needs Python 3.10")
    def test_compose_fits_the_specification(self):
        text = (DEPLOY / "compose/docker-compose.yaml").read_text()
        compose_spec.PyOptions(apply_merge=True).from_yaml(text).validate()
        misspelt = text.replace("stop_grace_period", "stop_grace_perod")
        with self.assertRaises(ValueError):
            compose_spec.PyOptions(apply_merge=True).from_yaml(misspelt)

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

    def test_the_unit_is_restarted_however_often_it_fails(self):
        unit = (DEPLOY / "systemd/warmroute.service").read_text()
        self.assertIn("\nRestart=always\n", unit)
        self.assertIn("\nStartLimitIntervalSec=0\n", unit.split("[Service]")[0])

    def test_the_unit_may_write_the_folders_of_the_documentation(self):
        unit = (DEPLOY / "systemd/warmroute.service").read_text()
        pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.yaml")]
        folders = {found for page in pages for found in re.findall(r"/var/(lib|log)/([\w-]+)/", page.read_text())}
        self.assertEqual(folders, {("lib", "warmroute"), ("log", "warmroute")})
        self.assertIn("\nStateDirectory=warmroute\nLogsDirectory=warmroute\n", unit)

    @unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not installed")
    def test_systemd_knows_every_line_of_the_unit(self):
        unit = DEPLOY / "systemd/warmroute.service"
        run = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
        found = [line for line in run.stderr.splitlines() if "warmroute" in line and "is not executable" not in line]
        self.assertEqual(found, [])


if __name__ == "__main__":
    unittest.main()
