//! Any bytes as a batch of the gRPC wire.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|message: &[u8]| {
    // Waits for `kv::protobuf`: `let _ = warmroute::kv::protobuf::decode_batch(message);`
    let _ = message;
});
