"""Everything under examples/ does what it says."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

from cluster import BINARY, STATE_TOKEN_KEY, LIMIT_S, ROOT, Cluster, eventually, get

EXAMPLES = ROOT / "examples"
#: Where `make sdk` installs the Node SDK; ES modules look for it beside themselves and above.
NODE = pathlib.Path(os.environ.get("WARMROUTE_NODE", ROOT / ".cache/node"))


def run(*command, **environment):
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=2 * LIMIT_S,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


class Configurations(unittest.TestCase):
    def test_every_example_configuration_is_accepted(self):
        configurations = sorted(set(EXAMPLES.rglob("*.yaml")) - {EXAMPLES / "workers.yaml"})
        self.assertTrue(configurations)
        given = {
            "WARMROUTE_STATE_KEY": STATE_TOKEN_KEY,
            "WARMROUTE_ADMIN_TOKEN": STATE_TOKEN_KEY,
            "PEERS_SECRET": STATE_TOKEN_KEY,
            "ADDRESS": "127.0.0.2",
            "TEAM_A_KEY": "sk-of-team-a-0123456789",
            "TEAM_B_KEY_SHA256": 64 * "b",
        }
        for path in configurations:
            with self.subTest(path.name):
                # Its secrets are files.
                flags = ["--allow-missing-files"] if path.name == "production.yaml" else []
                done = run(BINARY, "check", *flags, "--config", path, **given)
                self.assertEqual(done.returncode, 0, done.stdout)
                self.assertNotIn("warning: ", done.stdout)

    def test_the_file_of_workers_is_what_a_configuration_could_list(self):
        text = (EXAMPLES / "workers.yaml").read_text()
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "listed.yaml"
            path.write_text(text)
            done = run(BINARY, "check", "--config", path)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("name: second", done.stdout)


class Clients(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster()
        cls.addClassCleanup(cls.cluster.close)

    def run_client(self, *command, **environment):
        router = {"OPENAI_BASE_URL": self.cluster.base_url, "ADMIN_URL": self.cluster.router.admin_url, "LIMIT_MS": str(int(1_000 * LIMIT_S))}
        done = run(*command, **{**router, **environment})
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def test_python(self):
        output = self.run_client(sys.executable, EXAMPLES / "python/chat.py")
        self.assertIn("expected error: model_not_found", output)
        self.assertRegex(output, r"\[[1-9]\d* of \d+ prompt tokens were cached\]")

    def test_curl(self):
        output = self.run_client("sh", EXAMPLES / "curl.sh")
        self.assertRegex(output, "(?i)x-warmroute-decision: .*reason")
        self.assertIn("data: [DONE]", output)

    def node(self, path, **environment):
        if not shutil.which("node"):
            self.skipTest("node is missing")
        if not (NODE / "node_modules/openai").is_dir():
            self.skipTest("the Node SDK is not installed; `make sdk` does it")
        return self.run_client("node", shutil.copy(path, NODE), **environment)

    def test_node(self):
        output = self.node(EXAMPLES / "node/chat.mjs")
        self.assertIn("expected error: model_not_found", output)
        self.assertRegex(output, r"\[[1-9]\d* of \d+ prompt tokens were cached\]")

    def test_node_sdk(self):
        self.node(ROOT / "tests/sdk/checks.mjs")

    def test_node_sdk_over_a_websocket(self):
        self.node(ROOT / "tests/sdk/websocket.mjs")

    def test_node_sdk_and_batches(self):
        with tempfile.TemporaryDirectory() as folder, Cluster(config={"batches": {"folder": folder}}) as cluster:
            self.node(ROOT / "tests/sdk/batches.mjs", OPENAI_BASE_URL=cluster.base_url)

    def test_node_sdk_and_replicas(self):
        with Cluster(replicas=2) as cluster:
            urls = ",".join(f"{router.url}/v1" for router in cluster.routers)
            self.node(ROOT / "tests/sdk/responses.mjs", OPENAI_BASE_URLS=urls)


class Batches(unittest.TestCase):
    def test_the_command_runs_the_example(self):
        with tempfile.TemporaryDirectory() as directory:
            directory = pathlib.Path(directory)
            folder, given, results = (directory / name for name in ("stored", "in.jsonl", "out.jsonl"))
            folder.mkdir()
            text = (EXAMPLES / "batch.jsonl").read_text().replace("Qwen/Qwen3-8B", "sim")
            given.write_text(text)
            with Cluster(config={"batches": {"folder": str(folder)}}) as cluster:
                command = (BINARY, "batch", "run", given, "-o", results, "--url", cluster.base_url)
                done = run(*command)
                self.assertEqual(done.returncode, 0, done.stdout)
                lines = [json.loads(line) for line in results.read_text().splitlines()]
                expected = {json.loads(line)["custom_id"] for line in text.splitlines()}
                self.assertEqual({line["custom_id"] for line in lines}, expected)
                self.assertEqual(len(lines), len(expected))
                [batch] = re.findall(r"batch: (batch_\w+) at", done.stdout)
                shown = run(BINARY, "batch", "status", batch, "--url", cluster.base_url)
                self.assertIn('"status": "completed"', shown.stdout)


class Replicas(unittest.TestCase):
    ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")

    @classmethod
    def setUpClass(cls):
        names = ("PORT", "ADMIN_PORT", "ENGINE_PORT", "REDIS_PORT")
        ports = dict(zip(names, map(str, cls.free_ports(len(names)))))
        path = f"{BINARY.parent}:{os.environ['PATH']}"
        cls.output = tempfile.TemporaryFile("w+")
        cls.addClassCleanup(cls.output.close)
        cls.up = subprocess.Popen(
            ["sh", EXAMPLES / "replicas/up.sh"],
            stdin=subprocess.DEVNULL,
            stdout=cls.output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ports, "PATH": path},
        )
        cls.addClassCleanup(cls.down)
        cls.base_url = f"http://routers.example:{ports['PORT']}/v1"
        cls.admin_urls = [f"http://{address}:{ports['ADMIN_PORT']}" for address in cls.ADDRESSES]
        for url in cls.admin_urls:
            eventually("a router is ready", lambda: cls.is_ready(url))

    @classmethod
    def free_ports(cls, count):
        """Of those that none of the replicas has at any of the addresses."""
        with contextlib.ExitStack() as held:
            ports = []
            while len(ports) < count:
                first = held.enter_context(socket.socket())
                first.bind(("127.0.0.1", 0))
                port = first.getsockname()[1]
                try:
                    for address in cls.ADDRESSES:
                        held.enter_context(socket.socket()).bind((address, port))
                except OSError:
                    continue
                ports.append(port)
            return ports

    @classmethod
    def down(cls):
        cls.up.send_signal(signal.SIGTERM)
        cls.up.wait(LIMIT_S)

    @staticmethod
    def is_ready(url):
        try:
            return get(f"{url}/readyz")[0] == 200
        except OSError:
            return False

    def client(self, **options):
        return subprocess.Popen(
            [sys.executable, EXAMPLES / "replicas/client.py"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "OPENAI_BASE_URL": self.base_url,
                "RESOLVE": ",".join(self.ADDRESSES),
                **options,
            },
        )

    def resumed(self, url):
        """Streams that a router was asked to go on with."""
        page = get(f"{url}/metrics")[1]
        return int(sum(map(float, re.findall(r'background_readers_total\{kind="resume"\} (\S+)', page))))

    def check(self, client, events):
        output, _ = client.communicate(timeout=2 * LIMIT_S)
        self.assertEqual(client.returncode, 0, output)
        self.assertRegex(output, rf"\[incomplete: events 0 to {events}, each once\]")
        self.assertEqual(output.count("queued, then cancelled]"), 2, output)
        return output

    def test_a_client_resumes_and_cancels_at_the_next_address(self):
        output = self.check(self.client(TOKENS="30"), r"\d+")
        self.assertRegex(output, r"\[resp_\w+: left after event 9\]")

    def test_the_router_of_a_stream_is_killed(self):
        before = list(map(self.resumed, self.admin_urls))
        client = self.client(TOKENS="200")

        def read():
            now = list(map(self.resumed, self.admin_urls))
            return now if now != before else None

        now = eventually("a router is read", read)
        [place] = [place for place in range(3) if now[place] > before[place]]
        self.output.seek(0)
        processes = re.findall(r"process (\d+)", self.output.read())
        os.kill(int(processes[place]), signal.SIGKILL)
        self.assertIn("broke off after event", self.check(client, r"\d+"))


if __name__ == "__main__":
    unittest.main()
