//! Any bytes as the payload of a published batch. What is read must survive being written and read
//! again, in every layout that can hold it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use warmroute::kv::event::{Batch, Event};
use warmroute::kv::msgpack;
use warmroute::sim::worker::publisher::encode::encode;
use warmroute::sim::worker::publisher::{Hashes, Layout};

fuzz_target!(|payload: &[u8]| {
    let Ok(mut batch) = msgpack::decode(payload) else {
        return;
    };
    // How many events were joined into others: what is written has them joined.
    batch.joined = 0;
    // Encoders write one entry a block where payloads may have more or fewer, a salt among the keys, and no
    // blocks of an event that is not known; NaN differs from itself.
    if batch.timestamp.is_nan() || batch.events.iter().any(is_lossy) {
        return;
    }
    for layout in [Layout::Map, Layout::Array] {
        for hashes in [Hashes::Int, Hashes::Bytes] {
            let again = encode(&batch, layout, hashes);
            assert_eq!(msgpack::decode(&again).as_ref(), Ok::<&Batch, _>(&batch));
        }
    }
});

fn is_lossy(event: &Event) -> bool {
    match event {
        Event::Stored(stored) => {
            let entries = stored.extra_keys.len();
            stored.cache_salt.is_some() || (entries != 0 && entries != stored.hashes.len())
        }
        // Written without its blocks.
        Event::Unknown { hashes, .. } => hashes.as_ref().is_none_or(|hashes| !hashes.is_empty()),
        _ => false,
    }
}
