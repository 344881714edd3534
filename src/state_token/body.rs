//! Compression of a token's items, with a limit on the decompressed size. Pure.

use serde::{Deserialize, Serialize};
use zstd::bulk;

use super::rejection::RejectReason;

/// Smaller bodies are not compressed.
const COMPRESS_BYTES_MIN: usize = 1 << 10;
const LEVEL: i32 = 3;
/// A higher compression ratio is taken for a decompression bomb and rejected; text that would exceed it is
/// issued uncompressed. Conversations compress about 5:1, tables of numbers 20:1.
const RATIO_MAX: usize = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Compression {
    None,
    Zstd,
}

/// A token's body.
#[derive(Debug)]
pub(super) struct Packed {
    pub(super) compression: Compression,
    pub(super) bytes: Vec<u8>,
}

impl Packed {
    pub(super) fn pack(plain: &[u8]) -> Self {
        let compressed = match plain.len() {
            0..COMPRESS_BYTES_MIN => None,
            _ => bulk::compress(plain, LEVEL).ok(),
        };
        let is_worth_it = |packed: &Vec<u8>| {
            packed.len() < plain.len() && packed.len() * RATIO_MAX >= plain.len()
        };
        match compressed.filter(is_worth_it) {
            Some(bytes) => Self {
                compression: Compression::Zstd,
                bytes,
            },
            None => Self {
                compression: Compression::None,
                bytes: plain.to_vec(),
            },
        }
    }

    /// Decompresses. The result must have exactly `plain_bytes` bytes; no more is ever allocated.
    pub(super) fn unpack(self, plain_bytes: usize) -> Result<Vec<u8>, RejectReason> {
        let plain = match self.compression {
            Compression::None => self.bytes,
            Compression::Zstd if plain_bytes > self.bytes.len().saturating_mul(RATIO_MAX) => {
                return Err(RejectReason::TooLarge);
            }
            Compression::Zstd => {
                bulk::decompress(&self.bytes, plain_bytes).map_err(|_| RejectReason::Unreadable)?
            }
        };
        if plain.len() == plain_bytes {
            Ok(plain)
        } else {
            Err(RejectReason::Unreadable)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(bytes: u32) -> Vec<u8> {
        let digest = |at: u32| xxhash_rust::xxh3::xxh3_64(&at.to_le_bytes()) as u8;
        (0..bytes).map(digest).collect()
    }

    #[test]
    fn packing_and_unpacking_gives_the_same_bytes() {
        let cases = [
            (Vec::new(), Compression::None),
            (b"[]".to_vec(), Compression::None),
            (random(1_000).repeat(20), Compression::Zstd),
            (random(10_000), Compression::None),
            // Its ratio would exceed the limit.
            (vec![b'a'; 1 << 20], Compression::None),
        ];
        for (plain, compression) in cases {
            let packed = Packed::pack(&plain);
            assert_eq!(packed.compression, compression, "{} bytes", plain.len());
            assert_eq!(packed.unpack(plain.len()), Ok(plain));
        }
    }

    #[test]
    fn a_decompression_bomb_is_rejected() {
        let packed = |plain: &[u8]| Packed {
            compression: Compression::Zstd,
            bytes: bulk::compress(plain, LEVEL).unwrap(),
        };
        let bomb = packed(&vec![b'a'; 1 << 20]);
        assert_eq!(bomb.unpack(1 << 20), Err(RejectReason::TooLarge));
        let text = random(1_000).repeat(4);
        assert_eq!(packed(&text).unpack(4_000), Ok(text.clone()));
        // A declared size that is too small or too large.
        assert_eq!(packed(&text).unpack(3_999), Err(RejectReason::Unreadable));
        assert_eq!(packed(&text).unpack(4_001), Err(RejectReason::Unreadable));
    }
}
