#!/usr/bin/env python3
"""What a batch costs the people who wait, what it gets, and what its files cost the router.

    benches/rig/batch_beside.py beside [--engine URL]     interactive requests with and without a batch beside them
    benches/rig/batch_beside.py order                     lines as the router sends them, sorted by prefix, and in the file's order
    benches/rig/batch_beside.py memory [--size MIB]       memory of the router while a large file is uploaded, checked and run

One router with files in a folder, which goes with the run. WARMROUTE names the program (target/release/warmroute).

beside: the capacity is measured first, by a closed loop of --clients. Then interactive requests come at random times, at --loads of
    that rate, for --seconds: with a batch and without, in turns, with the same times of arrival. Lines ask for as much as the
    interactive requests do. TTFT is from the time when a request was due to the first text. "Of what is left over": the lines' rate
    by (1 - load) x the rate of a batch alone. The engines are `warmroute sim`, or the one at --engine, which runs already and speaks
    OpenAI's API (and vLLM's `ignore_eos`); in front of that a batch of --lines then runs to its end at the second of the --loads, and
    its results are counted.
order: each shard (256 lines) asks four questions about 64 documents, question after question, so that the file's order leaves as much
    as possible between two lines with the same document. The router sorts lines by the JSON text of their prompts and deals them into
    COLUMNS. White space before the first message, which neither engine nor router counts as prompt, brings the lines of a shard into
    another order, or is the same in all.
memory: the peak of the router's resident memory (VmHWM, Linux), reset before each step.
"""

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time

from loads import BINARY, free_port, get, start, wait_for

FIRST_TEXT = re.compile(rb'"text": ?"[^"]')
FILLER = "The report lists what was measured, by whom and when. " * 4_000
ENDS = ("completed", "failed", "expired", "cancelled")
BOUNDARY = "batch-beside"
SHARD_LINES, DOCUMENTS, QUESTIONS = 256, 64, 4
# As in src/batches/runner/input_lines.rs.
COLUMNS = 16


class Rig:
    """Engines, and one router in front of them."""

    def __init__(self, options, flags=(), engines=None):
        self.options, self.model, self.processes = options, "sim", []
        self.loads = itertools.count()
        self.directory = tempfile.TemporaryDirectory()
        try:
            self.start(flags, engines or options.engines)
        except BaseException:
            self.stop()
            raise

    def start(self, flags, engines):
        urls = [self.options.engine] if self.options.engine else []
        if not urls:
            ports = [free_port() for _ in range(engines)]
            for port in ports:
                self.processes.append(start([BINARY, "sim", "--listen", f"127.0.0.1:{port}", *flags]))
            for port in ports:
                wait_for(port, "/health")
            urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.api, self.admin = free_port(), free_port()
        lines = [
            f"api: {{listen: '127.0.0.1:{self.api}'}}",
            f"admin: {{listen: '127.0.0.1:{self.admin}'}}",
            "log: {access: false}",
            "workers: [" + ", ".join(f"{{url: '{url}'}}" for url in urls) + "]",
            f"batches: {{folder: '{self.directory.name}/files'}}",
            *(line.strip() for line in self.options.router.split(";")),
        ]
        config, log = f"{self.directory.name}/config.yaml", f"{self.directory.name}/log"
        with open(config, "w") as file:
            file.write("\n".join(lines) + "\n")
        with open(log, "w") as file:
            self.router = start([BINARY, "serve", "--config", config], stderr=file)
        self.processes.append(self.router)
        deadline = time.monotonic() + 60
        while True:
            if self.router.poll() is not None or time.monotonic() > deadline:
                with open(log) as file:
                    raise SystemExit(f"the router is not ready:\n{file.read()[-2000:]}")
            with contextlib.suppress(OSError):
                if get(self.admin, "/readyz")[0] == 200:
                    break
            time.sleep(0.1)
        if self.options.engine:
            self.model = self.options.model or self.call("GET", "/v1/models")["data"][0]["id"]

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()
        self.directory.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def call(self, method, path, body=None, headers=None):
        """The JSON of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.api, timeout=600)
        if isinstance(body, dict):
            body, headers = json.dumps(body), {"content-type": "application/json"}
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"{method} {path}: {answer.status} {text[:500]}")
        return json.loads(text)

    def upload(self, path):
        """The id of a file, which is streamed."""
        form = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        form += f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        end = f"\r\n--{BOUNDARY}--\r\n"

        def pieces():
            yield form.encode()
            with open(path, "rb") as file:
                while piece := file.read(1 << 20):
                    yield piece
            yield end.encode()

        length = len(form) + os.path.getsize(path) + len(end)
        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", "content-length": str(length)}
        return self.call("POST", "/v1/files", pieces(), headers)["id"]

    def create(self, lines):
        """A batch of these lines."""
        path = f"{self.directory.name}/in.jsonl"
        with open(path, "w") as file:
            file.writelines(lines)
        return self.create_of(self.upload(path))

    def create_of(self, file):
        body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return self.call("POST", "/v1/batches", body)["id"]

    def batch(self, identity):
        return self.call("GET", f"/v1/batches/{identity}")

    def wait(self, identity, statuses=ENDS):
        while True:
            batch = self.batch(identity)
            if batch["status"] in statuses:
                return batch
            if batch["status"] in ENDS:
                raise SystemExit(f"the batch ended as {batch['status']}: {batch['errors']}")
            time.sleep(0.1)

    def cancel(self, identity):
        self.call("POST", f"/v1/batches/{identity}/cancel")
        return self.wait(identity, ("cancelled",))

    def counted(self, name, *labels):
        """The sum of those series of a counter that have all these labels."""
        page = get(self.admin, "/metrics")[1]
        series = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", page, re.M)
        return sum(float(count) for found, count in series if all(label in found for label in labels))

    def finished_lines(self):
        """Lines that were answered. Only they are chats; `warmroute_batch_lines_total` counts a line when it is written, up to 5 s later."""
        return self.counted("warmroute_requests_total", 'api="chat"', 'status="200"', 'outcome="complete"')

    def lines_that_gave_way(self):
        return self.counted("warmroute_batch_lines_gave_way_total")

    def body(self, text, tokens):
        messages = [{"role": "user", "content": text}]
        return {"model": self.model, "max_tokens": tokens, "ignore_eos": True, "messages": messages}

    def line(self, identity, body):
        return json.dumps({"custom_id": identity, "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"

    async def ask(self, text, due):
        """Seconds from `due` to the first text; `None` if the answer is not whole."""
        body = {"model": self.model, "prompt": text, "max_tokens": self.options.answer, "ignore_eos": True, "stream": True}
        body = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\nconnection: close\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        first, seen, end = None, b"", b""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.api)
            try:
                writer.write(head.encode() + body)
                while piece := await reader.read(1 << 16):
                    if first is None:
                        seen += piece
                        if FIRST_TEXT.search(seen):
                            first = time.monotonic() - due
                    end = (end + piece)[-100:]
            finally:
                writer.close()
        except OSError:
            return None
        return first if seen.startswith(b"HTTP/1.1 200") and b"[DONE]" in end else None


def prompt(kind, number, tokens):
    """No two begin alike. A token is about four bytes of text."""
    return f"{kind} {number}: {FILLER}"[: 4 * tokens]


def quantile(values, part):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def spread(values, digits=2):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(rows):
    for number, row in enumerate(rows):
        print("| " + " | ".join(row) + " |")
        if number == 0:
            print("|" + "---|" * len(row))


async def until(moment):
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


async def closed_loop(rig, clients, seconds, warmup):
    """Requests that end in a second, of so many clients."""
    began, ends, failed = time.monotonic(), [], 0

    async def client(number):
        nonlocal failed
        turn = 0
        while time.monotonic() < began + warmup + seconds:
            text = prompt("capacity", f"{number} {turn}", rig.options.prompt)
            if await rig.ask(text, time.monotonic()) is None:
                failed += 1
                await asyncio.sleep(0.1)
            ends.append(time.monotonic())
            turn += 1

    await asyncio.gather(*(client(number) for number in range(clients)))
    if failed:
        raise SystemExit(f"{failed} of {len(ends)} requests failed while the capacity was measured")
    return sum(began + warmup <= end < began + warmup + seconds for end in ends) / seconds


async def line_rates(rig, began, seconds):
    """Lines that end and lines that give way in a second, from `began` on."""

    def counts():
        return rig.finished_lines(), rig.lines_that_gave_way(), time.monotonic()

    await until(began)
    ended, gave_way, at = await asyncio.to_thread(counts)
    await until(began + seconds)
    ended_after, gave_way_after, end = await asyncio.to_thread(counts)
    return (ended_after - ended) / (end - at), (gave_way_after - gave_way) / (end - at)


async def open_loop(rig, rate, seed, warmup, goes_on):
    """Times to the first text of requests that come at random times after the warm-up, until `goes_on(seconds)` says no."""
    # The same seed gives the same times, but never the same prompts, which would be cached.
    chance, load = random.Random(seed), next(rig.loads)
    began, at, asked = time.monotonic(), 0.0, []
    while True:
        at += chance.expovariate(rate)
        await until(began + at)
        if not goes_on(at):
            break
        text = prompt("interactive", f"{load} {len(asked)}", rig.options.prompt)
        asked.append((at, asyncio.create_task(rig.ask(text, began + at))))
    return [await task for at, task in asked if at >= warmup]


def lines_of(rig, name, count):
    for number in range(count):
        yield rig.line(f"{number}", rig.body(prompt(f"line {name}", number, rig.options.prompt), rig.options.answer))


async def running_batch(rig, name, count):
    """A batch of which lines run."""
    before = rig.finished_lines()
    identity = await asyncio.to_thread(rig.create, lines_of(rig, name, count))
    while await asyncio.to_thread(rig.finished_lines) == before:
        await asyncio.sleep(0.1)
    return identity


async def measure(rig, rate, seed, name, line_count):
    """One run; with a batch if it has lines. Returns times to the first text and the rates of lines."""
    options = rig.options
    identity = await running_batch(rig, name, line_count) if line_count else None
    began = time.monotonic() + options.warmup
    length = options.warmup + options.seconds
    firsts, lines = await asyncio.gather(
        open_loop(rig, rate, seed, options.warmup, lambda at: at < length),
        line_rates(rig, began, options.seconds) if identity else asyncio.sleep(0, (0.0, 0.0)),
    )
    if identity:
        if (await asyncio.to_thread(rig.batch, identity))["status"] in ENDS:
            raise SystemExit("the batch ended before the load did")
        await asyncio.to_thread(rig.cancel, identity)
    return firsts, lines


async def whole_batch(rig, rate):
    """A batch that runs to its end beside a load."""
    began, count, has_ended = time.monotonic(), rig.options.lines, False
    identity = await running_batch(rig, "whole", count)

    async def end():
        nonlocal has_ended
        batch = await asyncio.to_thread(rig.wait, identity)
        has_ended = True
        return batch, time.monotonic() - began

    firsts, (batch, took) = await asyncio.gather(open_loop(rig, rate, 0, 0, lambda _: not has_ended), end())
    results = []
    for name in ("output_file_id", "error_file_id"):
        if batch[name]:
            text = get(rig.api, f"/v1/files/{batch[name]}/content")[1]
            results += [json.loads(line)["custom_id"] for line in text.splitlines()]
    is_whole = sorted(results) == sorted(str(number) for number in range(count))
    good = [first for first in firsts if first is not None]
    print(
        f"\nA batch of {count} lines beside {rate:.2f} requests/s: {batch['status']} after {took:.0f} s ({count / took:.2f} lines/s), "
        f"counts {batch['request_counts']}; {'every line has one result' if is_whole else 'RESULTS ARE MISSING OR DOUBLE'}. "
        f"{len(good)} interactive requests ({len(firsts) - len(good)} failed), TTFT p50 {quantile(good, 0.5):.3f} s, p99 {quantile(good, 0.99):.3f} s."
    )


def sim_flags(options):
    return ["--max-num-seqs", str(options.slots), "--prefill-tokens-per-second", str(options.prefill), *options.sim.split()]


async def beside(options):
    flags = sim_flags(options)
    with Rig(options, flags) as rig:
        capacity = await closed_loop(rig, options.clients, options.seconds, options.warmup)
        print(f"capacity: {capacity:.2f} requests/s", file=sys.stderr)
        # Enough lines for the whole run, were the engines to do nothing else.
        count = int(1.5 * capacity * (options.warmup + options.seconds + 10)) + SHARD_LINES
        identity = await running_batch(rig, "alone", count)
        alone, _ = await line_rates(rig, time.monotonic() + options.warmup, options.seconds)
        await asyncio.to_thread(rig.cancel, identity)
        print(f"batch alone: {alone:.2f} lines/s", file=sys.stderr)
        runs = {load: [] for load in options.loads}
        failed = 0
        for number in range(options.rounds):
            for load in options.loads:
                pair = {}
                # Neither is always the first.
                for has_batch in (number % 2 == 0, number % 2 == 1):
                    name = f"{number} {load}"
                    firsts, lines = await measure(rig, load * capacity, name, name, count if has_batch else 0)
                    good = [first for first in firsts if first is not None]
                    failed += len(firsts) - len(good)
                    if not good:
                        raise SystemExit("no interactive request was answered")
                    pair[has_batch] = good, lines
                    print(
                        f"round {number + 1}, load {load:.0%}, {'with' if has_batch else 'without'}: {len(good)} requests, "
                        f"TTFT p50 {quantile(good, 0.5):.3f} s, p99 {quantile(good, 0.99):.3f} s, {lines[0]:.2f} lines/s, {lines[1]:.2f} gave way",
                        file=sys.stderr,
                    )
                runs[load].append(pair)
        what = f"the engine at {options.engine}" if options.engine else f"{options.engines} simulated engines ({' '.join(flags)})"
        print(
            f"{what}: capacity {capacity:.2f} requests/s (closed loop of {options.clients}), a batch alone {alone:.2f} lines/s. "
            f"Prompts of {options.prompt} tokens, answers of {options.answer}; {options.rounds} rounds of {options.seconds} s. Ratios: medians over "
            f"the rounds with the least and the greatest, then of all rounds together. {failed} interactive requests failed.\n"
        )
        head = ["load", "requests", "TTFT p50 without, with", "ratio", "TTFT p99 without, with", "ratio"]
        rows = [head + ["lines/s", "gave way/s", "of what is left over", "answers by capacity"]]
        for load, pairs in runs.items():
            row = [f"{load:.0%}", str(sum(len(pair[True][0]) for pair in pairs))]
            for part in (0.5, 0.99):
                without, beside_it = ([first for pair in pairs for first in pair[has][0]] for has in (False, True))
                ratios = [quantile(pair[True][0], part) / quantile(pair[False][0], part) for pair in pairs]
                together = quantile(beside_it, part) / quantile(without, part)
                row += [f"{quantile(without, part):.3f} s, {quantile(beside_it, part):.3f} s", f"{spread(ratios)}, {together:.2f}"]
            lines, gave_way = zip(*(pair[True][1] for pair in pairs))
            left = [rate / ((1 - load) * alone) for rate in lines]
            row += [spread(lines), spread(gave_way), spread(left), f"{load + statistics.median(lines) / capacity:.2f}"]
            rows.append(row)
        table(rows)
        if options.lines:
            await whole_batch(rig, options.loads[min(1, len(options.loads) - 1)] * capacity)


ORDERS = ("as the router sends them", "sorted by prefix", "the file's order")


def order_lines(rig, shards, order):
    """Shards whose lines the router sends in an order."""
    for number in range(shards * SHARD_LINES):
        shard, place = divmod(number, SHARD_LINES)
        question, document = divmod(place, DOCUMENTS)
        sent = document * QUESTIONS + question if order == "sorted by prefix" else place
        # Where the router sorts it to, if it is to send it there.
        column, row = sent % COLUMNS, sent // COLUMNS
        place = 0 if order == "as the router sends them" else column * (SHARD_LINES // COLUMNS) + row
        # Tabs sort before spaces.
        mark = f"{place:08b}".replace("0", "\t").replace("1", " ")
        text = prompt("document", f"{shard} {document}", rig.options.document) + f" Question {question}?"
        line = rig.line(f"{number}", rig.body(text, rig.options.answer))
        yield line.replace('"messages": [', f'"messages": [{mark}', 1)


def order(options):
    assert DOCUMENTS * QUESTIONS == SHARD_LINES
    runs = {name: [] for name in ORDERS}
    flags, count = sim_flags(options), options.shards * SHARD_LINES
    for number in range(options.rounds):
        # None is always the first.
        for name in ORDERS[number % 3 :] + ORDERS[: number % 3]:
            # Caches are empty.
            with Rig(options, flags) as rig:
                identity = rig.create(order_lines(rig, options.shards, name))
                rig.wait(identity, ("in_progress", "finalizing", "completed"))
                began = time.monotonic()
                batch = rig.wait(identity)
                took = time.monotonic() - began
            if batch["request_counts"]["completed"] != count:
                raise SystemExit(f"lines failed: {batch}")
            usage = batch["usage"]
            cached = usage["input_tokens_details"]["cached_tokens"]
            computed = (usage["input_tokens"] - cached) / options.prefill
            runs[name].append((cached / usage["input_tokens"], computed, took))
            print(f"round {number + 1}, {name}: {cached / usage['input_tokens']:.1%} cached, {took:.1f} s", file=sys.stderr)
    print(
        f"{options.engines} simulated engines ({' '.join(flags)}), {count} lines: {QUESTIONS} questions about each of "
        f"{options.shards * DOCUMENTS} documents of {options.document} tokens, answers of {options.answer}; {options.rounds} rounds with new engines.\n"
    )
    rows = [["lines", "prompt tokens cached", "engine seconds for prompts", "time of the batch"]]
    for name in ORDERS:
        cached, computed, took = zip(*runs[name])
        rows.append([name, spread([100 * part for part in cached], 1) + " %", spread(computed, 1), spread(took, 1) + " s"])
    table(rows)


def memory(options):
    count, size = options.memory_lines, options.size << 20
    flags = ["--prefill-tokens-per-second", "1000000", "--decode-time", "1ms"]
    rows = [["step", "seconds", "peak of the router's memory", "above that before"]]
    with Rig(options, flags, 1) as rig:
        process = f"/proc/{rig.router.pid}"

        def field(name):
            with open(f"{process}/status") as file:
                return next(int(line.split()[1]) for line in file if line.startswith(name)) / 1024

        path = f"{rig.directory.name}/large.jsonl"
        empty = len(rig.line(f"{count}", rig.body("", 1)))
        with open(path, "w") as file:
            for number in range(count):
                file.write(rig.line(f"{number}", rig.body(prompt("line", number, (size // count - empty) // 4), 1)))
        # Its first requests and its first batch take what every router has sooner or later.
        rig.wait(rig.create(lines_of(rig, "first", SHARD_LINES)))
        before = field("VmRSS")

        def step(name, act):
            with open(f"{process}/clear_refs", "w") as file:
                file.write("5")
            began = time.monotonic()
            result = act()
            took, peak = time.monotonic() - began, field("VmHWM")
            rows.append([name, f"{took:.1f}", f"{peak:.0f} MiB", f"{peak - before:+.0f} MiB"])
            return result

        def download(file):
            connection = http.client.HTTPConnection("127.0.0.1", rig.api, timeout=600)
            connection.request("GET", f"/v1/files/{file}/content")
            answer, length = connection.getresponse(), 0
            while piece := answer.read(1 << 20):
                length += len(piece)
            return length

        size = os.path.getsize(path)
        file = step("the file is uploaded", lambda: rig.upload(path))
        identity = rig.create_of(file)
        step("it is checked", lambda: rig.wait(identity, ("in_progress",)))
        finished = rig.finished_lines()
        step(f"lines run for {options.seconds} s", lambda: time.sleep(options.seconds))
        finished = rig.finished_lines() - finished
        batch = step("cancelled: every line gets a result", lambda: rig.cancel(identity))
        if batch["request_counts"]["total"] != count:
            raise SystemExit(f"lines are missing: {batch}")
        if step("the file is downloaded", lambda: download(file)) != size:
            raise SystemExit("the file came back in another size")
    print(f"A file of {size / (1 << 20):.0f} MiB with {count} lines, of which {finished:.0f} ran. Before that the router had {before:.0f} MiB.\n")
    table(rows)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("mode", choices=["beside", "order", "memory"])
    arguments.add_argument("--engine", default="", metavar="URL", help="beside: a real engine, instead of simulated ones")
    arguments.add_argument("--model", help="its model (default: its first)")
    arguments.add_argument("--router", default="", help="more lines of warmroute's YAML, with ; between")
    arguments.add_argument("--sim", default="", help="more flags of `warmroute sim`")
    arguments.add_argument("--engines", type=int, default=2)
    arguments.add_argument("--slots", type=int, default=16, help="answers that a simulated engine generates at a time")
    arguments.add_argument("--prefill", type=int, default=20_000, help="prompt tokens that it computes in a second")
    arguments.add_argument("--prompt", type=int, default=500, help="tokens of a prompt")
    arguments.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    arguments.add_argument("--loads", default="0.3,0.6,0.9", help="beside: parts of the capacity")
    arguments.add_argument("--clients", type=int, default=64, help="beside: of the closed loop, more than engines run at a time")
    arguments.add_argument("--lines", type=int, help="beside: of a batch that runs to its end after the rounds (2000 with --engine, else none)")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--seconds", type=int, default=40, help="of each measurement (memory: for which lines run)")
    arguments.add_argument("--warmup", type=int, default=5, help="seconds before each measurement")
    arguments.add_argument("--shards", type=int, default=4, help="order: of 256 lines each")
    arguments.add_argument("--document", type=int, default=2_000, help="order: tokens of a document")
    arguments.add_argument("--size", type=int, default=1_000, metavar="MIB", help="memory: of the file")
    arguments.add_argument("--memory-lines", type=int, default=200_000, help="memory: lines of the file")
    options = arguments.parse_args()
    options.loads = [float(load) for load in options.loads.split(",")]
    if options.engine and options.mode != "beside":
        arguments.error("--engine is for `beside`")
    if options.lines is None:
        options.lines = 2_000 if options.engine else 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.mode == "beside":
        asyncio.run(beside(options))
    else:
        {"order": order, "memory": memory}[options.mode](options)


if __name__ == "__main__":
    main()
