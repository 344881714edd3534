#!/usr/bin/env python3
"""A real vLLM prefill/decode pair behind Envoy and the endpoint picker, which names the prefill worker in a header.

    vllm serve MODEL --served-model-name tiny --port 8111 --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer",...}'
    vllm serve MODEL --served-model-name tiny --port 8112 --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer",...}'
    python benches/engines/picker_pair.py --router target/release/warmroute --prefill 127.0.0.1:8111 --decode 127.0.0.1:8112

Beside the decode engine stands a sidecar, as gateways have it: it obeys `x-prefiller-host-port`, has that worker compute the prompt, and gives the
decode engine the parameters that come back. Each answer through Envoy is compared with the decode engine's own answer to the same request with
another salt, and the decode engine's counter of transferred prompt tokens with the prompts. Run it with a Python that has tests/envoy/requirements.txt.
"""
import argparse, http.client, http.server, json, pathlib, sys, tempfile, threading, urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / 'tests/sdk'), str(ROOT / 'tests/envoy')]

import cluster  # noqa: E402
from gateway import Envoy, free_port  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument('--router', default='target/release/warmroute')
parser.add_argument('--prefill', default='127.0.0.1:8111')
parser.add_argument('--decode', default='127.0.0.1:8112')
parser.add_argument('--name', default='tiny', help='the served model name')
parser.add_argument('--requests', type=int, default=12)
arguments = parser.parse_args()
cluster.BINARY = arguments.router
cluster.LIMIT_S = 120
HEADER = 'x-prefiller-host-port'
CHAT = '/v1/chat/completions'


def send(address, method, path, body=None, headers=None):
    host, port = address.rsplit(':', 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    connection.request(method, path, body, headers or {'content-type': 'application/json'})
    return connection.getresponse()


class Sidecar(http.server.BaseHTTPRequestHandler):
    """Passes everything on to the decode engine; a request with the header gets a prefill leg before."""

    protocol_version = 'HTTP/1.1'
    prefilled = []

    def do_GET(self):
        self.pass_on(send(arguments.decode, 'GET', self.path))

    def do_POST(self):
        body = self.body()
        if prefill := self.headers.get(HEADER):
            request = json.loads(body)
            params = {'do_remote_decode': True, 'do_remote_prefill': False}
            first = {**request, 'max_tokens': 1, 'stream': False, 'kv_transfer_params': params}
            first.pop('stream_options', None)
            answer = json.load(send(prefill, 'POST', self.path, json.dumps(first)))
            Sidecar.prefilled.append(prefill)
            body = json.dumps({**request, 'kv_transfer_params': answer['kv_transfer_params']})
        self.pass_on(send(arguments.decode, 'POST', self.path, body))

    def body(self):
        # A gateway whose picker may change the body does not know its length.
        if length := self.headers['content-length']:
            return self.rfile.read(int(length))
        body = b''
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def pass_on(self, answer):
        self.send_response(answer.status)
        self.send_header('content-type', answer.headers.get('content-type', 'text/plain'))
        self.send_header('transfer-encoding', 'chunked')
        self.end_headers()
        while data := answer.read1(65536):
            self.wfile.write(b'%x\r\n%s\r\n' % (len(data), data))
        self.wfile.write(b'0\r\n\r\n')

    def log_message(self, *_):
        pass


def chat(number, stream, salt):
    text = f'Request {number}: ' + f'the {number}th part of a prompt that is long enough to be worth a transfer. ' * 12
    body = {'model': arguments.name, 'temperature': 0, 'max_tokens': 24, 'ignore_eos': True, 'stream': stream, 'cache_salt': salt}
    return json.dumps({**body, 'messages': [{'role': 'user', 'content': text}]})


def text_of(answer, stream):
    body = answer.read().decode()
    assert answer.status == 200, (answer.status, body)
    if not stream:
        message = json.loads(body)['choices'][0]['message']
        return (message.get('reasoning') or '') + (message.get('content') or '')
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith('data: ') and line != 'data: [DONE]']
    assert body.rstrip().endswith('data: [DONE]'), body[-200:]
    deltas = [it['choices'][0]['delta'] for it in events if it.get('choices')]
    return ''.join((it.get('reasoning') or '') + (it.get('content') or '') for it in deltas)


def transferred():
    metrics = urllib.request.urlopen(f'http://{arguments.decode}/metrics', timeout=30).read().decode()
    lines = [line for line in metrics.splitlines() if 'prompt_tokens_by_source' in line and 'external_kv_transfer' in line and not line.startswith('#')]
    return sum(float(line.rsplit(' ', 1)[1]) for line in lines)


with tempfile.TemporaryDirectory() as directory:
    sidecar = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Sidecar)
    # A router that is killed at the end leaves answers half sent.
    sidecar.handle_error = lambda *_: None
    threading.Thread(target=sidecar.serve_forever, daemon=True).start()
    decode = f'127.0.0.1:{sidecar.server_port}'
    picker = f'127.0.0.1:{free_port()}'
    workers = [{'url': f'http://{arguments.prefill}', 'role': 'prefill'}, {'url': f'http://{decode}', 'role': 'decode'}]
    config = {
        'endpoint_picker': {'listen': picker}, 'prefill_decode': {'connector': 'nixl', 'advanced': {'min_remote_tokens': 1}},
        'responses': {'mode': 'pass_through'}, 'fleet': {'health': {'interval': '2s', 'timeout': '10s'}},
    }
    router = cluster.Router(directory, workers, config)
    envoy = Envoy(directory, picker, [tuple(decode.rsplit(':', 1))[:1] + (sidecar.server_port,)])
    try:
        up = lambda: sum(it['health'] == 'up' for it in json.loads(cluster.get(f'{router.admin_url}/fleet')[1])['workers']) == 2
        cluster.eventually('both engines are up', up)
        before, equal = transferred(), 0
        for number in range(arguments.requests):
            stream = number % 2 == 1
            through = text_of(send(f'127.0.0.1:{envoy.port}', 'POST', CHAT, chat(number, stream, 'a')), stream)
            alone = text_of(send(arguments.decode, 'POST', CHAT, chat(number, stream, 'b')), stream)
            equal += through == alone
            assert through, number
        metrics = cluster.get(f'{router.admin_url}/metrics')[1].splitlines()
        print(json.dumps({
            'requests': arguments.requests, 'prefilled_at': sorted(set(Sidecar.prefilled)), 'prefill_legs': len(Sidecar.prefilled),
            'texts_equal_to_the_decode_engine_alone': equal, 'prompt_tokens_transferred': transferred() - before,
            'metrics': [line for line in metrics if line.startswith(('warmroute_endpoint_picker_exchanges', 'warmroute_prefill_decode'))][:12],
        }))
        raise SystemExit(0 if len(Sidecar.prefilled) == arguments.requests else 1)
    finally:
        envoy.kill()
        router.kill()
