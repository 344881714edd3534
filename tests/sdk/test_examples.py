"""Everything under examples/ does what it says."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from cluster import BINARY, CARRIER_KEY, LIMIT_S, ROOT, Cluster, get

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
    def test_each_is_accepted(self):
        configurations = sorted(set(EXAMPLES.glob("*.yaml")) - {EXAMPLES / "workers.yaml"})
        self.assertTrue(configurations)
        for path in configurations:
            with self.subTest(path.name):
                done = run(BINARY, "check", "--config", path, WARMROUTE_CARRIER_KEY=CARRIER_KEY)
                self.assertEqual(done.returncode, 0, done.stdout)

    def test_the_file_of_workers_is_what_a_configuration_could_list(self):
        text = (EXAMPLES / "workers.yaml").read_text()
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory) / "listed.yaml"
            path.write_text("fleet:\n" + "".join(f"  {line}\n" for line in text.splitlines()))
            done = run(BINARY, "check", "--config", path)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("name: second", done.stdout)


class Clients(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster()
        cls.addClassCleanup(cls.cluster.close)

    def run_client(self, *command, **environment):
        router = {"OPENAI_BASE_URL": self.cluster.base_url, "ADMIN_URL": self.cluster.router.admin_url}
        done = run(*command, **router, **environment)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def test_python(self):
        output = self.run_client(sys.executable, EXAMPLES / "python/chat.py")
        self.assertIn("as it should be: model_not_found", output)
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
        self.assertIn("as it should be: model_not_found", output)
        self.assertRegex(output, r"\[[1-9]\d* of \d+ prompt tokens were cached\]")

    def test_node_sdk(self):
        self.node(ROOT / "tests/sdk/checks.mjs")

    def test_node_sdk_and_replicas(self):
        with Cluster(replicas=2) as cluster:
            urls = ",".join(f"{router.url}/v1" for router in cluster.routers)
            self.node(ROOT / "tests/sdk/responses.mjs", OPENAI_BASE_URLS=urls)


if __name__ == "__main__":
    unittest.main()
