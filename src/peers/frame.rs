//! A message between replicas as the bytes that a stream carries. Pure.

use bytes::Bytes;
use prost::Message;

use super::wire::PeerMessage;
use super::wire::peer_message::Kind;
use crate::http::grpc;

/// A message in its frame, to be sent on any number of streams.
pub fn framed(kind: Kind) -> Bytes {
    let message = PeerMessage { kind: Some(kind) };
    grpc::frame(&message.encode_to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids;
    use crate::peers::wire;

    /// Replicas of other releases read them by the numbers of their fields. Hellos must be read by each release, since they
    /// have the version of all else. Made by another program, from the schema.
    #[test]
    fn the_bytes_of_messages_stay_as_they_are() {
        let hello = wire::Hello {
            version: 1,
            instance_id: vec![7; 16],
            nonce: vec![8; 32],
            name: "a".to_owned(),
            release: "1.0.0".to_owned(),
            port: 9_701,
        };
        let name = wire::WorkerName {
            number: 1,
            address: "a:1".to_owned(),
            rank: Some(0),
        };
        let load = wire::WorkerLoad {
            number: 1,
            requests: 2,
            queued_tokens: 3,
            context_tokens: 4,
            waiting_requests: 5,
            waiting_queued_tokens: 6,
            waiting_context_tokens: 7,
            uncomputed_prompts: 8,
            first_due_ms: Some(-9),
            first_priority: 10,
        };
        let report = wire::LoadReport {
            sequence: 1,
            is_whole: true,
            workers: vec![load],
            age_us: 4,
            is_ready: true,
            is_draining: true,
        };
        let routed = wire::RoutedPrompts {
            prompts: vec![wire::RoutedPrompt {
                number: 1,
                parent: Some(2),
                blocks: vec![3],
                tokens: vec![4],
                retracted: 5,
            }],
            unconfirmed: vec![wire::UnconfirmedPrompt {
                number: 1,
                prefixes: vec![2],
            }],
        };
        for (kind, expected) in [
            (
                Kind::Hello(hello),
                "0a4308011210070707070707070707070707070707071a20080808080808080808080808080808080808\
                 08080808080808080808080808082201612a05312e302e3030e54b",
            ),
            (
                Kind::Workers(wire::WorkerNames {
                    workers: vec![name],
                }),
                "1a0b0a0908011203613a311800",
            ),
            (
                Kind::Load(report),
                "2220080110011a140801100218032004280530063807400848115014200428013001",
            ),
            (
                Kind::Routed(routed),
                "2a2a0a1a08011102000000000000001a0803000000000000002201042805120c0801120802000000000000\
                 00",
            ),
        ] {
            let framed = framed(kind);
            assert_eq!(
                Some(framed[5..].to_vec()),
                ids::from_hex(expected),
                "{expected}"
            );
        }
    }
}
