#!/usr/bin/env python3
"""A real SGLang behind the router: does the router know its cache?

    python -m sglang.launch_server --model-path MODEL --served-model-name tiny --page-size 16 --max-total-tokens 1024 \\
      --enable-cache-report --kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5757","replay_endpoint":"tcp://*:5758","topic":"kv-events"}'
    python benches/engines/sglang.py --router target/release/warmroute --model MODEL

Sends 200 mixed requests (chats of several turns, streams, completions, cache salts) to an engine whose cache evicts, flushes it,
cuts the event connection while others use the engine, and compares each time the router's tree with what the engine replays. Counts how often the cached
tokens that the router named are those of `usage`, and how often they are more by over a page. Starts the router itself, with the
events through a proxy of its own that can be cut. Needs pyzmq and msgpack. With --restarted COMMAND that command is to restart the engine, which is tried too.
"""
import argparse, json, random, re, socket, subprocess, sys, tempfile, threading, time, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor

import msgpack, zmq

parser = argparse.ArgumentParser()
parser.add_argument('--router', default='target/release/warmroute')
parser.add_argument('--model', required=True, help="the model's folder, for its tokenizer")
parser.add_argument('--name', default='tiny', help='the served model name')
parser.add_argument('--engine', default='127.0.0.1:31000')
parser.add_argument('--events', type=int, default=5757)
parser.add_argument('--replay', type=int, default=5758)
parser.add_argument('--page', type=int, default=16)
parser.add_argument('--requests', type=int, default=200)
parser.add_argument('--restarted', help='a command that restarts the engine')
parser.add_argument('--set', default='', help='more configuration of the router, as YAML')
arguments = parser.parse_args()

ROUTER, ADMIN, ENGINE = 'http://127.0.0.1:8290', 'http://127.0.0.1:9290', 'http://' + arguments.engine
random_ = random.Random(7)
context = zmq.Context()


class Proxy:
    """Passes the event connection on, until it is cut."""

    def __init__(self, port):
        self.port, self.pairs, self.is_open = port, [], True
        self.listener = socket.create_server(('127.0.0.1', 0))
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            if not self.is_open:
                client.close()
                continue
            try:
                server = socket.create_connection(('127.0.0.1', self.port))
            except OSError:
                client.close()
                continue
            self.pairs.append((client, server))
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self.copy, args=(source, target), daemon=True).start()

    def copy(self, source, target):
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    def cut(self, is_open):
        self.is_open = is_open
        if not is_open:
            for pair in self.pairs:
                for end in pair:
                    try:
                        end.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass
            self.pairs.clear()


def http(url, body=None, headers={}, timeout=90):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={'content-type': 'application/json', **headers})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()
    except OSError as error:
        return 0, {}, str(error)


def wait_for(url, limit=300):
    deadline = time.time() + limit
    while http(url, timeout=3)[0] != 200:
        if time.time() > deadline:
            sys.exit(f'{url} is not up')
        time.sleep(1)


def replayed():
    """The names of the blocks that the engine has, by its own replay, and how many batches that were."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f'tcp://127.0.0.1:{arguments.replay}')
    dealer.send_multipart([b'', (0).to_bytes(8, 'big')])
    names, batches = set(), 0
    while dealer.poll(5000):
        frames = dealer.recv_multipart()
        if frames[-1] == b'':
            break
        batches += 1
        for event in msgpack.unpackb(frames[3], strict_map_key=False)[1]:
            hashes = {number & (2**64 - 1) for number in event.get('block_hashes', [])}
            if event['type'] == 'BlockStored':
                names |= hashes
            elif event['type'] == 'BlockRemoved':
                names -= hashes
            else:
                names.clear()
    dealer.close()
    return names, batches


def is_same_tree(what):
    for _ in range(40):
        engine, batches = replayed()
        tree = json.loads(http(ADMIN + '/kv/blocks?worker=sglang&rank=0')[2])
        own = {int(block['hash'], 16) for block in tree.get('blocks', [])}
        if tree.get('state') == 'live' and own == engine:
            print(f'{what}: the tree is the replay, {len(own)} pages of {batches} batches', flush=True)
            return True
        time.sleep(0.5)
    print(f'{what}: NOT THE SAME: {tree.get("state")}, {len(own)} pages here, {len(engine)} at the engine', flush=True)
    return False


words = [f'w{random_.randrange(900)}' for _ in range(900)]
conversations = []


def text(count):
    return ' '.join(random_.choice(words) for _ in range(count))


def mixed():
    kind = random_.choice(['chat', 'chat', 'completions', 'stream', 'salted', 'turn', 'turn', 'long'])
    if kind == 'turn' and conversations:
        messages = random_.choice(conversations[-4:])
        messages.append({'role': 'user', 'content': text(12)})
        return '/v1/chat/completions', {'model': arguments.name, 'messages': messages, 'max_tokens': 12}
    if kind == 'completions':
        return '/v1/completions', {'model': arguments.name, 'prompt': text(40), 'max_tokens': 8}
    system = {'role': 'system', 'content': 'You are terse. ' + ' '.join(words[:25])}
    messages = [system, {'role': 'user', 'content': text(60 if kind == 'long' else 20)}]
    body = {'model': arguments.name, 'messages': messages, 'max_tokens': random_.choice([2, 8, 20])}
    if kind == 'salted':
        body['cache_salt'] = random_.choice(['a', 'b'])
    elif kind == 'stream':
        body |= {'stream': True, 'stream_options': {'include_usage': True}}
        conversations.append(messages)
    elif kind != 'long':
        conversations.append(messages)
    return '/v1/chat/completions', body


class Counts:
    asked = exact = above = failed = 0


def ask(counts):
    path, body = mixed()
    status, headers, answer = http(ROUTER + path, body, {'x-warmroute-decision': '1'})
    if status != 200:
        counts.failed += 1
        print('FAILED', status, answer[:200])
        return
    said = int(re.search(r'cached_tokens=(\d+)', headers['x-warmroute-decision']).group(1))
    if body.get('stream'):
        chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith('data: {')]
        usage = [chunk['usage'] for chunk in chunks if chunk.get('usage')][-1]
    else:
        value = json.loads(answer)
        usage = value['usage']
        content = 'messages' in body and value['choices'][0]['message'].get('content')
        if content:
            body['messages'].append({'role': 'assistant', 'content': content})
    used = (usage.get('prompt_tokens_details') or {}).get('cached_tokens') or 0
    counts.asked += 1
    counts.exact += said == used
    counts.above += said > used + arguments.page
    if said != used:
        print(f'  said {said}, used {used} of {usage["prompt_tokens"]}: {"stream" if body.get("stream") else path} {body.get("cache_salt", "")}')


def run(count, counts):
    for _ in range(count):
        ask(counts)
        time.sleep(0.03)


def direct(_):
    prompt = [random_.randrange(4000) for _ in range(70)]
    return http(ENGINE + '/v1/completions', {'model': arguments.name, 'prompt': prompt, 'max_tokens': 2})[0]


def main():
    proxy = Proxy(arguments.events)
    port = proxy.listener.getsockname()[1]
    configuration = f'''
api: {{listen: "127.0.0.1:8290"}}
admin: {{listen: "127.0.0.1:9290"}}
workers:
  - url: {ENGINE}
    name: sglang
    events: {{from: zmq, endpoint: "tcp://127.0.0.1:{port}", replay: "tcp://127.0.0.1:{arguments.replay}", topic: kv-events}}
models:
  - {{name: {arguments.name}, tokenizer: "{arguments.model}", send_token_ids: true}}
{arguments.set}
'''
    file = tempfile.NamedTemporaryFile('w', suffix='.yaml')
    file.write(configuration)
    file.flush()
    router = subprocess.Popen([arguments.router, 'serve', '--config', file.name], stderr=subprocess.DEVNULL)
    counts = Counts()
    try:
        wait_for(ENGINE + '/ready')
        wait_for(ADMIN + '/readyz')
        if router.poll() is not None:
            sys.exit('the router has ended')
        time.sleep(3)
        run(arguments.requests, counts)
        is_good = is_same_tree(f'after {arguments.requests} mixed requests')
        share = 100 * counts.exact / max(counts.asked, 1)
        print(f'cached tokens as in usage: {counts.exact} of {counts.asked} ({share:.1f} %), above by more than a page: {counts.above}')
        is_good &= share >= 95 and counts.above == 0
        print('flush', http(ENGINE + '/flush_cache', {})[0])
        time.sleep(1)
        is_good &= is_same_tree('after a flush')
        run(20, counts)
        is_good &= is_same_tree('after 20 more')
        proxy.cut(False)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(direct, range(24)))
        time.sleep(1)
        proxy.cut(True)
        is_good &= is_same_tree('after a gap')
        run(10, counts)
        if arguments.restarted:
            subprocess.run(arguments.restarted, shell=True, check=True)
            wait_for(ENGINE + '/ready')
            wait_for(ADMIN + '/readyz')
            time.sleep(4)
            run(30, counts)
            is_good &= is_same_tree('after a restart')
        print(f'all: {counts.exact} of {counts.asked} as in usage, {counts.above} above by more than a page, {counts.failed} failed')
        metrics = http(ADMIN + '/metrics')[2]
        shown = r'warmroute_kv_(resyncs|gaps|replays|verifications)'
        print('\n'.join(line for line in metrics.splitlines() if re.match(shown, line) and not line.endswith(' 0')))
        print('good' if is_good and counts.failed == 0 else 'NOT GOOD')
    finally:
        router.terminate()
    return 0 if is_good and counts.failed == 0 else 1


if __name__ == '__main__':
    sys.exit(main())
