#!/usr/bin/env python3
"""Background responses that outlive their router: two routers over one Redis, real engines behind both, one router is killed.

    vllm serve MODEL --served-model-name tiny --port 8101     # one engine, or several
    python benches/engines/replica_continuation.py --router target/release/warmroute --engine 127.0.0.1:8101

Every response is run twice before, unbroken, at temperature 0: how often two unbroken runs have the same text is how often a broken one may.
Then all of them stream in the background over the first router until most have some text, and `kill -9` ends it. Their clients go on reading at
the second router, after the last event that they have. Each has to get one text, each event once, one end and the usage of the whole
answer; the stored response and a second reading of its stream have to say the same. Starts both routers and Redis itself.
"""
import argparse, collections, http.client, json, os, subprocess, tempfile, threading, time, urllib.request

parser = argparse.ArgumentParser()
parser.add_argument('--router', default='target/release/warmroute')
parser.add_argument('--engine', action='append', required=True)
parser.add_argument('--name', default='tiny', help='the served model name')
parser.add_argument('--responses', type=int, default=12)
parser.add_argument('--tokens', type=int, default=200)
parser.add_argument('--after', type=int, default=5, help='events with text that a response has before the kill')
parser.add_argument('--port', type=int, default=8290, help='the first of five ports: Redis, and two of each router')
arguments = parser.parse_args()
REDIS, *PORTS = range(arguments.port, arguments.port + 5)
KILLED, OTHER = (f'127.0.0.1:{PORTS[0]}', f'127.0.0.1:{PORTS[1]}'), (f'127.0.0.1:{PORTS[2]}', f'127.0.0.1:{PORTS[3]}')
KEY = os.urandom(32).hex()
ENDS = ('response.completed', 'response.incomplete', 'response.failed')


def ask(address, method, path, body=None):
    host, port = address.split(':')
    for last in (False, False, False, False, True):
        connection = http.client.HTTPConnection(host, int(port), timeout=180)
        connection.request(method, path, body and json.dumps(body), {'content-type': 'application/json'})
        answer = connection.getresponse()
        if answer.status == 200:
            return answer
        # A machine that is full of engines may be late with Redis: as SDKs do, try again.
        if answer.status != 503 or last:
            raise OSError(f'{answer.status} {answer.read()[:300]}')
        time.sleep(1)


def metrics(address):
    return ask(address, 'GET', '/metrics').read().decode().splitlines()


class Response:
    """One response in the background and what its client got of it."""

    def __init__(self, number):
        self.number, self.id, self.events, self.errors = number, None, [], []
        self.moves, self.marks, self.done, self.moved_at, self.pause = 0, 0, False, None, 0.0

    def read(self, address, next_address=None):
        body = {
            'model': arguments.name, 'stream': True, 'background': True, 'temperature': 0, 'ignore_eos': True,
            'max_output_tokens': arguments.tokens,
            'input': f'Question {self.number}: what is the {self.number}th word of the book, and why? ' * 3,
        }
        self.lines(lambda: ask(address, 'POST', '/v1/responses', body))
        while not self.done and next_address and self.id and self.moves < 60:
            self.moves += 1
            path = f'/v1/responses/{self.id}?stream=true&starting_after={len(self.events) - 1}'
            self.lines(lambda: ask(next_address, 'GET', path))
            time.sleep(0 if self.done else 0.5)

    def lines(self, send):
        try:
            for line in send():
                # The last line of a stream that broke off may be half of one.
                if line.endswith(b'\n'):
                    self.line(line.decode().strip())
        except (OSError, http.client.HTTPException) as error:
            self.errors.append(repr(error)[:200])

    def line(self, line):
        self.marks += line.startswith(': x-warmroute-continued')
        if line == 'data: [DONE]':
            self.done = True
        elif line.startswith('data: '):
            event = json.loads(line[6:])
            self.id = self.id or event['response']['id']
            if self.moves and event['type'] not in ('response.created', 'response.in_progress'):
                self.pause = self.pause or time.monotonic() - killed_at
            self.events.append(event)

    def ends(self):
        return [it for it in self.events if it['type'] in ENDS]

    def text(self):
        return ''.join(it['delta'] for it in self.events if it['type'] in ('response.output_text.delta', 'response.reasoning_text.delta'))

    def has_text(self):
        return sum(it['type'].endswith('_text.delta') for it in self.events)

    def problems(self, unbroken=None):
        """What a client would call broken; with the unbroken run, whether the usage is the same."""
        if len(self.ends()) != 1 or not self.done:
            return [f'{len(self.ends())} ends', self.errors]
        found, last = [], self.ends()[0]['response']
        if last['status'] not in ('completed', 'incomplete'):
            found.append(f'{last["status"]}: {last.get("error")}')
        if [it['sequence_number'] for it in self.events] != list(range(len(self.events))):
            found.append('events are missing or come twice')
        if self.text() != stored_text(last):
            found.append('the deltas are not the text of the end')
        usage = last['usage']
        if usage['output_tokens'] != arguments.tokens or usage['total_tokens'] != usage['input_tokens'] + usage['output_tokens']:
            found.append(f'usage {usage}')
        if unbroken and counts(usage) != counts(unbroken.ends()[0]['response']['usage']):
            found.append(f'usage {usage} is not the unbroken run\'s')
        if json.load(ask(OTHER[0], 'GET', f'/v1/responses/{self.id}')) != last:
            found.append('the stored response is not that of the end')
        again = Response(self.number)
        again.lines(lambda: ask(OTHER[0], 'GET', f'/v1/responses/{self.id}?stream=true'))
        if again.events != self.events:
            found.append('read again, the stream is another one')
        return found


def counts(usage):
    return [usage[it] for it in ('input_tokens', 'output_tokens', 'total_tokens')]


def stored_text(response):
    return ''.join(part['text'] for item in response['output'] for part in item.get('content') or [])


def start(address, next_address=None):
    responses = [Response(number) for number in range(arguments.responses)]
    threads = [threading.Thread(target=it.read, args=(address, next_address)) for it in responses]
    for thread in threads:
        thread.start()
    return responses, threads


def unbroken(address):
    responses, threads = start(address)
    for thread in threads:
        thread.join()
    assert not any(it.problems() for it in responses), [(it.number, it.problems()) for it in responses]
    return responses


def router(directory, place):
    path = os.path.join(directory, f'{place[0]}.yaml')
    with open(path, 'w') as file:
        json.dump({
            'api': {'listen': place[0]}, 'admin': {'listen': place[1]}, 'log': {'level': 'warn', 'access': False},
            'models': [{'name': arguments.name, 'stream_continuation': {}}],
            'workers': [{'url': f'http://{it}', 'responses': 'chat'} for it in arguments.engine],
            'fleet': {'health': {'timeout': '10s'}},
            'responses': {'mode': 'stateful', 'store': {'redis': f'redis://127.0.0.1:{REDIS}'}, 'state_token': {'keys': [KEY]}},
        }, file)
    return subprocess.Popen([arguments.router, 'serve', '--config', path])


def wait_until_up(place):
    for _ in range(300):
        time.sleep(0.2)
        try:
            if all(it['health'] == 'up' for it in json.load(urllib.request.urlopen(f'http://{place[1]}/fleet', timeout=5))['workers']):
                return
        except OSError:
            pass
    raise SystemExit('a router is not up')


killed_at = 0.0
with tempfile.TemporaryDirectory() as directory:
    redis = subprocess.Popen(['redis-server', '--port', str(REDIS), '--save', '', '--dir', directory], stdout=subprocess.DEVNULL)
    time.sleep(1)
    routers = [router(directory, it) for it in (KILLED, OTHER)]
    try:
        wait_until_up(KILLED), wait_until_up(OTHER)
        first, second = unbroken(OTHER[0]), unbroken(KILLED[0])
        same = sum(one.text() == two.text() for one, two in zip(first, second))
        print(json.dumps({'unbroken': len(first), 'texts_equal_in_two_runs': same}), flush=True)
        responses, threads = start(KILLED[0], OTHER[0])
        # An engine may not take all of them at a time.
        enough, limit = min(arguments.responses, 8 * len(arguments.engine)), time.monotonic() + 120
        while sum(it.has_text() >= arguments.after for it in responses) < enough and time.monotonic() < limit:
            time.sleep(0.01)
        routers[0].kill()
        killed_at = time.monotonic()
        had_text, were_over = sum(it.has_text() > 0 for it in responses), sum(it.done for it in responses)
        for thread in threads:
            thread.join()
        problems = [(it.number, found) for it, one in zip(responses, first) if (found := it.problems(one))]
        equal = sum(it.text() == one.text() for it, one in zip(responses, first))
        print(json.dumps({
            'responses': len(responses), 'with_text_at_the_kill': had_text, 'over_before_it': were_over,
            'ends': collections.Counter(it['type'] for response in responses for it in response.ends()),
            'marked_as_continued': sum(it.marks > 0 for it in responses), 'texts_equal_to_the_unbroken': equal, 'at_least': same - 1,
            'seconds_from_kill_to_next_output': sorted(round(it.pause, 1) for it in responses if it.pause),
            'broken': problems,
            'metrics': [it for it in metrics(OTHER[1]) if it.startswith(('warmroute_background_continuations_total', 'warmroute_background_orphans_total'))],
        }), flush=True)
        raise SystemExit(0 if not problems and equal >= same - 1 else 1)
    finally:
        for it in [*routers, redis]:
            it.kill()
            it.wait()
