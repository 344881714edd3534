"""The endpoint picker behind a real Envoy: what clients get through it, and what the router counts."""

import concurrent.futures
import http.client
import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "sdk"))

from cluster import LIMIT_S, Cluster, eventually, get  # noqa: E402
from gateway import DESTINATION, Envoy  # noqa: E402

CHAT = "/v1/chat/completions"


def host_and_port(url):
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def chat(text="hello", **more):
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


class Picker(Cluster):
    """Engines, and a router that gateways can ask."""

    def __init__(self, engines=2, config=None, **more):
        config = {"endpoint_picker": {"listen": "127.0.0.1:0"}, **(config or {})}
        super().__init__(engines=engines, config=config, **more)

    @property
    def picker(self):
        def address(line):
            fields = json.loads(line) if line.startswith("{") else {}
            return fields.get("address") if "endpoint picker listens" in fields.get("message", "") else None

        return self.router.await_line(address)

    def addresses(self):
        return [host_and_port(engine.url) for engine in self.engines]

    def client_names(self):
        """What clients see of each engine: no address."""
        names = {worker["name"]: worker.get("client_name", worker["name"]) for worker in self.fleet()}
        return [names["{}:{}".format(*address)] for address in self.addresses()]

    def envoy(self, listed=True, **more):
        workers = self.addresses() if listed else None
        return self.keep(Envoy(self.directory.name, self.picker, workers, **more))

    def fleet(self):
        return json.loads(get(f"{self.router.admin_url}/fleet")[1])["workers"]

    def load(self):
        """Requests that the router counts at its workers."""
        return sum(worker["requests"] for worker in self.fleet())

    def total(self, start):
        text = get(f"{self.router.admin_url}/metrics")[1]
        lines = [line for line in text.splitlines() if line.startswith(start)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def last_request(self, engine):
        seen = json.loads(get(f"{self.engines[engine].url}/sim/requests")[1])
        # Health checks and their questions come in between.
        posts = [request for request in seen["last"] if request["method"] == "POST"]
        return posts[-1] if posts else {"headers": {}}


def post(url, body, headers=None, path=CHAT):
    """Status, headers and text of an answer."""
    host, port = host_and_port(url)
    connection = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
    try:
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        connection.request("POST", path, data, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


class ListedWorkers(unittest.TestCase):
    """Envoy sends only to the workers that it lists itself, down the list of the choice."""

    listed, config = True, {}

    @classmethod
    def setUpClass(cls):
        cls.cluster = Picker(config=cls.config)
        cls.addClassCleanup(cls.cluster.close)
        cls.gateway = cls.cluster.envoy(listed=cls.listed)

    def setUp(self):
        eventually("no request is counted", lambda: self.cluster.load() == 0)

    def tearDown(self):
        eventually("no request is counted any more", lambda: self.cluster.load() == 0)

    def test_an_answer_is_the_one_that_the_proxy_gives(self):
        body = chat("the same words", temperature=0)
        expected = json.loads(post(self.cluster.router.url, body)[2])
        gateway = self.gateway
        status, headers, text = post(gateway.url, body, {"x-request-id": "mine", "x-warmroute-decision": "1"})
        self.assertEqual(status, 200, text)
        self.assertEqual(json.loads(text)["choices"], expected["choices"])
        self.assertEqual(headers["x-request-id"], "mine")
        self.assertIn("worker=", headers["x-warmroute-decision"])

    def test_a_stream_passes_whole_and_is_measured(self):
        seen = 'warmroute_time_to_first_token_seconds_count'
        gateway = self.gateway
        before = self.cluster.total(seen)
        status, _, text = post(gateway.url, chat("count", stream=True, max_tokens=30))
        self.assertEqual(status, 200)
        self.assertTrue(text.endswith("data: [DONE]\n\n"), text[-80:])
        self.assertGreaterEqual(text.count("data: "), 30)
        eventually("the first token was measured", lambda: self.cluster.total(seen) == before + 1)

    def test_a_conversation_stays_at_its_worker(self):
        gateway = self.gateway
        messages, met = [], set()
        for turn in range(4):
            messages.append({"role": "user", "content": f"{gateway.port} turn {turn} " + "and so on " * 60})
            body = {"model": "sim", "messages": messages, "max_tokens": 8}
            status, headers, text = post(gateway.url, body, {"x-warmroute-decision": "1"})
            self.assertEqual(status, 200, text)
            met.add(headers["x-warmroute-decision"].split(";")[0])
            messages.append(json.loads(text)["choices"][0]["message"])
        self.assertEqual(len(met), 1, met)

    def test_a_client_does_not_choose_its_worker(self):
        gateway = self.gateway
        # Nothing listens there.
        status, _, text = post(gateway.url, chat("x"), {DESTINATION: "127.0.0.1:1", "x-prefiller-host-port": "127.0.0.1:1"})
        self.assertEqual(status, 200, text)
        got = [self.cluster.last_request(number)["headers"] for number in range(2)]
        self.assertFalse([headers for headers in got if "x-prefiller-host-port" in headers])

    def test_errors_are_the_routers(self):
        gateway = self.gateway
        status, _, text = post(gateway.url, chat("x") | {"model": "nothing"})
        self.assertEqual((status, json.loads(text)["error"]["code"]), (404, "model_not_found"))
        status, _, text = post(gateway.url, "{")
        self.assertEqual(status, 400, text)
        status, _, text = post(gateway.url, chat("x"), path="/v1/nothing")
        self.assertEqual((status, json.loads(text)["error"]["code"]), (404, "unknown_url"))
        status, text = get(f"{gateway.url}/v1/models")
        self.assertEqual((status, [model["id"] for model in json.loads(text)["data"]]), (200, ["sim"]))

    def test_a_long_body_passes(self):
        gateway = self.gateway
        status, _, text = post(gateway.url, chat("long " * 220_000))
        # The engine's own opinion, and not the gateway's.
        self.assertEqual(status, 400, text)
        self.assertIn("maximum context length", text)

    def test_a_client_that_leaves_is_counted_no_longer(self):
        before = self.cluster.total('warmroute_endpoint_picker_exchanges_total{outcome="gateway_left"}')
        gateway = self.gateway
        for _ in range(10):
            host, port = host_and_port(gateway.url)
            connection = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
            body = json.dumps(chat("slow", stream=True, max_tokens=4000))
            connection.request("POST", CHAT, body, {"content-type": "application/json"})
            connection.getresponse().read(100)
            connection.close()
        eventually("the load is gone", lambda: self.cluster.load() == 0)
        left = self.cluster.total('warmroute_endpoint_picker_exchanges_total{outcome="gateway_left"}')
        self.assertEqual(left - before, 10)

    def test_many_at_once_are_all_answered(self):
        def one(number):
            text = f"request {number} " + "word " * (number % 40) * 100
            return post(self.gateway.url, chat(text, stream=number % 3 == 0))[0]

        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            statuses = list(pool.map(one, range(400)))
        self.assertEqual(set(statuses), {200})


class AnyAddress(ListedWorkers):
    """Envoy sends to the address that the header has."""

    listed, config = False, {"endpoint_picker": {"listen": "127.0.0.1:0", "fallbacks": 0}}


class SelfSigned(unittest.TestCase):
    def test_a_gateway_asks_over_tls_without_a_certificate_of_yours(self):
        with Picker(config={"endpoint_picker": {"listen": "127.0.0.1:0", "tls": {"self_signed": True}}}) as cluster:
            encrypted, clear = cluster.envoy(tls=True), cluster.envoy()
            status, _, text = post(encrypted.url, chat("x"))
            self.assertEqual(status, 200, text)
            self.assertGreaterEqual(post(clear.url, chat("x"))[0], 500)


class ConformanceHooks(unittest.TestCase):
    SELECTION, SERVED = "test-epp-endpoint-selection", "x-conformance-test-served-endpoint"

    def test_a_test_chooses_and_sees_who_served(self):
        config = {"endpoint_picker": {"listen": "127.0.0.1:0", "advanced": {"conformance_hooks": True}}}
        with Picker(engines=3, config=config) as cluster:
            gateway = cluster.envoy()
            for host, port in cluster.addresses() * 2:
                wanted = f"{host}:{port}"
                status, headers, text = post(gateway.url, chat("x"), {self.SELECTION: wanted})
                self.assertEqual((status, headers[self.SERVED]), (200, wanted), text)
            # A bare address is all ports of it.
            status, headers, _ = post(gateway.url, chat("x"), {self.SELECTION: "10.255.255.1,127.0.0.1"})
            self.assertEqual(status, 200)
            self.assertEqual(post(gateway.url, chat("x"), {self.SELECTION: "10.255.255.1"})[0], 503)
            # It wins over the subset.
            first, second = (f"{host}:{port}" for host, port in cluster.addresses()[:2])
            hinted = cluster.envoy(subset=[first])
            self.assertEqual(post(hinted.url, chat("x"), {self.SELECTION: second})[1][self.SERVED], second)

    def test_without_the_flag_it_is_a_header_like_any_other(self):
        with Picker() as cluster:
            status, headers, text = post(cluster.envoy().url, chat("x"), {self.SELECTION: "10.255.255.1"})
            self.assertEqual(status, 200, text)
            self.assertNotIn(self.SERVED, headers)


class Ranks(unittest.TestCase):
    def test_each_port_of_an_address_is_a_worker_of_its_own(self):
        with Picker(engines=3) as cluster:
            # As the data-parallel ranks of one pod, which have its address and ports of their own.
            gateway = cluster.envoy(subset="127.0.0.1")
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                requests = [chat(f"{number} " * 200, stream=True, max_tokens=100) for number in range(24)]
                answers = pool.map(lambda body: post(gateway.url, body, {"x-warmroute-decision": "1"}), requests)
                met = {headers["x-warmroute-decision"].split(";")[0] for _, headers, _ in answers}
            self.assertEqual(met, {f"worker={name}" for name in cluster.client_names()})


    def test_a_rank_behind_one_address_is_a_header(self):
        arguments = ("--decode-time", "2ms", "--data-parallel-size=2", "--kv-events=tcp://*:0", "--kv-replay=tcp://*:0")
        header = "x-data-parallel-rank"
        with Picker(engines=2, engine_arguments=arguments) as cluster:
            gateway = cluster.envoy()
            names = cluster.client_names()

            def ask(text):
                # What a client says of ranks does not count.
                headers = {"x-warmroute-decision": "1", header: "7"}
                status, headers, answer = post(gateway.url, chat(text), headers)
                self.assertEqual(status, 200, answer)
                decision = headers["x-warmroute-decision"]
                fields = dict(field.split("=", 1) for field in decision.split("; "))
                engine = names.index(fields["worker"])
                self.assertEqual(cluster.last_request(engine)["headers"].get(header), fields["rank"])
                return engine, fields["rank"]

            # Each new prompt is at one of four ranks that are all idle.
            met = set()
            for family in range(50):
                start = f"{family} is where it starts. " * 60
                places = {ask(start + "and so on. " * turn * 20) for turn in range(3)}
                self.assertEqual(len(places), 1, places)
                met |= places
                if len(met) > 2:
                    break
            self.assertGreater(len(met), 2, met)


class Queued(unittest.TestCase):
    def test_objectives_and_targets_are_read_and_go_no_further(self):
        config = {"queue": {"objectives": {"nightly": -100}, "trust_fairness_id": True}}
        with Picker(engines=1, config={**config, "endpoint_picker": {"listen": "127.0.0.1:0"}}) as cluster:
            control = {
                "x-llm-d-inference-objective": "nightly",
                "x-llm-d-inference-fairness-id": "team-a",
                "x-slo-ttft-ms": "2000",
                "x-data-parallel-host-port": "127.0.0.1:1",
            }
            status, _, text = post(cluster.envoy().url, chat("x"), control)
            self.assertEqual(status, 200, text)
            self.assertFalse(set(control) & set(cluster.last_request(0)["headers"]))


class Subset(unittest.TestCase):
    def test_the_choice_is_among_the_hinted_workers(self):
        with Picker(engines=3) as cluster:
            second = "{}:{}".format(*cluster.addresses()[1])
            name = cluster.client_names()[1]
            hinted = cluster.envoy(subset=[second])
            for number in range(6):
                status, headers, text = post(hinted.url, chat(f"number {number}"), {"x-warmroute-decision": "1"})
                self.assertEqual(status, 200, text)
                self.assertIn(f"worker={name};", headers["x-warmroute-decision"])
            for subset in ([], ["10.255.255.1:80"]):
                empty = cluster.envoy(subset=subset)
                status, _, text = post(empty.url, chat("x"))
                self.assertEqual(status, 503, text)


class Failures(unittest.TestCase):
    def test_a_dead_worker_is_passed_over_and_counted_where_it_went(self):
        # The health checks are not to see it first.
        config = {"fleet": {"health": {"interval": "100ms", "unhealthy_threshold": 1000}}}
        with Picker(config=config) as cluster:
            gateway = cluster.envoy()
            cluster.engines[0].kill()
            for number in range(8):
                status, _, text = post(gateway.url, chat(f"number {number} " * 50))
                self.assertEqual(status, 200, text)
            served = json.loads(get(f"{cluster.engines[1].url}/sim/requests")[1])["finished"]
            self.assertEqual(served, 8)
            eventually("no request is counted", lambda: cluster.load() == 0)

    def test_a_picker_that_is_gone_fails_as_the_gateway_says(self):
        with Picker() as cluster:
            closed, opened = cluster.envoy(), cluster.envoy(fails_open=True)
            self.assertEqual(post(closed.url, chat())[0], 200)
            cluster.router.kill()
            self.assertGreaterEqual(post(closed.url, chat())[0], 500)
            # Envoy can go on without the picker only while it has sent it no part of a body.
            self.assertEqual(get(f"{opened.url}/v1/models")[0], 200)

    def test_limits_hold_over_the_gateway(self):
        tenants = [{"name": "few", "keys": ["sk-few"], "limits": {"requests_per_minute": 60, "burst": "2s"}}]
        with Picker(config={"tenants": tenants}) as cluster:
            gateway = cluster.envoy()
            key = {"authorization": "Bearer sk-few"}
            statuses = [post(gateway.url, chat(), key)[0] for _ in range(6)]
            self.assertEqual(statuses[:2], [200, 200])
            self.assertIn(429, statuses)
            status, headers, text = post(gateway.url, chat())
            self.assertEqual((status, json.loads(text)["error"]["code"]), (401, "invalid_api_key"))
            # The key is the router's: engines do not see it.
            for number in range(2):
                self.assertNotIn("authorization", cluster.last_request(number)["headers"])


class Pairs(unittest.TestCase):
    def test_the_prefill_worker_is_a_header(self):
        arguments = ("--decode-time", "2ms", "--kv-connector", "nixl", "--kv-role", "both")
        with Picker(engine_arguments=arguments) as cluster:
            first, second = cluster.addresses()
            config = {
                "workers": [
                    {"url": "http://{}:{}".format(*first), "role": "prefill"},
                    {"url": "http://{}:{}".format(*second), "role": "decode"},
                ],
                "prefill_decode": {"connector": "nixl"},
                "endpoint_picker": {"listen": "127.0.0.1:0"},
            }
            cluster.router = cluster.keep(type(cluster.router)(cluster.directory.name, config["workers"], config, "pairs"))
            eventually("both are up", lambda: all(it["health"] == "up" for it in cluster.fleet()))
            gateway = cluster.envoy()
            status, _, text = post(gateway.url, chat("a long prompt " * 300))
            self.assertEqual(status, 200, text)
            got = cluster.last_request(1)["headers"]
            self.assertEqual(got["x-prefiller-host-port"], "{}:{}".format(*first))
            self.assertEqual(cluster.total('warmroute_disaggregated_requests_total{disaggregated="yes"'), 1)
            eventually("no request is counted", lambda: cluster.load() == 0)
            # Its usage is the decode worker's own.
            decode = next(it["name"] for it in cluster.fleet() if it["role"] == "decode")
            tokens = f'warmroute_worker_prompt_tokens_total{{worker="{decode}"'
            eventually("its prompt is counted", lambda: cluster.total(tokens) > 0)


if __name__ == "__main__":
    unittest.main()
