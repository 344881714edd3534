"""Clients that leave at any moment and pickers that die: no load stays counted, and nothing hangs.

WARMROUTE_EXCHANGES is how many requests each of the two tests makes.
"""

import collections
import concurrent.futures
import json
import os
import random
import socket
import threading
import time
import unittest

# These say where the modules of the SDKs' tests are.
from gateway import free_port
from test_endpoint_picker import CHAT, Picker, chat, host_and_port, post

from cluster import LIMIT_S, Router, eventually, get

EXCHANGES = int(os.environ.get("WARMROUTE_EXCHANGES", "400"))
CLIENTS = 16
#: How a client behaves, and how often.
KINDS = {"whole": 6, "stream": 4, "leaves in the body": 3, "leaves at once": 3, "leaves in the answer": 4}
MEGABYTE = 1_000_000


class Client:
    """One request that ends in one of the ways of `KINDS`."""

    def __init__(self, url, seed):
        self.address = host_and_port(url)
        self.random = random.Random(seed)
        self.kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]

    def request(self):
        size = MEGABYTE if self.random.random() < 0.05 else self.random.randrange(10, 4_000)
        is_stream = self.kind in ("stream", "leaves in the answer")
        tokens = 4_000 if self.kind == "leaves in the answer" else 8
        text = f"{self.random.random()} " + "x" * size
        body = json.dumps(chat(text, stream=is_stream, max_tokens=tokens)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        return head.encode() + body

    def run(self):
        """The status, or why there is none. A wait without an end is an error."""
        data = self.request()
        try:
            with socket.create_connection(self.address, LIMIT_S) as connection:
                connection.settimeout(LIMIT_S)
                if self.kind == "leaves in the body":
                    connection.sendall(data[: self.random.randrange(len(data))])
                    return "left"
                connection.sendall(data)
                if self.kind == "leaves at once":
                    return "left"
                answer = connection.recv(1_000)
                if self.kind == "leaves in the answer":
                    return "left"
                while piece := connection.recv(65_536):
                    answer += piece
                return answer[9:12].decode() or "closed"
        except TimeoutError:
            return f"hung ({self.kind})"
        except OSError:
            # Whoever answers before it has read all closes its side.
            return "closed"


class Aborts(unittest.TestCase):
    def test_nothing_stays_counted_where_clients_are_let_through_without_a_picker(self):
        self.check(fails_open=True)

    def test_nothing_stays_counted_where_clients_need_a_picker(self):
        self.check(fails_open=False)

    def check(self, fails_open):
        listen = f"127.0.0.1:{free_port()}"
        config = {"endpoint_picker": {"listen": listen}, "log": {"format": "json", "access": False}}
        with Picker(config=config) as cluster:
            gateway = cluster.envoy(fails_open=fails_open)
            seen, ended = collections.Counter(), threading.Event()
            restarts = threading.Thread(target=self.restart, args=(cluster, config, ended))
            seed = random.randrange(1 << 32)
            print(f"seed {seed}", end=" ", flush=True)
            began = time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
                restarts.start()
                for status in pool.map(lambda number: Client(gateway.url, seed + number).run(), range(EXCHANGES)):
                    seen[status] += 1
            took = time.monotonic() - began
            ended.set()
            restarts.join()
            print(f"{EXCHANGES} in {took:.0f} s: {dict(seen)}", flush=True)
            self.assertEqual([status for status in seen if status.startswith("hung")], [])
            # 400 is the engine's own opinion of a megabyte.
            self.assertLessEqual(set(seen), {"200", "400", "left", "closed", "500", "502", "503", "504"})
            self.assertGreater(seen["200"], EXCHANGES // 10)
            eventually("no request is counted", lambda: cluster.load() == 0)
            eventually("no exchange is open", lambda: cluster.total("warmroute_endpoint_picker_exchanges ") == 0)
            eventually("all engines are up", lambda: all(it["health"] == "up" for it in cluster.fleet()))
            status, _, text = post(gateway.url, chat("afterwards"))
            self.assertEqual(status, 200, text)
            for engine in cluster.engines:
                idle = lambda: json.loads(get(f"{engine.url}/sim/requests")[1])["running"] == 0
                eventually("no engine computes for a client that has left", idle)

    def restart(self, cluster, config, ended):
        """Kills the picker again and again; the next one listens at the same address."""
        number = 0
        pause = 1.0 if EXCHANGES < 1_000 else 5.0
        while not ended.wait(pause):
            number += 1
            workers = [engine.url for engine in cluster.engines]
            cluster.router.kill()
            cluster.router = cluster.keep(Router(cluster.directory.name, workers, config, f"router-{number}"))


if __name__ == "__main__":
    unittest.main()
