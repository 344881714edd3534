//! What is read of the two legs' answers before anything is passed on: all of the first, and of the second up to
//! its first token.

use bytes::{Bytes, BytesMut};

use super::Unopened;
use crate::prompt::Api;
use crate::relay::opening::{Opening, Seen};
use crate::relay::{direct, handoff, headers};

/// The rest of an answer, behind its first piece, within its limits.
pub(super) async fn read_whole(answer: &mut direct::Answer) -> Result<Bytes, direct::Error> {
    let mut whole = answer.first.take().unwrap_or_default();
    let mut more = BytesMut::new();
    loop {
        let next = tokio::select! {
            biased;
            next = direct::next_data(&mut answer.body) => next.map_err(direct::Error::Cut)?,
            () = &mut answer.timer => return Err(direct::Error::TimedOut),
        };
        match next {
            None if more.is_empty() => return Ok(whole),
            None => return Ok(more.freeze()),
            Some(piece) => {
                if more.is_empty() {
                    more.extend_from_slice(&std::mem::take(&mut whole));
                }
                more.extend_from_slice(&piece);
                if more.len() > handoff::ANSWER_BYTES_MAX {
                    return Err(direct::Error::TooLong);
                }
            }
        }
    }
}

/// Waits for a stream's first token, and keeps what came before it for the client.
pub(super) async fn open(api: Api, answer: &mut direct::Answer) -> Result<(), Unopened> {
    let is_stream =
        answer.head.status.is_success() && headers::is_event_stream(&answer.head.headers);
    if !is_stream {
        return Ok(());
    }
    let mut opening = Opening::new(api);
    let mut next = answer.first.take();
    let mut begun = BytesMut::new();
    loop {
        let Some(piece) = next else {
            return Err(Unopened::Failed("its stream ended before its first token"));
        };
        match opening.on_data(&piece) {
            Seen::Error => return Err(Unopened::Failed("it failed before its first token")),
            Seen::Token if begun.is_empty() => {
                answer.first = Some(piece);
                return Ok(());
            }
            Seen::Token => {
                begun.extend_from_slice(&piece);
                answer.first = Some(begun.freeze());
                return Ok(());
            }
            Seen::Nothing => begun.extend_from_slice(&piece),
        }
        let piece = tokio::select! {
            biased;
            piece = direct::next_data(&mut answer.body) => piece,
            () = &mut answer.timer => return Err(Unopened::Worker(direct::Error::TimedOut)),
        };
        next = match piece {
            Ok(next) => next,
            // A Responses stream is cut where the engine could not fetch the blocks; another only with its engine.
            Err(_) if api == Api::Responses => None,
            Err(error) => return Err(Unopened::Worker(direct::Error::Cut(error))),
        };
    }
}
