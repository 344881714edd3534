"""What open dashboards cost the router: CPU time of the process, and of the thread that reads it for them, with 0, 1 and 2
pages open, in front of 1,000 workers with 1,000 models under a little load.

    WARMROUTE=target/release/warmroute python3 benches/dashboard.py [SECONDS] [ROUNDS]

Ten simulated engines with 100 models each, every one on a hundred addresses of this host."""

import http.client
import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/sdk"))

from cluster import Engine, Router, eventually, get  # noqa: E402

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 60
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 3
REQUESTS_PER_SECOND = 20
TICK = os.sysconf("SC_CLK_TCK")
THREAD = "admin-pages"


def cpu(pid):
    """CPU seconds of the process, and of the thread of operators' pages."""

    def ticks(path):
        fields = pathlib.Path(path).read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    of_thread = 0.0
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == THREAD[:15]:
            of_thread += ticks(task / "stat")
    return ticks(f"/proc/{pid}/stat"), of_thread


class Viewer:
    """A page that is open: reads its events and throws them away."""

    def __init__(self, url):
        self.bytes = 0
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        self.connection.request("GET", "/dashboard/events")
        self.answer = self.connection.getresponse()
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        try:
            while piece := self.answer.read1():
                self.bytes += len(piece)
        except (OSError, ValueError, AttributeError):
            pass

    def close(self):
        self.connection.sock and self.connection.sock.shutdown(2)
        self.thread.join(10)


def load(url, models, stopped):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    number = 0
    while not stopped.wait(1 / REQUESTS_PER_SECOND):
        number += 1
        words = f"Conversation {number % 40}. " + "Answer shortly and kindly. " * 60
        body = {"model": models[number % len(models)], "max_tokens": 8, "messages": [{"role": "user", "content": words}]}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        connection.getresponse().read()


def main():
    with tempfile.TemporaryDirectory() as directory:
        models = [f"model-{n:04}" for n in range(1_000)]
        processes, workers = [], []
        try:
            for number in range(10):
                names = [part for model in models[100 * number : 100 * (number + 1)] for part in ("--model", model)]
                engine = Engine(directory, f"engine-{number}", "--listen", "0.0.0.0:0", "--decode-time", "2ms", *names)
                processes.append(engine)
                port = engine.url.rsplit(":", 1)[1]
                workers += [{"name": f"worker-{n:04}", "url": f"http://127.1.{n // 250}.{n % 250 + 1}:{port}"} for n in range(100 * number, 100 * (number + 1))]
            router = Router(directory, workers, {"fleet": {"health": {"interval": "30s"}}})
            processes.append(router)
            eventually("all workers are up", lambda: get(f"{router.admin_url}/metrics")[1].count("warmroute_worker_up{") >= 1_000)
            stopped = threading.Event()
            client = threading.Thread(target=load, args=(router.url, models, stopped), daemon=True)
            client.start()
            time.sleep(5)
            found = {}
            for _ in range(ROUNDS):
                for count in (0, 1, 2):
                    viewers = [Viewer(router.admin_url) for _ in range(count)]
                    time.sleep(3)
                    first = [viewer.bytes for viewer in viewers]
                    began, before = time.monotonic(), cpu(router.process.pid)
                    time.sleep(SECONDS)
                    took, after = time.monotonic() - began, cpu(router.process.pid)
                    sent = [(viewer.bytes - start) / took for viewer, start in zip(viewers, first)]
                    found.setdefault(count, []).append([100 * (now - then) / took for now, then in zip(after, before)] + [sum(sent)])
                    for viewer in viewers:
                        viewer.close()
            stopped.set()
            client.join(30)
            for count, rounds in found.items():
                shown = []
                for name, values in zip(("process", "thread"), zip(*rounds)):
                    shown.append(f"{name} {statistics.median(values):.2f} % of a core ({min(values):.2f} to {max(values):.2f})")
                sent = statistics.median(values[2] for values in rounds) / max(1, count)
                print(f"{count} pages open: {', '.join(shown)}; {sent / 1000:.1f} kB/s each")
        finally:
            for process in processes:
                process.kill()


if __name__ == "__main__":
    main()
