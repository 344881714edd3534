"""One create over HTTP, whole and streamed, and over a WebSocket, as bytes: what an SDK would forgive is seen here."""

import contextlib
import http.client
import json
import urllib.parse

from cluster import LIMIT_S
from shapes import Mismatch
from stream_order import ENDS, StreamOrder

try:
    from websockets.sync.client import connect
except ImportError:
    # It comes with the agents SDK.
    connect = None


class Answer:
    """The response, or the error and its status; of a stream the events too."""

    def __init__(self, response=None, error=None, status=200, events=()):
        self.response, self.error, self.status, self.events = response, error, status, list(events)

    def __repr__(self):
        return f"{self.status} {self.error or self.response}"


def call(method, url, body=None, headers=None):
    """Status, headers and body of one request on a connection of its own."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=LIMIT_S)
    try:
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        payload = None if body is None else json.dumps(body)
        connection.request(method, target, payload, {"content-type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        data = answer.read().decode()
    finally:
        connection.close()
    if not answer.headers["x-request-id"]:
        raise Mismatch(f"an answer without x-request-id: {answer.status} {url}")
    return answer.status, answer.headers, data


def ask(method, url, body=None):
    """What an endpoint answers, as JSON."""
    status, headers, data = call(method, url, body)
    if headers["content-type"] != "application/json":
        raise Mismatch(f"{headers['content-type']!r} for {method} {url}: {data}")
    value = json.loads(data)
    if status != 200:
        if set(value) != {"error"}:
            raise Mismatch(f"an error alone: {data}")
        return Answer(error=value["error"], status=status)
    return Answer(value)


def whole(url, body):
    return ask("POST", f"{url}/v1/responses", body)


def frames(text):
    """The events of a stream: `event:` and `data:`, an empty line after each, and the mark at the end."""
    blocks = text.split("\n\n")
    if blocks.pop() != "" or blocks.pop() != "data: [DONE]":
        raise Mismatch(f"a stream ends with its mark: {text[-300:]!r}")
    for block in blocks:
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        if len(lines) != 2 or not lines[0].startswith("event: ") or not lines[1].startswith("data: "):
            raise Mismatch(f"an event is two lines: {block!r}")
        event = json.loads(lines[1][len("data: "):])
        if event["type"] != lines[0][len("event: "):]:
            raise Mismatch(f"the type stands in both: {block!r}")
        yield event


def streamed(url, body, reasoning="response.reasoning_text"):
    return read_stream(*call("POST", f"{url}/v1/responses", {**body, "stream": True}), reasoning)


@contextlib.contextmanager
def open_stream(url, body):
    """The first event of a stream as soon as it is there, and what gives the others at its end."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=LIMIT_S)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/responses", json.dumps({**body, "stream": True}), headers)
        answer = connection.getresponse()
        first = "".join(answer.readline().decode() for _ in range(3))
        yield json.loads(first.split("data: ")[1]), lambda: list(frames(answer.read().decode()))
    finally:
        connection.close()


def resumed(url, response_id, after=None):
    """The events of a response that runs, or has ended, from the beginning or after one of them."""
    after = "" if after is None else f"&starting_after={after}"
    status, headers, data = call("GET", f"{url}/v1/responses/{response_id}?stream=true{after}")
    if status != 200:
        return Answer(error=json.loads(data)["error"], status=status)
    return list(frames(data))


def read_stream(status, headers, data, reasoning):
    if status != 200:
        return Answer(error=json.loads(data)["error"], status=status)
    if not headers["content-type"].startswith("text/event-stream") or headers["cache-control"] != "no-cache":
        raise Mismatch(f"headers of a stream: {headers}")
    events = list(frames(data))
    return in_order(events, reasoning)


def in_order(events, reasoning="response.reasoning_text"):
    """The answer that the events make up. Fails if they are out of order."""
    order = StreamOrder(reasoning)
    for event in events:
        order.feed(event)
    if order.last is None:
        raise Mismatch(f"a stream without an end: {events[-1:]}")
    return Answer(order.last, events=events)


def over_websocket(url, body):
    with websocket(url) as connection:
        return turn(connection, body)


def websocket(url):
    return connect(f"ws{url.removeprefix('http')}/v1/responses", open_timeout=LIMIT_S, compression=None)


def turn(connection, body):
    """One turn on a connection that nothing else runs on."""
    connection.send(json.dumps({"type": "response.create", **body}))
    events = []
    while True:
        event = json.loads(connection.recv(timeout=LIMIT_S))
        if "stream_id" in body and event.pop("stream_id", None) != body["stream_id"]:
            raise Mismatch(f"an event without its stream: {event}")
        if event["type"] == "error":
            if events or set(event) != {"type", "status", "error"}:
                raise Mismatch(f"an error frame: {event}")
            event["error"].pop("headers", None)
            return Answer(error=event["error"], status=event["status"])
        events.append(event)
        if event["type"] in ENDS:
            return in_order(events)
