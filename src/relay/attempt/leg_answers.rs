//! Reads the legs' answers before anything goes to the client: all of a prefill leg's, and of a decode leg's up to
//! its first token.

use bytes::{Bytes, BytesMut};

use super::exchange;
use super::first_token::{self, Beginning};
use super::outcome::FailedAttempt;
use crate::prompt::Api;
use crate::relay::kv_transfer::ANSWER_BYTES_MAX;

const ENDED: &str = "the stream ended before its first token";

/// Why a decode leg has no first token.
pub(in crate::relay) enum DecodeFailure {
    /// The prefill leg, which runs at the same time, has failed.
    Prefill(FailedAttempt),
    /// The worker did not answer, or its answer broke off.
    Exchange(exchange::Error),
    /// The engine reports a failure before its first token, or ends its stream as engines do then.
    BeforeFirstToken(&'static str),
    /// No token for `transfer_timeout`: it may wait for KV blocks that never come, or in the engine's queue.
    Silent,
    /// The prefill worker's engine process is gone, and the KV blocks with it.
    PrefillGone,
}

/// Reads a whole answer, within its time limit and [`ANSWER_BYTES_MAX`].
pub(in crate::relay) async fn read_whole(
    answer: &mut exchange::Answer,
) -> Result<Bytes, exchange::Error> {
    let mut whole = BytesMut::from(answer.first.take().unwrap_or_default());
    while let Some(piece) = answer.next_piece().await? {
        whole.extend_from_slice(&piece);
        if whole.len() > ANSWER_BYTES_MAX {
            return Err(exchange::Error::TooLong);
        }
    }
    Ok(whole.freeze())
}

/// Waits for a stream's first token. What came before it stays in `answer.first`, for the client.
pub(in crate::relay) async fn wait_for_first_token(
    api: Api,
    answer: &mut exchange::Answer,
) -> Result<(), DecodeFailure> {
    let why = match first_token::wait(api, answer).await {
        Ok(Beginning::Token) => return Ok(()),
        Ok(Beginning::Refusal | Beginning::Error) => {
            "the engine reported an error before its first token"
        }
        Ok(Beginning::Nothing) => ENDED,
        // vLLM cuts a Responses stream when it could not fetch the blocks; other streams break only with the engine.
        Err(error) if api == Api::Responses && error.is_cut() => ENDED,
        Err(error) => return Err(DecodeFailure::Exchange(error)),
    };
    Err(DecodeFailure::BeforeFirstToken(why))
}
