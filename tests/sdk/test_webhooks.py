"""Webhooks, as OpenAI's Python SDK receives them."""

import http.server
import threading
import unittest

import openai

from cluster import Cluster, eventually

MODEL = "sim"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_" + "QUJD" * 8


class Receiver(http.server.ThreadingHTTPServer):
    """Takes every event, and keeps headers and bytes."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.events = []
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/hooks"

    def close(self):
        self.shutdown()
        self.server_close()
        self.thread.join()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.events.append((dict(self.headers), body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


class Unwrap(unittest.TestCase):
    def setUp(self):
        self.receiver = Receiver()
        self.addCleanup(self.receiver.close)
        endpoint = {
            "name": "sdk",
            "url": self.receiver.url,
            # While a secret is changed.
            "secrets": [OTHER, SECRET],
            "allow_http": True,
            "allowed_networks": ["127.0.0.1"],
        }
        cluster = Cluster(config={"webhooks": {"endpoints": [endpoint]}})
        self.addCleanup(cluster.close)
        self.client = openai.OpenAI(base_url=cluster.base_url, api_key="none", webhook_secret=SECRET, max_retries=0)
        self.addCleanup(self.client.close)

    def received(self, count):
        eventually(f"{count} events", lambda: len(self.receiver.events) >= count)
        self.assertEqual(len(self.receiver.events), count)
        return self.receiver.events[-1]

    def test_an_event_is_unwrapped_and_its_response_retrieved(self):
        created = self.client.responses.create(model=MODEL, input="Hi", background=True, max_output_tokens=5)
        headers, body = self.received(1)
        event = self.client.webhooks.unwrap(body, headers)
        self.assertEqual((event.type, event.object, event.data.id), ("response.incomplete", "event", created.id))
        self.assertEqual(event.id, headers["webhook-id"])
        self.assertEqual(type(event).__name__, "ResponseIncompleteWebhookEvent")
        last = self.client.responses.retrieve(event.data.id)
        self.assertEqual((last.status, last.usage.output_tokens), ("incomplete", 5))
        # By either secret, and by no other; every byte counts.
        self.client.webhooks.verify_signature(body, headers, secret=OTHER)
        with self.assertRaises(openai.InvalidWebhookSignatureError):
            self.client.webhooks.unwrap(body, headers, secret="whsec_" + "YWJj" * 8)
        with self.assertRaises(openai.InvalidWebhookSignatureError):
            self.client.webhooks.unwrap(body.replace(b"incomplete", b"completed"), headers)

    def test_a_cancelled_response_is_an_event(self):
        created = self.client.responses.create(model=MODEL, input="Hi", background=True, max_output_tokens=5_000)
        self.client.responses.cancel(created.id)
        headers, body = self.received(1)
        event = self.client.webhooks.unwrap(body, headers)
        self.assertEqual((event.type, event.data.id), ("response.cancelled", created.id))


if __name__ == "__main__":
    unittest.main()
