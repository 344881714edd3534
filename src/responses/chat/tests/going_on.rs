//! An answer that one replica begins and another one goes on with is the answer of one.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::answer::ChatAnswer;
use super::super::tools::AnsweredTools;
use super::super::written::Written;
use crate::ids::{ResponseId, Root};
use crate::responses::events::{EventOptions, EventRewriter, ReasoningEvents};
use crate::responses::item::Ids;
use crate::responses::outcome::Outcome;
use crate::responses::request::CreateRequest;
use crate::responses::template::{ResponseMeta, ResponseTemplate};

fn rewriter(reasoning: ReasoningEvents) -> EventRewriter {
    let body = r#"{"model":"m","input":"x","background":true,"temperature":0.3}"#;
    let create = CreateRequest::read(body.as_bytes()).unwrap();
    let response = ResponseId::new(Root(1), 2);
    let meta = ResponseMeta {
        id: &response.to_string(),
        created_at: 7,
        previous: None,
        conversation: None,
        store: true,
    };
    let options = EventOptions {
        bytes_max: 1 << 20,
        reasoning,
    };
    let template = ResponseTemplate::new(&create, &meta, Ids::of(response));
    EventRewriter::new(template, options, None).in_background()
}

/// A replica that reads the chunks of a chat and writes events.
struct Replica {
    answer: ChatAnswer,
    events: EventRewriter,
    outcome: Option<Outcome>,
}

impl Replica {
    fn new(reasoning: ReasoningEvents) -> Self {
        let mut tools = AnsweredTools::default();
        tools.has_logprobs = true;
        Self {
            answer: ChatAnswer::new(tools, 1 << 20, false),
            events: rewriter(reasoning),
            outcome: None,
        }
    }

    fn read(&mut self, chunk: &str, log: &mut Vec<u8>) {
        self.events.announce(log);
        let mut native = Vec::new();
        self.answer.on_data(chunk, &mut native);
        self.outcome = self.events.push(&native, log).or(self.outcome.take());
    }

    fn after(log: &[u8], reasoning: ReasoningEvents) -> Option<Self> {
        let mut replica = Self::new(reasoning);
        replica.answer.go_on_after(&Written::read(log)?);
        let count = log.windows(2).filter(|two| two == b"\n\n").count();
        let goes_on = replica.events.go_on_after(log, count as u64);
        goes_on.then_some(replica)
    }
}

fn chunk(delta: &Value) -> Value {
    json!({"choices": [{"index": 0, "delta": delta}]})
}

fn piece() -> impl Strategy<Value = Value> {
    let text = || "[a-z\"\\\\\n é😀]{1,6}";
    prop_oneof![
        text().prop_map(|text| chunk(&json!({"content": text}))),
        text().prop_map(|text| chunk(&json!({"reasoning": text}))),
        text().prop_map(|text| chunk(&json!({"refusal": text}))),
        text().prop_map(|text| {
            let mut chunk = chunk(&json!({"content": text}));
            chunk["choices"][0]["logprobs"] =
                json!({"content": [{"token": text, "logprob": -0.5}]});
            chunk
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn replicas_that_die_after_any_chunk_write_the_events_of_one(
        pieces in proptest::collection::vec(piece(), 1..16),
        is_open in any::<bool>(),
        also in any::<prop::sample::Index>(),
    ) {
        let reasoning = if is_open {
            ReasoningEvents::OpenResponses
        } else {
            ReasoningEvents::OpenAi
        };
        let mut chunks: Vec<String> = pieces.iter().map(Value::to_string).collect();
        chunks.push(json!({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}).to_string());
        chunks.push(json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}).to_string());
        chunks.push("[DONE]".to_owned());
        let play = |deaths: [usize; 2]| {
            let (mut replica, mut log) = (Replica::new(reasoning), Vec::new());
            for (at, chunk) in chunks.iter().enumerate() {
                if deaths.contains(&at) {
                    replica = Replica::after(&log, reasoning).expect("it goes on");
                }
                replica.read(chunk, &mut log);
            }
            (String::from_utf8(log).unwrap(), replica.outcome.unwrap())
        };
        let (whole, outcome) = play([usize::MAX; 2]);
        // Not before the first text, and not after the reason of the end.
        for death in 1..=pieces.len() {
            let (log, end) = play([death, 1 + also.index(pieces.len())]);
            prop_assert_eq!(&log, &whole, "{}", death);
            prop_assert_eq!(&end.output, &outcome.output);
            prop_assert_eq!((end.status, end.usage), (outcome.status, outcome.usage));
        }
    }
}

#[test]
fn nobody_goes_on_with_a_call_or_with_events_that_are_not_whole() {
    let reasoning = ReasoningEvents::OpenAi;
    let (mut replica, mut log) = (Replica::new(reasoning), Vec::new());
    replica.read(&chunk(&json!({"content": "a"})).to_string(), &mut log);
    assert!(Replica::after(&log, reasoning).is_some());
    let text = String::from_utf8(log.clone()).unwrap();
    let from = text.find("event: response.content_part.added").unwrap();
    assert!(Replica::after(&log[from..], reasoning).is_none());
    let call = json!({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]});
    replica.read(&chunk(&call).to_string(), &mut log);
    assert!(Replica::after(&log, reasoning).is_none());
}
