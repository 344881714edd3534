//! A digest of a message that stays the same when it is asked for again: of all of its fields but the
//! load, which is as of the moment of sending.

use bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, skip_field};
use xxhash_rust::xxh3::Xxh3;

/// The field of `KvEventBatch` that is left out.
const LOAD: u32 = 8;

/// Over the bytes as they came, so that no two servers' ways to encode need to be alike: a batch is only
/// ever compared with itself, from the same process.
pub fn digest(message: &[u8]) -> u128 {
    let mut hash = Xxh3::new();
    let mut rest = message;
    while !rest.is_empty() {
        let Some((field, length)) = field(rest) else {
            // Not a message; then its bytes are all that can be compared.
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

/// The number of the first field, and how many bytes it takes.
fn field(bytes: &[u8]) -> Option<(u32, usize)> {
    let mut rest = bytes;
    let (number, kind) = decode_key(&mut rest).ok()?;
    if kind == WireType::EndGroup {
        return None;
    }
    skip_field(kind, number, &mut rest, DecodeContext::default()).ok()?;
    Some((number, bytes.len() - rest.remaining()))
}
