"""OpenAI's Python SDK against a router and its engines, over real sockets."""

import asyncio
import unittest

import openai

from cluster import Cluster, eventually
from patience import LIMIT_S

HELLO = [{"role": "user", "content": "Tell me of the sea, at some length, if you would."}]
MODEL = "sim"



def client(cluster, **options):
    options = {"max_retries": 0, "timeout": LIMIT_S, **options}
    return openai.OpenAI(base_url=cluster.base_url, api_key="none", **options)


class WithCluster(unittest.TestCase):
    """Tests that leave the fleet as it is share one."""

    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster(config={"api": {"max_body": "100000B"}})
        cls.addClassCleanup(cls.cluster.close)
        cls.client = client(cls.cluster)
        cls.addClassCleanup(cls.client.close)


class Answers(WithCluster):
    def test_models_are_listed_and_found(self):
        self.assertEqual([model.id for model in self.client.models.list()], [MODEL])
        self.assertEqual(self.client.models.retrieve(MODEL).id, MODEL)

    def test_chat(self):
        answer = self.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
        self.assertEqual(len(answer.choices), 1)
        self.assertTrue(answer.choices[0].message.content)
        self.assertEqual(answer.choices[0].finish_reason, "length")
        self.assertEqual(answer.usage.completion_tokens, 5)

    def test_streamed_chat_ends_with_usage(self):
        chunks = list(
            self.client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=7, stream=True, stream_options={"include_usage": True}
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.assertTrue(text)
        self.assertEqual([bool(chunk.usage) for chunk in chunks[-2:]], [False, True])
        self.assertEqual(chunks[-1].usage.completion_tokens, 7)
        self.assertEqual(len({chunk.id for chunk in chunks}), 1)

    def test_a_second_turn_finds_the_first_cached(self):
        messages = [{"role": "user", "content": "An opening of its own: " + "many words of it, " * 50}]
        first = self.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
        messages.append({"role": "assistant", "content": first.choices[0].message.content})
        messages.append({"role": "user", "content": "And then?"})
        second = self.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
        self.assertEqual(first.usage.prompt_tokens_details.cached_tokens, 0)
        self.assertGreater(second.usage.prompt_tokens_details.cached_tokens, 100)

    def test_completions_whole_and_streamed(self):
        whole = self.client.completions.create(model=MODEL, prompt="Once upon", max_tokens=5)
        chunks = self.client.completions.create(model=MODEL, prompt="Once upon", max_tokens=5, stream=True)
        self.assertTrue(whole.choices[0].text)
        self.assertTrue("".join(chunk.choices[0].text for chunk in chunks))

    def test_responses_whole_and_streamed(self):
        whole = self.client.responses.create(model=MODEL, input="Hello there", max_output_tokens=5)
        self.assertTrue(whole.output_text)
        self.assertEqual(whole.usage.output_tokens, 5)

        events = list(self.client.responses.create(model=MODEL, input="Hello there", max_output_tokens=5, stream=True))
        self.assertEqual(events[0].type, "response.created")
        self.assertIn(events[-1].type, ("response.completed", "response.incomplete"))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        self.assertEqual("".join(deltas), events[-1].response.output_text)
        numbers = [event.sequence_number for event in events]
        self.assertEqual(numbers, list(range(len(numbers))))

    def test_embeddings(self):
        # The SDK asks for base64 by default, and decodes it.
        for options in ({}, {"encoding_format": "float"}):
            answer = self.client.embeddings.create(model=MODEL, input=["one", "two"], **options)
            self.assertEqual([item.index for item in answer.data], [0, 1])
            self.assertTrue(all(isinstance(number, float) for number in answer.data[0].embedding))

    def test_fifty_streams_at_once(self):
        async def stream(fan, number):
            chunks = await fan.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Story {number}"}],
                max_tokens=40,
                stream=True,
                stream_options={"include_usage": True},
            )
            return [chunk async for chunk in chunks][-1].usage.completion_tokens

        async def all_of_them():
            options = {"max_retries": 0, "timeout": LIMIT_S}
            async with openai.AsyncOpenAI(base_url=self.cluster.base_url, api_key="none", **options) as fan:
                streams = asyncio.gather(*(stream(fan, number) for number in range(50)))
                return await asyncio.wait_for(streams, 2 * LIMIT_S)

        self.assertEqual(asyncio.run(all_of_them()), [40] * 50)


class RequestIds(WithCluster):
    def test_an_answer_has_a_request_id(self):
        answer = self.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
        self.assertTrue(answer._request_id)

    def test_the_clients_own_request_id_comes_back(self):
        mine = {"x-request-id": "mine-1"}
        answer = self.client.chat.completions.with_raw_response.create(
            model=MODEL, messages=HELLO, max_tokens=1, extra_headers=mine
        )
        self.assertEqual(answer.headers["x-request-id"], "mine-1")
        self.assertEqual(answer.parse()._request_id, "mine-1")

    def test_an_error_has_a_request_id(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.chat.completions.create(model="none", messages=HELLO, extra_headers={"x-request-id": "mine-2"})
        self.assertEqual(caught.exception.request_id, "mine-2")


class Errors(WithCluster):
    def test_an_unknown_model_is_not_found(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.chat.completions.create(model="none", messages=HELLO)
        self.assertEqual((caught.exception.code, caught.exception.param), ("model_not_found", "model"))
        with self.assertRaises(openai.NotFoundError):
            self.client.models.retrieve("none")

    def test_reserved_parameters_are_a_bad_request(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(
                model=MODEL, messages=HELLO, extra_body={"kv_transfer_params": {"do_remote_decode": True}}
            )
        self.assertEqual(caught.exception.param, "kv_transfer_params")
        self.assertEqual(caught.exception.code, "unsupported_parameter")

    def test_an_engine_error_message_is_passed_on(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10_000_000)
        self.assertIn("max_model_len", caught.exception.message)

    def test_a_body_that_is_too_large_is_413(self):
        # The second does not fit into a socket's buffers: the answer comes while it is being sent.
        for length in (100_001, 20_000_000):
            with self.subTest(length=length):
                with self.assertRaises(openai.APIStatusError) as caught:
                    self.client.chat.completions.create(
                        model=MODEL, messages=[{"role": "user", "content": "a" * length}]
                    )
                self.assertEqual(caught.exception.status_code, 413)
                self.assertEqual(caught.exception.code, "request_too_large")

    def test_an_unknown_path_is_not_found(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.vector_stores.list()
        self.assertEqual(caught.exception.code, "unknown_url")


class LostEngines(unittest.TestCase):
    def test_without_an_engine_a_client_gives_up_after_its_retries(self):
        with Cluster() as cluster, client(cluster, max_retries=2) as patient:
            for engine in cluster.engines:
                engine.kill()
            eventually("the router has noticed", lambda: not cluster.is_ready())
            before = sum(value for _, value in cluster.metric("warmroute_requests_total"))
            with self.assertRaises(openai.InternalServerError) as caught:
                patient.chat.completions.create(model=MODEL, messages=HELLO)
            self.assertEqual(caught.exception.status_code, 503)
            self.assertEqual(caught.exception.code, "no_healthy_worker")
            # The router says when to come back, and it is soon.
            self.assertEqual(caught.exception.response.headers["retry-after"], "1")
            after = sum(value for _, value in cluster.metric("warmroute_requests_total"))
            self.assertEqual(after - before, 3)

    def test_one_lost_engine_is_not_seen(self):
        with Cluster() as cluster, client(cluster) as impatient:
            cluster.engines[0].kill()
            for number in range(20):
                messages = [{"role": "user", "content": f"Number {number}"}]
                impatient.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)

    def test_a_chat_whose_engine_dies_is_an_error_and_ends(self):
        with Cluster(engines=1, engine_arguments=("--decode-time", "50ms")) as cluster, client(cluster) as impatient:
            chunks = impatient.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2000, stream=True)
            for _ in range(5):
                next(chunks)
            cluster.engines[0].kill()
            with self.assertRaises(openai.APIError) as caught:
                for _ in chunks:
                    pass
            self.assertEqual(caught.exception.code, "engine_stream_broken")

    def test_a_response_whose_engine_dies_has_failed(self):
        with Cluster(engines=1, engine_arguments=("--decode-time", "50ms")) as cluster, client(cluster) as impatient:
            events = impatient.responses.create(
                model=MODEL, input="Hello there", max_output_tokens=2000, stream=True
            )
            seen = [next(events) for _ in range(6)]
            cluster.engines[0].kill()
            seen.extend(events)
            self.assertEqual(seen[-1].type, "response.failed")
            self.assertEqual(seen[-1].response.status, "failed")
            numbers = [event.sequence_number for event in seen]
            self.assertEqual(numbers, list(range(len(numbers))))

    def test_a_router_that_is_asked_to_stop_finishes_its_streams(self):
        with Cluster(engine_arguments=("--decode-time", "10ms")) as cluster, client(cluster) as impatient:
            chunks = impatient.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=50, stream=True)
            next(chunks)
            cluster.router.process.terminate()
            finish = [chunk.choices[0].finish_reason for chunk in chunks][-1]
            self.assertEqual(finish, "length")
            self.assertEqual(cluster.router.stop(), 0)


if __name__ == "__main__":
    unittest.main()
