//! Encoding of values in Redis: raw or compressed, in one field or split into pieces.
//!
//! A packed value is `r` and the bytes, or `z`, the uncompressed length (u32, little-endian) and a zstd frame. A
//! value that is too large for one field is split into pieces, and its field refers to them (see `common.lua`).

use std::cell::RefCell;

use bytes::Bytes;

use crate::store::Error;

/// Larger values are split: one large write would block Redis for every client.
const WHOLE_BYTES_MAX: usize = 1 << 20;
const PIECE_BYTES: usize = 512 << 10;
/// The approximate maximum of one read. At 1 Gbit/s it delays small reads of other requests by 10 ms.
pub(super) const BATCH_BYTES: usize = 1 << 20;
pub(super) const PIECES_AT_A_TIME: usize = BATCH_BYTES / PIECE_BYTES;
/// The zstd level. JSON shrinks to a third; higher levels cost more CPU than they save.
const LEVEL: i32 = 1;
/// No value has more: `keep.max_record` is at most as large.
const BYTES_MAX: usize = 1 << 29;

/// Compressing or decompressing larger values takes most of a millisecond, so I/O threads do not do it.
pub(super) const LARGE_BYTES: usize = 256 << 10;

/// The uncompressed length that a compressed value claims; 0 for other values.
pub(super) fn bytes_to_unpack(packed: &[u8]) -> usize {
    match packed {
        [b'z', a, b, c, d, ..] => u32::from_le_bytes([*a, *b, *c, *d]) as usize,
        _ => 0,
    }
}

/// A value that is ready to be written.
pub(super) struct Packed {
    /// The content of the field itself.
    pub(super) field: Bytes,
    /// The content of the fields `<name>:<nonce>:<n>`, which are written before.
    pub(super) pieces: Vec<Bytes>,
    pub(super) nonce: u64,
}

impl Packed {
    pub(super) fn new(bytes: &Bytes, compress_min: u64) -> Self {
        let packed = pack(bytes, compress_min);
        if packed.len() <= WHOLE_BYTES_MAX {
            return Self {
                field: packed,
                pieces: Vec::new(),
                nonce: 0,
            };
        }
        // Random, so that two writers of one value never mix their pieces.
        let nonce = fastrand::u64(..);
        let cut = |from| packed.slice(from..packed.len().min(from + PIECE_BYTES));
        let pieces: Vec<Bytes> = (0..packed.len()).step_by(PIECE_BYTES).map(cut).collect();
        Self {
            field: format!("c{nonce:x}:{}", pieces.len()).into(),
            pieces,
            nonce,
        }
    }

    /// The pieces of the value `name`, each with its field name.
    pub(super) fn fields(&self, name: &str) -> impl Iterator<Item = (String, &Bytes)> {
        let field = move |(index, piece)| (format!("{name}:{:x}:{index}", self.nonce), piece);
        self.pieces.iter().enumerate().map(field)
    }
}

/// Whether a field refers to pieces instead of containing the value.
pub(super) fn is_split(field: &[u8]) -> bool {
    field.first() == Some(&b'c')
}

/// The field names of the pieces that the field of the value `name` refers to.
pub(super) fn pieces(name: &str, field: &[u8]) -> Result<Vec<String>, Error> {
    let parsed = || {
        let text = std::str::from_utf8(field).ok()?.strip_prefix('c')?;
        let (nonce, count) = text.split_once(':')?;
        let count: usize = count.parse().ok()?;
        (count <= BYTES_MAX / PIECE_BYTES + 1).then_some((nonce, count))
    };
    let (nonce, count) = parsed()
        .ok_or_else(|| Error::Unreadable("malformed reference to the pieces of a value".into()))?;
    let field = |index| format!("{name}:{nonce}:{index}");
    Ok((0..count).map(field).collect())
}

fn pack(bytes: &Bytes, compress_min: u64) -> Bytes {
    if bytes.len() as u64 >= compress_min
        && let Some(frame) = compressed(bytes)
        && frame.len() + 4 < bytes.len()
    {
        let length = bytes.len() as u32;
        let packed = [b"z".as_slice(), &length.to_le_bytes(), &frame].concat();
        return packed.into();
    }
    [b"r".as_slice(), bytes].concat().into()
}

pub(super) fn unpack(packed: Vec<u8>) -> Result<Bytes, Error> {
    let unreadable = |reason: &str| Error::Unreadable(reason.into());
    match packed.first() {
        Some(b'r') => Ok(Bytes::from(packed).slice(1..)),
        Some(b'z') => {
            let (length, frame) = packed[1..]
                .split_first_chunk()
                .ok_or_else(|| unreadable("a compressed value is truncated"))?;
            let length = u32::from_le_bytes(*length) as usize;
            if length > BYTES_MAX {
                return Err(unreadable("a compressed value claims an excessive length"));
            }
            let bytes = decompressed(frame, length);
            let bytes = bytes.filter(|bytes| bytes.len() == length);
            Ok(bytes
                .ok_or_else(|| unreadable("a compressed value is damaged"))?
                .into())
        }
        _ => Err(unreadable("a value has an unknown encoding")),
    }
}

thread_local! {
    // Kept per thread: setting them up takes longer than compressing most values.
    static COMPRESSOR: RefCell<Option<zstd::bulk::Compressor<'static>>> =
        RefCell::new(zstd::bulk::Compressor::new(LEVEL).ok());
    static DECOMPRESSOR: RefCell<Option<zstd::bulk::Decompressor<'static>>> =
        RefCell::new(zstd::bulk::Decompressor::new().ok());
}

fn compressed(bytes: &[u8]) -> Option<Vec<u8>> {
    COMPRESSOR.with_borrow_mut(|compressor| compressor.as_mut()?.compress(bytes).ok())
}

fn decompressed(frame: &[u8], length: usize) -> Option<Vec<u8>> {
    DECOMPRESSOR
        .with_borrow_mut(|decompressor| decompressor.as_mut()?.decompress(frame, length).ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn joined(packed: &Packed) -> Vec<u8> {
        if packed.pieces.is_empty() {
            packed.field.to_vec()
        } else {
            packed.pieces.concat()
        }
    }

    proptest! {
        #[test]
        fn a_value_survives_packing(bytes: Vec<u8>, times in 0..2_000_usize, min in 0..4_000u64) {
            let bytes = Bytes::from(bytes.repeat(times));
            let packed = Packed::new(&bytes, min);
            prop_assert_eq!(unpack(joined(&packed)).unwrap(), bytes);
        }

        #[test]
        fn arbitrary_bytes_never_panic(mut bytes: Vec<u8>, kind in prop_oneof![Just(b'r'), Just(b'z'), any::<u8>()]) {
            bytes.insert(0, kind);
            let _ = unpack(bytes);
        }
    }

    #[test]
    fn a_compressed_value_states_its_length() {
        let text = Bytes::from(vec![b'x'; LARGE_BYTES]);
        for (min, expected) in [(0, LARGE_BYTES), (u64::MAX, 0)] {
            let packed = Packed::new(&text, min).field;
            assert_eq!(bytes_to_unpack(&packed), expected);
        }
        assert_eq!((bytes_to_unpack(b""), bytes_to_unpack(b"z12")), (0, 0));
    }

    #[test]
    fn a_large_incompressible_value_is_split() {
        let mut random = fastrand::Rng::with_seed(1);
        let bytes: Bytes = (0..3 << 20).map(|_| random.u8(..)).collect();
        let packed = Packed::new(&bytes, 0);
        let field = packed.field.clone();
        assert!(is_split(&field) && packed.pieces.len() == 7);
        assert!(packed.pieces.iter().all(|piece| piece.len() <= PIECE_BYTES));
        assert_eq!(unpack(joined(&packed)).unwrap(), bytes);
        let small = Packed::new(&Bytes::from_static(b"c1:1"), 0);
        assert!(!is_split(&small.field));
        let written: Vec<_> = packed.fields("in").map(|(name, _)| name).collect();
        assert_eq!(pieces("in", &field).unwrap(), written);
        for damaged in ["c", "c1", "c1:", "c1:-1", "c1:99999999999", "c1:1000000"] {
            assert!(pieces("in", damaged.as_bytes()).is_err(), "{damaged}");
        }
    }
}
