#!/usr/bin/env python3
"""Loads that fleets have, over HTTP, in front of simulated engines that batch: how long do clients wait, and does the load spread?

    benches/rig/loads.py hot|agents|applications|trace [--rounds 5] ROUTER...

A ROUTER is lines of warmroute's YAML, such as 'routing: {policy: least_load}; queue: off' (`defaults`: none), or another
router and its policy, such as `vllm-router:cache_aware` or `smg:cache_aware` (VENV has them, see others.sh). All are
measured in turns, each time with new engines. Prints for each the mean time to the first token and to the whole answer (medians
over the rounds, lowest and highest), their ratio to the first ROUTER's in the same round, the part of the prompts that engines
had cached, and the largest part of the answers' tokens that one engine made.

  hot            one system prompt of 6,200 tokens that every request has; --clients at a time, 256 tokens an answer
  agents         --clients sessions that share a system prompt of 6,000 tokens and grow by 1,100 a turn; 40 tokens an answer
  applications   60 applications of unequal use, each with a system prompt of 500 to 6,000 tokens and answers of its own length;
                 requests come at random times, --rate a second
  trace          the first --requests of a trace like Mooncake's (--trace FILE), at --speed times its rate
"""

import argparse
import collections
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import tempfile
import threading
import time

BINARY = os.environ.get("WARMROUTE", "target/release/warmroute")
VENV = os.environ.get("VENV", os.path.expanduser("~/.cache/warmroute/others"))
Seen = collections.namedtuple("Seen", "first whole prompt cached")


def free_port(taken=set()):
    """Below those that the system gives to outgoing connections, which would take one before its server listens."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if port not in taken and probe.connect_ex(("127.0.0.1", port)):
                taken.add(port)
                return port


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def wait_for(port, path):
    for _ in range(600):
        try:
            if get(port, path)[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"nothing answers at port {port}")


def ask(port, messages, tokens, is_stream):
    """What one request saw."""
    body = {"model": "sim", "max_tokens": tokens, "stream": is_stream, "messages": messages}
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    first, text, last = None, [], b""
    if not is_stream:
        last = answer.read()
    while is_stream:
        line = answer.readline()
        if not line:
            break
        if not line.startswith(b"data: {"):
            continue
        last = line[6:]
        found = re.search(rb'"content":"([^"]+)"', line)
        if found:
            first = first or time.monotonic() - began
            text.append(found[1].decode())
    whole = time.monotonic() - began
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {last[:200]}")
    usage = json.loads(last)["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Seen(first or whole, whole, usage["prompt_tokens"], cached), "".join(text)


class Load:
    """Plays a load at some ports, of replicas of a router, and gathers what was seen."""

    def __init__(self, options, ports):
        self.options, self.ports, self.seen, self.failures, self.count = options, ports, [], [], 0

    def ask(self, messages, tokens):
        self.count += 1
        port = self.ports[self.count % len(self.ports)]
        try:
            seen, text = ask(port, messages, tokens, not self.options.whole)
        except (OSError, RuntimeError, ValueError, KeyError, http.client.HTTPException) as error:
            self.failures.append(repr(error))
            return ""
        self.seen.append(seen)
        return text

    def together(self, play, numbers):
        threads = [threading.Thread(target=play, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def hot(self):
        system = {"role": "system", "content": "You are a helpful assistant. " * 900}

        def play(number):
            for turn in range(self.options.turns or 3):
                question = {"role": "user", "content": f"question {number} {turn} " + "q" * 200}
                self.ask([system, question], 256)

        self.together(play, range(self.options.clients or 100))

    def agents(self):
        system = {"role": "system", "content": "You are a coding agent with many tools. " * 620}

        def play(number):
            chance = random.Random(number)
            time.sleep(chance.random() * 2)
            messages = [system]
            for turn in range(self.options.turns or 6):
                text = "".join(chance.choice("abcdefgh ") for _ in range(4_000))
                messages.append({"role": "user", "content": f"{number} {turn} {text}"})
                messages.append({"role": "assistant", "content": self.ask(messages, 40)})
                time.sleep(0.3 + chance.random() * 0.4)

        self.together(play, range(self.options.clients or 24))

    def applications(self):
        chance = random.Random(self.options.seed)
        prompts, tokens, weights = [], [], []
        for number in range(60):
            words = chance.randint(500, 6_000)
            prompts.append({"role": "system", "content": f"{number:03} " * words})
            tokens.append(int(min(800, max(20, chance.lognormvariate(4.8, 0.8)))))
            weights.append(1 / (number + 1))
        at, requests = 0.0, []
        for number in range(self.options.requests):
            at += chance.expovariate(self.options.rate)
            text = "".join(chance.choice("abcdefgh ") for _ in range(chance.randint(200, 3_000)))
            requests.append((at, chance.choices(range(60), weights)[0], text))
        began = time.monotonic()

        def play(number):
            at, application, text = requests[number]
            time.sleep(max(0.0, began + at - time.monotonic()))
            self.ask([prompts[application], {"role": "user", "content": text}], tokens[application])

        self.together(play, range(len(requests)))

    def trace(self):
        with open(self.options.trace) as file:
            lines = [json.loads(line) for line, _ in zip(file, range(self.options.requests))]

        def block(number):
            # 512 tokens, of four bytes each.
            return f"{number:07x} " * 256

        began = time.monotonic()

        def play(number):
            line = lines[number]
            text = "".join(block(number) for number in line["hash_ids"])[: 4 * line["input_length"]]
            at = line["timestamp"] / 1000 / self.options.speed
            time.sleep(max(0.0, began + at - time.monotonic()))
            self.ask([{"role": "user", "content": text}], max(1, line["output_length"]))

        self.together(play, range(len(lines)))


def start(arguments, **more):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **more}
    return subprocess.Popen(arguments, **quiet)


def worker_of(port, options):
    """A worker of warmroute's configuration. An engine with KV events publishes them at the two ports after its own."""
    events = f", events: {{from: zmq, endpoint: 'tcp://127.0.0.1:{port + 1}', replay: 'tcp://127.0.0.1:{port + 2}'}}" if options.exact else ""
    return f"{{url: 'http://127.0.0.1:{port}'{events}}}"


def start_warmroute(lines, engines, directory, options):
    """Replicas, and the ports of their APIs."""
    apis = [free_port() for _ in range(options.replicas)]
    admins = [free_port() for _ in range(options.replicas)]
    peers = [free_port() for _ in range(options.replicas)]
    started = []
    for number in range(options.replicas):
        text = [f"api: {{listen: '127.0.0.1:{apis[number]}'}}", f"admin: {{listen: '127.0.0.1:{admins[number]}'}}", "log: {access: false}"]
        text.append("workers: [" + ", ".join(worker_of(port, options) for port in engines) + "]")
        if options.replicas > 1:
            text.append("responses: {mode: pass_through}")
            all_peers = ", ".join(f"'127.0.0.1:{port}'" for port in peers)
            text.append(f"peers: {{listen: '127.0.0.1:{peers[number]}', discovery: [{{static: [{all_peers}]}}]}}")
        text += [line.strip() for line in lines.split(";") if line.strip()]
        path = os.path.join(directory, f"{number}.yaml")
        with open(path, "w") as file:
            file.write("\n".join(text) + "\n")
        binary = options.binaries.get(lines or "defaults", BINARY)
        started.append(start([binary, "serve", "--config", path]))
    for admin in admins:
        wait_for(admin, "/readyz")
    return started, apis


def start_other(name, engines):
    """Another router, and its port."""
    what, _, policy = name.partition(":")
    port, urls = free_port(), [f"http://127.0.0.1:{engine}" for engine in engines]
    common = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", policy or "cache_aware"]
    metrics = ["--prometheus-port", str(free_port())]
    if what == "smg":
        flags = ["--prometheus-host", "127.0.0.1", *metrics, "--disable-tokenizer-autoload", "--log-level", "error"]
        process = start([f"{VENV}/bin/smg", "launch", *common, *flags])
    else:
        process = start([f"{VENV}/bin/vllm-router", *common, *metrics, "--log-level", "error"])
    wait_for(port, "/health")
    # It finds its workers after it answers.
    time.sleep(4)
    return [process], [port]


def measure(router, options):
    engines = [free_port() for _ in range(options.engines)]
    flags = options.engine.split()
    events = lambda port: ["--enable-scale-out", "--kv-events", f"tcp://127.0.0.1:{port + 1}", "--kv-replay", f"tcp://127.0.0.1:{port + 2}"]
    started = [start([BINARY, "sim", "--listen", f"127.0.0.1:{port}", *(events(port) if options.exact else []), *flags]) for port in engines]
    with tempfile.TemporaryDirectory() as directory:
        try:
            for port in engines:
                wait_for(port, "/health")
            is_other = router.partition(":")[0] in ("smg", "vllm-router")
            routers, ports = start_other(router, engines) if is_other else start_warmroute("" if router == "defaults" else router, engines, directory, options)
            started += routers
            load = Load(options, ports)
            getattr(load, options.load)()
            counts = [sum(float(count) for count in re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", get(port, "/metrics")[1], re.M)) for port in engines]
        finally:
            for process in started:
                process.kill()
                process.wait()
    if load.failures:
        print(f"  {len(load.failures)} of {load.count} failed: {load.failures[0]}")
    seen = load.seen
    cached = sum(one.cached for one in seen) / max(1, sum(one.prompt for one in seen))
    firsts = sorted(one.first for one in seen)
    return {
        "first": statistics.mean(firsts),
        "p99": firsts[int(len(firsts) * 0.99)],
        "whole": statistics.mean(one.whole for one in seen),
        "cached": cached,
        "largest": max(counts) / max(1, sum(counts)),
    }


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("load", choices=["hot", "agents", "applications", "trace"])
    arguments.add_argument("--clients", type=int, help="requests (hot: default 100) or sessions (agents: default 24) at a time")
    arguments.add_argument("--turns", type=int, help="requests of each of them (default 3 and 6)")
    arguments.add_argument("--rate", type=float, default=12, help="applications: requests a second (default 12)")
    arguments.add_argument("--requests", type=int, default=400, help="applications and trace: requests (default 400)")
    arguments.add_argument("--trace", help="trace: the file")
    arguments.add_argument("--speed", type=float, default=2, help="trace: times its rate (default 2)")
    arguments.add_argument("--seed", type=int, default=1, help="applications: of the requests")
    arguments.add_argument("--engines", type=int, default=4)
    arguments.add_argument("--engine", default="", help="flags of `warmroute sim`, such as '--max-num-seqs 8'")
    arguments.add_argument("--replicas", type=int, default=1, help="replicas of warmroute; requests go to each in turn")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--exact", action="store_true", help="the engines publish KV events, and tokenize for warmroute")
    arguments.add_argument("--whole", action="store_true", help="do not stream: the first token is not seen")
    arguments.add_argument("--binary", action="append", default=[], metavar="ROUTER=FILE", help="another build for one ROUTER")
    arguments.add_argument("routers", nargs="+", metavar="ROUTER")
    options = arguments.parse_args()
    if options.load == "trace" and not options.trace:
        arguments.error("trace needs --trace FILE")
    options.binaries = dict(pair.rsplit("=", 1) for pair in options.binary)
    rounds = collections.defaultdict(list)
    for number in range(options.rounds):
        for router in options.routers:
            result = measure(router, options)
            rounds[router].append(result)
            print(
                f"round {number + 1}: {router}: first token {result['first']:.2f} s (p99 {result['p99']:.2f}), answer {result['whole']:.2f} s, "
                f"cached {result['cached']:.0%}, {result['largest']:.0%} at one engine",
                flush=True,
            )
    base = rounds[options.routers[0]]

    def spread(values, unit=" s"):
        return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"

    for router in options.routers:
        mine = rounds[router]

        def of(name):
            return spread([one[name] for one in mine])

        def ratio(name):
            return spread([one[name] / other[name] for one, other in zip(mine, base)], "")

        cached, largest = statistics.median(one["cached"] for one in mine), max(one["largest"] for one in mine)
        print(
            f"{router}: first token {of('first')}, x {ratio('first')}, p99 {of('p99')}; answer {of('whole')}, x {ratio('whole')}; "
            f"cached {cached:.0%}; at most {largest:.0%} at one engine"
        )


if __name__ == "__main__":
    main()
