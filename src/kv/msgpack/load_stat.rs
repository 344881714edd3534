//! Decodes what SGLang publishes of its load (`--load-publish-endpoint`): `["LoadStat", running, waiting, used tokens, tokens
//! that fit, ...]`. Later fields may follow.

use super::read::{Cursor, Read};
use crate::kv::event::Load;
use crate::kv::source::DecodeError;

const TAG: &str = "LoadStat";
/// The fields that are read, with the tag.
const FIELDS: usize = 5;

/// Decodes a payload. The error says what is wrong and at which byte.
pub fn decode(payload: &[u8]) -> Result<Load, DecodeError> {
    read(&mut Cursor::new(payload)).map_err(|fault| DecodeError(fault.to_string()))
}

fn read(cursor: &mut Cursor<'_>) -> Read<Load> {
    let start = cursor.clone();
    let fields = cursor.array()?;
    if fields < FIELDS || cursor.text()? != TAG {
        return Err(start.fault(format!("not a {TAG} of {FIELDS} fields or more")));
    }
    let mut next = || cursor.float();
    let [running, waiting, used, capacity] = [next()?, next()?, next()?, next()?];
    let usage = used / capacity;
    Ok(Load {
        // From a float, too large ones are cut and NaN is 0.
        running_requests: running as u32,
        waiting_requests: waiting as u32,
        token_usage: if usage.is_finite() { usage } else { 0.0 },
        ..Load::default()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `["LoadStat", 3, 200, 512, 1024, 0, 70000]`.
    const STAT: &[u8] =
        b"\x97\xa8LoadStat\x03\xcc\xc8\xcd\x02\x00\xcd\x04\x00\x00\xce\x00\x01\x11\x70";

    #[test]
    fn requests_and_the_used_part_of_the_cache_are_read_and_the_rest_is_left() {
        let load = decode(STAT).unwrap();
        assert_eq!((load.running_requests, load.waiting_requests), (3, 200));
        assert_eq!(load.token_usage, 0.5);
        let empty = decode(b"\x95\xa8LoadStat\x00\x00\x00\x00").unwrap();
        assert_eq!(empty, Load::default());
    }

    #[test]
    fn other_messages_are_refused() {
        for other in [
            &b"\x95\xa8LoadStaX\x00\x00\x00\x00"[..],
            b"\x94\xa8LoadStat\x00\x00\x00",
            b"\x95\xa8LoadStat\x00\xc0\x00\x00",
            b"\x80",
            b"",
        ] {
            assert!(decode(other).is_err(), "{other:?}");
        }
    }

    proptest! {
        #[test]
        fn no_payload_makes_it_panic(
            payload in proptest::collection::vec(any::<u8>(), 0..64),
            cut in 0..STAT.len(),
        ) {
            let _ = decode(&payload);
            let mut changed = STAT[..cut].to_vec();
            changed.extend(payload);
            let _ = decode(&changed);
        }
    }
}
