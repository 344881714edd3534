#!/usr/bin/env python3
"""Streams that outlive a real vLLM: two of them serve the model, one is killed under twenty streams.

    vllm serve MODEL --served-model-name tiny --port 8101     # and another on 8102, in process groups of their own
    python benches/engines/continuation.py --router target/release/warmroute --engine 127.0.0.1:8101 --pid PID --other 127.0.0.1:8102

Every answer is asked for twice before, of the engine that stays, at temperature 0: how often two unbroken runs have the same text is how
often a broken one may. Then twenty streams run over the router until each has some text, `kill -9` ends the first engine's process group, and
each stream has to end by itself: with one `finish_reason`, the usage of the whole answer, and `[DONE]`. Starts the router itself.
"""
import argparse, http.client, json, os, signal, subprocess, tempfile, threading, time, urllib.request

parser = argparse.ArgumentParser()
parser.add_argument('--router', default='target/release/warmroute')
parser.add_argument('--engine', default='127.0.0.1:8101')
parser.add_argument('--pid', type=int, required=True, help='the process group of that engine')
parser.add_argument('--other', default='127.0.0.1:8102')
parser.add_argument('--name', default='tiny', help='the served model name')
parser.add_argument('--streams', type=int, default=20)
parser.add_argument('--tokens', type=int, default=200)
parser.add_argument('--after', type=int, default=5, help='chunks with text that each stream has before the kill')
arguments = parser.parse_args()
ROUTER, ADMIN = '127.0.0.1:8290', '127.0.0.1:9290'


class Stream:
    """One answer, read to its end."""

    def __init__(self, number):
        self.number, self.text, self.finish, self.usage, self.done, self.error = number, '', [], None, False, None
        self.chunks, self.continued = 0, False

    def read(self, address):
        body = {
            'model': arguments.name, 'stream': True, 'stream_options': {'include_usage': True}, 'temperature': 0,
            'max_tokens': arguments.tokens, 'ignore_eos': True,
            'messages': [{'role': 'user', 'content': f'Question {self.number}: what is the {self.number}th word of the book, and why? ' * 3}],
        }
        try:
            host, port = address.split(':')
            connection = http.client.HTTPConnection(host, int(port), timeout=120)
            connection.request('POST', '/v1/chat/completions', json.dumps(body), {'content-type': 'application/json'})
            answer = connection.getresponse()
            if answer.status != 200:
                self.error = f'{answer.status} {answer.read()[:200]}'
                return self
            for line in answer:
                self.line(line.decode().strip())
        except Exception as error:
            self.error = repr(error)
        return self

    def line(self, line):
        if line.startswith(': x-warmroute-continued'):
            self.continued = True
        if line == 'data: [DONE]':
            self.done = True
        elif line.startswith('data: '):
            event = json.loads(line[6:])
            if 'error' in event:
                self.error = event['error']
            self.usage = event.get('usage') or self.usage
            for choice in event.get('choices', []):
                text = choice.get('delta', {}).get('content') or choice.get('delta', {}).get('reasoning') or ''
                self.text += text
                self.chunks += bool(text)
                if choice.get('finish_reason'):
                    self.finish.append(choice['finish_reason'])

    def is_whole(self):
        usage = self.usage or {}
        return self.error is None and self.done and len(self.finish) == 1 and usage.get('completion_tokens') == arguments.tokens


def run(address, numbers):
    streams = [Stream(number) for number in numbers]
    threads = [threading.Thread(target=stream.read, args=(address,)) for stream in streams]
    for thread in threads:
        thread.start()
    return streams, threads


def all_of(address, numbers):
    streams, threads = run(address, numbers)
    for thread in threads:
        thread.join()
    return streams


numbers = range(arguments.streams)
first, second = all_of(arguments.other, numbers), all_of(arguments.other, numbers)
assert all(it.is_whole() for it in first + second), [(it.number, it.error, it.finish, it.usage) for it in first + second if not it.is_whole()]
same = sum(one.text == two.text for one, two in zip(first, second))
print(json.dumps({'unbroken': len(first), 'texts_equal_in_two_runs': same}), flush=True)

with tempfile.TemporaryDirectory() as directory:
    path = os.path.join(directory, 'router.yaml')
    with open(path, 'w') as file:
        json.dump({
            'api': {'listen': ROUTER}, 'admin': {'listen': ADMIN}, 'log': {'level': 'warn', 'access': False},
            'models': [{'name': arguments.name, 'stream_continuation': {}}],
            'workers': [{'url': f'http://{it}'} for it in (arguments.engine, arguments.other)],
            # Round robin, so that both engines have streams.
            'routing': {'policy': 'round_robin'},
        }, file)
    router = subprocess.Popen([arguments.router, 'serve', '--config', path])
    try:
        for _ in range(300):
            time.sleep(0.1)
            try:
                fleet = json.load(urllib.request.urlopen(f'http://{ADMIN}/fleet', timeout=5))
                if sum(it['health'] == 'up' for it in fleet['workers']) == 2:
                    break
            except OSError:
                pass
        streams, threads = run(ROUTER, numbers)
        limit = time.monotonic() + 60
        while sum(it.chunks >= arguments.after for it in streams) < min(arguments.streams, 16) and time.monotonic() < limit:
            time.sleep(0.01)
        running = sum(arguments.after <= it.chunks and not it.done for it in streams)
        os.killpg(arguments.pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
        whole = sum(it.is_whole() for it in streams)
        equal = sum(it.text == one.text for it, one in zip(streams, first))
        metrics = urllib.request.urlopen(f'http://{ADMIN}/metrics', timeout=5).read().decode()
        print(json.dumps({
            'streams': len(streams), 'with_text_at_the_kill': running, 'whole': whole, 'continued': sum(it.continued for it in streams),
            'texts_equal_to_the_unbroken': equal, 'at_least': same - 1,
            'broken': [(it.number, it.error, it.finish, it.usage, it.chunks) for it in streams if not it.is_whole()],
            'metrics': [line for line in metrics.splitlines() if line.startswith('warmroute_stream_continuations_total')],
        }), flush=True)
        raise SystemExit(0 if whole == len(streams) and equal >= same - 1 else 1)
    finally:
        router.kill()
