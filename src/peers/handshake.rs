//! The first two messages of each side of a stream between replicas: who the other side is, and that it knows the shared
//! secret. Pure; the driver sends and receives.
//!
//! Each side makes up a nonce and proves the secret with an HMAC over both nonces and both instance ids, so that neither
//! a recorded nor a reflected proof is worth anything. The acceptor proves last: a stranger learns nothing from it.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::wire;
use crate::ids;
use crate::secret::Secret;

/// Of the protocol. Replicas with different versions share nothing.
pub const VERSION: u32 = 1;

const NONCE_BYTES: usize = 32;
/// Names and releases of other replicas are cut to this length, in bytes.
const MAX_TEXT: usize = 128;

/// What a replica's process is known by, whatever its address: random bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId([u8; 16]);

impl InstanceId {
    /// `random` must be random: two replicas with one id would not share anything.
    pub fn new(random: u128) -> Self {
        Self(random.to_be_bytes())
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = ids::hex::<32>(&self.0);
        f.write_str(std::str::from_utf8(&digits).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What this process says of itself.
#[derive(Clone, Debug)]
pub struct Identity {
    pub id: InstanceId,
    /// For operators.
    pub name: Arc<str>,
    pub release: Arc<str>,
    /// Where it accepts streams of other replicas; 0: nowhere.
    pub port: u16,
    /// Empty: none.
    pub secret: Secret,
}

/// What another replica says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    pub id: InstanceId,
    pub name: Arc<str>,
    pub release: Arc<str>,
    pub port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Dialer,
    Acceptor,
}

/// Why a stream is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("this replica itself")]
    Itself,
    #[error("it speaks version {0} of the protocol between replicas, this one version {own}", own = VERSION)]
    Version(u32),
    /// Or it does not know any.
    #[error("it has another `peers.secret`")]
    Secret,
    #[error("malformed handshake: {0}")]
    Malformed(&'static str),
}

#[derive(Debug)]
pub struct Handshake<'a> {
    identity: &'a Identity,
    side: Side,
    nonce: [u8; NONCE_BYTES],
    peer: Option<(PeerIdentity, [u8; NONCE_BYTES])>,
}

impl<'a> Handshake<'a> {
    /// `nonce` must be random, and is used for one stream.
    pub fn new(identity: &'a Identity, side: Side, nonce: [u8; NONCE_BYTES]) -> Self {
        Self {
            identity,
            side,
            nonce,
            peer: None,
        }
    }

    /// The first message to send.
    pub fn hello(&self) -> wire::Hello {
        wire::Hello {
            version: VERSION,
            instance_id: self.identity.id.0.to_vec(),
            nonce: self.nonce.to_vec(),
            name: self.identity.name.to_string(),
            release: self.identity.release.to_string(),
            port: self.identity.port.into(),
        }
    }

    pub fn on_hello(&mut self, hello: &wire::Hello) -> Result<(), Refusal> {
        // Before anything else: another version may have another form.
        if hello.version != VERSION {
            return Err(Refusal::Version(hello.version));
        }
        let id = hello.instance_id.as_slice().try_into();
        let id = InstanceId(id.map_err(|_| Refusal::Malformed("instance_id is not 16 bytes"))?);
        let nonce = hello.nonce.as_slice().try_into();
        let nonce = nonce.map_err(|_| Refusal::Malformed("nonce is not 32 bytes"))?;
        if id == self.identity.id {
            return Err(Refusal::Itself);
        }
        let peer = PeerIdentity {
            id,
            name: short(&hello.name),
            release: short(&hello.release),
            port: hello.port.try_into().unwrap_or(0),
        };
        self.peer = Some((peer, nonce));
        Ok(())
    }

    /// The second message to send, once the other side's hello is known.
    pub fn proof(&self) -> Result<wire::Proof, Refusal> {
        let digest = self.digest(self.side)?.finalize().into_bytes();
        Ok(wire::Proof {
            hmac_sha256: digest.to_vec(),
        })
    }

    /// The other side, if it knows the secret.
    pub fn on_proof(self, proof: &wire::Proof) -> Result<PeerIdentity, Refusal> {
        let other = match self.side {
            Side::Dialer => Side::Acceptor,
            Side::Acceptor => Side::Dialer,
        };
        self.digest(other)?
            .verify_slice(&proof.hmac_sha256)
            .map_err(|_| Refusal::Secret)?;
        let (peer, _) = self.peer.ok_or(NO_HELLO)?;
        Ok(peer)
    }

    /// What `prover` must send.
    fn digest(&self, prover: Side) -> Result<Hmac<Sha256>, Refusal> {
        let (peer, peer_nonce) = self.peer.as_ref().ok_or(NO_HELLO)?;
        let (own, other) = ((&self.nonce, &self.identity.id.0), (peer_nonce, &peer.id.0));
        let (dialer, acceptor) = match self.side {
            Side::Dialer => (own, other),
            Side::Acceptor => (other, own),
        };
        let key = self.identity.secret.expose().as_bytes();
        let mut digest =
            Hmac::<Sha256>::new_from_slice(key).expect("a key of any length makes an HMAC");
        digest.update(match prover {
            Side::Dialer => b"warmroute peers 1 dialer  ",
            Side::Acceptor => b"warmroute peers 1 acceptor",
        });
        digest.update(dialer.0);
        digest.update(acceptor.0);
        digest.update(dialer.1);
        digest.update(acceptor.1);
        Ok(digest)
    }
}

const NO_HELLO: Refusal = Refusal::Malformed("the first message must be a hello");

/// Of two streams of a pair of replicas the one that the smaller id dialed stays.
pub fn is_preferred(own: InstanceId, peer: InstanceId, side: Side) -> bool {
    match side {
        Side::Dialer => own < peer,
        Side::Acceptor => peer < own,
    }
}

fn short(text: &str) -> Arc<str> {
    let text: String = text.chars().filter(|c| !c.is_control()).collect();
    let end = (0..=text.len().min(MAX_TEXT)).rev();
    let end = end.into_iter().find(|end| text.is_char_boundary(*end));
    text[..end.unwrap_or(0)].into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn identity(id: u128, secret: &str) -> Identity {
        Identity {
            id: InstanceId::new(id),
            name: "router-0".into(),
            release: "1.0.0".into(),
            port: 9_701,
            secret: Secret::new(secret),
        }
    }

    /// Both sides' verdicts on each other.
    fn shake(
        dialer: &Identity,
        acceptor: &Identity,
    ) -> (Result<PeerIdentity, Refusal>, Result<PeerIdentity, Refusal>) {
        let mut dialer = Handshake::new(dialer, Side::Dialer, [1; 32]);
        let mut acceptor = Handshake::new(acceptor, Side::Acceptor, [2; 32]);
        let hellos = (dialer.hello(), acceptor.hello());
        if let Err(refusal) = dialer.on_hello(&hellos.1) {
            let other = acceptor.on_hello(&hellos.0).unwrap_err();
            return (Err(refusal), Err(other));
        }
        acceptor.on_hello(&hellos.0).unwrap();
        let proofs = (dialer.proof().unwrap(), acceptor.proof().unwrap());
        (dialer.on_proof(&proofs.1), acceptor.on_proof(&proofs.0))
    }

    #[test]
    fn replicas_with_one_secret_know_each_other() {
        let (a, b) = (identity(1, "a secret"), identity(2, "a secret"));
        let (seen_by_a, seen_by_b) = shake(&a, &b);
        assert_eq!(seen_by_a.unwrap().id, b.id);
        let a_as_seen = seen_by_b.unwrap();
        assert_eq!((a_as_seen.id, a_as_seen.port), (a.id, 9_701));
        assert!(shake(&identity(1, ""), &identity(2, "")).0.is_ok());
    }

    #[test]
    fn another_secret_is_refused_by_both_sides() {
        for other in ["b secret", "", "a secret "] {
            let (of_a, of_b) = shake(&identity(1, "a secret"), &identity(2, other));
            assert_eq!((of_a, of_b), (Err(Refusal::Secret), Err(Refusal::Secret)));
        }
    }

    #[test]
    fn a_replica_knows_itself() {
        let own = identity(7, "s");
        let refused = (Err(Refusal::Itself), Err(Refusal::Itself));
        assert_eq!(shake(&own, &own), refused);
    }

    #[test]
    fn another_version_is_refused_before_anything_else() {
        let own = identity(1, "s");
        let mut handshake = Handshake::new(&own, Side::Dialer, [0; 32]);
        let hello = wire::Hello {
            version: 2,
            ..wire::Hello::default()
        };
        assert_eq!(handshake.on_hello(&hello), Err(Refusal::Version(2)));
    }

    #[test]
    fn a_reflected_proof_and_one_of_another_stream_are_refused() {
        let (a, b) = (identity(1, "s"), identity(2, "s"));
        let mut dialer = Handshake::new(&a, Side::Dialer, [1; 32]);
        let mut acceptor = Handshake::new(&b, Side::Acceptor, [2; 32]);
        dialer.on_hello(&acceptor.hello()).unwrap();
        acceptor.on_hello(&dialer.hello()).unwrap();
        let recorded = acceptor.proof().unwrap();
        let reflected = dialer.proof().unwrap();
        assert_eq!(dialer.on_proof(&reflected), Err(Refusal::Secret));
        let mut later = Handshake::new(&a, Side::Dialer, [3; 32]);
        later.on_hello(&acceptor.hello()).unwrap();
        assert_eq!(later.on_proof(&recorded), Err(Refusal::Secret));
    }

    #[test]
    fn a_proof_before_the_hello_is_refused() {
        let own = identity(1, "s");
        let handshake = Handshake::new(&own, Side::Dialer, [0; 32]);
        assert_eq!(handshake.proof(), Err(NO_HELLO));
        assert_eq!(handshake.on_proof(&wire::Proof::default()), Err(NO_HELLO));
    }

    #[test]
    fn a_long_name_is_cut_and_shows_no_control_characters() {
        assert_eq!(&*short("router\n-0\u{7}"), "router-0");
        assert_eq!(short(&"é".repeat(100)).len(), 128);
    }

    proptest! {
        #[test]
        fn both_sides_prefer_the_same_stream(a: u128, b: u128) {
            prop_assume!(a != b);
            let (a, b) = (InstanceId::new(a), InstanceId::new(b));
            let dialed_by_a = is_preferred(a, b, Side::Dialer);
            prop_assert_eq!(dialed_by_a, is_preferred(b, a, Side::Acceptor));
            prop_assert_ne!(dialed_by_a, is_preferred(b, a, Side::Dialer));
        }

        #[test]
        fn a_foreign_hello_never_panics(
            version in 0..3_u32,
            instance_id: Vec<u8>,
            nonce: Vec<u8>,
            name: String,
            port: u32,
            proof: Vec<u8>,
        ) {
            let own = identity(1, "s");
            let mut handshake = Handshake::new(&own, Side::Acceptor, [0; 32]);
            let release = name.clone();
            let _ = handshake.on_hello(&wire::Hello { version, instance_id, nonce, name, release, port });
            let proof = wire::Proof { hmac_sha256: proof };
            prop_assert!(handshake.on_proof(&proof).is_err());
        }
    }
}
