//! Waits for the first token of a stream before the client gets anything of it: until then the request can be tried elsewhere.

use bytes::BytesMut;
use http_body::Body as _;

use super::exchange;
use crate::prompt::Api;
use crate::relay::answer::engine_answer::{self, Finish};
use crate::relay::answer::first_token_gate::{FirstTokenGate, Verdict};
use crate::relay::headers;
use crate::relay::job::Job;

/// Whether the first piece of a whole answer, which is mostly all of it, says that its engine gave it up.
pub(in crate::relay) fn is_given_up(api: Api, answer: &exchange::Answer) -> bool {
    let first = answer.first.as_ref().filter(|_| {
        answer.head.status.is_success() && !headers::is_event_stream(&answer.head.headers)
    });
    let Some(first) = first else {
        return false;
    };
    let finish = engine_answer::last_finish(api, first).map(|(_, finish)| finish);
    match finish {
        Some(Finish::Abort) => true,
        Some(Finish::Reason) => false,
        // The reason may be still to come.
        _ if !answer.body.is_end_stream() => false,
        Some(Finish::None) => true,
        // vLLM leaves it out.
        None => api == Api::Messages,
    }
}

/// Reads up to the first token. What was read is in `answer.first`, for the client. [`Verdict::Undecided`]: the stream ended
/// before. What is no stream of events counts as one that has a token.
pub(in crate::relay) async fn wait(
    job: &Job<'_>,
    answer: &mut exchange::Answer,
) -> Result<Verdict, exchange::Error> {
    let is_stream =
        answer.head.status.is_success() && headers::is_event_stream(&answer.head.headers);
    if !is_stream {
        return Ok(Verdict::Token);
    }
    let mut gate = FirstTokenGate::new(job.api);
    if job.is_converted {
        gate.require_finish();
    }
    let mut next = answer.first.take();
    let mut read = BytesMut::new();
    let verdict = loop {
        let Some(piece) = next else {
            answer.first = (!read.is_empty()).then(|| read.freeze());
            break Verdict::Undecided;
        };
        let verdict = gate.on_data(&piece);
        if verdict != Verdict::Undecided {
            answer.first = Some(if read.is_empty() {
                piece
            } else {
                read.extend_from_slice(&piece);
                read.freeze()
            });
            break verdict;
        }
        read.extend_from_slice(&piece);
        next = answer.next_piece().await?;
    };
    answer.has_begun = gate.has_begun;
    Ok(verdict)
}
