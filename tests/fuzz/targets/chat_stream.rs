//! Any bytes as the chat stream of an engine. However they are cut, a client of the Responses API gets the same events,
//! each of them one line of JSON, and one terminal event.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::value::RawValue;
use warmroute::responses::converted_chat;

// The first byte chooses the length of the pieces.
fuzz_target!(|bytes: &[u8]| {
    let Some((&choice, bytes)) = bytes.split_first() else {
        return;
    };
    let whole = events(&[bytes]);
    let pieces: Vec<&[u8]> = bytes.chunks(1 + usize::from(choice)).collect();
    assert_eq!(whole, events(&pieces));
    let is_terminal = |event: &&String| {
        ["completed", "incomplete", "failed"]
            .iter()
            .any(|kind| event.starts_with(&format!(r#"{{"type":"response.{kind}","#)))
    };
    assert_eq!(whole.iter().filter(is_terminal).count(), 1);
});

fn events(pieces: &[&[u8]]) -> Vec<String> {
    let mut text = String::from_utf8(converted_chat(pieces)).expect("events are text");
    // Ids that the engine left out are random.
    while let Some(at) = text.find("\"call_id\":\"call_") {
        let end = at + text[at + 11..].find('"').map_or(0, |end| end + 12);
        text.replace_range(at..end, "\"call_id\":0");
    }
    text.split_terminator("\n\n")
        .map(|event| {
            let data = event.strip_prefix("data: ").expect("each event is data");
            // As written: half a character is an escape that a string cannot have.
            let _: &RawValue = serde_json::from_str(data).expect("data is JSON");
            data.to_owned()
        })
        .collect()
}
