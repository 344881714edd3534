"""WebSocket mode as OpenAI's Python SDK and its agents SDK use it, against two replicas over one Redis."""

import asyncio
import threading
import unittest

import openai

from cluster import Cluster, Router, eventually

try:
    import agents
except ImportError:
    # They want Python 3.10.
    agents = None

MODEL = "sim"
LIMIT_S = 30


def strictly(event):
    """Fails where the SDK's own types do not fit what it received."""
    if isinstance(event, dict):
        raise AssertionError(f"an event of no known type: {event}")
    type(event).model_validate(event.model_dump(), strict=False)
    return event


@unittest.skipIf(agents is None, "WebSocket mode wants Python 3.10")
class Websocket(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster(replicas=2)
        cls.addClassCleanup(cls.cluster.close)

    def client(self, router=0):
        url = f"{self.cluster.routers[router].url}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=LIMIT_S)
        self.addCleanup(client.close)
        return client

    def turn(self, connection, text="Tell me of the sea.", **options):
        """The last event of a turn, and the types of all."""
        connection.response.create(model=MODEL, input=text, max_output_tokens=8, **options)
        kinds = []
        for event in connection:
            strictly(event)
            kinds.append(event.type)
            if event.type in ("response.completed", "response.incomplete", "response.failed", "error"):
                return event, kinds

    def test_turns_on_one_connection(self):
        with self.client().responses.connect() as connection:
            first, kinds = self.turn(connection, store=False)
            self.assertEqual(kinds[:2], ["response.created", "response.in_progress"])
            self.assertIn("response.output_text.delta", kinds)
            second, _ = self.turn(connection, "And in French?", store=False, previous_response_id=first.response.id)
            self.assertEqual(second.response.previous_response_id, first.response.id)
            self.assertTrue(second.response.output_text)
            self.assertGreater(second.response.usage.input_tokens, first.response.usage.input_tokens)

    def test_what_is_lost_with_a_connection(self):
        with self.client().responses.connect() as connection:
            unstored, _ = self.turn(connection, store=False)
            stored, _ = self.turn(connection)
        with self.client(1).responses.connect() as connection:
            error, kinds = self.turn(connection, previous_response_id=unstored.response.id)
            self.assertEqual(kinds, ["error"])
            self.assertEqual(error.error.code, "previous_response_not_found")
            self.assertEqual(error.status, 400)
            continued, _ = self.turn(connection, previous_response_id=stored.response.id)
            self.assertEqual(continued.response.previous_response_id, stored.response.id)
        self.assertEqual(self.client().responses.retrieve(continued.response.id).status, "incomplete")

    def test_lanes(self):
        with self.client().responses.connect() as connection:
            for lane in ("a", "b"):
                connection.response.create(model=MODEL, input=lane, max_output_tokens=8, stream_id=lane)
            ended = set()
            for event in connection:
                if event.type == "response.incomplete":
                    ended.add(event.stream_id)
                if len(ended) == 2:
                    break
            self.assertEqual(ended, {"a", "b"})

    def test_nothing_is_generated_ahead(self):
        with self.client().responses.connect() as connection:
            warm, kinds = self.turn(connection, generate=False, store=False)
            self.assertEqual(kinds, ["response.created", "response.in_progress", "response.completed"])
            self.assertEqual(warm.response.output, [])
            self.turn(connection, "Go on.", store=False, previous_response_id=warm.response.id)

    def test_a_reconnecting_client_outlives_a_router(self):
        cluster = Cluster(engines=1)
        self.addCleanup(cluster.close)
        client = openai.OpenAI(base_url=cluster.base_url, api_key="none", max_retries=0)
        self.addCleanup(client.close)
        reconnected, received = [], []

        def read(connection):
            # The SDK connects again while it waits for an event.
            for event in connection:
                received.append(event.type)
                if event.type == "response.incomplete":
                    return

        with client.responses.connect(on_reconnecting=reconnected.append, initial_delay=0.1) as connection:
            self.turn(connection)
            address = cluster.router.url.removeprefix("http://")
            cluster.router.stop()
            workers = [engine.url for engine in cluster.engines]
            config = {"api": {"listen": address}}
            cluster.router = cluster.keep(Router(cluster.directory.name, workers, config, "again"))
            eventually("the engine is up", cluster.workers_up)
            reader = threading.Thread(target=read, args=[connection])
            reader.start()
            eventually("it is connected again", lambda: self.open_now(cluster) == 1)
            connection.response.create(model=MODEL, input="Go on.", max_output_tokens=8)
            reader.join(LIMIT_S)
        self.assertTrue(reconnected)
        self.assertEqual(received[-1:], ["response.incomplete"])

    def test_an_async_client(self):
        async def run():
            url = f"{self.cluster.router.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                async with client.responses.connect() as connection:
                    await connection.response.create(model=MODEL, input="hello", max_output_tokens=4)
                    async for event in connection:
                        strictly(event)
                        if event.type == "response.incomplete":
                            return event.response

        response = asyncio.run(asyncio.wait_for(run(), LIMIT_S))
        self.assertTrue(response.output_text)

    def test_an_agent_with_tools(self):
        asked = []

        @agents.function_tool
        def weather(city: str) -> str:
            """What the weather is like in a city."""
            asked.append(city)
            return "Rain."

        async def run():
            agents.set_tracing_disabled(True)
            url = f"{self.cluster.router.url}/v1"
            provider = agents.OpenAIProvider(base_url=url, api_key="none", use_responses_websocket=True)
            agent = agents.Agent(name="Forecaster", instructions="Say what the weather is.", model=MODEL, tools=[weather])
            config = agents.RunConfig(model_provider=provider)
            try:
                result = await agents.Runner.run(agent, "What is the weather like?", run_config=config)
            finally:
                await provider.aclose()
            return result.final_output

        before = self.opened()
        self.assertTrue(asyncio.run(asyncio.wait_for(run(), 2 * LIMIT_S)))
        self.assertEqual(len(asked), 1)
        self.assertEqual(self.opened() - before, 1, "both turns were on one connection")

    def open_now(self, cluster):
        return sum(value for _, value in cluster.metric("warmroute_websocket_connections"))

    def opened(self):
        """Connections that have come and gone."""
        ended = self.cluster.metric("warmroute_websocket_connections_closed_total")
        now = self.cluster.metric("warmroute_websocket_connections")
        return sum(value for _, value in ended + now)


if __name__ == "__main__":
    unittest.main()
