//! What the answers of a worker show of its speed: rows, from first tokens and from ends. Requests add, one reader takes them.

use std::time::Duration;

use parking_lot::Mutex;

use super::types::Row;

/// Prompt tokens that an engine computes in one step at most: vLLM's and SGLang's default of a chunk on large GPUs. A longer
/// prompt takes several steps.
const CHUNK_TOKENS: f64 = 8_192.0;
/// First tokens that come within it are of one step.
const SAME_STEP: f64 = 0.001;
/// Rows of one kind that are kept until they are taken; with more, every other one is.
const MAX_ROWS: usize = 32;
/// A time shows something if the worker had other replicas' prompts to compute in at most this part of it. How much it computed of
/// them is not known well enough: a prompt is known to be computed when its first token comes, and its replica reports that
/// some milliseconds later. A count of it gave eight replicas rates of up to 40 times the true one.
const SHARED_MAX: f64 = 0.1;

/// What was seen since it was last taken. Each request takes the lock two or three times, for some nanoseconds.
#[derive(Debug, Default)]
pub struct Seen(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Until when `passed` counts.
    passed: Passed,
    /// When the last first token came. Engines compute prompts nearly in the order in which they come, so the prompts behind
    /// it were computed from then on.
    last_first: f64,
    /// What [`Passed::shared`] was then.
    shared_at_last_first: f64,
    /// Whether the time before it shows something.
    counts_last_first: bool,
    /// Streams of this router whose first token has not come.
    waiting: u32,
    firsts: Vec<Row>,
    ends: Vec<Row>,
}

/// The requests of a worker over time, from when it joined until a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Passed {
    /// In seconds.
    at: f64,
    /// Answers that it generated x seconds.
    answers: f64,
    /// Tokens of their contexts x seconds.
    context: f64,
    /// Prompt tokens that it computed.
    prompt_tokens: f64,
    /// Seconds in which it had prompts of other replicas to compute.
    shared: f64,
    /// A request that was sent then may have waited for a slot first.
    may_wait: bool,
}

/// A worker's load at one moment, of all replicas.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadNow {
    pub requests: u32,
    pub context_tokens: u64,
    /// Prompt tokens that it has to compute for other replicas.
    pub peers_queued_tokens: u64,
    /// One more request may wait for a slot.
    pub next_waits: bool,
    /// The engine's slots are taken: requests may wait for one, and the time of a prompt shows nothing.
    pub is_full: bool,
}

/// What is taken at once.
#[derive(Debug, Default)]
pub struct SeenRows {
    /// From first tokens: what computing prompts takes.
    pub firsts: Vec<Row>,
    /// From the ends of answers: what generating takes.
    pub ends: Vec<Row>,
}

impl Seen {
    /// A request is sent. `load`: before it counts.
    pub fn on_sent(&self, at: Duration, load: &LoadNow, is_stream: bool) -> Passed {
        let mut inner = self.0.lock();
        inner.pass(at.as_secs_f64(), load);
        inner.waiting += u32::from(is_stream);
        Passed {
            may_wait: load.next_waits,
            ..inner.passed
        }
    }

    /// What the worker has done until now.
    pub fn passed(&self, at: Duration, load: &LoadNow) -> Passed {
        let mut inner = self.0.lock();
        inner.pass(at.as_secs_f64(), load);
        inner.passed
    }

    /// The first token of a stream came. `load`: while its prompt still counts as queued.
    pub fn on_first_token(
        &self,
        at: Duration,
        sent: &Passed,
        uncached_tokens: u32,
        load: &LoadNow,
    ) -> Passed {
        let mut inner = self.0.lock();
        let now = at.as_secs_f64();
        inner.pass(now, load);
        let tokens = f64::from(uncached_tokens);
        inner.passed.prompt_tokens += tokens;
        // It was no answer yet while its prompt was computed.
        let row = inner.row_of_prompt(now, sent.at, tokens, load);
        inner.waiting = inner.waiting.saturating_sub(1);
        let shared = inner.passed.shared - sent.shared.max(inner.shared_at_last_first);
        inner.last_first = inner.last_first.max(now);
        inner.shared_at_last_first = inner.passed.shared;
        let may_have_waited = load.is_full || sent.may_wait;
        let is_same_step = row.steps == 0.0;
        let shows_something = if is_same_step {
            inner.counts_last_first
        } else {
            shared <= SHARED_MAX * row.seconds
        };
        inner.counts_last_first = shows_something && !may_have_waited;
        let counts = inner.counts_last_first;
        match inner.firsts.last_mut() {
            _ if !counts => {}
            Some(before) if is_same_step => before.add(&row),
            _ => push(&mut inner.firsts, row),
        }
        inner.passed
    }

    /// A stream ends whose first token never came.
    pub fn on_unanswered(&self) {
        let mut inner = self.0.lock();
        inner.waiting = inner.waiting.saturating_sub(1);
    }

    /// An answer has ended that had `tokens` since `from`: since its first token, or of an answer whose first token was not
    /// seen since it was sent; then `uncached_tokens` of its prompt were computed in the time, too.
    pub fn on_end(
        &self,
        at: Duration,
        from: &Passed,
        tokens: u64,
        uncached_tokens: u32,
        load: &LoadNow,
    ) {
        let mut inner = self.0.lock();
        inner.pass(at.as_secs_f64(), load);
        inner.passed.prompt_tokens += f64::from(uncached_tokens);
        let passed = inner.passed;
        let seconds = passed.at - from.at;
        let may_have_waited = uncached_tokens > 0 && (load.is_full || from.may_wait);
        let is_shared = passed.shared - from.shared > SHARED_MAX * seconds;
        if tokens == 0 || seconds <= 0.0 || may_have_waited || is_shared {
            return;
        }
        let steps = tokens as f64;
        let row = Row {
            seconds,
            steps,
            answer_tokens: steps * ((passed.answers - from.answers) / seconds).max(1.0),
            context_tokens: steps * (passed.context - from.context) / seconds,
            prompt_tokens: passed.prompt_tokens - from.prompt_tokens,
            beside_tokens: passed.prompt_tokens - from.prompt_tokens - f64::from(uncached_tokens),
            is_from_sent: false,
        };
        push(&mut inner.ends, row);
    }

    /// What was seen since the last call.
    pub fn take(&self) -> SeenRows {
        let mut inner = self.0.lock();
        SeenRows {
            firsts: std::mem::take(&mut inner.firsts),
            ends: std::mem::take(&mut inner.ends),
        }
    }
}

impl Inner {
    /// Time passes, in which the worker had what it has until now.
    fn pass(&mut self, now: f64, load: &LoadNow) {
        let seconds = (now - self.passed.at).max(0.0);
        let part = self.generating(load);
        self.passed.answers += seconds * part * f64::from(load.requests);
        self.passed.context += seconds * part * load.context_tokens as f64;
        if load.peers_queued_tokens > 0 {
            self.passed.shared += seconds;
        }
        self.passed.at = now.max(self.passed.at);
    }

    /// The part of the requests whose answers are being generated.
    fn generating(&self, load: &LoadNow) -> f64 {
        let requests = f64::from(load.requests.max(1));
        (1.0 - f64::from(self.waiting) / requests).clamp(0.0, 1.0)
    }

    fn row_of_prompt(&self, now: f64, sent: f64, tokens: f64, load: &LoadNow) -> Row {
        let seconds = now - self.last_first.max(sent);
        let steps = match seconds > SAME_STEP {
            // It came while a step ran, and waited for half of it.
            true if sent > self.last_first && load.requests > 1 => {
                (tokens / CHUNK_TOKENS).ceil().max(1.0) + 0.5
            }
            true => (tokens / CHUNK_TOKENS).ceil().max(1.0),
            false => 0.0,
        };
        let part = self.generating(load);
        Row {
            seconds: seconds.max(0.0),
            steps,
            answer_tokens: steps * part * f64::from(load.requests),
            context_tokens: steps * part * load.context_tokens as f64,
            prompt_tokens: tokens,
            beside_tokens: 0.0,
            is_from_sent: sent > self.last_first,
        }
    }
}

fn push(rows: &mut Vec<Row>, row: Row) {
    if rows.len() == MAX_ROWS {
        let mut index = 0;
        rows.retain(|_| {
            index += 1;
            index % 2 == 0
        });
    }
    rows.push(row);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn load(requests: u32, context_tokens: u64) -> LoadNow {
        LoadNow {
            requests,
            context_tokens,
            ..LoadNow::default()
        }
    }

    #[test]
    fn a_prompt_behind_another_was_computed_from_the_first_token_of_that_one_on() {
        let seen = Seen::default();
        let first = seen.on_sent(at(0), &load(0, 0), true);
        let second = seen.on_sent(at(10), &load(1, 1_000), true);
        seen.on_first_token(at(100), &first, 1_000, &load(2, 3_000));
        seen.on_first_token(at(300), &second, 20_000, &load(2, 3_000));
        let rows = seen.take().firsts;
        let times: Vec<_> = rows
            .iter()
            .map(|row| (row.seconds, row.prompt_tokens))
            .collect();
        assert_eq!(times, [(0.1, 1_000.0), (0.3 - 0.1, 20_000.0)]);
        assert_eq!((rows[0].steps, rows[1].steps), (1.0, 3.0));
        // One of two streams generates, which has half of the contexts.
        assert_eq!(
            (rows[1].answer_tokens, rows[1].context_tokens),
            (3.0, 4_500.0)
        );
        assert!(seen.take().firsts.is_empty());
    }

    #[test]
    fn prompts_that_one_step_computed_together_are_one_row() {
        let seen = Seen::default();
        let sent = [(); 2].map(|()| seen.on_sent(at(0), &load(0, 0), true));
        for sent in &sent {
            seen.on_first_token(at(200), sent, 1_000, &load(2, 2_000));
        }
        let rows = seen.take().firsts;
        assert_eq!(rows.len(), 1);
        assert_eq!(
            (rows[0].seconds, rows[0].prompt_tokens, rows[0].steps),
            (0.2, 2_000.0, 1.0)
        );
    }

    #[test]
    fn an_answer_shows_how_long_tokens_take_beside_what_else_was_there() {
        let seen = Seen::default();
        let sent = seen.on_sent(at(0), &load(0, 0), true);
        let first = seen.on_first_token(at(100), &sent, 500, &load(1, 500));
        // Another one is there for half of the time.
        let other = seen.on_sent(at(1_100), &load(1, 500), true);
        seen.on_first_token(at(1_100), &other, 300, &load(2, 1_500));
        seen.on_end(at(2_100), &first, 100, 0, &load(2, 1_500));
        let rows = seen.take().ends;
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].seconds, rows[0].steps), (2.0, 100.0));
        assert!((rows[0].answer_tokens - 150.0).abs() < 1e-6, "{rows:?}");
        assert!(
            (rows[0].context_tokens - 100.0 * 1_000.0).abs() < 1e-3,
            "{rows:?}"
        );
        assert_eq!(rows[0].prompt_tokens, 300.0);
    }

    #[test]
    fn what_may_have_waited_for_a_slot_shows_nothing_of_its_prompt() {
        let seen = Seen::default();
        let of = |requests| LoadNow {
            next_waits: requests >= 2,
            is_full: requests > 2,
            ..load(requests, 1_000)
        };
        // Two slots are taken when it is sent; by its first token one is free again.
        let sent = seen.on_sent(at(0), &of(2), true);
        let first = seen.on_first_token(at(900), &sent, 1_000, &of(2));
        let whole = seen.on_sent(at(900), &of(2), false);
        seen.on_end(at(2_000), &whole, 10, 1_000, &of(2));
        let rows = seen.take();
        assert_eq!((rows.firsts.len(), rows.ends.len()), (0, 0));
        // From its first token on, it has one.
        seen.on_end(at(2_000), &first, 10, 0, &of(2));
        assert_eq!(seen.take().ends.len(), 1);
        let sent = seen.on_sent(at(2_000), &of(1), true);
        seen.on_first_token(at(2_100), &sent, 1_000, &of(2));
        assert_eq!(seen.take().firsts.len(), 1);
    }

    #[test]
    fn a_whole_answer_shows_its_prompt_and_its_tokens_together() {
        let seen = Seen::default();
        let sent = seen.on_sent(at(0), &load(0, 0), false);
        seen.on_end(at(1_500), &sent, 50, 6_000, &load(1, 6_000));
        let rows = seen.take().ends;
        assert_eq!(
            (rows[0].seconds, rows[0].prompt_tokens, rows[0].steps),
            (1.5, 6_000.0, 50.0)
        );
    }

    #[test]
    fn a_time_in_which_other_replicas_prompts_were_computed_shows_nothing() {
        let queued = |peers_queued_tokens| LoadNow {
            peers_queued_tokens,
            ..load(2, 0)
        };
        let rows = |between: &[(u64, u64)]| {
            let seen = Seen::default();
            let sent = seen.on_sent(at(0), &load(0, 0), true);
            let first = seen.on_first_token(at(100), &sent, 1_000, &load(1, 0));
            assert_eq!(seen.take().firsts.len(), 1);
            let second = seen.on_sent(at(150), &load(1, 0), true);
            for (millis, peers_queued_tokens) in between {
                seen.passed(at(*millis), &queued(*peers_queued_tokens));
            }
            // Two in one step, and the end of the first answer.
            seen.on_first_token(at(250), &second, 1_000, &queued(0));
            seen.on_first_token(at(250), &second, 1_000, &queued(0));
            seen.on_end(at(1_100), &first, 10, 0, &queued(0));
            let rows = seen.take();
            let tokens = |rows: &[Row]| rows.iter().map(|row| row.prompt_tokens).sum::<f64>();
            [tokens(&rows.firsts), tokens(&rows.ends)]
        };
        assert_eq!(rows(&[]), [2_000.0, 2_000.0]);
        // What was there until then, for 5 of 100 and of 1,000 ms.
        assert_eq!(rows(&[(200, 0), (205, 10)]), [2_000.0, 2_000.0]);
        assert_eq!(rows(&[(200, 0), (240, 10)]), [0.0, 2_000.0]);
        assert_eq!(rows(&[(160, 0), (250, 10)]), [0.0, 2_000.0]);
        let seen = Seen::default();
        let whole = seen.on_sent(at(0), &load(0, 0), false);
        seen.on_end(at(500), &whole, 10, 700, &queued(1));
        assert!(seen.take().ends.is_empty());
    }

    #[test]
    fn the_rows_that_nobody_takes_are_bounded() {
        let seen = Seen::default();
        for number in 0..1_000 {
            let sent = seen.on_sent(at(number * 10), &load(0, 0), false);
            seen.on_end(at(number * 10 + 5), &sent, 1, 1, &load(1, 1));
        }
        let rows = seen.take().ends.len();
        assert!((1..=MAX_ROWS).contains(&rows), "{rows}");
    }
}
