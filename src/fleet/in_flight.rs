//! Counts a request in its worker's load for as long as the request runs.

use std::sync::Arc;
use std::time::Instant;

use super::load::Load;
use super::speed::Passed;
use super::worker::Worker;

/// One request on one worker; it counts until this is dropped, however the request ends.
#[must_use = "dropping the guard ends the request"]
#[derive(Debug)]
pub struct InFlight {
    worker: Arc<Worker>,
    /// The dp rank that it is pinned to.
    rank: Option<u32>,
    prompt_tokens: u32,
    uncached_tokens: u32,
    is_decoding: bool,
    /// It counts as decoding because its prompt should be computed by now.
    is_assumed: bool,
    shows: Shows,
    is_over: bool,
}

/// What the request's answer can show of how fast its worker is.
#[derive(Clone, Copy, Debug)]
enum Shows {
    Nothing,
    /// When its first token comes: what follows shows how long tokens take. Another worker computes its prompt.
    LaterTokens,
    /// A stream that was sent then: when its first token comes.
    FirstToken(Passed),
    /// When it ends: from then on, in which so many tokens of its prompt were computed, too.
    End(Passed, u32),
}

impl InFlight {
    /// Counts a request before it is sent, so that the next routing decision includes it.
    pub fn new(worker: Arc<Worker>, prompt_tokens: u32, cached_tokens: u32) -> Self {
        let uncached_tokens = prompt_tokens.saturating_sub(cached_tokens);
        worker.load.begin_request(prompt_tokens, uncached_tokens);
        Self {
            worker,
            rank: None,
            prompt_tokens,
            uncached_tokens,
            is_decoding: false,
            is_assumed: false,
            shows: Shows::Nothing,
            is_over: false,
        }
    }

    /// Counts a decode leg whose prompt another worker computes. It counts as decoding from the start, or the
    /// requests of a burst would all choose the same decode worker. None of its prompt counts as queued,
    /// because this worker does not compute it.
    pub fn decoding(worker: Arc<Worker>, prompt_tokens: u32) -> Self {
        let mut in_flight = Self::new(worker, prompt_tokens, prompt_tokens);
        in_flight.shows = Shows::LaterTokens;
        in_flight.on_first_token();
        in_flight
    }

    /// Pinned to a dp rank of the worker.
    pub fn at_rank(mut self, rank: Option<u32>) -> Self {
        if let Some(rank) = rank {
            self.rank = Some(rank);
            let (uncached_tokens, prompt_tokens) = (self.uncached_tokens, self.prompt_tokens);
            let is_decoding = self.is_decoding;
            self.worker.pinned.change(rank, |load| {
                load.begin_request(prompt_tokens, uncached_tokens);
                if is_decoding {
                    load.begin_decoding(prompt_tokens, uncached_tokens, 0);
                }
            });
        }
        self
    }

    pub fn rank(&self) -> Option<u32> {
        self.rank
    }

    /// The request is sent now, and its answer shows how fast the worker is.
    pub fn sent_at(mut self, now: Instant, is_stream: bool) -> Self {
        let sent = self.worker.on_sent(now, is_stream);
        self.shows = if is_stream {
            Shows::FirstToken(sent)
        } else {
            Shows::End(sent, self.uncached_tokens)
        };
        self
    }

    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// The first token has arrived: the prompt is computed, and decoding has started.
    pub fn on_first_token(&mut self) {
        let computed = self.uncached_tokens.into();
        if std::mem::take(&mut self.is_assumed) {
            self.change_load(|load| load.begin_decoding(self.prompt_tokens, 0, computed));
        } else {
            self.begin_decoding(computed);
        }
    }

    /// As [`Self::on_first_token`], and the token came as soon as the prompt was computed.
    pub fn on_prompt_computed(&mut self, now: Instant) {
        self.shows = match self.shows {
            Shows::FirstToken(sent) => {
                let uncached = self.uncached_tokens;
                Shows::End(self.worker.on_first_token(now, &sent, uncached), 0)
            }
            Shows::LaterTokens => Shows::End(self.worker.passed(now), 0),
            shows @ (Shows::Nothing | Shows::End(..)) => shows,
        };
        self.on_first_token();
    }

    /// The answer is complete, and its last token came at `now`. `tokens`: those after the first one, or all of an answer whose
    /// first token was not seen.
    pub fn on_answered(&mut self, now: Instant, tokens: u64) {
        if let Shows::End(from, uncached_tokens) = self.shows {
            self.worker.on_answered(now, &from, tokens, uncached_tokens);
            self.shows = Shows::Nothing;
        }
    }

    /// The prompt counts as queued no longer, although no token was seen. It counts as computed once the answer comes.
    pub fn assume_prefilled(&mut self) {
        self.is_assumed |= !self.is_decoding && !self.is_over;
        self.begin_decoding(0);
    }

    /// The request does not run any more, although it is not over for its client.
    pub fn end(&mut self) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        if let Shows::FirstToken(_) = self.shows {
            self.worker.seen.on_unanswered();
        }
        let queued = if self.is_decoding {
            0
        } else {
            self.uncached_tokens
        };
        self.change_load(|load| load.end_request(self.prompt_tokens, queued));
        self.worker.freed.on_freed();
    }

    fn change_load(&self, change: impl Fn(&Load)) {
        change(&self.worker.load);
        if let Some(rank) = self.rank {
            self.worker.pinned.change(rank, change);
        }
    }

    fn begin_decoding(&mut self, computed: u64) {
        if !self.is_decoding && !self.is_over {
            self.is_decoding = true;
            self.change_load(|load| {
                load.begin_decoding(self.prompt_tokens, self.uncached_tokens, computed);
            });
            self.worker.freed.on_freed();
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::load::LoadReport;
    use crate::fleet::registry::tests::worker;
    use crate::observe;

    fn load_of(worker: &Worker) -> (u32, u64, u64) {
        (
            worker.load.requests(),
            worker.load.queued_tokens(),
            worker.load.context_tokens(),
        )
    }

    #[test]
    fn a_request_is_queued_then_decoding_then_gone() {
        let worker = worker("a");
        let mut request = InFlight::new(worker.clone(), 100, 60);
        assert_eq!(load_of(&worker), (1, 40, 100));
        request.on_first_token();
        request.on_first_token();
        assert_eq!(load_of(&worker), (1, 0, 100));
        drop(request);
        assert_eq!(load_of(&worker), (0, 0, 0));
    }

    #[test]
    fn a_prompt_that_should_be_computed_counts_as_computed_once_the_answer_comes() {
        let worker = worker("a");
        let mut request = InFlight::new(worker.clone(), 100, 60);
        request.assume_prefilled();
        request.assume_prefilled();
        assert_eq!(load_of(&worker), (1, 0, 100));
        assert_eq!(worker.load.computed_tokens(), 0);
        request.on_first_token();
        request.on_first_token();
        assert_eq!(worker.load.computed_tokens(), 40);
        drop(request);
        assert_eq!(load_of(&worker), (0, 0, 0));
    }

    #[test]
    fn a_decode_leg_counts_as_decoding_from_the_start() {
        let worker = worker("a");
        let mut request = InFlight::decoding(worker.clone(), 100);
        assert_eq!(load_of(&worker), (1, 0, 100));
        request.on_first_token();
        assert_eq!(load_of(&worker), (1, 0, 100));
        drop(request);
        assert_eq!(load_of(&worker), (0, 0, 0));
    }

    #[test]
    fn a_request_without_a_first_token_leaves_the_load_unchanged() {
        let worker = worker("a");
        drop(InFlight::new(worker.clone(), 100, 0));
        assert_eq!(load_of(&worker), (0, 0, 0));
    }

    #[test]
    fn requests_of_others_that_the_engine_reports_count_until_the_report_expires() {
        let worker = worker("a");
        let _own = InFlight::new(worker.clone(), 10, 0);
        let at = observe::now();
        worker.load.report(LoadReport {
            at,
            running: 3,
            waiting: 2,
            deferred: 0,
            kv_usage: 0.5,
        });
        assert_eq!(worker.load.requests(), 5);
        worker.load.expire_report_before(at);
        assert_eq!(worker.load.requests(), 5);
        worker
            .load
            .expire_report_before(at + std::time::Duration::from_millis(1));
        assert_eq!(worker.load.requests(), 1);
    }
}
