"""OpenAI's agents SDK, which runs tools in a loop, against two replicas over one Redis."""

import asyncio
import itertools
import unittest

import openai

from cluster import ENGINE_ARGUMENTS, Cluster
from patience import LIMIT_S

try:
    import agents
    import httpx2
except ImportError:
    # They want Python 3.10.
    agents = None

MODEL = "sim"


class ToTheNext:
    """Sends each request to another of the routers: a hook of the SDK's HTTP client."""

    def __init__(self, urls):
        self.urls = itertools.cycle([httpx2.URL(url) for url in urls])
        self.paths = []

    async def __call__(self, request):
        url = next(self.urls)
        self.paths.append((request.method, request.url.path))
        request.url = request.url.copy_with(host=url.host, port=url.port)
        request.headers["host"] = f"{url.host}:{url.port}"


@unittest.skipIf(agents is None, "the agents SDK wants Python 3.10")
class Agents(unittest.IsolatedAsyncioTestCase):
    #: Of the engines.
    arguments = ENGINE_ARGUMENTS

    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster(replicas=2, engine_arguments=cls.arguments)
        cls.addClassCleanup(cls.cluster.close)

    async def asyncSetUp(self):
        agents.set_tracing_disabled(True)
        self.sent = ToTheNext([router.url for router in self.cluster.routers])
        self.client = openai.AsyncOpenAI(
            base_url=f"{self.cluster.router.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=LIMIT_S,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"request": [self.sent]}),
        )
        self.addAsyncCleanup(self.client.close)
        self.asked = []

        @agents.function_tool
        def weather(city: str) -> str:
            """What the weather is like in a city."""
            self.asked.append(city)
            return "Rain."

        self.agent = agents.Agent(
            name="Forecaster",
            instructions="Tell people what the weather is like.",
            model=agents.OpenAIResponsesModel(MODEL, openai_client=self.client),
            tools=[weather],
        )

    async def run_agent(self, text, **options):
        return await asyncio.wait_for(agents.Runner.run(self.agent, text, **options), 2 * LIMIT_S)

    def creates(self):
        return self.sent.paths.count(("POST", "/v1/responses"))

    async def test_a_loop_of_tools(self):
        result = await self.run_agent("What is the weather like?")
        self.assertEqual(len(self.asked), 1)
        self.assertTrue(result.final_output)
        self.assertEqual(self.creates(), 2)

    async def test_a_loop_that_continues_the_last_response(self):
        first = await self.run_agent("What is the weather like?", auto_previous_response_id=True)
        second = await self.run_agent("And tomorrow?", previous_response_id=first.last_response_id)
        self.assertEqual(len(self.asked), 2)
        self.assertEqual(self.creates(), 4)
        # The second run sent only what was new, and what went before was there.
        items = [item async for item in self.client.responses.input_items.list(second.last_response_id)]
        self.assertEqual([item.type for item in items], ["function_call_output"])
        whole = second.raw_responses[-1].usage.input_tokens
        alone = first.raw_responses[0].usage.input_tokens
        self.assertGreater(whole, alone)

    async def test_a_streamed_loop(self):
        result = agents.Runner.run_streamed(self.agent, "What is the weather like?", auto_previous_response_id=True)
        types = [event.type async for event in result.stream_events()]
        self.assertEqual(len(self.asked), 1)
        self.assertTrue(result.final_output)
        self.assertIn("run_item_stream_event", types)

    async def test_a_loop_in_a_conversation(self):
        conversation = await self.client.conversations.create()
        for text in ("What is the weather like?", "And tomorrow?"):
            result = await self.run_agent(text, conversation_id=conversation.id)
            self.assertTrue(result.final_output)
        self.assertEqual(len(self.asked), 2)
        items = [item async for item in self.client.conversations.items.list(conversation.id, order="asc")]
        turn = ["message", "function_call", "function_call_output", "message"]
        self.assertEqual([item.type for item in items], 2 * turn)

    async def test_a_session_kept_in_a_conversation(self):
        session = agents.OpenAIConversationsSession(openai_client=self.client)
        for text in ("What is the weather like?", "And tomorrow?", "And on Sunday?"):
            result = await self.run_agent(text, session=session)
            self.assertTrue(result.final_output)
        self.assertEqual(len(self.asked), 3)
        items = await session.get_items()
        self.assertEqual(len(items), 12)
        self.assertEqual((await session.get_items(limit=1))[0]["role"], "assistant")
        await session.pop_item()
        self.assertEqual(len(await session.get_items()), 11)
        # More than fit into one request.
        await session.add_items([{"role": "user", "content": f"Note {number}"} for number in range(45)])
        items = await session.get_items()
        self.assertEqual([item["content"][0]["text"] for item in items[-3:]], ["Note 42", "Note 43", "Note 44"])
        self.assertEqual(len(items), 56)
        await session.clear_session()
        with self.assertRaises(ValueError):
            session.session_id


if __name__ == "__main__":
    unittest.main()
