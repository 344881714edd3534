#!/usr/bin/env python3
"""A real engine, or a real prefill/decode pair, behind one router beside simulated engines of another model: OpenAI's SDK against both at once.

    python benches/engines/mixed_fleet.py --router target/release/warmroute --worker 127.0.0.1:8101
    python benches/engines/mixed_fleet.py --prefill 127.0.0.1:8111 --decode 127.0.0.1:8112 --connector nixl
    python benches/engines/mixed_fleet.py --prefill 127.0.0.1:8121 --decode 127.0.0.1:8122 --connector mooncake --bootstrap 8998
    python benches/engines/mixed_fleet.py --prefill 127.0.0.1:31001 --decode 127.0.0.1:31002 --connector sglang --bootstrap 8998

Chat, completions and Responses, whole and streamed, stored, continued by previous_response_id, in the background and cancelled; each situation for the
real model and the simulated one at the same time, with Responses served natively (where the engine does) and over chat. A pair's line says how many
attempts were split, and it fails if none were. Needs the package `openai`.
"""
import argparse, concurrent.futures, json, subprocess, sys, tempfile, time, urllib.request

import openai

parser = argparse.ArgumentParser()
parser.add_argument('--router', default='target/release/warmroute')
parser.add_argument('--worker', action='append', default=[])
parser.add_argument('--prefill')
parser.add_argument('--decode')
parser.add_argument('--connector')
parser.add_argument('--bootstrap', type=int)
parser.add_argument('--name', default='tiny', help='the served model name of the real engine')
parser.add_argument('--responses', default='native,chat')
arguments = parser.parse_args()
ROUTER, ADMIN, SIM = '127.0.0.1:8290', '127.0.0.1:9290', ('127.0.0.1:8291', '127.0.0.1:8292')
LONG = 'A sentence of a prompt that is long enough to be computed elsewhere. ' * 20


def workers(responses):
    real = [{'url': f'http://{it}'} for it in arguments.worker]
    if arguments.prefill:
        real += [{'url': f'http://{arguments.prefill}', 'role': 'prefill'}, {'url': f'http://{arguments.decode}', 'role': 'decode'}]
    return [{**it, 'responses': responses} for it in real] + [{'url': f'http://{it}'} for it in SIM]


def chat(client, model):
    answer = client.chat.completions.create(model=model, messages=[{'role': 'user', 'content': LONG}], max_tokens=8)
    assert answer.usage.completion_tokens >= 1 and answer.choices[0].finish_reason, answer


def chat_stream(client, model):
    stream = client.chat.completions.create(
        model=model, messages=[{'role': 'user', 'content': 'Hi. ' + LONG}], max_tokens=8, stream=True, stream_options={'include_usage': True}
    )
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens >= 1 and any(it.choices and it.choices[0].finish_reason for it in chunks), chunks[-1]


def completion(client, model):
    answer = client.completions.create(model=model, prompt='Once. ' + LONG, max_tokens=8)
    assert answer.usage.completion_tokens >= 1, answer


def response(client, model):
    answer = client.responses.create(model=model, input='Say. ' + LONG, max_output_tokens=16)
    assert answer.status in ('completed', 'incomplete'), answer
    again = client.responses.retrieve(answer.id)
    assert again.id == answer.id
    follow = client.responses.create(model=model, input='And then?', previous_response_id=answer.id, max_output_tokens=16)
    assert follow.status in ('completed', 'incomplete') and follow.usage.input_tokens > answer.usage.input_tokens, follow


def response_stream(client, model):
    events = list(client.responses.create(model=model, input='Stream. ' + LONG, max_output_tokens=16, stream=True))
    assert events[0].type == 'response.created' and events[-1].type in ('response.completed', 'response.incomplete'), events[-1]
    assert [it.sequence_number for it in events] == list(range(len(events)))


def until_over(client, id):
    limit = time.monotonic() + 90
    while (answer := client.responses.retrieve(id)).status in ('queued', 'in_progress'):
        assert time.monotonic() < limit, answer
        time.sleep(0.1)
    return answer


def background(client, model):
    answer = client.responses.create(model=model, input='Later. ' + LONG, max_output_tokens=16, background=True)
    assert until_over(client, answer.id).status in ('completed', 'incomplete')


def cancelled(client, model):
    answer = client.responses.create(model=model, input='Never. ' + LONG, max_output_tokens=600, background=True)
    client.responses.cancel(answer.id)
    assert until_over(client, answer.id).status in ('cancelled', 'completed', 'incomplete')


def attempts():
    """Attempts at the real model by whether they were split, or why not; KV transfers by what became of them."""
    lines = urllib.request.urlopen(f'http://{ADMIN}/metrics', timeout=30).read().decode().splitlines()
    names = ('warmroute_disaggregated_requests_total', 'warmroute_kv_transfers_total')
    return [it for it in lines if it.startswith(names) and f'model="{arguments.name}"' in it]


SITUATIONS = [chat, chat_stream, completion, response, response_stream, background, cancelled]
sims = [subprocess.Popen([arguments.router, 'sim', '--listen', it, '--model', 'sim', '--decode-time', '5ms'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for it in SIM]
failed = 0
try:
    for responses in arguments.responses.split(','):
        with tempfile.NamedTemporaryFile('w', suffix='.yaml') as file:
            config = {
                'api': {'listen': ROUTER}, 'admin': {'listen': ADMIN}, 'log': {'level': 'error', 'access': False}, 'workers': workers(responses),
                'responses': {'mode': 'stateful'}, 'fleet': {'health': {'timeout': '10s'}},
            }
            if arguments.connector:
                advanced = {'min_remote_tokens': 1, **({'bootstrap_port': arguments.bootstrap} if arguments.bootstrap else {})}
                config['prefill_decode'] = {'connector': arguments.connector, 'advanced': advanced}
            json.dump(config, file)
            file.flush()
            router = subprocess.Popen([arguments.router, 'serve', '--config', file.name])
            try:
                limit = time.monotonic() + 60
                while True:
                    time.sleep(0.2)
                    assert router.poll() is None and time.monotonic() < limit, 'the router is not up'
                    try:
                        fleet = json.load(urllib.request.urlopen(f'http://{ADMIN}/fleet', timeout=5))['workers']
                    except OSError:
                        continue
                    if all(it['health'] == 'up' for it in fleet):
                        break
                client = openai.OpenAI(base_url=f'http://{ROUTER}/v1', api_key='none', max_retries=0, timeout=120)
                problems = []
                for _ in range(2):
                    with concurrent.futures.ThreadPoolExecutor(4) as pool:
                        runs = {pool.submit(it, client, model): (it.__name__, model) for it in SITUATIONS for model in (arguments.name, 'sim')}
                        for run in concurrent.futures.as_completed(runs):
                            if error := run.exception():
                                problems.append([*runs[run], repr(error)[:400]])
                line = {'responses': responses, 'checks': 4 * len(SITUATIONS)}
                if arguments.connector:
                    line['attempts'] = attempts()
                    if not any('disaggregated="yes"' in it for it in line['attempts']):
                        problems.append('nothing was split')
                failed += len(problems)
                print(json.dumps({**line, 'failed': len(problems), 'problems': problems}), flush=True)
            finally:
                router.kill()
                router.wait()
finally:
    for sim in sims:
        sim.kill()
sys.exit(1 if failed else 0)
