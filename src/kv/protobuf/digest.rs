//! A digest of a message that is the same when the message is replayed: over all fields but the load
//! report, which is of the moment of sending.

use bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, skip_field};
use xxhash_rust::xxh3::Xxh3;

/// The load field of `KvEventBatch`.
const LOAD: u32 = 8;

/// Over the received bytes: servers may encode differently, but a batch is only compared with itself from
/// the same process.
pub fn digest(message: &[u8]) -> u128 {
    let mut hash = Xxh3::new();
    let mut rest = message;
    while !rest.is_empty() {
        let Some((field, length)) = field(rest) else {
            // Not a protobuf message; compare its raw bytes.
            hash.update(rest);
            break;
        };
        if field != LOAD {
            hash.update(&rest[..length]);
        }
        rest = &rest[length..];
    }
    hash.digest128()
}

/// The number of the first field, and its length in bytes.
fn field(bytes: &[u8]) -> Option<(u32, usize)> {
    let mut rest = bytes;
    let (number, kind) = decode_key(&mut rest).ok()?;
    if kind == WireType::EndGroup {
        return None;
    }
    skip_field(kind, number, &mut rest, DecodeContext::default()).ok()?;
    Some((number, bytes.len() - rest.remaining()))
}
