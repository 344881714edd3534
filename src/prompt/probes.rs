//! Requests of each kind that chats have, by which a model's renderer shows before the first request what it cannot render.
//! Pure.

use serde_json::{Value, json};

use super::render::{Renderer, TokenizeError};
use super::types::Api;

/// A kind of request that cannot be rendered.
#[derive(Debug, PartialEq)]
pub struct RefusedKind {
    pub kind: &'static str,
    /// For a template's refusal its own words.
    pub why: String,
}

/// The kinds of requests that are tried, in the order in which they are reported.
pub const KINDS: [&str; 5] = ["plain", "system", "tools", "tool result", "reasoning"];

/// The kinds that the renderer refuses. Some templates refuse a kind on purpose: then the engine refuses such requests, too.
pub fn refused(renderer: &Renderer) -> Vec<RefusedKind> {
    let render = |kind: &'static str| {
        let body = body(kind).to_string();
        match renderer.render(Api::Chat, body.as_bytes(), 0) {
            Ok(_) => None,
            Err(error) => Some(RefusedKind {
                kind,
                why: why(&error),
            }),
        }
    };
    KINDS.into_iter().filter_map(render).collect()
}

fn why(error: &TokenizeError) -> String {
    match error {
        TokenizeError::Api => "the model has no chat template that the router can use".to_owned(),
        TokenizeError::Refused(why) => format!("the chat template: {why}"),
        other => other.to_string(),
    }
}

fn body(kind: &str) -> Value {
    let user = json!({"role": "user", "content": "What is the weather?"});
    let tool = json!({"type": "function", "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "A city."}},
            "required": ["place"],
        },
    }});
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{
        "id": "abcdefgh1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": "{\"place\": \"Rome\"}"},
    }]});
    let result = json!({"role": "tool", "tool_call_id": "abcdefgh1", "content": "sunny"});
    match kind {
        "system" => json!({"messages": [{"role": "system", "content": "Be brief."}, user]}),
        "tools" => json!({"messages": [user], "tools": [tool]}),
        "tool result" => json!({"messages": [user, call, result], "tools": [tool]}),
        "reasoning" => json!({"messages": [
            user,
            {"role": "assistant", "content": "Sunny.", "reasoning": "They ask for the weather."},
            {"role": "user", "content": "And tomorrow?"},
        ]}),
        _ => json!({"messages": [user]}),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::prompt::render::{Options, Templates};
    use crate::prompt::template::Template;

    fn of(source: &str) -> Vec<(&'static str, String)> {
        let templates = Templates {
            plain: Some(Template::new(source).unwrap()),
            with_tools: None,
        };
        let renderer = Renderer::new(templates, Map::new(), Options::default());
        let refused = refused(&renderer).into_iter();
        refused.map(|refused| (refused.kind, refused.why)).collect()
    }

    #[test]
    fn the_kinds_that_a_template_refuses_are_named_with_its_words() {
        assert_eq!(of("{% for m in messages %}{{ m.content }}{% endfor %}"), []);
        let strict = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}\
                      {% if tools %}{{ tools.nothing.at_all }}{% endif %}";
        let refused = of(strict);
        let kinds: Vec<&str> = refused.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, ["system", "tools", "tool result"]);
        assert!(refused[0].1.contains("no system"), "{refused:?}");
    }

    #[test]
    fn a_model_without_a_template_refuses_every_kind() {
        let renderer = Renderer::new(Templates::default(), Map::new(), Options::default());
        assert_eq!(refused(&renderer).len(), KINDS.len());
    }
}
