//! Any bytes as a frame of a client of WebSocket mode. A create's body is JSON, always a stream, and has no member of
//! the frame alone; a lane's name needs no escapes.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use serde_json::value::RawValue;
use warmroute::responses::websocket::client_frame::{ClientFrame, read};

fuzz_target!(|bytes: &[u8]| {
    match read(bytes) {
        Err(_) | Ok(ClientFrame::Ignored) => {}
        Ok(ClientFrame::Answered(answer)) => {
            let answer = object(&answer);
            assert_eq!(answer["type"].get(), "\"response.steer.failed\"");
        }
        Ok(ClientFrame::Create(create)) => {
            if let Some(name) = create.lane.name() {
                assert!((1..=256).contains(&name.len()));
                assert!(name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"' && byte != b'\\'));
            }
            let Ok(work) = create.work else { return };
            let body = object(&work.body);
            assert_eq!(body["stream"].get(), "true");
            for name in ["type", "stream_id", "generate", "stream_options", "client_metadata"] {
                assert!(!body.contains_key(name));
            }
        }
    }
});

/// Members as written: a number may be greater than any that Rust has.
fn object(json: &[u8]) -> BTreeMap<String, &RawValue> {
    serde_json::from_slice(json).expect("an object")
}
