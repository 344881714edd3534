//! Identifiers that all parts share: workers, models, requests, prompt blocks, tenants, stored responses.

use std::fmt;
use std::net::IpAddr;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// One worker for as long as the fleet lists it. A worker that leaves and comes back gets a new number, so
/// that nothing recorded about the old process is applied to the new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u32);

impl WorkerId {
    /// The lower bits number the worker, the upper ones its dp rank plus one, or 0 for the worker itself.
    const RANK_SHIFT: u32 = 25;

    /// The cache of one dp rank of the worker, where caches are known by rank. `None` for numbers that do not fit.
    #[inline]
    pub fn at_rank(self, rank: u32) -> Option<Self> {
        let fits = rank < (1 << (32 - Self::RANK_SHIFT)) - 1 && self.0 >> Self::RANK_SHIFT == 0;
        fits.then(|| Self(self.0 | (rank + 1) << Self::RANK_SHIFT))
    }

    /// Whose cache it is that a request uses: the rank's that it is pinned to, or the worker's.
    #[inline]
    pub fn cache_owner(self, rank: Option<u32>) -> Self {
        rank.and_then(|rank| self.at_rank(rank)).unwrap_or(self)
    }

    /// The worker, whichever of its ranks this is.
    #[inline]
    pub fn worker(self) -> Self {
        Self(self.0 & ((1 << Self::RANK_SHIFT) - 1))
    }

    /// The dp rank, if this is the cache of one.
    #[inline]
    pub fn rank(self) -> Option<u32> {
        (self.0 >> Self::RANK_SHIFT).checked_sub(1)
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank() {
            None => write!(f, "w{}", self.0),
            Some(rank) => write!(f, "w{}/{rank}", self.worker().0),
        }
    }
}

/// Defines an index of one kind, which cannot be passed for an index of another kind.
macro_rules! index_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u32);

        impl $name {
            #[inline]
            pub const fn new(index: usize) -> Self {
                Self(index as u32)
            }

            /// The index as a number, for the list that it belongs to.
            #[inline]
            pub const fn get(self) -> usize {
                self.0 as usize
            }

            #[inline]
            pub fn range(
                indices: Range<usize>,
            ) -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator + Clone {
                indices.map(Self::new)
            }
        }
    };
}

index_type! {
    /// A worker's index among the workers of one model, in one snapshot of the fleet.
    WorkerIndex
}

index_type! {
    /// The index of a place that a request can be sent to: a worker, or one dp rank of a worker whose ranks requests are pinned to.
    RankPlace
}

index_type! {
    /// The index of a candidate in the view that one decision gets.
    ViewIndex
}

/// The model name that clients use. A LoRA adapter is a model of its own.
pub type Model = Arc<str>;

/// The identity of a prompt prefix: a hash over a block and everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

/// One block of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Identifies the whole prefix that ends with this block.
    pub path: BlockHash,
    /// Tokens from the prompt's start to the end of this block.
    pub end_tokens: u32,
}

/// The request id that engines get. The router makes it and never uses the client's: two clients may choose
/// the same id, and an engine confuses two requests that have it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId([u8; RequestId::LENGTH]);

impl RequestId {
    const LENGTH: usize = 27;

    /// `wr-` and 24 hex digits from 96 bits of `random`.
    pub fn new(random: u128) -> Self {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        let mut text = *b"wr-000000000000000000000000";
        for (index, digit) in text[3..].iter_mut().enumerate() {
            *digit = HEX[(random >> (4 * index)) as usize & 15];
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

/// The owner of stored data: 16 hex digits derived from the tenant's name. It is part of every key of the
/// response store and of every state token, so that other tenants' data cannot be found.
///
/// It is derived from the name only: if a secret went in, a change of the secret would lose the stored data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant([u8; Tenant::LENGTH]);

impl Tenant {
    const LENGTH: usize = 16;
    /// The only tenant's name if none are configured.
    pub const DEFAULT: &str = "default";

    pub fn of(name: &str) -> Self {
        let digest = Sha256::new()
            .chain_update("warmroute tenant v1\0")
            .chain_update(name)
            .finalize();
        Self(hex(&digest))
    }

    /// The tenant whose 16 hex digits are these.
    pub fn tagged(tag: u64) -> Self {
        Self(hex(&tag.to_be_bytes()))
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

/// Whose requests these are, where one client must not harm the others: a tenant, or without tenants a client's
/// address. A host has a whole IPv6 network of 64 bits, so such a network is one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientKey(pub u64);

impl ClientKey {
    pub fn of_tenant(tenant: Tenant) -> Self {
        Self(xxh3_64(&tenant.0))
    }

    /// Of a name that whoever is in front gives: never the key of a tenant or an address, which are hashed without a
    /// seed.
    pub fn of_flow(name: &[u8]) -> Self {
        const SEED: u64 = 1;
        Self(xxh3_64_with_seed(name, SEED))
    }

    pub fn of_address(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V4(address) => xxh3_64(&address.octets()),
            IpAddr::V6(address) => xxh3_64(&address.octets()[..8]),
        })
    }
}

/// The part of an id that all responses of a chain share, and a conversation with its responses. Tenant and
/// root choose the Redis slot, so that one script can use all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Root(pub u64);

impl fmt::Display for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Defines an id of a root and 128 bits of its own, written as 48 hex digits after a prefix.
macro_rules! rooted_id {
    ($(#[$about:meta])* $name:ident, $prefix:literal) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name {
            root: Root,
            own: u128,
        }

        impl $name {
            pub const PREFIX: &str = $prefix;

            /// `own` must be random: a client that guesses an id can use it.
            pub fn new(root: Root, own: u128) -> Self {
                Self { root, own }
            }

            pub fn root(self) -> Root {
                self.root
            }

            pub fn own(self) -> u128 {
                self.own
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                const START: usize = $prefix.len();
                let mut text = [0; START + 48];
                text[..START].copy_from_slice($prefix.as_bytes());
                text[START..START + 16].copy_from_slice(&hex::<16>(&self.root.0.to_be_bytes()));
                text[START + 16..].copy_from_slice(&hex::<32>(&self.own.to_be_bytes()));
                f.write_str(std::str::from_utf8(&text).map_err(|_| fmt::Error)?)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        /// Refuses every text that [`fmt::Display`] does not write.
        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                let digits = text.strip_prefix($prefix).ok_or(InvalidId)?;
                if !is_hex(digits, 48) {
                    return Err(InvalidId);
                }
                let (root, own) = digits.split_at(16);
                Ok(Self {
                    root: Root(u64::from_str_radix(root, 16).map_err(|_| InvalidId)?),
                    own: u128::from_str_radix(own, 16).map_err(|_| InvalidId)?,
                })
            }
        }
    };
}

rooted_id! {
    /// The id of a stored response. A response that continues another one has the same root, and one that
    /// belongs to a conversation has the conversation's.
    ResponseId, "resp_"
}

rooted_id! {
    /// The id of a stored conversation.
    ConversationId, "conv_"
}

/// What a name must be that an operator gives: of a tenant, a class or an endpoint.
pub const NAME_RULE: &str = "must be 1 to 64 of A-Z, a-z, 0-9, `-`, `_` and `.`";

/// Whether a text keeps to [`NAME_RULE`].
pub fn is_name(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=64).contains(&text.len()) && text.bytes().all(is_plain)
}

/// The text is not an id that a router of this project writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an id that this router wrote")]
pub struct InvalidId;

/// The first `N` hex digits of some bytes.
pub fn hex<const N: usize>(bytes: &[u8]) -> [u8; N] {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut digits = [b'0'; N];
    for (pair, byte) in digits.chunks_mut(2).zip(bytes) {
        pair[0] = HEX[usize::from(byte >> 4)];
        if let Some(second) = pair.get_mut(1) {
            *second = HEX[usize::from(byte & 15)];
        }
    }
    digits
}

/// Whether a text is so many hex digits, as [`hex`] writes them.
pub fn is_hex(text: &str, digits: usize) -> bool {
    let is_digit = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
    text.len() == digits && text.bytes().all(is_digit)
}

/// The bytes that hex digits, of either case, stand for.
pub fn from_hex(digits: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = |[high, low]: &[u8; 2]| u8::try_from(digit(*high)? << 4 | digit(*low)?).ok();
    pairs.iter().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    #[test]
    fn a_tenant_shows_its_tag() {
        assert_eq!(Tenant::tagged(0x1f).as_str(), "000000000000001f");
    }

    #[test]
    fn a_response_id_is_its_root_and_its_own_bits() {
        let id = ResponseId::new(Root(0xab), 0xcd);
        let text = "resp_00000000000000ab000000000000000000000000000000cd";
        assert_eq!(id.to_string(), text);
        assert_eq!(text.parse(), Ok(id));
        assert_eq!(text.parse::<ConversationId>(), Err(InvalidId));
    }

    #[test]
    fn a_text_that_is_not_exactly_as_written_is_no_id() {
        let id = ResponseId::new(Root(u64::MAX), 7).to_string();
        for text in [
            id.to_uppercase(),
            id[..52].to_owned(),
            format!("{id}0"),
            id.replace("resp_", "resp-"),
            id.replacen('f', "+", 1),
            id.replacen("ff", "\u{e9}", 1),
            String::new(),
        ] {
            assert_eq!(text.parse::<ResponseId>(), Err(InvalidId), "{text}");
        }
    }

    proptest! {
        #[test]
        fn an_id_is_read_back_as_it_was_written(root: u64, own: u128) {
            let id = ConversationId::new(Root(root), own);
            prop_assert_eq!(id.to_string().parse(), Ok(id));
        }
    }
}
