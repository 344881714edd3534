"""What clients ask of the Responses API, and what they must not ask."""

MODEL = "sim"
TEXT = "Describe a harbour at dusk in a few sentences."
PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PARAMETERS = {
    "type": "object",
    "properties": {"town": {"type": "string"}, "hour": {"type": "integer"}},
    "required": ["town"],
    "additionalProperties": False,
}
TIDE = {"type": "function", "name": "tide", "description": "The tide of a town.", "parameters": PARAMETERS}
FERRY = {"type": "function", "name": "ferry", "parameters": PARAMETERS, "strict": True}
SHELL = {"type": "custom", "name": "shell", "description": "Runs a command."}
SCHEMA = {"type": "json_schema", "name": "town", "schema": PARAMETERS, "strict": True}


def message(role, content, **more):
    return {"type": "message", "role": role, "content": content, **more}


#: The create of each situation, how it ends, and which items it has at least.
SITUATIONS = {
    "a text": ({"input": TEXT}, "completed", ["message"]),
    "a list of parts": (
        {"input": [message("user", [{"type": "input_text", "text": TEXT}, {"type": "input_text", "text": "Go on."}])]},
        "completed",
        ["message"],
    ),
    "instructions": ({"input": TEXT, "instructions": "Rhyme."}, "completed", ["message"]),
    "rules of the system and of a developer": (
        {"input": [message("system", "Rhyme."), message("developer", "Be short."), message("user", TEXT)]},
        "completed",
        ["message"],
    ),
    "turns that went before": (
        {
            "input": [
                message("user", "I live in Lisbon."),
                message("assistant", [{"type": "output_text", "text": "Good to know.", "annotations": []}]),
                message("user", "Where do I live?"),
            ]
        },
        "completed",
        ["message"],
    ),
    "messages with a phase": (
        {
            "input": [
                message("user", "Add 20 and 22."),
                message("assistant", "Adding them.", phase="commentary"),
                message("assistant", "42", phase="final_answer"),
                message("user", "Once more, please."),
            ]
        },
        "completed",
        ["message"],
    ),
    "an image": (
        {
            "input": [
                message(
                    "user",
                    [
                        {"type": "input_text", "text": "Which colour is this?"},
                        {"type": "input_image", "image_url": PIXEL, "detail": "low"},
                    ],
                )
            ]
        },
        "completed",
        ["message"],
    ),
    "reasoning": ({"input": TEXT, "reasoning": {"effort": "low"}}, "completed", ["reasoning", "message"]),
    "reasoning with a summary": (
        {"input": TEXT, "reasoning": {"effort": "high", "summary": "auto"}},
        "completed",
        ["reasoning", "message"],
    ),
    "state that the client keeps": (
        {
            "input": TEXT,
            "reasoning": {"effort": "low"},
            "include": ["reasoning.encrypted_content"],
            "store": False,
        },
        "completed",
        ["reasoning", "message", "reasoning"],
    ),
    "a function that must be called": (
        {"input": TEXT, "tools": [TIDE], "tool_choice": "required"},
        "completed",
        ["function_call"],
    ),
    "a function that is named": (
        {"input": TEXT, "tools": [TIDE, FERRY], "tool_choice": {"type": "function", "name": "tide"}},
        "completed",
        ["function_call"],
    ),
    "some functions allowed": (
        {
            "input": TEXT,
            "tools": [TIDE, FERRY],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "tide"}]},
        },
        "completed",
        [],
    ),
    "no function, one call at a time": (
        {"input": TEXT, "tools": [TIDE], "tool_choice": "none", "parallel_tool_calls": False, "max_tool_calls": 2},
        "completed",
        ["message"],
    ),
    "a custom tool": ({"input": TEXT, "tools": [SHELL]}, "completed", []),
    "a call and its output": (
        {
            "input": [
                message("user", "When is high tide?"),
                {"type": "function_call", "call_id": "call_1", "name": "tide", "arguments": '{"town": "Faro"}'},
                {"type": "function_call_output", "call_id": "call_1", "output": "At six."},
            ],
            "tools": [TIDE],
        },
        "completed",
        ["message"],
    ),
    "an object by a schema": ({"input": TEXT, "text": {"format": SCHEMA}}, "completed", ["message"]),
    "any object": (
        {"input": TEXT, "text": {"format": {"type": "json_object"}, "verbosity": "low"}},
        "completed",
        ["message"],
    ),
    "log probabilities": (
        {"input": TEXT, "include": ["message.output_text.logprobs"], "top_logprobs": 3},
        "completed",
        ["message"],
    ),
    "an answer that is cut": ({"input": TEXT, "max_output_tokens": 16}, "incomplete", ["message"]),
    "a call that is cut": (
        {"input": TEXT, "tools": [TIDE], "tool_choice": "required", "max_output_tokens": 16},
        "incomplete",
        [],
    ),
    "names and labels": (
        {
            "input": TEXT,
            "metadata": {"ticket": "12"},
            "user": "u",
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "service_tier": "flex",
            "truncation": "auto",
        },
        "completed",
        ["message"],
    ),
    "sampling": (
        {"input": TEXT, "temperature": 0, "top_p": 0.5, "presence_penalty": 0.25, "frequency_penalty": 1},
        "completed",
        ["message"],
    ),
    "nothing is stored": ({"input": TEXT, "store": False}, "completed", ["message"]),
}

#: Members that an answer repeats as they were sent.
REPEATED = (
    "instructions max_output_tokens max_tool_calls metadata parallel_tool_calls prompt_cache_key safety_identifier store"
    " temperature top_p presence_penalty frequency_penalty top_logprobs tool_choice truncation user"
).split()

#: Creates that are refused: status, code and param.
REFUSED = {
    "no model": ({"input": TEXT, "model": None}, 400, "missing_required_parameter", "model"),
    "no such model": ({"input": TEXT, "model": "none"}, 404, "model_not_found", "model"),
    "nothing to answer": ({}, 400, "missing_required_parameter", "input"),
    "an input of another type": ({"input": 7}, 400, "invalid_type", "input"),
    "a temperature out of bounds": ({"input": TEXT, "temperature": -1}, 400, "invalid_value", "temperature"),
    "an unknown previous response": (
        {"input": TEXT, "previous_response_id": "resp_" + "0" * 48},
        400,
        "previous_response_not_found",
        "previous_response_id",
    ),
    "an unknown conversation": ({"input": TEXT, "conversation": "conv_none"}, 404, None, None),
    "two histories": (
        {"input": TEXT, "conversation": "conv_none", "previous_response_id": "resp_" + "0" * 48},
        400,
        "mutually_exclusive_parameters",
        "conversation",
    ),
    "an output without its call": (
        {"input": [{"type": "function_call_output", "call_id": "call_none", "output": "x"}]},
        400,
        None,
        "input",
    ),
    "a call without its output": (
        {
            "input": [
                {"type": "function_call", "call_id": "call_1", "name": "tide", "arguments": "{}"},
                message("user", TEXT),
            ]
        },
        400,
        None,
        "input",
    ),
    "a prompt of OpenAI's": ({"prompt": {"id": "pmpt_1"}}, 400, "unsupported_parameter", "prompt"),
    "what belongs to engines": (
        {"input": TEXT, "kv_transfer_params": {}},
        400,
        "unsupported_parameter",
        "kv_transfer_params",
    ),
    "too many labels": (
        {"input": TEXT, "metadata": {str(number): "x" for number in range(17)}},
        400,
        "invalid_value",
        "metadata",
    ),
    "an unknown include": ({"input": TEXT, "include": ["all"]}, 400, "invalid_value", "include[0]"),
    "content of another server": (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA=="}, message("user", TEXT)]},
        400,
        "invalid_encrypted_content",
        None,
    ),
}
