//! The messages of vLLM's two sockets -> frames. Pure.

use xxhash_rust::xxh3::xxh3_128;

use crate::kv::msgpack;
use crate::kv::source::Frame;

/// Answers a question for batches is ended by: this number, without a payload.
const END: u64 = u64::MAX;

/// What a replay socket answers with, one message at a time.
#[derive(Debug)]
pub enum Answer {
    Batch(Frame),
    End,
}

/// A published message, `topic | number | payload`; the topic may be missing.
pub fn live<B: AsRef<[u8]>>(parts: &[B]) -> Result<Frame, String> {
    match parts {
        [number, payload] | [_, number, payload] => frame(number.as_ref(), payload.as_ref()),
        _ => Err(format!(
            "a published message of {} frames, not topic, number and payload",
            parts.len()
        )),
    }
}

/// An answer, `empty | topic | number | payload`; releases before 0.26 leave the topic out, and only
/// the last two frames are the same in all of them.
pub fn answer<B: AsRef<[u8]>>(parts: &[B]) -> Result<Answer, String> {
    let [.., number, payload] = parts else {
        return Err("an answer of one frame".to_owned());
    };
    if payload.as_ref().is_empty() && number.as_ref() == END.to_be_bytes() {
        return Ok(Answer::End);
    }
    frame(number.as_ref(), payload.as_ref()).map(Answer::Batch)
}

/// The question for all batches from `first` on.
pub fn question(first: u64) -> [u8; 8] {
    first.to_be_bytes()
}

fn frame(number: &[u8], payload: &[u8]) -> Result<Frame, String> {
    let number: [u8; 8] = number
        .try_into()
        .map_err(|_| format!("a number of {} bytes, not 8", number.len()))?;
    Ok(Frame {
        sequence: u64::from_be_bytes(number),
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
        let numbers = messages.iter().map(|parts| match answer(parts).unwrap() {
            Answer::Batch(frame) => Some(frame.sequence),
            Answer::End => None,
        });
        assert_eq!(Vec::from_iter(numbers), [Some(5), Some(6), Some(7), None]);
        // As older releases send it.
        let old = [&messages[0][0], &messages[0][2], &messages[0][3]];
        assert!(matches!(answer(&old), Ok(Answer::Batch(frame)) if frame.sequence == 5));
        let past = self::messages(include_str!(
            "../../../tests/fixtures/kv/replay_past_the_end.txt"
        ));
        assert!(matches!(answer(&past[0]), Ok(Answer::End)));
    }

    #[test]
    fn a_batch_asked_for_again_has_the_digest_it_had() {
        let stored = messages(include_str!("../../../tests/fixtures/kv/stored.txt"));
        let replayed = messages(include_str!("../../../tests/fixtures/kv/replay.txt"));
        let Ok(Answer::Batch(again)) = answer(&replayed[0]) else {
            panic!("not a batch");
        };
        assert_eq!(live(&stored[1]).unwrap().digest, again.digest);
    }
}
