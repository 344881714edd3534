//! Any bytes as a batch of the gRPC wire; and what was read, written again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use warmroute::kv::protobuf;

fuzz_target!(|message: &[u8]| {
    let _ = protobuf::digest(message);
    let _ = protobuf::decode_request(message);
    let Ok(read) = protobuf::decode_batch(message) else {
        return;
    };
    if let Ok(written) = protobuf::encode_batch(read.sequence, &read.batch, None) {
        let again = protobuf::decode_batch(&written.message).expect("it was written here");
        if written.left_out.is_empty() {
            // Removals that differ only in what is not written are joined.
            let events = again.batch.events.len() + again.batch.joined as usize;
            assert_eq!(events, read.batch.events.len());
        }
    }
});
