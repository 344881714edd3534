//! Any bytes as what passes between the workers of a split request: as the body that becomes two, as a prefill
//! leg's answer, and as the answer that goes to the client.

#![no_main]

use std::sync::Arc;

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use warmroute::fleet::kv_transfer::{BootstrapInfo, Connector};
use warmroute::prompt::Api;
use warmroute::relay::kv_transfer::{Legs, Transfer};
use warmroute::relay::answer::usage_rewriter::UsageRewriter;

fuzz_target!(|input: &[u8]| {
    let Some((choice, bytes)) = input.split_first() else {
        return;
    };
    let choice = usize::from(*choice);
    let api = Api::ALL[choice % Api::ALL.len()];
    let own = Legs::of(Api::Chat, &Bytes::from_static(br#"{"messages":[]}"#)).expect("it can be split");
    for connector in Connector::ALL {
        let begin = || {
            let bootstrap_info = BootstrapInfo::parse(br#"{"0":{"engine_id":"e"}}"#, "http://p:1").map(Arc::new);
            Transfer::begin(connector, api, "t".to_owned(), "p", bootstrap_info, None, 0).expect("all is known")
        };
        if let Ok(handed) = begin().end(bytes) {
            is_json(&own.decode(handed.params));
        }
        // The legs of SGLang meet: no body asks for a transfer.
        if let Ok(legs) = Legs::for_connector(connector, api, &Bytes::copy_from_slice(bytes))
            && connector != Connector::Sglang
        {
            is_json(&legs.prefill(&begin()));
        }
    }
    for is_events in [false, true] {
        let whole = passed(&[bytes], is_events);
        let at = choice % (bytes.len() + 1);
        assert_eq!(passed(&[&bytes[..at], &bytes[at..]], is_events), whole);
        let each: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(passed(&each, is_events), whole);
    }
});

fn is_json(body: &[u8]) {
    serde_json::from_slice::<Value>(body).expect("a spliced body is still JSON");
}

fn passed(pieces: &[&[u8]], is_events: bool) -> Vec<u8> {
    let mut usage = UsageRewriter::new(7, is_events);
    let pieces = pieces.iter().map(|piece| usage.on_data(Bytes::copy_from_slice(piece)));
    pieces.collect::<Vec<_>>().concat()
}
