//! Takes the billing header out of the system prompt of a Messages request: a text that some clients put first and that
//! differs in each request, so that no two prompts would share a prefix. Some engines drop it themselves. Pure.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::types::BILLING_HEADER;

static HEADER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(BILLING_HEADER));

/// The body without text blocks of `system` that are a billing header; of a system prompt that is one text, without its
/// first line. `None` if nothing is to be taken out. All other bytes stay.
pub fn without_billing_header(body: &Bytes) -> Option<Bytes> {
    HEADER.find(body)?;
    #[derive(Deserialize)]
    struct Body<'a> {
        #[serde(borrow)]
        system: Option<&'a RawValue>,
    }
    let whole: Body<'_> = serde_json::from_slice(body).ok()?;
    let system = whole.system?.get();
    let start = system.as_ptr().addr() - body.as_ptr().addr();
    let mut kept = Vec::with_capacity(body.len());
    let mut position = 0;
    for range in ranges(system) {
        kept.extend_from_slice(&body[position..start + range.start]);
        position = start + range.end;
    }
    if position == 0 {
        return None;
    }
    kept.extend_from_slice(&body[position..]);
    Some(kept.into())
}

/// What is taken out of the raw JSON of a system prompt, in order.
fn ranges(system: &str) -> Vec<Range<usize>> {
    if system.starts_with('"') {
        return first_line(system).into_iter().collect();
    }
    let Ok(blocks) = serde_json::from_str::<Vec<&RawValue>>(system) else {
        return Vec::new();
    };
    let place = |block: &RawValue| {
        let start = block.get().as_ptr().addr() - system.as_ptr().addr();
        start..start + block.get().len()
    };
    let places: Vec<Range<usize>> = blocks.iter().map(|block| place(block)).collect();
    let mut has_kept = false;
    let mut taken = Vec::new();
    for (index, block) in blocks.iter().enumerate() {
        if !is_header(block.get()) {
            has_kept = true;
            continue;
        }
        // A comma goes with it: the one after it, or before it if others stand before.
        let range = match (has_kept, places.get(index + 1)) {
            (true, _) => places[index - 1].end..places[index].end,
            (false, Some(next)) => places[index].start..next.start,
            (false, None) => places[index].clone(),
        };
        taken.push(range);
    }
    taken
}

fn is_header(block: &str) -> bool {
    #[derive(Deserialize)]
    struct Block<'a> {
        #[serde(rename = "type", borrow)]
        kind: Cow<'a, str>,
        #[serde(borrow)]
        text: Option<Cow<'a, str>>,
    }
    serde_json::from_str::<Block<'_>>(block).is_ok_and(|block| {
        block.kind == "text"
            && block
                .text
                .is_some_and(|text| text.starts_with(BILLING_HEADER))
    })
}

/// The first line of a JSON string, with its end, if that is a billing header.
fn first_line(text: &str) -> Option<Range<usize>> {
    let inside = &text[1..text.len() - 1];
    if !inside.starts_with(BILLING_HEADER) {
        return None;
    }
    let bytes = inside.as_bytes();
    let mut position = 0;
    while let Some(next) = memchr::memchr(b'\\', &bytes[position..]) {
        position += next + 2;
        if bytes.get(position - 1) == Some(&b'n') {
            return Some(1..1 + position);
        }
    }
    Some(1..1 + inside.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const HEADER: &str = "x-anthropic-billing-header: cc_version=1; cch=5f3a;";

    fn check(body: &str, expected: Option<&str>) {
        let found = without_billing_header(&Bytes::copy_from_slice(body.as_bytes()));
        let found = found.map(|body| String::from_utf8(body.to_vec()).unwrap());
        assert_eq!(found.as_deref(), expected, "{body}");
    }

    #[test]
    fn the_billing_header_goes_and_all_other_bytes_stay() {
        let header = format!(r#"{{"type":"text","text":"{HEADER}"}}"#);
        let rest = r#"{"type": "text","text":"You are"}"#;
        check(
            &format!(r#"{{"model":"m", "system":[{header}, {rest}],"n":1.00}}"#),
            Some(&format!(r#"{{"model":"m", "system":[{rest}],"n":1.00}}"#)),
        );
        check(
            &format!(r#"{{"system":[{rest} , {header} ]}}"#),
            Some(&format!(r#"{{"system":[{rest} ]}}"#)),
        );
        check(
            &format!(r#"{{"system":[{header}]}}"#),
            Some(r#"{"system":[]}"#),
        );
        check(
            &format!(r#"{{"system":[{header},{header},{rest}]}}"#),
            Some(&format!(r#"{{"system":[{rest}]}}"#)),
        );
        check(
            &format!(r#"{{"system":"{HEADER}\nYou \"are\"\n"}}"#),
            Some(r#"{"system":"You \"are\"\n"}"#),
        );
        check(
            &format!(r#"{{"system":"{HEADER}"}}"#),
            Some(r#"{"system":""}"#),
        );
    }

    #[test]
    fn a_header_that_is_no_system_prompt_stays() {
        check(
            &format!(r#"{{"messages":[{{"role":"user","content":"{HEADER}"}}]}}"#),
            None,
        );
        check(&format!(r#"{{"system":"about {HEADER}"}}"#), None);
        check(
            &format!(r#"{{"system":[{{"type":"text","text":"about {HEADER}"}}]}}"#),
            None,
        );
        check(&format!(r#"{{"system":1,"a":"{HEADER}"}}"#), None);
        check(&format!(r#"{{"system":"{HEADER}"#), None);
    }

    proptest! {
        #[test]
        fn any_order_of_blocks_keeps_the_others(kinds in proptest::collection::vec(any::<bool>(), 0..6)) {
            let block = |(index, is_header): (usize, &bool)| {
                let text = if *is_header { format!("{HEADER}{index}") } else { format!("t{index}") };
                json!({"type": "text", "text": text})
            };
            let blocks: Vec<Value> = kinds.iter().enumerate().map(block).collect();
            let body = json!({"a": 1, "system": blocks, "z": 2}).to_string();
            let found = without_billing_header(&Bytes::from(body.clone())).unwrap_or(body.into());
            let found: Value = serde_json::from_slice(&found).unwrap();
            let expected: Vec<Value> = kinds.iter().enumerate().filter(|(_, is_header)| !**is_header).map(block).collect();
            prop_assert_eq!(&found["system"], &Value::from(expected));
            prop_assert_eq!(&found["z"], 2);
        }
    }
}
