//! The members of a create, one row each: what a client may write, whom it is sent to, and what the Response object shows.
//! A member without a row goes to every engine as it is. Pure.

/// What the JSON value of a member must be. `null` counts as absent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Shape {
    /// Checked where it is read, or only by the engine.
    Any,
    Text,
    Flag,
    Object,
    List,
    /// A whole number within these bounds.
    Integer(i64, i64),
    /// A number from the first to the second bound.
    Number(f64, f64),
    /// As `Number`, but not the first bound itself.
    NumberAbove(f64, f64),
    OneOf(&'static [&'static str]),
    /// A text or a list.
    TextOrList,
}

/// No upper bound.
pub(super) const ANY: f64 = f64::MAX;

/// How the Response object shows a member of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// Not, or as the template writes it.
    Otherwise,
    /// As the client wrote it; this if it did not.
    Or(&'static str),
    /// As the client wrote it, if that is a number; this if it is not.
    NumberOr(&'static str),
    /// As the client wrote it, if it did.
    IfGiven,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Member {
    pub(super) name: &'static str,
    pub(super) shape: Shape,
    /// Copied into the body for an engine with the Responses API. The router reads the others, and writes some itself.
    pub(super) to_engine: bool,
    /// Copied into the body that asks an engine for a summary: not what decides how an answer ends, or which form it has.
    pub(super) to_summary: bool,
    /// Copied into a chat completion. The others are converted, or a chat completion does not have them, or their name means
    /// something else there.
    pub(super) to_chat: bool,
    pub(super) shown: Shown,
    /// Refused from a client: it could crash an engine with it, or hijack the request of another client.
    pub(super) is_reserved: bool,
}

/// Goes everywhere as it is.
const fn copied(name: &'static str, shape: Shape) -> Member {
    Member {
        name,
        shape,
        to_engine: true,
        to_summary: true,
        to_chat: true,
        shown: Shown::Otherwise,
        is_reserved: false,
    }
}

/// Goes to engines with the Responses API; a chat completion has it in another form, or not.
const fn native(name: &'static str, shape: Shape) -> Member {
    Member {
        to_chat: false,
        ..copied(name, shape)
    }
}

/// The router's own: no engine is sent it as the client wrote it.
const fn own(name: &'static str) -> Member {
    Member {
        to_engine: false,
        to_summary: false,
        ..native(name, Shape::Any)
    }
}

/// Said between the router and engines only.
const fn reserved(name: &'static str) -> Member {
    Member {
        is_reserved: true,
        ..own(name)
    }
}

impl Member {
    const fn shape(self, shape: Shape) -> Self {
        Self { shape, ..self }
    }

    const fn not_to_summary(self) -> Self {
        Self {
            to_summary: false,
            ..self
        }
    }

    const fn shown(self, shown: Shown) -> Self {
        Self { shown, ..self }
    }
}

use Shape::{Any, Flag, Integer, List, Number, NumberAbove, Object, OneOf, Text, TextOrList};

/// The Response object has those that say how they are shown in this order.
pub(super) const MEMBERS: &[Member] = &[
    copied("model", Any),
    // Sampling.
    copied("temperature", Number(0.0, ANY)),
    copied("top_p", NumberAbove(0.0, 1.0)),
    copied("presence_penalty", Number(-2.0, 2.0)).shown(Shown::NumberOr("0.0")),
    copied("frequency_penalty", Number(-2.0, 2.0)).shown(Shown::NumberOr("0.0")),
    native("top_logprobs", Integer(0, 20))
        .not_to_summary()
        .shown(Shown::NumberOr("0")),
    copied("min_p", Number(0.0, 1.0)),
    copied("repetition_penalty", NumberAbove(0.0, ANY)),
    copied("top_k", Integer(-1, i64::MAX)),
    copied("seed", Integer(i64::MIN, i64::MAX)),
    copied("stop", TextOrList).not_to_summary(),
    copied("stop_token_ids", List).not_to_summary(),
    copied("ignore_eos", Flag).not_to_summary(),
    copied("min_tokens", Any).not_to_summary(),
    copied("stop_regex", Any).not_to_summary(),
    copied("skip_special_tokens", Flag),
    copied("logit_bias", Object).not_to_summary(),
    copied("bad_words", Any).not_to_summary(),
    copied("allowed_token_ids", Any).not_to_summary(),
    copied("structured_outputs", Object).not_to_summary(),
    copied("regex", Any).not_to_summary(),
    copied("ebnf", Any).not_to_summary(),
    // The prompt and how it is written.
    own("input"),
    native("instructions", Any).shown(Shown::Or("null")),
    own("prompt"),
    copied("chat_template_kwargs", Object),
    copied("image", Object),
    // Tools, and the form of the answer.
    native("tools", Any),
    native("tool_choice", Any).not_to_summary(),
    own(ALLOWED_TOOLS),
    native("parallel_tool_calls", Flag).shown(Shown::Or("true")),
    own("truncation").shown(Shown::Or("\"disabled\"")),
    native("text", Any).not_to_summary(),
    native("reasoning", Any),
    copied("include_reasoning", Flag),
    native("max_output_tokens", Integer(1, i64::MAX))
        .not_to_summary()
        .shown(Shown::Or("null")),
    native("max_tool_calls", Integer(1, i64::MAX))
        .not_to_summary()
        .shown(Shown::Or("null")),
    own("include"),
    // How it is answered and kept.
    own("stream"),
    own("stream_options"),
    own("background"),
    own("store"),
    own("previous_response_id"),
    own("previous_response"),
    own("previous_input_messages"),
    own("conversation"),
    own("context_management"),
    own("service_tier").shape(Text),
    copied("priority", Integer(i64::MIN, i64::MAX)),
    own("metadata").shown(Shown::Or("{}")),
    native("safety_identifier", Text).shown(Shown::Or("null")),
    native("prompt_cache_key", Text).shown(Shown::Or("null")),
    native("user", Text).shown(Shown::Or("null")),
    native(
        "prompt_cache_retention",
        OneOf(&["in-memory", "in_memory", "24h"]),
    )
    .shown(Shown::IfGiven),
    native("prompt_cache_options", Object).shown(Shown::IfGiven),
    copied("session_id", Text),
    native("moderation", Object),
    native("background_options", Object),
    native("client_metadata", Any),
    native("enable_response_messages", Any),
    copied("access_programs", List),
    Member {
        // As the router wrote it.
        to_chat: true,
        ..reserved("request_id")
    },
    reserved("kv_transfer_params"),
    reserved("ec_transfer_params"),
    // Of chat completions: here they mean nothing, there they would.
    native("audio", Any),
    native("function_call", Any),
    native("functions", Any),
    native("logprobs", Any),
    native("max_completion_tokens", Any),
    native("max_tokens", Any),
    native("messages", Any),
    native("modalities", Any),
    native("n", Any),
    native("reasoning_effort", Any),
    native("response_format", Any),
];

/// Written by the router only: a `tool_choice` of type `allowed_tools`, whose mode alone is the `tool_choice` that engines get.
pub(super) const ALLOWED_TOOLS: &str = "allowed_tools";

/// A member's row.
pub(super) fn member(name: &str) -> Option<&'static Member> {
    MEMBERS.iter().find(|member| member.name == name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_member_has_one_row() {
        let names: BTreeSet<&str> = MEMBERS.iter().map(|member| member.name).collect();
        assert_eq!(names.len(), MEMBERS.len());
    }

    #[test]
    fn what_only_the_router_may_say_reaches_no_engine() {
        for name in ["request_id", "kv_transfer_params", "ec_transfer_params"] {
            let member = member(name).unwrap();
            assert!(!member.to_engine && !member.to_summary, "{name}");
            assert!(member.is_reserved, "{name}");
        }
    }

    #[test]
    fn a_summary_has_no_member_that_an_answer_has_not() {
        for member in MEMBERS {
            assert!(member.to_engine || !member.to_summary, "{}", member.name);
        }
    }
}
