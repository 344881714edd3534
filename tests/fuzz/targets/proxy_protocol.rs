//! Any bytes as the start of a connection. A verdict is final: more bytes never change it, and a header is
//! never longer than what was received.

#![no_main]

use libfuzzer_sys::fuzz_target;
use warmroute::http::proxy_protocol::{Parsed, parse};

fuzz_target!(|bytes: &[u8]| {
    let whole = parse(bytes);
    if let Parsed::Header { length, .. } = whole {
        assert!(length <= bytes.len());
        assert_eq!(parse(&bytes[..length]), whole);
    }
    for cut in 0..bytes.len().min(256) {
        let part = parse(&bytes[..cut]);
        assert!(part == Parsed::Incomplete || part == whole, "{cut}: {part:?}, then {whole:?}");
    }
});
