//! The client side of ZMTP 3, ZeroMQ's wire protocol, without I/O: takes received bytes, returns messages
//! and bytes to send. Only what a SUB and a DEALER socket need: NULL security, no listening.
//!
//! Speaks 3.1 with peers that support it (libzmq since 4.3: subscriptions and heartbeats are commands),
//! otherwise 3.0 (a subscription is a message, and there are no heartbeats).
//! <https://rfc.zeromq.org/spec/37/>

use bytes::{Buf, BufMut, Bytes, BytesMut};
use smallvec::SmallVec;

/// The frames (parts) of one message.
pub type Parts = SmallVec<[Bytes; 4]>;

const GREETING_LEN: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// A command is a name and a few properties.
const COMMAND_BYTES_MAX: u64 = 4_096;

/// The socket type of this end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Receives messages whose topic begins with `topic`.
    Subscriber { topic: Bytes },
    /// Sends requests and receives any number of messages for each.
    Dealer,
}

impl Role {
    fn name(&self) -> &'static str {
        match self {
            Role::Subscriber { .. } => "SUB",
            Role::Dealer => "DEALER",
        }
    }

    fn accepts(&self, peer: &[u8]) -> bool {
        match self {
            Role::Subscriber { .. } => matches!(peer, b"PUB" | b"XPUB"),
            Role::Dealer => matches!(peer, b"ROUTER" | b"DEALER" | b"REP"),
        }
    }
}

/// Limits of one message.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub message_bytes_max: usize,
    pub parts_max: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub enum PeerMessage {
    /// The handshake is done, and the subscription is on its way.
    Ready,
    /// The answer to a ping: the peer has read everything sent before the ping.
    Pong,
    Message(Parts),
}

/// Why the connection cannot be used any further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub enum ProtocolError {
    /// A message exceeds its limits.
    TooLarge(String),
    /// The peer violates the protocol, or is not the expected kind of socket.
    Invalid(String),
}

fn invalid<T>(what: impl Into<String>) -> Result<T, ProtocolError> {
    Err(ProtocolError::Invalid(what.into()))
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    Greeting,
    Handshake,
    Open,
}

#[derive(Debug)]
pub struct Session {
    role: Role,
    bounds: Bounds,
    phase: Phase,
    /// The peer's minor version; its major one is 3.
    minor: u8,
    /// The frames received so far of an incomplete message.
    parts: Parts,
    parts_bytes: usize,
}

impl Session {
    /// Starts a session, and puts its greeting into `out`.
    pub fn new(role: Role, bounds: Bounds, out: &mut BytesMut) -> Self {
        let mut greeting = [0; GREETING_LEN];
        greeting[0] = 0xff;
        greeting[9] = 0x7f;
        greeting[10..12].copy_from_slice(&[3, 1]);
        greeting[12..16].copy_from_slice(b"NULL");
        out.put_slice(&greeting);
        Self {
            role,
            bounds,
            phase: Phase::Greeting,
            minor: 0,
            parts: Parts::new(),
            parts_bytes: 0,
        }
    }

    /// Whether the peer answers pings.
    pub fn can_ping(&self) -> bool {
        self.phase == Phase::Open && self.minor >= 1
    }

    pub fn ping(&self, out: &mut BytesMut) {
        // Time to live 0: this end closes silent connections itself.
        put_frame(COMMAND, b"\x04PING\0\0", out);
    }

    pub fn send(&self, parts: &[&[u8]], out: &mut BytesMut) {
        for (at, part) in parts.iter().enumerate() {
            let more = if at + 1 < parts.len() { MORE } else { 0 };
            put_frame(more, part, out);
        }
    }

    /// Consumes whole frames from `input` until there is something to return; `None` if more bytes are
    /// needed. Puts what must be sent in answer into `out`.
    pub fn read(
        &mut self,
        input: &mut BytesMut,
        out: &mut BytesMut,
    ) -> Result<Option<PeerMessage>, ProtocolError> {
        if self.phase == Phase::Greeting {
            match greeting(input)? {
                Some(minor) => self.minor = minor,
                None => return Ok(None),
            }
            self.phase = Phase::Handshake;
            let mut ready = BytesMut::from(&b"\x05READY\x0bSocket-Type"[..]);
            let name = self.role.name();
            ready.put_u32(name.len() as u32);
            ready.put_slice(name.as_bytes());
            put_frame(COMMAND, &ready, out);
        }
        while let Some((flags, body)) = self.frame(input)? {
            let message = if flags & COMMAND != 0 {
                self.command(&body, out)?
            } else {
                self.part(flags, body)?
            };
            if message.is_some() {
                return Ok(message);
            }
        }
        Ok(None)
    }

    /// The next whole frame. Its length is checked as soon as it is received.
    fn frame(&self, input: &mut BytesMut) -> Result<Option<(u8, Bytes)>, ProtocolError> {
        let Some(&flags) = input.first() else {
            return Ok(None);
        };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & (MORE | COMMAND) == MORE | COMMAND {
            return invalid(format!("a frame with the flags {flags:#04x}"));
        }
        let (header, len) = if flags & LONG == 0 {
            match input.get(1) {
                Some(&len) => (2, u64::from(len)),
                None => return Ok(None),
            }
        } else {
            match input.get(1..9) {
                Some(len) => (9, len.iter().fold(0, |sum, &b| sum << 8 | u64::from(b))),
                None => return Ok(None),
            }
        };
        let left = if flags & COMMAND == 0 {
            (self.bounds.message_bytes_max - self.parts_bytes) as u64
        } else {
            COMMAND_BYTES_MAX
        };
        if len > left {
            return Err(ProtocolError::TooLarge(format!(
                "a frame of {len} bytes, {left} are allowed"
            )));
        }
        if ((input.len() - header) as u64) < len {
            return Ok(None);
        }
        input.advance(header);
        Ok(Some((flags, input.split_to(len as usize).freeze())))
    }

    fn part(&mut self, flags: u8, body: Bytes) -> Result<Option<PeerMessage>, ProtocolError> {
        if self.phase != Phase::Open {
            return invalid("a message before the handshake");
        }
        if self.parts.len() >= self.bounds.parts_max {
            return Err(ProtocolError::TooLarge(format!(
                "a message of more than {} frames",
                self.bounds.parts_max
            )));
        }
        self.parts_bytes += body.len();
        self.parts.push(body);
        if flags & MORE != 0 {
            return Ok(None);
        }
        self.parts_bytes = 0;
        Ok(Some(PeerMessage::Message(std::mem::take(&mut self.parts))))
    }

    fn command(
        &mut self,
        body: &[u8],
        out: &mut BytesMut,
    ) -> Result<Option<PeerMessage>, ProtocolError> {
        let split = body
            .split_first()
            .and_then(|(&len, rest)| rest.split_at_checked(usize::from(len)));
        let Some((name, rest)) = split else {
            return invalid("a command without a whole name");
        };
        match (name, &self.phase) {
            (b"READY", Phase::Handshake) => self.ready(rest, out).map(Some),
            (b"ERROR", _) => {
                let reason = rest.get(1..).unwrap_or_default();
                invalid(format!(
                    "the peer refuses: {}",
                    String::from_utf8_lossy(reason).escape_default()
                ))
            }
            (b"PING", Phase::Open) => {
                // Two bytes of time to live, then a context of at most 16 bytes that the pong repeats.
                let context = rest.get(2..).unwrap_or_default();
                let context = &context[..context.len().min(16)];
                put_frame(COMMAND, &[b"\x04PONG", context].concat(), out);
                Ok(None)
            }
            (b"PONG", Phase::Open) => Ok(Some(PeerMessage::Pong)),
            // Commands of later versions; none is needed here.
            (_, Phase::Open) => Ok(None),
            _ => invalid(format!(
                "the command {:?} in place of READY",
                String::from_utf8_lossy(name)
            )),
        }
    }

    fn ready(
        &mut self,
        mut properties: &[u8],
        out: &mut BytesMut,
    ) -> Result<PeerMessage, ProtocolError> {
        let mut peer = None;
        while !properties.is_empty() {
            let Some((name, value, rest)) = property(properties) else {
                return invalid("a property of READY that is cut");
            };
            if name.eq_ignore_ascii_case(b"Socket-Type") {
                peer = Some(value);
            }
            properties = rest;
        }
        let peer = peer.unwrap_or_default();
        if !self.role.accepts(peer) {
            return invalid(format!(
                "a {} socket, which does not go with {}",
                String::from_utf8_lossy(peer).escape_default(),
                self.role.name()
            ));
        }
        self.phase = Phase::Open;
        if let Role::Subscriber { topic } = &self.role {
            if self.minor >= 1 {
                put_frame(COMMAND, &[b"\x09SUBSCRIBE", &topic[..]].concat(), out);
            } else {
                put_frame(0, &[b"\x01", &topic[..]].concat(), out);
            }
        }
        Ok(PeerMessage::Ready)
    }
}

/// Returns the peer's minor version. Wrong bytes are reported before all 64 are received, since a server
/// of another protocol may send little and wait.
fn greeting(input: &mut BytesMut) -> Result<Option<u8>, ProtocolError> {
    let wrong = |at: usize, expected: u8| input.get(at).is_some_and(|&byte| byte != expected);
    if wrong(0, 0xff) || input.get(9).is_some_and(|byte| byte & 1 == 0) {
        return invalid("no ZeroMQ greeting");
    }
    if input.get(10).is_some_and(|&major| major < 3) {
        return invalid("ZMTP before version 3");
    }
    if input.len() < GREETING_LEN {
        return Ok(None);
    }
    let greeting = input.split_to(GREETING_LEN);
    let mechanism = &greeting[12..32];
    if mechanism
        .strip_prefix(b"NULL")
        .is_none_or(|rest| rest.iter().any(|&b| b != 0))
    {
        return invalid(format!(
            "the security mechanism {}",
            String::from_utf8_lossy(mechanism)
                .trim_end_matches('\0')
                .escape_default()
        ));
    }
    // A peer with a later major version falls back to ours.
    Ok(Some(if greeting[10] > 3 { 1 } else { greeting[11] }))
}

/// Name, value and rest.
fn property(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (&name_len, bytes) = bytes.split_first()?;
    let (name, bytes) = bytes.split_at_checked(usize::from(name_len))?;
    let (value_len, bytes) = bytes.split_first_chunk::<4>()?;
    let value_len = usize::try_from(u32::from_be_bytes(*value_len)).ok()?;
    let (value, rest) = bytes.split_at_checked(value_len)?;
    Some((name, value, rest))
}

fn put_frame(flags: u8, body: &[u8], out: &mut BytesMut) {
    match u8::try_from(body.len()) {
        Ok(len) => out.put_slice(&[flags, len]),
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(body.len() as u64);
        }
    }
    out.put_slice(body);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOUNDS: Bounds = Bounds {
        message_bytes_max: 1_000,
        parts_max: 4,
    };

    /// What libzmq 4.3.5 sends as a publisher, recorded.
    fn publisher(minor: u8) -> Vec<u8> {
        let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, minor];
        bytes.extend(b"NULL");
        bytes.resize(GREETING_LEN, 0);
        bytes.extend(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
        bytes
    }

    fn subscriber() -> (Session, BytesMut) {
        let mut out = BytesMut::new();
        let topic = Bytes::from_static(b"kv");
        let session = Session::new(Role::Subscriber { topic }, BOUNDS, &mut out);
        (session, out)
    }

    /// What is received if `bytes` arrive in pieces of `piece` bytes, and what is sent.
    fn receive(bytes: &[u8], piece: usize) -> (Result<Vec<PeerMessage>, ProtocolError>, BytesMut) {
        let (mut session, mut out) = subscriber();
        let mut input = BytesMut::new();
        let mut received = Vec::new();
        for piece in bytes.chunks(piece) {
            input.put_slice(piece);
            loop {
                match session.read(&mut input, &mut out) {
                    Ok(Some(message)) => received.push(message),
                    Ok(None) => break,
                    Err(error) => return (Err(error), out),
                }
            }
        }
        (Ok(received), out)
    }

    fn error(after_handshake: &[u8]) -> String {
        let bytes = [&publisher(1), after_handshake].concat();
        receive(&bytes, 7).0.unwrap_err().to_string()
    }

    #[test]
    fn a_subscriber_is_subscribed_by_command_or_message_as_the_peer_understands() {
        let (received, out) = receive(&publisher(1), 64);
        assert_eq!(received.unwrap(), [PeerMessage::Ready]);
        assert!(out.ends_with(b"\x04\x0c\x09SUBSCRIBEkv"));
        let (_, out) = receive(&publisher(0), 64);
        assert!(out.ends_with(b"\0\x03\x01kv"));
    }

    #[test]
    fn a_message_arrives_whole_and_once_however_its_bytes_are_split() {
        let bytes = [
            &publisher(1)[..],
            b"\x01\x02kv\x01\x00\x00\x03abc\x04\x06\x05OTHER",
        ]
        .concat();
        let parts = [&b"kv"[..], b"", b"abc"].map(Bytes::from_static);
        for piece in 1..bytes.len() {
            let (received, _) = receive(&bytes, piece);
            let message = PeerMessage::Message(Parts::from_iter(parts.clone()));
            assert_eq!(received.unwrap(), [PeerMessage::Ready, message]);
        }
    }

    #[test]
    fn a_ping_is_answered_with_its_context() {
        let bytes = [
            &publisher(1)[..],
            b"\x04\x09\x04PING\0\x0aab\x04\x05\x04PONG",
        ]
        .concat();
        let (received, out) = receive(&bytes, 9);
        assert_eq!(received.unwrap(), [PeerMessage::Ready, PeerMessage::Pong]);
        assert!(out.ends_with(b"\x04\x07\x04PONGab"));
    }

    #[test]
    fn a_frame_above_the_limit_is_refused_by_its_length_alone() {
        assert_eq!(
            error(b"\x02\0\0\x10\0\0\0\0\0"),
            "a frame of 17592186044416 bytes, 1000 are allowed"
        );
        let mut two = b"\x01\xff".to_vec();
        two.extend([0; 255]);
        two.extend(b"\x02\0\0\0\0\0\0\x03\xe8");
        assert_eq!(error(&two), "a frame of 1000 bytes, 745 are allowed");
        assert_eq!(
            error(&b"\x01\0".repeat(5)),
            "a message of more than 4 frames"
        );
        assert!(error(b"\x06\0\0\0\0\xff\0\0\0").contains("4096 are allowed"));
    }

    #[test]
    fn protocol_errors_name_what_is_wrong() {
        let other = |bytes: &[u8]| receive(bytes, 100).0.unwrap_err().to_string();
        assert_eq!(other(b"HTTP/1.1 400"), "no ZeroMQ greeting");
        let mut curve = publisher(1);
        curve[12..17].copy_from_slice(b"CURVE");
        assert_eq!(other(&curve), "the security mechanism CURVE");
        let mut router = publisher(1);
        router.truncate(GREETING_LEN);
        router.extend(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06ROUTER");
        assert_eq!(
            other(&router),
            "a ROUTER socket, which does not go with SUB"
        );
        assert_eq!(error(b"\x08\x00"), "a frame with the flags 0x08");
        assert_eq!(error(b"\x04\x07\x05ERROR\x01"), "the peer refuses: ");
    }

    proptest! {
        #[test]
        fn any_bytes_give_the_same_result_in_any_pieces(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            open in any::<bool>(),
            piece in 1..50_usize,
        ) {
            let bytes = if open { [publisher(1), bytes].concat() } else { bytes };
            let whole = receive(&bytes, bytes.len().max(1)).0;
            let pieces = receive(&bytes, piece).0;
            prop_assert_eq!(whole, pieces);
        }
    }
}
