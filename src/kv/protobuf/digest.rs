//! A digest of a KV event batch. A batch has the same digest when it is replayed, so the digest leaves out the
//! load report, which the server writes anew each time it sends the batch.

use bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, skip_field};
use xxhash_rust::xxh3::Xxh3;

/// The load field of `KvEventBatch`.
const LOAD: u32 = 8;

/// The digest of an encoded batch. It depends on the encoding, which protobuf does not fix; that is enough,
/// because only two copies of a batch from the same server process are compared.
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

/// The number of the first field, and its length in bytes with its key. `None` if the bytes are malformed.
fn field(bytes: &[u8]) -> Option<(u32, usize)> {
    let mut rest = bytes;
    let (number, kind) = decode_key(&mut rest).ok()?;
    if kind == WireType::EndGroup {
        return None;
    }
    skip_field(kind, number, &mut rest, DecodeContext::default()).ok()?;
    Some((number, bytes.len() - rest.remaining()))
}
