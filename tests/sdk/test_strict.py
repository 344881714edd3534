"""Every answer against the SDK's own types: a member that is missing or of a wrong type is an error here."""

import json
import unittest

import openai

import shapes
import wire
from cluster import ENGINE_ARGUMENTS, Cluster, eventually, get
from patience import LIMIT_S

MODEL = "sim"
HELLO = "Tell me of the sea, at some length, if you would."
IMAGE = "data:image/png;base64,iVBORw0KGgo="
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


class StrictTypes(unittest.TestCase):
    #: Of the engines.
    arguments = ENGINE_ARGUMENTS

    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster(replicas=2, engine_arguments=cls.arguments)
        cls.addClassCleanup(cls.cluster.close)
        cls.clients = [
            openai.OpenAI(
                base_url=f"{router.url}/v1",
                api_key="none",
                max_retries=0,
                timeout=LIMIT_S,
                _strict_response_validation=True,
            )
            for router in cls.cluster.routers
        ]
        for client in cls.clients:
            cls.addClassCleanup(client.close)
        cls.sdk, cls.other = cls.clients

    def create(self, given=HELLO, **options):
        return self.sdk.responses.create(model=MODEL, input=given, **options)

    def test_responses_of_all_kinds(self):
        for options in (
            {},
            {"instructions": "Be brief.", "metadata": {"a": "b"}, "store": False, "max_output_tokens": 16},
            {"reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "store": False},
            {"reasoning": {"effort": "low", "summary": "auto"}},
            {"tools": [WEATHER], "tool_choice": "required"},
            {
                "tools": [WEATHER],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "weather"}],
                },
            },
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
            {"user": "u", "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "flex"},
        ):
            with self.subTest(options=options):
                response = self.create(**options)
                self.assertEqual(response.object, "response")
                self.assertGreaterEqual(response.usage.input_tokens_details.cache_write_tokens, 0)
                with self.create(stream=True, **options) as stream:
                    kinds = [event.type for event in stream]
                self.assertIn(kinds[-1], ("response.completed", "response.incomplete"))

    def test_what_is_stored(self):
        response = self.create(
            [
                {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]},
                {"role": "assistant", "content": "An image."},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "sunny"},
                {"role": "user", "content": HELLO},
            ],
            reasoning={"effort": "low"},
        )
        self.other.responses.retrieve(response.id)
        included = self.other.responses.retrieve(response.id, include=["reasoning.encrypted_content"])
        self.assertTrue(included.output[0].encrypted_content)
        listed = list(self.other.responses.input_items.list(response.id, limit=2))
        self.assertEqual(len(listed), 6)
        self.other.responses.create(model=MODEL, input="And?", previous_response_id=response.id)
        self.other.responses.delete(response.id)

    def test_compact(self):
        response = self.create()
        with self.assertRaises(openai.BadRequestError):
            self.sdk.responses.compact(model=MODEL)
        # Pretend engines end an answer at its limit, and a summary must end by itself.
        self.set_faults({"stop_at_once": True})
        self.addCleanup(self.set_faults, {})
        # The SDK's type for the output has no user messages, though its description lists them.
        lenient = self.other.with_options(_extra_kwargs={"_strict_response_validation": False})
        window = lenient.responses.compact(model=MODEL, input="And?", previous_response_id=response.id)
        self.assertEqual(window.object, "response.compaction")
        self.assertEqual([item.type for item in window.output], ["message", "message", "compaction"])
        self.create([*[item.model_dump(exclude_none=True) for item in window.output], {"role": "user", "content": "On."}])
        self.other.responses.create(model=MODEL, input="On.", previous_response_id=window.id)

    def set_faults(self, faults):
        for engine in self.cluster.engines:
            status, text = get(f"{engine.url}/sim/faults", json.dumps(faults).encode())
            self.assertEqual(status, 200, text)

    def test_background(self):
        response = self.create(background=True)
        self.assertEqual(response.status, "queued")
        done = eventually(
            "the response ends",
            lambda: (
                lambda it: it if it.status not in ("queued", "in_progress") else None
            )(self.other.responses.retrieve(response.id)),
        )
        self.assertIn(done.status, ("completed", "incomplete"))
        self.other.responses.cancel(response.id)
        with self.create(background=True, stream=True) as stream:
            for event in stream:
                pass
        with self.other.responses.retrieve(event.response.id, stream=True, starting_after=2) as stream:
            self.assertTrue([event.sequence_number for event in stream])

    def test_conversations(self):
        conversation = self.sdk.conversations.create(
            items=[{"type": "message", "role": "user", "content": HELLO}], metadata={"a": "b"}
        )
        self.create(conversation=conversation.id)
        self.other.conversations.retrieve(conversation.id)
        self.other.conversations.update(conversation.id, metadata={"c": "d"})
        items = list(self.other.conversations.items.list(conversation.id, limit=1))
        self.assertEqual(len(items), 3)
        self.other.conversations.items.retrieve(items[0].id, conversation_id=conversation.id)
        self.other.conversations.items.create(
            conversation.id, items=[{"type": "message", "role": "user", "content": "more"}]
        )
        self.other.conversations.items.delete(items[0].id, conversation_id=conversation.id)
        self.other.conversations.delete(conversation.id)

    def test_models_and_counted_tokens(self):
        self.assertEqual([model.id for model in self.sdk.models.list()], [MODEL])
        self.sdk.models.retrieve(MODEL)
        previous = self.create()
        for options in (
            {"input": HELLO},
            {"input": [{"role": "user", "content": HELLO}], "instructions": "Be brief.", "tools": [WEATHER]},
            {"input": HELLO, "previous_response_id": previous.id},
        ):
            with self.subTest(options=options):
                counted = self.other.responses.input_tokens.count(model=MODEL, **options)
                self.assertEqual(counted.input_tokens, self.create(options.pop("input"), **options).usage.input_tokens)

    def test_chat_completions(self):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HELLO}]
        function = {name: value for name, value in WEATHER.items() if name != "type"}
        for options in (
            {},
            {"max_completion_tokens": 5, "logprobs": True, "top_logprobs": 2},
            {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
            {"response_format": {"type": "json_object"}, "seed": 7, "reasoning_effort": "low"},
        ):
            with self.subTest(options=options):
                whole = self.sdk.chat.completions.create(model=MODEL, messages=messages, **options)
                asked = {"stream": True, "stream_options": {"include_usage": True}, **options}
                with self.sdk.chat.completions.create(model=MODEL, messages=messages, **asked) as stream:
                    chunks = list(stream)
                self.assertEqual(chunks[-1].usage.completion_tokens, whole.usage.completion_tokens)

    def test_completions_and_embeddings(self):
        whole = self.sdk.completions.create(model=MODEL, prompt=HELLO, max_tokens=5, logprobs=1)
        # Of a stream the SDK's type demands a finish reason in every chunk, which OpenAI does not send either.
        lenient = self.sdk.with_options(_extra_kwargs={"_strict_response_validation": False})
        with lenient.completions.create(model=MODEL, prompt=HELLO, max_tokens=5, stream=True) as stream:
            text = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        self.assertEqual(text, whole.choices[0].text)
        for given in (HELLO, [HELLO, "Two."]):
            listed = self.sdk.embeddings.create(model=MODEL, input=given, encoding_format="float")
            self.assertEqual(len(listed.data), 1 if given is HELLO else 2)
            # By itself the SDK asks for base64 and makes numbers of it; its strict type knows lists only.
            numbers = lenient.embeddings.create(model=MODEL, input=given)
            for one, other in zip(numbers.data, listed.data):
                self.assertEqual(len(one.embedding), len(other.embedding))
                for left, right in zip(one.embedding, other.embedding):
                    self.assertAlmostEqual(left, right, places=6)

    def test_the_helpers(self):
        with self.sdk.responses.stream(model=MODEL, input=HELLO, tools=[WEATHER], tool_choice="required") as stream:
            final = stream.until_done().get_final_response()
        self.assertEqual(final.output[0].type, "function_call")
        background = self.sdk.responses.create(model=MODEL, input=HELLO, background=True, stream=True)
        response_id = next(background).response.id
        background.close()
        for options in ({}, {"starting_after": 3}):
            with self.other.responses.stream(response_id=response_id, **options) as stream:
                self.assertEqual(stream.get_final_response().id, response_id)
        raw = self.sdk.responses.with_raw_response.create(model=MODEL, input=HELLO)
        self.assertTrue(raw.headers["x-request-id"])
        self.assertEqual(raw.parse().object, "response")


@unittest.skipIf(shapes.document is None, "the types of the public document want Python 3.11")
class Errors(unittest.TestCase):
    """Every error of every endpoint has the members that SDKs read, and no others."""

    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster(engines=1)
        cls.addClassCleanup(cls.cluster.close)

    def test_every_error_has_the_same_members(self):
        unknown = {"model": "none", "input": HELLO, "prompt": HELLO, "messages": [{"role": "user", "content": HELLO}]}
        for method, path, body, expected in (
            ("POST", "/chat/completions", unknown, 404),
            ("POST", "/completions", unknown, 404),
            ("POST", "/embeddings", unknown, 404),
            ("POST", "/responses/input_tokens", {**unknown, "prompt": None}, 404),
            ("POST", "/responses/compact", {"model": "none", "input": HELLO}, 404),
            ("POST", "/chat/completions", {"model": MODEL, "messages": 1, "kv_transfer_params": {}}, 400),
            ("POST", "/completions", [], 400),
            ("POST", "/responses", "text", 400),
            ("POST", "/conversations", {"items": 1}, 400),
            ("GET", "/models/none", None, 404),
            ("GET", "/conversations/conv_none", None, 404),
            ("GET", "/conversations/conv_none/items", None, 404),
            ("GET", "/responses/resp_none", None, 404),
            ("GET", "/responses/resp_none/input_items", None, 404),
            ("POST", "/responses/resp_none/cancel", None, 404),
            ("DELETE", "/responses/resp_none", None, 404),
            ("GET", "/nothing", None, 404),
            ("PUT", "/responses", {}, 405),
            ("GET", "/chat/completions", None, 405),
        ):
            with self.subTest(f"{method} {path}", body=body):
                answer = wire.ask(method, f"{self.cluster.router.url}/v1{path}", body)
                self.assertEqual(answer.status, expected, answer)
                shapes.check_error(answer.error)


if __name__ == "__main__":
    unittest.main()
