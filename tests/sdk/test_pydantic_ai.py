"""Pydantic AI, which speaks each of the three APIs by the SDK of its maker, against a router and its engines."""

import asyncio
import unittest

from cluster import ENGINE_ARGUMENTS, Cluster
from patience import LIMIT_S

try:
    import pydantic
    import pydantic_ai
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider
except ImportError:
    # It wants Python 3.10.
    pydantic_ai = None

MODEL = "sim"
#: Of engines whose answers end by themselves: Messages ask for 4,096 tokens.
ENDING = (*ENGINE_ARGUMENTS, "--stop-after", "32")


@unittest.skipIf(pydantic_ai is None, "Pydantic AI wants Python 3.10")
class PydanticAi(unittest.TestCase):
    #: Of the engines.
    arguments = ENDING

    @classmethod
    def setUpClass(cls):
        cls.cluster = Cluster(engine_arguments=cls.arguments)
        cls.addClassCleanup(cls.cluster.close)

    def models(self, name=MODEL):
        """One model of each API, as its users write it."""
        openai = OpenAIProvider(base_url=self.cluster.base_url, api_key="none")
        anthropic = AnthropicProvider(base_url=self.cluster.router.url, api_key="none")
        return (
            OpenAIChatModel(name, provider=openai),
            OpenAIResponsesModel(name, provider=openai),
            AnthropicModel(name, provider=anthropic),
        )

    def for_each_api(self, check, **options):
        """Each in an event loop of its own, as the connections of its client are."""

        async def once(place):
            model = self.models(**options)[place]
            async with model:
                await asyncio.wait_for(check(model), 2 * LIMIT_S)

        for place, model in enumerate(self.models(**options)):
            with self.subTest(type(model).__name__):
                asyncio.run(once(place))

    def test_a_second_turn_has_the_first(self):
        async def check(model):
            agent = pydantic_ai.Agent(model, instructions="Be brief.")
            first = await agent.run("Tell me of the sea.")
            self.assertTrue(first.output)
            second = await agent.run("And of its tides?", message_history=first.all_messages())
            self.assertGreater(second.usage.input_tokens, first.usage.input_tokens)

        self.for_each_api(check)

    def test_text_is_streamed(self):
        async def check(model):
            async with pydantic_ai.Agent(model).run_stream("Tell me of the sea.") as result:
                pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
                self.assertGreater(len(pieces), 1)
                self.assertEqual("".join(pieces), await result.get_output())
                self.assertGreater(result.usage.output_tokens, 0)

        self.for_each_api(check)

    def test_a_tool_is_called_and_answered(self):
        async def check(model):
            asked = []
            agent = pydantic_ai.Agent(model)

            @agent.tool_plain
            def weather(city: str) -> str:
                """What the weather is like in a city."""
                asked.append(city)
                return "Rain."

            result = await agent.run("What is the weather like?")
            self.assertEqual(len(asked), 1)
            self.assertTrue(result.output)
            self.assertEqual(result.usage.requests, 2)

        self.for_each_api(check)

    def test_an_answer_has_the_type_that_was_asked_for(self):
        class Sea(pydantic.BaseModel):
            name: str
            depth: int

        async def check(model):
            # As a call of a tool, and by a schema that the engine enforces; Messages have only the first.
            kinds = [pydantic_ai.ToolOutput(Sea)]
            if not isinstance(model, AnthropicModel):
                kinds.append(pydantic_ai.NativeOutput(Sea))
            for kind in kinds:
                result = await pydantic_ai.Agent(model, output_type=kind).run("Describe a sea.")
                self.assertIsInstance(result.output, Sea)

        self.for_each_api(check)

    def test_a_conversation_that_the_router_keeps(self):
        async def run():
            model = self.models()[1]
            async with model:
                agent = pydantic_ai.Agent(model, model_settings={"openai_previous_response_id": "auto"})
                first = await agent.run("Tell me of the sea.")
                second = await agent.run("And of its tides?", message_history=first.all_messages())
                self.assertGreater(second.usage.input_tokens, first.usage.input_tokens)

        asyncio.run(asyncio.wait_for(run(), 2 * LIMIT_S))

    def test_an_unknown_model_is_an_error_with_its_status(self):
        async def check(model):
            with self.assertRaises(pydantic_ai.ModelHTTPError) as caught:
                await pydantic_ai.Agent(model).run("Hello")
            self.assertEqual(caught.exception.status_code, 404)

        self.for_each_api(check, name="none")


class OverChat(PydanticAi):
    """Over engines that speak chat completions and Messages only."""

    arguments = (*ENDING, "--no-responses")


if __name__ == "__main__":
    unittest.main()
