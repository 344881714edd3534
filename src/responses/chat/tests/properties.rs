use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::engine_answer::converted;
use super::super::tools::AnsweredTools;

/// A piece of an answer: which field of the delta it is in, and its text.
#[derive(Clone, Debug)]
enum Piece {
    Text(String),
    Reasoning(String),
    Arguments(u64, String),
}

fn piece() -> impl Strategy<Value = Piece> {
    let text = || "[a-z\"\\\\\n é😀]{1,12}";
    prop_oneof![
        text().prop_map(Piece::Text),
        text().prop_map(Piece::Reasoning),
        (0..3_u64, text()).prop_map(|(index, text)| Piece::Arguments(index, text)),
    ]
}

fn chunk(delta: Value) -> String {
    format!(
        "data: {}\n\n",
        json!({"choices": [{"index": 0, "delta": delta}]})
    )
}

/// A stream with each text in pieces of `length` characters.
fn stream(pieces: &[Piece], length: usize) -> String {
    let mut out = String::new();
    let mut named = [false; 3];
    for piece in pieces {
        let (Piece::Text(text) | Piece::Reasoning(text) | Piece::Arguments(_, text)) = piece;
        let characters: Vec<char> = text.chars().collect();
        for part in characters.chunks(length) {
            let part: String = part.iter().collect();
            out += &chunk(match piece {
                Piece::Text(_) => json!({"content": part}),
                Piece::Reasoning(_) => json!({"reasoning": part}),
                Piece::Arguments(index, _) => {
                    let mut call = json!({"index": index, "function": {"arguments": part}});
                    if !std::mem::replace(&mut named[*index as usize], true) {
                        call["id"] = format!("call_{index}").into();
                        call["function"]["name"] = "f".into();
                    }
                    json!({"tool_calls": [call]})
                }
            });
        }
    }
    out += "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
    out + "data: [DONE]\n\n"
}

fn convert(pieces: &[&[u8]]) -> Vec<Value> {
    let out = converted(AnsweredTools::default(), pieces);
    let text = String::from_utf8(out).unwrap();
    text.split_terminator("\n\n")
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
        .collect()
}

/// The events with consecutive deltas of one item joined, since the cuts of a text are the engine's.
fn joined(events: Vec<Value>) -> Vec<Value> {
    let mut all: Vec<Value> = Vec::new();
    for event in events {
        let Some(delta) = event.get("delta").and_then(Value::as_str) else {
            all.push(event);
            continue;
        };
        let last = all.last_mut().filter(|last| {
            last["type"] == event["type"] && last["output_index"] == event["output_index"]
        });
        match last {
            Some(last) => {
                last["delta"] = format!("{}{delta}", last["delta"].as_str().unwrap()).into()
            }
            None => all.push(event),
        }
    }
    all
}

proptest! {
    #[test]
    fn cuts_of_the_bytes_change_no_event(
        pieces in proptest::collection::vec(piece(), 0..12),
        cuts in proptest::collection::vec(any::<usize>(), 0..12),
    ) {
        let text = stream(&pieces, 3).into_bytes();
        let mut ends: Vec<usize> = cuts.iter().map(|cut| cut % (text.len() + 1)).collect();
        ends.push(text.len());
        ends.sort_unstable();
        let mut begin = 0;
        let parts: Vec<&[u8]> = ends.into_iter().map(|end| {
            let part = &text[begin..end];
            begin = end;
            part
        }).collect();
        prop_assert_eq!(convert(&parts), convert(&[&text]));
    }

    #[test]
    fn cuts_of_the_texts_change_only_the_deltas(
        pieces in proptest::collection::vec(piece(), 0..12),
        length in 1..12_usize,
    ) {
        let whole = joined(convert(&[stream(&pieces, 64).as_bytes()]));
        prop_assert_eq!(joined(convert(&[stream(&pieces, length).as_bytes()])), whole);
    }

    #[test]
    fn any_bytes_give_one_terminal_event_and_items_that_open_before_they_close(
        lines in proptest::collection::vec(
            "(data: )?(\\{\"choices\":\\[\\{(\"index\":[01],)?\"delta\":\\{\"(content|reasoning|refusal|tool_calls)\":(\"[a-z]{0,3}\"|null|\\[\\]|\\[\\{\"index\":[0-2],\"function\":\\{\"name\":\"f\",\"arguments\":\"x\"\\}\\}\\])\\}(,\"finish_reason\":\"(stop|length|x)\")?\\}\\]\\}|\\[DONE\\]|[a-z{}\":]{0,8})\n\n?",
            0..12,
        ),
    ) {
        let events = convert(&[lines.concat().as_bytes()]);
        let ends = events.iter().filter(|event| {
            matches!(event["type"].as_str(), Some("response.completed" | "response.incomplete" | "response.failed"))
        });
        prop_assert_eq!(ends.count(), 1);
        prop_assert_eq!(&events[0]["type"], "response.created");
        let mut open = std::collections::BTreeSet::new();
        let mut next = 0;
        for event in &events {
            let index = event["output_index"].as_u64();
            match event["type"].as_str().unwrap() {
                "response.output_item.added" => {
                    prop_assert_eq!(index, Some(next));
                    next += 1;
                    open.insert(index);
                }
                "response.output_item.done" => prop_assert!(open.remove(&index)),
                _ => prop_assert!(index.is_none() || open.contains(&index)),
            }
        }
        prop_assert!(open.is_empty() || events.last().unwrap()["type"] == "response.failed");
    }
}
