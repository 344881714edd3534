//! The names that every part shares: workers, models, requests, prompt blocks.

use std::fmt;
use std::sync::Arc;

use sha2::Digest;
use sha2::Sha256;

/// One worker for as long as the fleet lists it. A worker that leaves and comes back gets a new
/// number, so nothing learnt of the old process can be taken for the new one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u32);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "w{}", self.0)
    }
}

/// The name under which clients ask for a model; a LoRA adapter is a model of its own.
pub type Model = Arc<str>;

/// The identity of a prompt prefix: a hash over a block and everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

/// One block of a prompt on the way from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Names the whole prefix that ends with this block.
    pub path: BlockHash,
    /// Tokens from the prompt's start to the end of this block.
    pub end_tokens: u32,
}

/// The id under which an engine knows a request. Ours, never the client's: two clients may choose
/// the same one, and an engine that is given it twice mixes the requests up.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId([u8; RequestId::LENGTH]);

impl RequestId {
    const LENGTH: usize = 27;

    /// `wr-` and 24 hex digits from 96 bits of `random`.
    pub fn new(random: u128) -> Self {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        let mut text = *b"wr-000000000000000000000000";
        for (place, digit) in text[3..].iter_mut().enumerate() {
            *digit = HEX[(random >> (4 * place)) as usize & 15];
        }
        Self(text)
    }

    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("made of ASCII")
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Whose data something is: 16 hex digits made from a tenant's name. It is part of every key of the
/// store and of every carrier, so what belongs to somebody else is not refused but simply not there.
///
/// Made from the name and nothing else: were a secret in it, a change of the secret would lose what
/// is stored. Names are no secrets, and API keys never go in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant([u8; Tenant::LENGTH]);

impl Tenant {
    const LENGTH: usize = 16;
    /// The name of the one tenant there is where none are configured.
    pub const DEFAULT: &str = "default";

    pub fn of(name: &str) -> Self {
        let digest = Sha256::new()
            .chain_update("warmroute tenant v1\0")
            .chain_update(name)
            .finalize();
        Self(hex(&digest))
    }

    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("made of ASCII")
    }
}

impl Default for Tenant {
    fn default() -> Self {
        Self::of(Self::DEFAULT)
    }
}

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The first `N` hex digits of some bytes.
pub fn hex<const N: usize>(bytes: &[u8]) -> [u8; N] {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut digits = [b'0'; N];
    for (place, digit) in digits.iter_mut().enumerate() {
        let shift = if place % 2 == 0 { 4 } else { 0 };
        *digit = HEX[usize::from(bytes[place / 2] >> shift) & 15];
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_is_its_name_on_every_replica_and_release() {
        assert_eq!(Tenant::of("default").as_str(), "62ce1639fe60da0a");
        assert_eq!(Tenant::default(), Tenant::of("default"));
        assert_ne!(Tenant::of("a"), Tenant::of("A"));
    }

    #[test]
    fn a_request_id_shows_its_random_bits() {
        assert_eq!(RequestId::new(0x1f).as_str(), "wr-f10000000000000000000000");
        assert_ne!(RequestId::new(1), RequestId::new(2));
    }
}
