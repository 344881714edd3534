//! The end of an attempt that failed: where, how, and whose fault it is. The only place that judges an engine's answer, whichever
//! part of a request it is the answer to. Pure.

use hyper::StatusCode;

use super::failure_owner::FailureOwner;
use super::types::{Failure, Stage};
use crate::prompt::Api;

/// A failed attempt, as its request's course judges it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::relay) struct Fault {
    pub(in crate::relay) stage: Stage,
    pub(in crate::relay) failure: Failure,
    pub(in crate::relay) owner: FailureOwner,
    /// The connection broke after the request was sent over it.
    pub(in crate::relay) is_cut: bool,
    /// The decode engine may have refused the dp rank that its leg was pinned to: the next attempt names none.
    pub(in crate::relay) is_rank_refused: bool,
}

/// What a worker was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::relay) enum Part {
    /// The request, of which it computes the prompt and the answer.
    Whole,
    PrefillLeg,
    DecodeLeg,
}

/// What an answer says beside its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::relay) enum Sign {
    Nothing,
    /// Its status is one after which another worker is to be asked.
    Retryable,
    /// It refuses the key that the router has for the worker.
    KeyRefused,
    /// It refuses that key at an endpoint that computes no prompt. Some engines say so of one that they do not have.
    EndpointRefused,
    /// The worker's context may be too short for the request, unlike another one's.
    TooLong,
    /// The engine may have refused the dp rank.
    RankRefused,
    /// A stream that begins with an error for which the request is not to blame.
    ErrorEvent,
    /// The engine gave it up before its first token.
    GivenUp,
}

impl Sign {
    /// What the status of an answer of this API says. `has_own_key`: the worker was sent the router's key for it. In place of
    /// that, the client's own may have been sent, which is the client's to correct. A 403 may be what a filter before
    /// the engine says of the request, and passes on.
    pub(in crate::relay) fn of_status(
        status: StatusCode,
        api: Api,
        has_own_key: bool,
        retry_statuses: &[u16],
    ) -> Self {
        if status == StatusCode::UNAUTHORIZED && has_own_key {
            if api.computes_prompt() {
                Self::KeyRefused
            } else {
                Self::EndpointRefused
            }
        } else if retry_statuses.contains(&status.as_u16()) {
            Self::Retryable
        } else {
            Self::Nothing
        }
    }
}

impl Fault {
    pub(in crate::relay) fn new(stage: Stage, failure: Failure, owner: FailureOwner) -> Self {
        Self {
            stage,
            failure,
            owner,
            is_cut: false,
            is_rank_refused: false,
        }
    }

    /// The fault of an answer. `None` if it is the client's, or what a leg was sent for.
    pub(in crate::relay) fn of_answer(part: Part, status: StatusCode, sign: Sign) -> Option<Self> {
        let stage = match part {
            Part::Whole | Part::DecodeLeg => Stage::Worker,
            Part::PrefillLeg => Stage::Prefill,
        };
        let owner = FailureOwner::of_status(status);
        let fault = |failure| Some(Self::new(stage, failure, owner));
        match sign {
            // One that gives it up does as an engine that answers 503: another one may do better.
            Sign::Retryable | Sign::GivenUp => fault(Failure::Refused),
            Sign::ErrorEvent => {
                let owner = FailureOwner::of_status(StatusCode::INTERNAL_SERVER_ERROR);
                Some(Self::new(stage, Failure::Refused, owner))
            }
            Sign::KeyRefused => {
                let owner = FailureOwner::of_failure(Failure::KeyRefused, false);
                Some(Self::new(stage, Failure::KeyRefused, owner))
            }
            Sign::EndpointRefused => {
                let owner = FailureOwner::Unattributed;
                Some(Self::new(stage, Failure::KeyRefused, owner))
            }
            Sign::TooLong => fault(Failure::TooLong),
            Sign::RankRefused => Some(Self {
                is_rank_refused: true,
                ..Self::new(stage, Failure::KvTransfer, owner)
            }),
            Sign::Nothing => {
                let is_failure = owner != FailureOwner::Unattributed;
                let fault = match part {
                    Part::Whole => None,
                    Part::PrefillLeg => fault(Failure::KvTransfer),
                    Part::DecodeLeg => Some(Self::of_transfer(FailureOwner::KvTransfer)),
                };
                fault.filter(|_| is_failure)
            }
        }
    }

    /// The decode worker has no blocks of the prompt.
    pub(in crate::relay) fn of_transfer(owner: FailureOwner) -> Self {
        Self::new(Stage::Transfer, Failure::KvTransfer, owner)
    }

    /// True if the worker had closed the idle connection that the attempt used.
    pub(in crate::relay) fn is_stale(&self) -> bool {
        self.failure == Failure::Broken && self.owner == FailureOwner::Unattributed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer's fault as a whole request's, a prefill leg's and a decode leg's.
    fn check(status: u16, sign: Sign, expected: [Option<(Stage, Failure, FailureOwner)>; 3]) {
        let status = StatusCode::from_u16(status).unwrap();
        let found = [Part::Whole, Part::PrefillLeg, Part::DecodeLeg].map(|part| {
            let fault = Fault::of_answer(part, status, sign)?;
            assert_eq!(fault.is_rank_refused, sign == Sign::RankRefused);
            Some((fault.stage, fault.failure, fault.owner))
        });
        assert_eq!(found, expected, "{status} {sign:?}");
    }

    #[test]
    fn an_engines_error_is_the_answer_of_one_worker_and_a_failure_of_two() {
        let (worker, prefill) = (Stage::Worker, Stage::Prefill);
        let (nobody, request) = (FailureOwner::Unattributed, FailureOwner::Request);
        for status in [200, 400, 501] {
            check(status, Sign::Nothing, [None; 3]);
        }
        let failed = Some((prefill, Failure::KvTransfer, request));
        let fetched = (
            Stage::Transfer,
            Failure::KvTransfer,
            FailureOwner::KvTransfer,
        );
        check(500, Sign::Nothing, [None, failed, Some(fetched)]);
        let refused =
            |owner| [worker, prefill, worker].map(|stage| Some((stage, Failure::Refused, owner)));
        check(503, Sign::Retryable, refused(nobody));
        check(502, Sign::Retryable, refused(request));
        check(200, Sign::GivenUp, refused(nobody));
        check(200, Sign::ErrorEvent, refused(request));
        let key_refused =
            [worker, prefill, worker].map(|stage| Some((stage, Failure::KeyRefused, request)));
        check(401, Sign::KeyRefused, key_refused);
        let of = |failure| [worker, prefill, worker].map(|stage| Some((stage, failure, nobody)));
        check(413, Sign::TooLong, of(Failure::TooLong));
        check(401, Sign::EndpointRefused, of(Failure::KeyRefused));
        check(400, Sign::RankRefused, of(Failure::KvTransfer));
    }

    #[test]
    fn only_the_routers_own_key_sends_a_request_to_another_worker() {
        for (status, api, has_own_key, expected) in [
            (401, Api::Chat, true, Sign::KeyRefused),
            (401, Api::Embeddings, true, Sign::KeyRefused),
            (401, Api::Tokenize, true, Sign::EndpointRefused),
            (401, Api::CountTokens, true, Sign::EndpointRefused),
            (403, Api::Chat, true, Sign::Nothing),
            (403, Api::Tokenize, true, Sign::Nothing),
            (401, Api::Chat, false, Sign::Nothing),
            (401, Api::Tokenize, false, Sign::Nothing),
            (403, Api::Chat, false, Sign::Nothing),
            (400, Api::Chat, true, Sign::Nothing),
            (503, Api::Chat, true, Sign::Retryable),
            (503, Api::Chat, false, Sign::Retryable),
        ] {
            let code = StatusCode::from_u16(status).unwrap();
            let sign = Sign::of_status(code, api, has_own_key, &[502, 503]);
            assert_eq!(sign, expected, "{status} {api:?} {has_own_key}");
        }
    }
}
