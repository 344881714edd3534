//! The names that every part shares: workers, models, requests, prompt blocks, stored responses.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use sha2::{Digest, Sha256};

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

    /// The tag as 16 lower-case hex digits.
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

/// What the responses of one chain share, and the conversation with its responses: with the tenant
/// it names the slot of the store in which all of them lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Root(pub u64);

impl fmt::Display for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A root and 128 bits of one's own, as 48 hex digits behind a prefix.
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

            /// Its own part must be random: whoever guesses it can ask for it.
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

        /// Any text that [`fmt::Display`] cannot have written is refused: it names nothing of ours.
        impl FromStr for $name {
            type Err = NotOurs;

            fn from_str(text: &str) -> Result<Self, NotOurs> {
                let digits = text.strip_prefix($prefix).ok_or(NotOurs)?;
                let is_hex = |digit: u8| matches!(digit, b'0'..=b'9' | b'a'..=b'f');
                if digits.len() != 48 || !digits.bytes().all(is_hex) {
                    return Err(NotOurs);
                }
                let (root, own) = digits.split_at(16);
                Ok(Self {
                    root: Root(u64::from_str_radix(root, 16).map_err(|_| NotOurs)?),
                    own: u128::from_str_radix(own, 16).map_err(|_| NotOurs)?,
                })
            }
        }
    };
}

rooted_id! {
    /// A response of ours. One that continues another has its root, so that a whole chain lies in one
    /// slot; one that belongs to a conversation has the conversation's.
    ResponseId, "resp_"
}

rooted_id! {
    /// A conversation of ours.
    ConversationId, "conv_"
}

/// An id that this router never gave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotOurs;

impl fmt::Display for NotOurs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not an id of this router")
    }
}

impl std::error::Error for NotOurs {}

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
        assert_eq!(text.parse::<ConversationId>(), Err(NotOurs));
    }

    #[test]
    fn what_we_never_wrote_is_no_id_of_ours() {
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
            assert_eq!(text.parse::<ResponseId>(), Err(NotOurs), "{text}");
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
