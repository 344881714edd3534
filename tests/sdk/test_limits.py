"""OpenAI's Python SDK as a tenant with limits: typed errors, headers, waits and retries."""

import time
import unittest

import openai

from cluster import Cluster
from patience import LIMIT_S

HELLO = [{"role": "user", "content": "hello"}]
MODEL = "sim"

TENANTS = [
    # Room for two, and another one each second.
    {"name": "few", "keys": ["sk-few"], "limits": {"requests_per_minute": 60, "burst": "2s"}},
    # Room for one, and another one after three seconds: longer than the SDK waits by itself before its first retries.
    {"name": "slow", "keys": ["sk-slow"], "limits": {"requests_per_minute": 20, "burst": "3s"}},
    {"name": "small", "keys": ["sk-small"], "limits": {"tokens_per_minute": 600, "models": [{"name": MODEL, "max_tokens": 100}]}},
    {"name": "elsewhere", "keys": ["sk-other"], "limits": {"models": ["another"]}},
    {"name": "many", "keys": ["sk-many"], "limits": {"requests_per_minute": 6000, "tokens_per_minute": 1000000}},
]


class Limits(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        config = {"tenants": TENANTS, "limits": {"output_reserve": 16}}
        cls.cluster = Cluster(config=config, replicas=2)
        cls.addClassCleanup(cls.cluster.close)

    def client(self, name, max_retries=0, replica=0):
        client = openai.OpenAI(
            base_url=f"{self.cluster.routers[replica].url}/v1",
            api_key=f"sk-{name}",
            max_retries=max_retries,
            timeout=LIMIT_S,
        )
        self.addCleanup(client.close)
        return client

    def test_a_refusal_is_a_rate_limit_error_and_the_sdk_waits_for_its_turn(self):
        clients = [self.client("few", replica=replica) for replica in range(2)]
        refused = None
        for number in range(10):
            try:
                clients[number % 2].chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
            except openai.RateLimitError as error:
                refused = error
                break
        self.assertIsNotNone(refused)
        self.assertEqual((refused.status_code, refused.code, refused.type), (429, "rate_limit_exceeded", "requests"))
        self.assertIn("Rate limit reached for sim on requests per min (RPM): Limit 60 (at most 2 at once)", refused.message)
        headers = refused.response.headers
        self.assertEqual(headers["x-ratelimit-remaining-requests"], "0")
        self.assertGreaterEqual(int(headers["retry-after"]), 1)
        waited = int(headers["retry-after-ms"]) / 1000
        self.assertLessEqual(waited, 2)
        patient = self.client("few", max_retries=5, replica=1)
        patient.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)

    def test_the_sdk_waits_as_long_as_it_is_told_and_retries_once(self):
        self.client("slow").chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
        started = time.monotonic()
        # By itself the SDK would be back after half a second, and fail.
        patient = self.client("slow", max_retries=1, replica=1)
        raw = patient.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=1)
        waited = time.monotonic() - started
        self.assertEqual(raw.retries_taken, 1)
        self.assertGreater(waited, 1.5)

    def test_a_request_that_never_fits_is_not_retried(self):
        client = self.client("small", max_retries=5)
        with self.assertRaises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt=list(range(1, 700)), max_tokens=1)
        self.assertEqual(caught.exception.type, "tokens")
        self.assertEqual(caught.exception.response.headers["x-should-retry"], "false")
        self.assertEqual(caught.exception.request.headers["x-stainless-retry-count"], "0")

    def test_models_and_lengths_have_errors_of_their_own(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client("other").chat.completions.create(model=MODEL, messages=HELLO)
        self.assertEqual(caught.exception.code, "model_not_found")
        self.assertEqual(list(self.client("other").models.list()), [])
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client("small").chat.completions.create(model=MODEL, messages=HELLO, max_tokens=101)
        self.assertEqual(caught.exception.param, "max_tokens")

    def test_every_kind_of_answer_has_the_six_headers(self):
        client = self.client("many")
        left = []

        def check(raw):
            headers = raw.headers
            for kind in ("requests", "tokens"):
                for what in ("limit", "remaining", "reset"):
                    self.assertIn(f"x-ratelimit-{what}-{kind}", headers)
            left.append(int(headers["x-ratelimit-remaining-tokens"]))

        check(client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=2))
        with client.chat.completions.with_streaming_response.create(
            model=MODEL, messages=HELLO, max_tokens=2, stream=True
        ) as raw:
            check(raw)
            raw.read()
        check(client.responses.with_raw_response.create(model=MODEL, input="hello", max_output_tokens=2))
        created = client.responses.with_raw_response.create(
            model=MODEL, input="hello", max_output_tokens=2, background=True
        )
        check(created)
        check(client.models.with_raw_response.list())
        self.assertTrue(all(tokens <= 1000000 for tokens in left))
        self.assertLess(min(left), 1000000)


if __name__ == "__main__":
    unittest.main()
