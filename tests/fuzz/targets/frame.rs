//! Any bytes as what a peer sends over ZMTP, in pieces; its messages as published batches and as replays. However
//! the bytes are cut, the same messages are read, and no more is buffered than a message may have.

#![no_main]

use bytes::{Bytes, BytesMut};
use libfuzzer_sys::fuzz_target;
use warmroute::kv::zmq::frame;
use warmroute::kv::zmq::zmtp::{Bounds, ProtocolError, PeerMessage, Role, Session};

// The first byte chooses: the role, whether the handshake is done already, and the pieces.
fuzz_target!(|bytes: &[u8]| {
    let Some((&choice, bytes)) = bytes.split_first() else {
        return;
    };
    let role = if choice & 1 == 0 {
        Role::Subscriber {
            topic: Bytes::from_static(b"kv"),
        }
    } else {
        Role::Dealer
    };
    let mut all = Vec::new();
    if choice & 2 == 0 {
        all.extend(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL");
        all.resize(64, 0);
        all.extend(match role {
            Role::Subscriber { .. } => &b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"[..],
            Role::Dealer => &b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06ROUTER"[..],
        });
    }
    all.extend(bytes);
    let whole = read(role.clone(), &all, usize::MAX);
    let pieces = read(role, &all, 1 + usize::from(choice >> 2));
    assert_eq!(whole, pieces);
});

fn read(role: Role, bytes: &[u8], piece: usize) -> (Vec<PeerMessage>, Option<ProtocolError>) {
    let bounds = Bounds {
        message_bytes_max: 4_096,
        parts_max: 6,
    };
    let mut out = BytesMut::new();
    let mut input = BytesMut::new();
    let mut session = Session::new(role, bounds, &mut out);
    let mut messages = Vec::new();
    for piece in bytes.chunks(piece.min(bytes.len().max(1))) {
        input.extend_from_slice(piece);
        loop {
            match session.read(&mut input, &mut out) {
                Ok(None) => break,
                Ok(Some(message)) => {
                    if let PeerMessage::Message(parts) = &message {
                        assert!(parts.len() <= bounds.parts_max);
                        assert!(parts.iter().map(Bytes::len).sum::<usize>() <= 4_096);
                        let _ = frame::live(parts);
                        let _ = frame::replay_message(parts);
                    }
                    messages.push(message);
                }
                Err(error) => return (messages, Some(error)),
            }
        }
    }
    (messages, None)
}
