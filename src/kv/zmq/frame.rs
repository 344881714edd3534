//! The messages of vLLM's publish and replay sockets. Pure.

use xxhash_rust::xxh3::xxh3_128;

use crate::kv::msgpack;
use crate::kv::source::SourceBatch;

/// The sequence number that ends a replay, sent with an empty payload.
const REPLAY_END: u64 = u64::MAX;

#[derive(Debug)]
pub enum ReplayMessage {
    Batch(SourceBatch),
    End,
}

/// Reads a published message: `topic | sequence number | payload`; the topic may be missing.
pub fn live<B: AsRef<[u8]>>(parts: &[B]) -> Result<SourceBatch, String> {
    match parts {
        [sequence, payload] | [_, sequence, payload] => batch(sequence.as_ref(), payload.as_ref()),
        _ => Err(format!(
            "a published message of {} frames, not topic, number and payload",
            parts.len()
        )),
    }
}

/// Reads a replay message: `empty | topic | sequence number | payload`. vLLM before 0.26 omits the topic;
/// only the last two frames are the same in all versions.
pub fn replay_message<B: AsRef<[u8]>>(parts: &[B]) -> Result<ReplayMessage, String> {
    let [.., sequence, payload] = parts else {
        return Err("a replay message of one frame".to_owned());
    };
    if payload.as_ref().is_empty() && sequence.as_ref() == REPLAY_END.to_be_bytes() {
        return Ok(ReplayMessage::End);
    }
    batch(sequence.as_ref(), payload.as_ref()).map(ReplayMessage::Batch)
}

fn batch(sequence: &[u8], payload: &[u8]) -> Result<SourceBatch, String> {
    let sequence: [u8; 8] = sequence
        .try_into()
        .map_err(|_| format!("a sequence number of {} bytes, not 8", sequence.len()))?;
    Ok(SourceBatch {
        sequence: u64::from_be_bytes(sequence),
        digest: xxh3_128(payload),
        bytes: payload.len(),
        batch: msgpack::decode(payload),
        snapshot: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages of a recording, as frames.
    fn messages(recording: &str) -> Vec<Vec<Vec<u8>>> {
        let lines = recording.lines().filter(|line| !line.starts_with('#'));
        let bytes = |frame: &str| {
            let digits = frame.trim_start_matches('-').as_bytes();
            let pairs = digits.chunks(2).map(|pair| str::from_utf8(pair).unwrap());
            pairs
                .map(|pair| u8::from_str_radix(pair, 16).unwrap())
                .collect()
        };
        lines
            .map(|line| line.split(' ').map(bytes).collect())
            .collect()
    }

    #[test]
    fn recorded_messages_are_read_with_and_without_a_topic() {
        let recording = include_str!("../../../tests/fixtures/kv/lora.txt");
        let messages = messages(recording);
        let with = live(&messages[2]).unwrap();
        let without = live(&messages[2][1..]).unwrap();
        assert_eq!(with.sequence, 2);
        assert_eq!(with.batch, without.batch);
        assert_eq!(with.digest, xxh3_128(&messages[2][2]));
        assert!(with.batch.is_ok());
        assert!(live(&messages[2][2..]).is_err());
        assert!(live(&messages[2][..2]).is_err());
    }

    #[test]
    fn recorded_answers_end_with_their_end() {
        let recording = include_str!("../../../tests/fixtures/kv/replay.txt");
        let messages = messages(recording);
        let numbers = messages
            .iter()
            .map(|parts| match replay_message(parts).unwrap() {
                ReplayMessage::Batch(frame) => Some(frame.sequence),
                ReplayMessage::End => None,
            });
        assert_eq!(Vec::from_iter(numbers), [Some(5), Some(6), Some(7), None]);
        // As older releases send it.
        let old = [&messages[0][0], &messages[0][2], &messages[0][3]];
        assert!(
            matches!(replay_message(&old), Ok(ReplayMessage::Batch(frame)) if frame.sequence == 5)
        );
        let past = self::messages(include_str!(
            "../../../tests/fixtures/kv/replay_past_the_end.txt"
        ));
        assert!(matches!(replay_message(&past[0]), Ok(ReplayMessage::End)));
    }

    #[test]
    fn a_batch_asked_for_again_has_the_digest_it_had() {
        let stored = messages(include_str!("../../../tests/fixtures/kv/stored.txt"));
        let replayed = messages(include_str!("../../../tests/fixtures/kv/replay.txt"));
        let Ok(ReplayMessage::Batch(again)) = replay_message(&replayed[0]) else {
            panic!("not a batch");
        };
        assert_eq!(live(&stored[1]).unwrap().digest, again.digest);
    }
}
