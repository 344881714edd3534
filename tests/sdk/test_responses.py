"""OpenAI's Python SDK against two replicas over one Redis: each call goes to the other one."""

import itertools
import json
import threading
import unittest

import openai
import pydantic

from cluster import ENGINE_ARGUMENTS, STATE_TOKEN_KEY, Cluster, eventually
from patience import LIMIT_S

MODEL = "sim"
HELLO = "Tell me of the sea, at some length, if you would."
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "What the weather is like.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
ENCRYPTED = ["reasoning.encrypted_content"]



class Replicas:
    """A client of each router; whatever is asked for goes to the next of them."""

    def __init__(self, cluster, key="none", **options):
        options = {"max_retries": 0, "timeout": LIMIT_S, "api_key": key, **options}
        self.clients = [openai.OpenAI(base_url=f"{router.url}/v1", **options) for router in cluster.routers]
        self.turns = itertools.cycle(self.clients)

    def __getattr__(self, resource):
        return getattr(next(self.turns), resource)

    def create(self, given, **options):
        return self.responses.create(model=MODEL, input=given, **options)

    def close(self):
        for client in self.clients:
            client.close()


def user(text):
    return {"role": "user", "content": text}


def plain(items):
    """What items say, without the ids they were given."""
    return [item.model_dump(exclude={"id", "status"}, exclude_none=True) for item in items]


class WithReplicas(unittest.TestCase):
    """Tests that leave the fleet as it is share one."""

    #: Of the engines.
    arguments = ENGINE_ARGUMENTS

    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster(replicas=2, engine_arguments=cls.arguments)
        cls.addClassCleanup(cls.cluster.close)
        cls.sdk = Replicas(cls.cluster)
        cls.addClassCleanup(cls.sdk.close)

    def assert_refused(self, error, call, *arguments, code=None, param=None, says="", **options):
        with self.assertRaises(error) as caught:
            call(*arguments, **options)
        refusal = caught.exception
        self.assertEqual((refusal.code, refusal.param), (code, param), refusal)
        self.assertEqual(refusal.type, "invalid_request_error")
        self.assertIn(says, refusal.message)
        return refusal

    def assert_forgotten(self, response_id):
        """No replica knows it, and all say so in the same words."""
        for _ in self.cluster.routers:
            for call in (
                self.sdk.responses.retrieve,
                self.sdk.responses.delete,
                self.sdk.responses.cancel,
                lambda id: self.sdk.responses.input_items.list(id).data,
            ):
                refusal = self.assert_refused(openai.NotFoundError, call, response_id)
                self.assertEqual(refusal.body["message"], f"Response with id '{response_id}' not found.")
            self.assert_refused(
                openai.BadRequestError,
                self.sdk.create,
                HELLO,
                previous_response_id=response_id,
                code="previous_response_not_found",
                param="previous_response_id",
                says=f"Previous response with id '{response_id}' not found.",
            )


class Create(WithReplicas):
    def test_the_response_repeats_the_request_parameters(self):
        created = self.sdk.create(
            HELLO,
            instructions="Be brief.",
            metadata={"ticket": "7"},
            temperature=0.5,
            top_p=0.25,
            max_tool_calls=3,
            parallel_tool_calls=False,
            prompt_cache_key="k",
            safety_identifier="s",
            tools=[WEATHER],
            tool_choice="none",
            truncation="auto",
            max_output_tokens=100,
            top_logprobs=0,
        )
        self.assertRegex(created.id, "^resp_[0-9a-f]{48}$")
        self.assertEqual(created.object, "response")
        self.assertEqual(created.instructions, "Be brief.")
        self.assertEqual(created.metadata, {"ticket": "7"})
        self.assertEqual((created.temperature, created.top_p), (0.5, 0.25))
        self.assertEqual(created.max_tool_calls, 3)
        self.assertIs(created.parallel_tool_calls, False)
        self.assertEqual((created.prompt_cache_key, created.safety_identifier), ("k", "s"))
        self.assertEqual([tool.name for tool in created.tools], ["weather"])
        self.assertEqual(created.tool_choice, "none")
        self.assertEqual(created.max_output_tokens, 100)
        self.assertEqual((created.store, created.background), (True, False))
        self.assertIsNone(created.error)
        self.assertEqual(created.usage.total_tokens, created.usage.input_tokens + created.usage.output_tokens)
        self.assertEqual(self.sdk.responses.retrieve(created.id), created)

    def test_a_finished_answer_is_completed_and_a_cut_one_incomplete(self):
        done = self.sdk.create(HELLO)
        self.assertEqual((done.status, done.incomplete_details), ("completed", None))
        self.assertGreaterEqual(done.completed_at, done.created_at)
        self.assertTrue(done.output_text)
        cut = self.sdk.create(HELLO, max_output_tokens=16)
        self.assertEqual((cut.status, cut.incomplete_details.reason), ("incomplete", "max_output_tokens"))
        self.assertIsNone(cut.completed_at)
        self.assertEqual(cut.output[-1].status, "incomplete")

    def test_a_text_and_an_item_list_are_equivalent_inputs(self):
        text = self.sdk.create(HELLO).output_text
        parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": HELLO}]}]
        for given in ([user(HELLO)], parts):
            self.assertEqual(self.sdk.create(given).output_text, text)

    def test_an_unstored_response_is_not_found(self):
        created = self.sdk.create(HELLO, store=False)
        self.assertEqual((created.status, created.store), ("completed", False))
        self.assert_forgotten(created.id)

    def test_reasoning(self):
        created = self.sdk.create(HELLO, reasoning={"effort": "low"}, include=ENCRYPTED)
        self.assertEqual([item.type for item in created.output[:2]], ["reasoning", "message"])
        self.assertTrue(created.output[0].content[0].text)
        self.assertEqual(created.reasoning.effort, "low")
        self.assertGreater(created.usage.output_tokens_details.reasoning_tokens, 0)

    def test_a_schema_with_parse(self):
        class Town(pydantic.BaseModel):
            name: str
            people: int

        parsed = self.sdk.responses.parse(model=MODEL, input="Name a town.", text_format=Town)
        self.assertIsInstance(parsed.output_parsed, Town)
        self.assertEqual(parsed.text.format.type, "json_schema")
        again = self.sdk.responses.retrieve(parsed.id)
        self.assertEqual(Town.model_validate_json(again.output_text), parsed.output_parsed)

    def test_a_function_is_called(self):
        created = self.sdk.create("What is the weather like?", tools=[WEATHER])
        [call] = created.output
        self.assertEqual((call.type, call.name, call.status), ("function_call", "weather", "completed"))
        self.assertTrue(json.loads(call.arguments)["city"])


class Stream(WithReplicas):
    def check(self, events, created_status="in_progress"):
        """Every stream: numbered from 0, created first, one end; gives the last response."""
        self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
        self.assertEqual([event.type for event in events[:2]], ["response.created", "response.in_progress"])
        first, last = events[0].response, events[-1].response
        self.assertEqual((first.status, first.output, first.usage), (created_status, [], None))
        self.assertEqual(events[-1].type, f"response.{last.status}")
        ends = ("response.completed", "response.incomplete", "response.failed")
        self.assertEqual([event.type for event in events if event.type in ends], [events[-1].type])
        self.assertEqual(first.id, last.id)
        return last

    def test_a_streamed_response_is_stored_when_it_ends(self):
        for options in ({}, {"max_output_tokens": 16}, {"tools": [WEATHER]}, {"reasoning": {"effort": "low"}}):
            with self.subTest(**options):
                events = list(self.sdk.create(HELLO, stream=True, **options))
                last = self.check(events)
                # The other replica knows it as soon as the last event is out.
                self.assertEqual(self.sdk.responses.retrieve(last.id), last)
                text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
                self.assertEqual(text, last.output_text)
                arguments = [event.delta for event in events if event.type.endswith("arguments.delta")]
                calls = [item.arguments for item in last.output if item.type == "function_call"]
                self.assertEqual("".join(arguments), "".join(calls))
                done = [event.item for event in events if event.type == "response.output_item.done"]
                self.assertEqual(done, last.output)

    def test_a_stream_has_the_same_text_as_a_whole_answer(self):
        whole = self.sdk.create(HELLO)
        last = self.check(list(self.sdk.create(HELLO, stream=True)))
        self.assertEqual(plain(last.output), plain(whole.output))
        self.assertEqual(last.usage.output_tokens, whole.usage.output_tokens)

    def test_the_stream_helper(self):
        with self.sdk.responses.stream(model=MODEL, input=HELLO) as stream:
            events = list(stream)
            final = stream.get_final_response()
        self.assertEqual(events[-1].type, "response.completed")
        self.assertEqual(final.status, "completed")
        self.assertEqual(self.sdk.responses.retrieve(final.id).output_text, final.output_text)

    def test_the_stream_helper_with_a_function_and_a_schema(self):
        class Town(pydantic.BaseModel):
            name: str

        with self.sdk.responses.stream(model=MODEL, input=HELLO, text_format=Town) as stream:
            stream.until_done()
            self.assertIsInstance(stream.get_final_response().output_parsed, Town)
        with self.sdk.responses.stream(model=MODEL, input=HELLO, tools=[WEATHER]) as stream:
            stream.until_done()
            self.assertEqual(stream.get_final_response().output[0].name, "weather")

    def test_the_end_of_a_stream_on_the_wire(self):
        options = {"model": MODEL, "input": HELLO, "stream": True}
        with self.sdk.responses.with_streaming_response.create(**options) as raw:
            self.assertRegex(raw.headers["content-type"], "^text/event-stream")
            lines = [line for line in raw.iter_lines() if line]
        self.assertEqual(lines[-3], "event: response.completed")
        self.assertEqual(lines[-1], "data: [DONE]")


class Stored(WithReplicas):
    def test_a_deleted_response_is_gone_from_every_replica(self):
        created = self.sdk.create(HELLO)
        self.assertIsNone(self.sdk.responses.delete(created.id))
        self.assert_forgotten(created.id)

    def test_the_answer_to_a_delete(self):
        created = self.sdk.create(HELLO)
        raw = self.sdk.responses.with_raw_response.delete(created.id)
        self.assertEqual(
            json.loads(raw.http_response.text), {"id": created.id, "object": "response.deleted", "deleted": True}
        )

    def test_retrieve_takes_include(self):
        created = self.sdk.create(HELLO)
        again = self.sdk.responses.retrieve(created.id, include=["message.output_text.logprobs"])
        self.assertEqual(again.output_text, created.output_text)

    def test_a_foreground_response_cannot_be_cancelled_or_resumed(self):
        created = self.sdk.create(HELLO)
        self.assert_refused(
            openai.BadRequestError,
            self.sdk.responses.cancel,
            created.id,
            param="response_id",
            says="Cannot cancel a synchronous response.",
        )
        self.assert_refused(
            openai.BadRequestError, self.sdk.responses.retrieve, created.id, stream=True, param="stream"
        )
        self.assert_refused(
            openai.BadRequestError,
            self.sdk.responses.retrieve,
            created.id,
            starting_after=1,
            code="invalid_value",
            param="starting_after",
        )

    def test_input_items_in_pages_either_way(self):
        given = [user(f"Number {number}") for number in range(5)]
        created = self.sdk.create(given)
        listing = self.sdk.responses.input_items.list
        for limit in (1, 2, 100):
            for order, expected in (("asc", range(5)), ("desc", range(4, -1, -1))):
                items = list(listing(created.id, limit=limit, order=order))
                texts = [item.content[0].text for item in items]
                self.assertEqual(texts, [f"Number {number}" for number in expected], (limit, order))
                self.assertEqual({(item.type, item.role, item.status) for item in items}, {("message", "user", "completed")})
        default = listing(created.id)
        self.assertEqual(default.data[0].content[0].text, "Number 4")
        second = listing(created.id, order="asc", limit=2)
        self.assertTrue(second.has_more)
        self.assertEqual((second.first_id, second.last_id), (second.data[0].id, second.data[1].id))
        rest = listing(created.id, order="asc", after=second.last_id)
        self.assertEqual([item.content[0].text for item in rest.data], ["Number 2", "Number 3", "Number 4"])
        self.assertFalse(rest.has_more)

    def test_invalid_page_parameters(self):
        created = self.sdk.create(HELLO)
        listing = self.sdk.responses.input_items.list
        for options in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_none"}):
            with self.subTest(**options), self.assertRaises(openai.BadRequestError) as caught:
                listing(created.id, **options)
            self.assertEqual(caught.exception.param, next(iter(options)))

    def test_input_items_exclude_the_history(self):
        first = self.sdk.create("One")
        second = self.sdk.create("Two", previous_response_id=first.id)
        items = list(self.sdk.responses.input_items.list(second.id))
        self.assertEqual([item.content[0].text for item in items], ["Two"])

    def test_unknown_and_malformed_ids(self):
        self.assert_forgotten("resp_" + "0" * 48)
        self.assert_forgotten("resp_unknown")
        self.assert_refused(
            openai.BadRequestError,
            self.sdk.create,
            HELLO,
            previous_response_id="resp one",
            code="invalid_value",
            param="previous_response_id",
        )


class Continue(WithReplicas):
    def test_a_continuation_answers_like_the_whole_conversation(self):
        # Long enough that the cache decides, whatever else a worker still has to do.
        texts = ["Tell me of the sea. " * 200, "And of the wind?", "And of the sand?", "Now in short."]
        history, previous = [], None
        for text in texts:
            history.append(user(text))
            options = {"previous_response_id": previous} if previous else {}
            continued = self.sdk.create(text, **options)
            whole = self.sdk.create(history, store=False)
            self.assertEqual(continued.output_text, whole.output_text)
            self.assertEqual(continued.usage.input_tokens, whole.usage.input_tokens)
            self.assertEqual(continued.previous_response_id, previous)
            history += [item.model_dump(exclude_none=True) for item in continued.output]
            previous = continued.id
        # It was read from the cache of the worker that holds it.
        self.assertGreater(continued.usage.input_tokens_details.cached_tokens, 0)

    def test_instructions_and_tools_do_not_carry_over(self):
        first = self.sdk.create("One", instructions="Be brief.", tools=[WEATHER], tool_choice="none")
        second = self.sdk.create("Two", previous_response_id=first.id)
        self.assertIsNone(second.instructions)
        self.assertEqual(second.tools, [])
        history = [user("One"), *(item.model_dump(exclude_none=True) for item in first.output), user("Two")]
        self.assertEqual(second.output_text, self.sdk.create(history, store=False).output_text)

    def test_a_function_call_and_its_output(self):
        for streamed in (False, True):
            with self.subTest(streamed=streamed):
                asked = self.sdk.create("What is the weather like?", tools=[WEATHER])
                call = asked.output[-1]
                output = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
                options = {"tools": [WEATHER], "previous_response_id": asked.id}
                if streamed:
                    answer = list(self.sdk.create([output], stream=True, **options))[-1].response
                else:
                    answer = self.sdk.create([output], **options)
                self.assertEqual(answer.status, "completed")
                self.assertTrue(answer.output_text)
                thanks = self.sdk.create("Thanks.", previous_response_id=answer.id)
                history = [
                    user("What is the weather like?"),
                    {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
                    output,
                    {"role": "assistant", "content": answer.output_text},
                    user("Thanks."),
                ]
                self.assertEqual(thanks.output_text, self.sdk.create(history, store=False).output_text)

    def test_unpaired_calls_and_outputs_are_refused(self):
        asked = self.sdk.create("What is the weather like?", tools=[WEATHER])
        call = asked.output[-1]
        refused = self.assert_refused
        unknown = {"type": "function_call_output", "call_id": "call_none", "output": "Rain."}
        refused(
            openai.BadRequestError,
            self.sdk.create,
            [unknown],
            param="input",
            says="No tool call found for function call output with call_id call_none.",
        )
        refused(
            openai.BadRequestError,
            self.sdk.create,
            "Never mind.",
            previous_response_id=asked.id,
            param="input",
            says=f"No tool output found for function call {call.call_id}.",
        )

    def test_branches_and_parallel_branches(self):
        root = self.sdk.create("Tell me of the sea.")
        middle = self.sdk.create("And of the wind?", previous_response_id=root.id)
        self.sdk.create("And of the sand?", previous_response_id=middle.id)
        texts = [f"Branch {number}" for number in range(8)]
        answers = {}

        def branch(text, client):
            created = client.responses.create(model=MODEL, input=text, previous_response_id=root.id)
            answers[text] = created

        threads = [
            threading.Thread(target=branch, args=(text, client)) for text, client in zip(texts, self.sdk.turns)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT_S)
        start = [user("Tell me of the sea."), {"role": "assistant", "content": root.output_text}]
        for text in texts:
            whole = self.sdk.create([*start, user(text)], store=False)
            self.assertEqual(answers[text].output_text, whole.output_text)
        # No branch changed the stem.
        self.assertEqual(self.sdk.responses.retrieve(root.id), root)

    def test_a_deleted_ancestor_is_an_error(self):
        first = self.sdk.create("One")
        second = self.sdk.create("Two", previous_response_id=first.id)
        self.sdk.responses.delete(first.id)
        self.assert_refused(
            openai.BadRequestError,
            self.sdk.create,
            "Three",
            previous_response_id=second.id,
            code="previous_response_not_found",
            param="previous_response_id",
        )
        # It is itself still there.
        self.assertEqual(self.sdk.responses.retrieve(second.id).id, second.id)

    def test_reasoning_is_part_of_the_history(self):
        first = self.sdk.create("One", reasoning={"effort": "low"})
        second = self.sdk.create("Two", previous_response_id=first.id, reasoning={"effort": "low"})
        self.assertEqual(second.status, "completed")
        history = [user("One"), *(item.model_dump(exclude_none=True) for item in first.output), user("Two")]
        whole = self.sdk.create(history, reasoning={"effort": "low"}, store=False)
        self.assertEqual(second.output_text, whole.output_text)

    def test_only_one_parent_is_allowed(self):
        first = self.sdk.create("One")
        conversation = self.sdk.conversations.create()
        self.assert_refused(
            openai.BadRequestError,
            self.sdk.create,
            "Two",
            previous_response_id=first.id,
            conversation=conversation.id,
            code="mutually_exclusive_parameters",
            param="conversation",
        )

    def test_input_tokens_match_the_usage(self):
        first = self.sdk.create("One")
        given = {"model": MODEL, "input": "Two", "previous_response_id": first.id}
        counted = self.sdk.responses.input_tokens.count(**given)
        self.assertEqual(counted.object, "response.input_tokens")
        self.assertEqual(counted.input_tokens, self.sdk.responses.create(**given).usage.input_tokens)


class Conversations(WithReplicas):
    def texts(self, conversation_id):
        items = self.sdk.conversations.items.list(conversation_id, order="asc", limit=2)
        return [item.content[0].text for item in items]

    def test_create_update_delete(self):
        made = self.sdk.conversations.create(metadata={"topic": "sea"}, items=[user("One")])
        self.assertEqual((made.object, made.metadata), ("conversation", {"topic": "sea"}))
        self.assertEqual(self.sdk.conversations.retrieve(made.id), made)
        updated = self.sdk.conversations.update(made.id, metadata={"topic": "wind"})
        self.assertEqual(updated.metadata, {"topic": "wind"})
        self.assertEqual(self.sdk.conversations.retrieve(made.id).metadata, {"topic": "wind"})
        deleted = self.sdk.conversations.delete(made.id)
        self.assertEqual((deleted.id, deleted.deleted, deleted.object), (made.id, True, "conversation.deleted"))
        for call in (self.sdk.conversations.retrieve, self.sdk.conversations.delete):
            self.assert_refused(
                openai.NotFoundError, call, made.id, says=f"Conversation with id '{made.id}' not found."
            )
        self.assert_refused(openai.NotFoundError, self.sdk.create, HELLO, conversation=made.id)

    def test_add_list_delete_items(self):
        made = self.sdk.conversations.create(items=[user("One")])
        items = self.sdk.conversations.items
        added = items.create(made.id, items=[user("Two"), user("Three")])
        self.assertEqual([item.content[0].text for item in added.data], ["Two", "Three"])
        self.assertEqual(self.texts(made.id), ["One", "Two", "Three"])
        # The newest first, unless asked otherwise.
        self.assertEqual([item.content[0].text for item in items.list(made.id)], ["Three", "Two", "One"])
        two = added.data[0]
        self.assertEqual(items.retrieve(two.id, conversation_id=made.id), two)
        left = items.delete(two.id, conversation_id=made.id)
        self.assertEqual(left.id, made.id)
        self.assertEqual(self.texts(made.id), ["One", "Three"])
        with self.assertRaises(openai.NotFoundError):
            items.retrieve(two.id, conversation_id=made.id)
        with self.assertRaises(openai.BadRequestError):
            items.create(made.id, items=[user(str(number)) for number in range(21)])

    def test_responses_are_appended(self):
        made = self.sdk.conversations.create(items=[user("My name is Ann.")])
        first = self.sdk.create("Tell me of the sea.", conversation=made.id)
        self.assertEqual(first.conversation.id, made.id)
        second = list(self.sdk.create("And the wind?", conversation={"id": made.id}, stream=True))[-1].response
        self.assertEqual(second.status, "completed")
        said = ["My name is Ann.", "Tell me of the sea.", first.output_text, "And the wind?", second.output_text]
        self.assertEqual(self.texts(made.id), said)
        history = [user(said[0]), user(said[1]), {"role": "assistant", "content": said[2]}, user(said[3])]
        self.assertEqual(second.output_text, self.sdk.create(history, store=False).output_text)

    def test_a_function_call_and_its_output(self):
        made = self.sdk.conversations.create()
        asked = self.sdk.create("What is the weather like?", conversation=made.id, tools=[WEATHER])
        output = {"type": "function_call_output", "call_id": asked.output[-1].call_id, "output": "Rain."}
        answer = self.sdk.create([output], conversation=made.id, tools=[WEATHER])
        self.assertTrue(answer.output_text)
        types = [item.type for item in self.sdk.conversations.items.list(made.id, order="asc")]
        self.assertEqual(types, ["message", "function_call", "function_call_output", "message"])


class ConversationLocks(unittest.TestCase):
    def test_a_conversation_has_one_running_response(self):
        with Cluster(replicas=2, engine_arguments=("--decode-time", "50ms")) as cluster:
            sdk = Replicas(cluster)
            self.addCleanup(sdk.close)
            made = sdk.conversations.create()
            stream = sdk.create(HELLO, conversation=made.id, stream=True, max_output_tokens=1000)
            next(stream)
            with self.assertRaises(openai.BadRequestError) as caught:
                sdk.create(HELLO, conversation=made.id)
            self.assertEqual((caught.exception.code, caught.exception.param), ("conversation_locked", "conversation"))
            # A client that leaves frees it, and leaves nothing in it.
            stream.close()

            def next_one():
                try:
                    return sdk.create(HELLO, conversation=made.id)
                except openai.BadRequestError as error:
                    self.assertEqual(error.code, "conversation_locked")

            answer = eventually("the conversation is free again", next_one)
            texts = [item.content[0].text for item in sdk.conversations.items.list(made.id, order="asc")]
            self.assertEqual(texts, [HELLO, answer.output_text])


class StateTokens(WithReplicas):
    OPTIONS = {"store": False, "include": ENCRYPTED}

    def state(self, response):
        """The state item, which is the last."""
        item = response.output[-1]
        self.assertEqual((item.type, item.summary), ("reasoning", []))
        self.assertTrue(item.encrypted_content.startswith("wrc1."))
        return item

    def test_a_conversation_continues_on_any_replica_without_a_store(self):
        for streamed in (False, True):
            with self.subTest(streamed=streamed):
                history, previous = [], None
                for text in ("Tell me of the sea.", "And of the wind?", "And of the sand?"):
                    history.append(user(text))
                    options = dict(self.OPTIONS)
                    if previous:
                        options["extra_body"] = {"previous_response": previous}
                    if streamed:
                        events = list(self.sdk.create(text, stream=True, **options))
                        answer = events[-1].response
                        done = [event.item for event in events if event.type == "response.output_item.done"]
                        self.assertEqual(done, answer.output)
                    else:
                        answer = self.sdk.create(text, **options)
                    self.state(answer)
                    self.assertIs(answer.store, False)
                    whole = self.sdk.create(history, store=False)
                    self.assertEqual(answer.output_text, whole.output_text)
                    history.append({"role": "assistant", "content": answer.output_text})
                    previous = answer.model_dump(mode="json")
                self.assert_forgotten(answer.id)

    def test_the_client_may_resend_all_items(self):
        """As clients do that know only OpenAI's own encrypted reasoning."""
        first = self.sdk.create("One", reasoning={"effort": "low"}, **self.OPTIONS)
        reasoning = first.output[0]
        self.assertTrue(reasoning.encrypted_content)
        self.state(first)
        replayed = [user("One"), *(item.model_dump(exclude_none=True) for item in first.output), user("Two")]
        second = self.sdk.create(replayed, reasoning={"effort": "low"}, **self.OPTIONS)
        # Only what is sealed has the thoughts.
        for item in replayed:
            item.pop("content") if item.get("type") == "reasoning" and "content" in item else None
        sealed = self.sdk.create(replayed, reasoning={"effort": "low"}, **self.OPTIONS)
        self.assertEqual(sealed.output_text, second.output_text)

    def test_a_function_call_and_its_output(self):
        asked = self.sdk.create("What is the weather like?", tools=[WEATHER], **self.OPTIONS)
        call = asked.output[0]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
        previous = {"previous_response": asked.model_dump(mode="json")}
        answer = self.sdk.create([output], tools=[WEATHER], extra_body=previous, **self.OPTIONS)
        self.assertTrue(answer.output_text)

    def test_from_a_state_token_to_a_stored_response(self):
        first = self.sdk.create("One", **self.OPTIONS)
        previous = {"previous_response": first.model_dump(mode="json")}
        second = self.sdk.create("Two", extra_body=previous)
        third = self.sdk.create("Three", previous_response_id=second.id)
        history = [
            user("One"),
            {"role": "assistant", "content": first.output_text},
            user("Two"),
            {"role": "assistant", "content": second.output_text},
            user("Three"),
        ]
        self.assertEqual(third.output_text, self.sdk.create(history, store=False).output_text)

    def test_any_change_is_rejected_with_the_same_error(self):
        first = self.sdk.create("One", reasoning={"effort": "low"}, **self.OPTIONS)
        text = self.state(first).encrypted_content
        changes = [text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :] for at in range(0, len(text), 7)]
        changes += [text[:-1], text + "A", "gAAAAABo" + "x" * 100 + "==", "wrc1.", ""]
        for changed in changes:
            response = first.model_dump(mode="json")
            response["output"][-1]["encrypted_content"] = changed
            with self.assertRaises(openai.BadRequestError, msg=changed) as caught:
                self.sdk.create("Two", extra_body={"previous_response": response}, **self.OPTIONS)
            if changed:
                self.assertEqual(caught.exception.code, "invalid_encrypted_content", changed)
            else:
                self.assertEqual(caught.exception.param, "previous_response")
        sealed = first.output[0].model_dump(exclude_none=True)
        sealed["encrypted_content"] = sealed["encrypted_content"][:-2] + "zz"
        self.assert_refused(
            openai.BadRequestError, self.sdk.create, [user("One"), sealed, user("Two")], code="invalid_encrypted_content"
        )

    def test_mutually_exclusive_parameters(self):
        first = self.sdk.create("One", **self.OPTIONS)
        previous = first.model_dump(mode="json")
        stored = self.sdk.create("One")
        body = {"previous_response": previous, "previous_response_id": stored.id}
        with self.assertRaises(openai.BadRequestError) as caught:
            self.sdk.create("Two", extra_body=body)
        self.assertEqual(caught.exception.code, "mutually_exclusive_parameters")
        bare = {**previous, "output": previous["output"][:-1]}
        with self.assertRaises(openai.BadRequestError) as caught:
            self.sdk.create("Two", extra_body={"previous_response": bare})
        self.assertEqual(caught.exception.param, "previous_response")


class StateTokenLimits(unittest.TestCase):
    def test_a_state_too_large_for_a_token_is_refused_before_an_engine_works(self):
        limits = {"state_token": {"keys": [STATE_TOKEN_KEY], "max_plain_size": "4KiB"}}
        with Cluster(config={"responses": limits}) as cluster:
            sdk = Replicas(cluster)
            self.addCleanup(sdk.close)
            with self.assertRaises(openai.BadRequestError) as caught:
                sdk.create("a" * 5000, store=False, include=ENCRYPTED)
            self.assertEqual(caught.exception.param, "input")
            self.assertEqual(cluster.seen("finished"), 0)
            self.assertEqual(sdk.create("a" * 5000, store=False).status, "completed")


class Tenants(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        tenants = [{"name": "a", "keys": ["sk-a"], "cache_salt": "one"}, {"name": "b", "keys": ["sk-b"]}]
        cls.cluster = Cluster(replicas=2, config={"tenants": tenants})
        cls.addClassCleanup(cls.cluster.close)
        cls.a, cls.b, cls.stranger = (Replicas(cls.cluster, key) for key in ("sk-a", "sk-b", "sk-c"))
        for sdk in (cls.a, cls.b, cls.stranger):
            cls.addClassCleanup(sdk.close)

    def refusal(self, error, call, *arguments, **options):
        with self.assertRaises(error) as caught:
            call(*arguments, **options)
        return caught.exception

    def test_an_unknown_key_gets_nothing(self):
        for call in (
            lambda: self.stranger.create(HELLO),
            lambda: self.stranger.responses.retrieve("resp_x"),
            lambda: self.stranger.conversations.create(),
            lambda: self.stranger.models.list(),
        ):
            self.assertEqual(self.refusal(openai.AuthenticationError, call).code, "invalid_api_key")

    def test_responses_of_other_tenants_are_not_found(self):
        theirs = self.a.create(HELLO)
        conversation = self.a.conversations.create(items=[user("One")])
        unknown = "resp_" + "f" * 48

        def same(call):
            """The refusals of what is another's and of what does not exist differ in the id alone."""
            mine, none = (self.refusal(openai.APIStatusError, call, id) for id in (theirs.id, unknown))
            self.assertEqual(mine.status_code, none.status_code)
            self.assertEqual(json.dumps(mine.body).replace(theirs.id, unknown), json.dumps(none.body))
            return mine.status_code

        self.assertEqual(same(self.b.responses.retrieve), 404)
        self.assertEqual(same(self.b.responses.cancel), 404)
        self.assertEqual(same(self.b.responses.delete), 404)
        self.assertEqual(same(lambda id: self.b.responses.input_items.list(id).data), 404)
        self.assertEqual(same(lambda id: self.b.create(HELLO, previous_response_id=id)), 400)
        for call in (self.b.conversations.retrieve, self.b.conversations.delete):
            self.refusal(openai.NotFoundError, call, conversation.id)
        self.refusal(openai.NotFoundError, self.b.create, HELLO, conversation=conversation.id)
        # And nothing happened to it.
        self.assertEqual(self.a.responses.retrieve(theirs.id), theirs)
        self.assertEqual(self.a.conversations.retrieve(conversation.id), conversation)

    def test_a_state_token_of_another_tenant_is_rejected(self):
        first = self.a.create("One", store=False, include=ENCRYPTED)
        body = {"previous_response": first.model_dump(mode="json")}
        self.assertTrue(self.a.create("Two", store=False, extra_body=body).output_text)
        refused = self.refusal(openai.BadRequestError, self.b.create, "Two", store=False, extra_body=body)
        self.assertEqual(refused.code, "invalid_encrypted_content")

    def test_a_client_cannot_set_the_cache_salt(self):
        refused = self.refusal(openai.BadRequestError, self.a.create, HELLO, extra_body={"cache_salt": "mine"})
        self.assertEqual(refused.param, "cache_salt")


class Protocol(WithReplicas):
    def test_raw_answers_have_a_request_id(self):
        raw = self.sdk.responses.with_raw_response.create(
            model=MODEL, input=HELLO, extra_headers={"x-request-id": "mine-1"}
        )
        self.assertEqual(raw.headers["x-request-id"], "mine-1")
        again = self.sdk.responses.with_raw_response.retrieve(raw.parse().id)
        self.assertTrue(again.headers["x-request-id"])
        with self.assertRaises(openai.NotFoundError) as caught:
            self.sdk.responses.retrieve("resp_none", extra_headers={"x-request-id": "mine-2"})
        self.assertEqual(caught.exception.request_id, "mine-2")

    def test_reserved_parameters_are_refused_by_name(self):
        for name in ("request_id", "kv_transfer_params", "ec_transfer_params"):
            with self.subTest(name), self.assertRaises(openai.BadRequestError) as caught:
                self.sdk.create(HELLO, extra_body={name: {"x": 1}})
            self.assertEqual(caught.exception.param, name)

    def test_an_unknown_model_is_not_found(self):
        with self.assertRaises(openai.NotFoundError) as caught:
            self.sdk.responses.create(model="none", input=HELLO)
        self.assertEqual((caught.exception.code, caught.exception.param), ("model_not_found", "model"))

    def test_parameters_that_openai_refuses(self):
        for name, options in (
            ("prompt", {"prompt": {"id": "pmpt_1"}}),
            ("metadata", {"metadata": {str(number): "x" for number in range(17)}}),
            ("include", {"include": ["everything"]}),
        ):
            with self.subTest(name), self.assertRaises(openai.BadRequestError) as caught:
                self.sdk.create(HELLO, **options)
            self.assertTrue((caught.exception.param or "").startswith(name), caught.exception)


class Disconnects(unittest.TestCase):
    def test_a_disconnected_client_stops_the_engine_and_nothing_is_stored(self):
        with Cluster(replicas=2, engine_arguments=("--decode-time", "50ms")) as cluster:
            sdk = Replicas(cluster)
            self.addCleanup(sdk.close)
            stream = sdk.create(HELLO, stream=True, max_output_tokens=1000)
            created = next(stream).response
            stream.close()
            eventually("the engine has stopped", lambda: cluster.seen("aborted") == 1)
            impatient = Replicas(cluster, timeout=0.5)
            self.addCleanup(impatient.close)
            with self.assertRaises(openai.APITimeoutError):
                impatient.create(HELLO, max_output_tokens=1000)
            eventually("the engine has stopped", lambda: cluster.seen("aborted") == 2)
            self.assertEqual(cluster.seen("running"), 0)
            for _ in cluster.routers:
                with self.assertRaises(openai.NotFoundError):
                    sdk.responses.retrieve(created.id)

    def test_a_stream_whose_engine_dies_fails(self):
        arguments = ("--decode-time", "50ms")
        with Cluster(engines=1, replicas=2, engine_arguments=arguments) as cluster:
            sdk = Replicas(cluster)
            self.addCleanup(sdk.close)
            stream = sdk.create(HELLO, stream=True, max_output_tokens=1000)
            events = [next(stream) for _ in range(8)]
            cluster.engines[0].kill()
            events += list(stream)
            self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
            self.assertEqual(events[-1].type, "response.failed")
            self.assertEqual(events[-1].response.error.code, "server_error")
            for _ in cluster.routers:
                try:
                    self.assertEqual(sdk.responses.retrieve(events[-1].response.id).status, "failed")
                except openai.NotFoundError:
                    pass


class LostStore(unittest.TestCase):
    def test_a_store_outage_is_503_and_not_404(self):
        with Cluster(replicas=2) as cluster:
            sdk = Replicas(cluster)
            self.addCleanup(sdk.close)
            known = sdk.create("One")
            before = cluster.seen("finished")
            cluster.redis.kill()
            for _ in cluster.routers:
                for call in (
                    lambda: sdk.responses.retrieve(known.id),
                    lambda: sdk.responses.delete(known.id),
                    lambda: sdk.create("Two", previous_response_id=known.id),
                    lambda: sdk.create("Two"),
                    lambda: sdk.conversations.create(),
                ):
                    with self.assertRaises(openai.InternalServerError) as caught:
                        call()
                    self.assertEqual(caught.exception.status_code, 503)
                    self.assertTrue(caught.exception.response.headers.get("retry-after"))
            # No engine worked for what could not be kept, and what needs no store goes on.
            self.assertEqual(cluster.seen("finished"), before)
            for _ in cluster.routers:
                self.assertEqual(sdk.create("Two", store=False).status, "completed")
            cluster.redis.start()

            def is_forgotten():
                try:
                    sdk.responses.retrieve(known.id)
                except openai.NotFoundError:
                    return True
                except openai.InternalServerError:
                    return False

            # It came back empty: now it is unknown indeed.
            for _ in cluster.routers:
                eventually("the store is back", is_forgotten)
            self.assertEqual(sdk.create("Two").status, "completed")

    def test_a_stream_that_could_not_be_stored_says_so_in_its_final_event(self):
        with Cluster(replicas=2, engine_arguments=("--decode-time", "50ms")) as cluster:
            sdk = Replicas(cluster)
            self.addCleanup(sdk.close)
            stream = sdk.create(HELLO, stream=True, max_output_tokens=30)
            events = [next(stream) for _ in range(8)]
            self.assertIs(events[0].response.store, True)
            cluster.redis.kill()
            events += list(stream)
            self.assertEqual([event.sequence_number for event in events], list(range(len(events))))
            last = events[-1].response
            self.assertEqual((events[-1].type, last.store), ("response.incomplete", False))
            self.assertTrue(last.output_text)

    def test_an_unstored_answer_is_not_retried_by_the_sdk(self):
        with Cluster(replicas=2, engine_arguments=("--decode-time", "100ms")) as cluster:
            sdk = Replicas(cluster, max_retries=2)
            self.addCleanup(sdk.close)
            failed = []

            def ask():
                try:
                    sdk.create(HELLO, max_output_tokens=30)
                except openai.APIStatusError as error:
                    failed.append(error)

            asking = threading.Thread(target=ask)
            asking.start()
            eventually("the engine works", lambda: cluster.seen("running") == 1)
            cluster.redis.kill()
            asking.join(2 * LIMIT_S)
            [error] = failed
            self.assertEqual(error.status_code, 503)
            self.assertEqual(error.response.headers["x-should-retry"], "false")
            self.assertEqual(cluster.seen("finished") + cluster.seen("aborted"), 1)


if __name__ == "__main__":
    unittest.main()
