#!/usr/bin/env python3
"""Real engines under one prompt that all requests share: how evenly they are used, what classes wait, what is expected.

Engines run already; the router is started anew for each configuration. Prints one line a round.

    waiting.py hot http://127.0.0.1:8101 http://127.0.0.1:8102 --rounds 5
    waiting.py classes http://127.0.0.1:8101 http://127.0.0.1:8102 --clients 64 --rounds 5
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request

API, ADMIN = 18080, 18090


def get(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def generated(engines):
    """Tokens of answers that each engine has generated."""
    name = r"^(?:vllm:generation_tokens_total|sglang:generation_tokens_total)\S* (\S+)$"
    return [sum(float(value) for value in re.findall(name, get(f"{engine}/metrics"), re.M)) for engine in engines]


def expected_first_tokens():
    """How many first tokens took at most so many times the expected time."""
    name = r'warmroute_seen_to_expected_time_ratio_bucket\{[^}]*of="first_token",le="([^"]*)"\} (\S+)'
    return {bound: float(count) for bound, count in re.findall(name, get(f"http://127.0.0.1:{ADMIN}/metrics"))}


class Router:
    def __init__(self, binary, engines, settings):
        self.folder = tempfile.TemporaryDirectory()
        path = f"{self.folder.name}/config.yaml"
        lines = [f"api: {{listen: '127.0.0.1:{API}'}}", f"admin: {{listen: '127.0.0.1:{ADMIN}'}}"]
        lines += ["log: {access: false}", f"workers: {json.dumps(engines)}", settings.replace(";", "\n")]
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        self.process = subprocess.Popen([binary, "serve", "--config", path], stderr=subprocess.DEVNULL)

    def __enter__(self):
        for _ in range(200):
            try:
                get(f"http://127.0.0.1:{ADMIN}/readyz")
                return self
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the router does not become ready")

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def ask(model, prompt, question, tokens, headers):
    """Seconds to the first token, and to the end."""
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": question}]
    body = {"model": model, "max_tokens": tokens, "ignore_eos": True, "stream": True, "messages": messages}
    url = f"http://127.0.0.1:{API}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    start, first = time.monotonic(), None
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if first is None and b'"content":"' in line and b'"content":""' not in line:
                first = time.monotonic() - start
    end = time.monotonic() - start
    return first or end, end


def load(options, model, seconds, headers_of):
    """Clients that ask one request after the other: (client, first token, end) of each."""
    seen, until = [], time.monotonic() + seconds
    prompt = "You are a helpful assistant. " * options.sentences

    def play(client):
        draw = random.Random(client)
        turn = 0
        while time.monotonic() < until:
            letters = "".join(draw.choice("abcdefgh ") for _ in range(60))
            turn += 1
            question = f"question {client} {turn} {letters}"
            seen.append((client, *ask(model, prompt, question, options.tokens, headers_of(client))))

    threads = [threading.Thread(target=play, args=(client,)) for client in range(options.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def shares(before, after):
    parts = [late - early for early, late in zip(before, after)]
    return " ".join(f"{part / max(sum(parts), 1):.2f}" for part in parts)


def hot(options, model):
    for number in range(options.rounds):
        for settings in options.settings:
            with Router(options.warmroute, options.engines, settings):
                before = generated(options.engines)
                seen = load(options, model, options.seconds, lambda client: {})
                used = shares(before, generated(options.engines))
            first, end = (statistics.mean(row[at] for row in seen) for at in (1, 2))
            name = settings or "defaults"
            print(f"round {number}: {name}: {len(seen)} answers, mean {end:.2f} s, first token {first:.2f} s, shares {used}", flush=True)


def classes(options, model):
    """Every other client is of the low class."""
    of = lambda client: {"x-warmroute-priority": "-1"} if client % 2 else {}
    with Router(options.warmroute, options.engines, options.settings[0]):
        for number in range(options.rounds):
            counted = expected_first_tokens()
            seen = load(options, model, options.seconds, of)
            median = lambda low: statistics.median(row[1] for row in seen if row[0] % 2 == low)
            now = expected_first_tokens()
            at_most = {bound: now[bound] - counted.get(bound, 0) for bound in now}
            within = (at_most["1.3"] - at_most["0.7"]) / max(at_most["+Inf"], 1)
            print(f"span {number}: {len(seen)} answers, first token normal {median(0):.2f} s, low {median(1):.2f} s, within 30 % of the expected {within:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["hot", "classes"])
    parser.add_argument("engines", nargs="+", help="URLs")
    parser.add_argument("--warmroute", default="target/release/warmroute")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=25, help="of a round")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--sentences", type=int, default=170, help="of the shared prompt, six tokens each")
    parser.add_argument("--settings", action="append", help="lines of YAML, with ; between them; of `hot` several, in turns")
    options = parser.parse_args()
    options.settings = options.settings or (["", "routing: {policy: least_load};queue: off"] if options.what == "hot" else [""])
    model = json.loads(get(f"{options.engines[0]}/v1/models"))["data"][0]["id"]
    (hot if options.what == "hot" else classes)(options, model)


if __name__ == "__main__":
    main()
