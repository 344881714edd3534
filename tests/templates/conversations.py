"""The conversations that every template of the corpus renders: what clients of chat completions send, in the form in which
transformers takes it (arguments of calls are objects)."""


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(name, arguments, id="abcdefgh1"):
    return {"id": id, "function": {"arguments": arguments, "name": name}, "type": "function"}


def result(content, id="abcdefgh1", **more):
    return {"role": "tool", "content": content, "tool_call_id": id, **more}


def function(name, description, parameters):
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


SYSTEM = system("  Be brief.\nAnd kind. ")
WEATHER = function(
    "get_weather",
    'The weather\nof a <place> & "time"',
    {
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "A city, größer als 5"},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "days": {"type": "array", "items": {"type": "integer"}},
            "where": {
                "type": "object",
                "properties": {"lat": {"type": "number"}, "lon": {"type": ["number", "null"]}},
                "required": ["lat"],
            },
        },
        "required": ["place"],
    },
)
NOW = function("now", "The time.", {"type": "object", "properties": {}})
NUMBERS = function(
    "measure",
    "Numbers of all sizes.",
    {
        "type": "object",
        "properties": {
            "tiny": {"type": "number", "minimum": 1e-07, "default": 1.5e-10},
            "large": {"type": "number", "maximum": 1e20, "exclusiveMinimum": -1e16},
            "huge": {"type": "integer", "maximum": 2**64, "minimum": -(2**70), "default": 18446744073709551615},
            "any": {"anyOf": [{"type": "number", "multipleOf": 0.1}, {"type": "null"}], "description": "or none"},
        },
        "required": ["tiny", "huge"],
        "additionalProperties": False,
    },
)
DEEP = function(
    "deep",
    "Refers and nests.",
    {
        "type": "object",
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "properties": {
            "list": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
            "map": {"type": "object", "additionalProperties": {"type": "string"}},
            "node": {"$ref": "#/$defs/node"},
            "pair": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            "nullable": {"type": "string", "nullable": True, "enum": ["x", None]},
        },
    },
)
BARE = {"type": "function", "function": {"name": "bare"}}
ARGUMENTS = {"place": 'Köln "am" Rhein', "days": [1, 2.5, 1e20], "deep": {"x": None, "y": True}}
SIZES = {"tiny": 1e-07, "large": 1e20, "huge": 2**70, "whole": 3.0, "list": [1e-05, 123456789.125, -0.0], "none": None}

CONVERSATIONS = {
    "one": dict(messages=[user("Hi!")]),
    "system": dict(messages=[SYSTEM, user("Hi!")]),
    "empty system": dict(messages=[system(""), user("Hi!")]),
    "later system": dict(messages=[user("Hi!"), assistant("Hello."), system("Be brief."), user("Go on.")]),
    "two systems": dict(messages=[SYSTEM, system("Be exact."), user("Hi!")]),
    "developer": dict(messages=[{"role": "developer", "content": "Rules."}, user("a")]),
    "turns": dict(messages=[SYSTEM, user(" One? "), assistant("1."), user("Two?"), assistant(" 2. "), user("Three?\n")]),
    "many turns": dict(messages=[m for i in range(6) for m in (user(f"q{i}"), assistant(f"a{i}"))] + [user("end")]),
    "not asked": dict(messages=[user("Hi!"), assistant("Hello.")], add_generation_prompt=False),
    "asked after an answer": dict(messages=[user("Hi!"), assistant("Hello.")]),
    "out of turn": dict(messages=[user("a"), user("b")]),
    "no text": dict(messages=[user("")]),
    "white space": dict(messages=[user("\n\n a \t\n"), assistant("\n b \n\n"), user("  ")]),
    "marks in text": dict(messages=[user("{{ 1 }} {% if %} <|im_end|> ﷽ \u2028 e\u0301 \U0001f600")]),
    "tools": dict(messages=[SYSTEM, user("Weather?")], tools=[WEATHER, NOW]),
    "tools, no system": dict(messages=[user("Weather?")], tools=[WEATHER]),
    "tools of all kinds": dict(messages=[user("x")], tools=[DEEP, NOW, WEATHER]),
    "tool without parameters": dict(messages=[user("x")], tools=[BARE]),
    "tools with numbers": dict(messages=[SYSTEM, user("x")], tools=[NUMBERS]),
    "no tools": dict(messages=[user("x")], tools=[]),
    "call": dict(messages=[user("Weather?"), assistant("", tool_calls=[call("get_weather", ARGUMENTS)])], tools=[WEATHER]),
    "call without content": dict(messages=[user("Weather?"), assistant(None, tool_calls=[call("get_weather", ARGUMENTS)])], tools=[WEATHER]),
    "call and result": dict(
        messages=[user("Weather?"), assistant("", tool_calls=[call("get_weather", ARGUMENTS)]), result('{"degrees": 21}', name="get_weather")],
        tools=[WEATHER],
    ),
    "call with numbers": dict(
        messages=[user("x"), assistant("", tool_calls=[call("measure", SIZES)]), result("1e-07")],
        tools=[NUMBERS],
    ),
    "result in parts": dict(
        messages=[user("x"), assistant("", tool_calls=[call("now", {})]), result([{"type": "text", "text": "noon"}])],
        tools=[NOW],
    ),
    "two calls": dict(
        messages=[
            user("Weather?"),
            assistant("I look.", tool_calls=[call("get_weather", ARGUMENTS), call("now", {}, "abcdefgh2")]),
            result("sunny"),
            result("noon", "abcdefgh2"),
            assistant("Sunny at noon."),
            user("Thanks."),
        ],
        tools=[WEATHER, NOW],
    ),
    "call after call": dict(
        messages=[
            SYSTEM,
            user("Weather?"),
            assistant("", tool_calls=[call("now", {})], reasoning_content="First the time."),
            result("noon"),
            assistant("", tool_calls=[call("get_weather", ARGUMENTS, "abcdefgh2")], reasoning_content="Then the weather."),
            result("sunny", "abcdefgh2"),
        ],
        tools=[WEATHER, NOW],
    ),
    "calls without tools": dict(messages=[user("x"), assistant("", tool_calls=[call("now", {})]), result("noon"), user("y")]),
    "short id": dict(messages=[user("x"), assistant("", tool_calls=[call("now", {}, "1")])]),
    "result and user": dict(
        messages=[user("x"), assistant("", tool_calls=[call("now", {})]), result("noon"), user("And tomorrow?")], tools=[NOW]
    ),
    "empty calls": dict(messages=[user("x"), assistant("a", tool_calls=[]), user("y")]),
    "reasoning": dict(
        messages=[user("a"), assistant("b", reasoning_content="\nwhy\n", reasoning="\nwhy\n"), user("c"), assistant("d", reasoning_content="so")],
        add_generation_prompt=False,
    ),
    "reasoning before a question": dict(messages=[user("a"), assistant("b", reasoning_content="why", reasoning="why"), user("c")]),
    "empty reasoning": dict(messages=[user("a"), assistant("b", reasoning_content="", reasoning=""), user("c")]),
    "no reasoning": dict(messages=[user("a"), assistant("b", reasoning_content=None, reasoning=None), user("c")]),
    "thought in text": dict(messages=[user("a"), assistant("<think>\nwhy\n</think>\n\nb"), user("c")]),
    "thinking off": dict(messages=[user("a")], kwargs=dict(enable_thinking=False, thinking=False)),
    "thinking on": dict(messages=[SYSTEM, user("a")], kwargs=dict(enable_thinking=True, thinking=True)),
    "effort": dict(messages=[SYSTEM, user("a")], kwargs=dict(reasoning_effort="high")),
    "no effort": dict(messages=[user("a")], kwargs=dict(reasoning_effort="none")),
    "budget": dict(messages=[user("a")], kwargs=dict(thinking_budget=512, enable_thinking=True)),
    "documents": dict(
        messages=[user("Which?")],
        documents=[{"title": "First one", "text": " A text. "}, {"title": "Second", "text": "Größe"}],
        kwargs=dict(controls={"citations": True, "length": "short"}),
    ),
    "parts": dict(messages=[user([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])]),
    "image": dict(messages=[user([{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": "b"}])]),
    "image first": dict(messages=[SYSTEM, user([{"type": "image"}, {"type": "text", "text": "What?"}]), assistant("A cat."), user("Sure?")]),
    "system in parts": dict(messages=[system([{"type": "text", "text": "Be brief."}]), user([{"type": "text", "text": "x"}])]),
    "answer in parts": dict(messages=[user("a"), assistant([{"type": "text", "text": "b"}]), user("c")]),
    "continued": dict(messages=[user("Count."), assistant("1, 2, ")], add_generation_prompt=False, continue_final_message=True),
    "continued, trimmed": dict(messages=[user("Count."), assistant("1, 2,  \n")], add_generation_prompt=False, continue_final_message=True),
    "continued after turns": dict(
        messages=[SYSTEM, user("a"), assistant("b"), user("Count."), assistant("1")], add_generation_prompt=False, continue_final_message=True
    ),
    "continued with tools": dict(
        messages=[user("x"), assistant("", tool_calls=[call("now", {})]), result("noon"), assistant("It is")],
        tools=[NOW],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "continued parts": dict(
        messages=[user("Count."), assistant([{"type": "text", "text": "1, "}, {"type": "text", "text": "2"}])],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "odd roles": dict(messages=[user("a"), {"role": "skip", "content": "s"}, {"role": "stop", "content": "z"}]),
    "named": dict(messages=[{"role": "user", "content": "a", "name": "Ann"}, assistant("b"), {"role": "user", "content": "c", "name": "Bob"}]),
    "long": dict(messages=[SYSTEM, user("x y " * 400), assistant("z\n" * 300), user("?")]),
}
