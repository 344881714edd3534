//! Measures an answer while it passes: first token, gaps between pieces, usage at the end. Changes no byte.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::StatusCode;
use prometheus::local::LocalHistogram;

use super::account::usage::UsageEntry;
use super::account::worker_series::WorkerSeries;
use super::answer::engine_answer::{Usage, is_token};
use super::answer::token_count::{ListedIds, Plain, TokenCount};
use super::answer::usage_reader::UsageReader;
use super::attempt::running::Running;
use super::failure::failure_owner::FailureOwner;
use super::failure::types::Outcome;
use super::request::context::RequestContext;
use super::request::summary::SummaryCell;
use super::request_count::RequestCount;
use super::traced;
use crate::fleet::Worker;
use crate::ids::ClientKey;
use crate::observe;
use crate::prompt::Api;
use crate::routing::Reason;

/// The histogram of gaps is shared by all streams of a worker, so a stream adds to it this often and not with each piece.
const GAPS_TIME: Duration = Duration::from_secs(1);

/// An answer whose reader takes tokens late says how fast its worker is only if it takes longer.
const LATE_TIME_MIN: Duration = Duration::from_secs(2);

/// The gaps of so many tokens of one piece are counted.
const LATE_TOKENS_MAX: u64 = 100;

/// The gaps between a stream's pieces that the histogram does not have yet; it gets them when this is dropped.
#[derive(Debug)]
struct Gaps {
    counted: LocalHistogram,
    since: Instant,
}

#[derive(Debug)]
pub(super) struct Meter {
    count: RequestCount,
    series: Arc<WorkerSeries>,
    status: StatusCode,
    running: Running,
    /// The worker that computed the prompt, if another one writes the end of the answer.
    pub(super) computed_by: Option<Arc<Worker>>,
    summary: Option<SummaryCell>,
    client: ClientKey,
    is_events: bool,
    /// Its reader lets tokens come together, so the gap before a piece is that of all its tokens.
    is_read_late: bool,
    has_token: bool,
    /// The worker was lost and reported, and no other goes on yet.
    is_lost: bool,
    /// Another worker goes on, and has sent no token yet.
    is_next: bool,
    /// When the last piece came.
    last: Instant,
    gaps: Option<Gaps>,
    bytes: u64,
    /// What the engine reports.
    usage: UsageReader,
    /// Output that passed after what the engine has reported.
    unreported: TokenCount,
    /// The ids of a whole answer that may have no usage.
    listed: Option<Box<ListedIds>>,
    /// When the first token came, and how many there were then. None of a stream that another worker went on with.
    first: Option<(Instant, u64)>,
    /// The entry of the request's tenant.
    entry: Option<UsageEntry>,
    /// Kept only of a request that is traced.
    passed: traced::Passed,
}

impl Meter {
    pub(super) fn new(
        count: RequestCount,
        status: StatusCode,
        running: Running,
        is_events: bool,
        context: &RequestContext,
        entry: Option<UsageEntry>,
    ) -> Self {
        let usage = UsageReader::new(count.wire);
        let listed = (!is_events && count.wire == Api::Generate).then(Box::default);
        Self {
            series: count.model.counts.series.of(running.worker()),
            last: count.started,
            gaps: None,
            count,
            status,
            running,
            computed_by: None,
            summary: context.summary.clone(),
            client: context.client,
            is_events,
            is_read_late: !context.kind.is_interactive(),
            has_token: false,
            is_lost: false,
            is_next: false,
            bytes: 0,
            usage,
            unreported: TokenCount::default(),
            listed,
            first: None,
            entry,
            passed: traced::Passed::default(),
        }
    }

    /// Takes the next piece. `plain`: the events with which it begins and of which all is known.
    pub(super) fn on_data(&mut self, now: Instant, data: &Bytes, plain: Plain) {
        self.bytes += data.len() as u64;
        if self.running.span().is_some() {
            self.passed.on_data(data, self.is_events);
        }
        if !self.is_events {
            self.running.on_whole_answer(now);
            self.usage.on_whole(data);
            if let Some(listed) = &mut self.listed {
                listed.add(data);
            }
            return;
        }
        let before = if self.is_read_late { self.output() } else { 0 };
        self.unreported.add_plain(plain);
        let rest = &data[plain.length..];
        if !rest.is_empty() {
            let reported = self.usage.on_events(rest);
            if reported.is_some() {
                self.unreported = TokenCount::default();
            }
            let unreported = &rest[reported.unwrap_or(0)..];
            self.unreported.add(self.count.wire, unreported);
        }
        if self.has_token {
            let tokens = if self.is_read_late {
                self.output().saturating_sub(before)
            } else {
                1
            };
            self.on_gap(now, tokens);
            if self.is_next {
                self.is_next = false;
                self.running.on_first_token(now);
            }
        } else if is_token(self.count.wire, data) {
            self.has_token = true;
            self.last = now;
            self.first = Some((now, self.output()));
            let waited = now.saturating_duration_since(self.count.started);
            self.series
                .time_to_first_token
                .observe(waited.as_secs_f64());
            if let Some(ratio) = self.running.ratio(now, |expected| expected.first_token) {
                self.count.model.first_token_ratio.observe(ratio);
            }
            self.running.on_first_token(now);
            if let Some(summary) = &self.summary {
                summary.update(|summary| summary.time_to_first_token = Some(waited));
            }
        }
    }

    fn output(&self) -> u64 {
        let passed = self.passed_tokens();
        let reported = self.usage.usage();
        reported.map_or(passed, |usage| usage.output_tokens + passed)
    }

    /// Output tokens that the engine has not reported.
    fn passed_tokens(&self) -> u64 {
        match &self.listed {
            Some(_) if self.usage.usage().is_some() => 0,
            Some(listed) => listed.count,
            None => self.unreported.total(self.count.model.bytes_per_token),
        }
    }

    /// What the request has used: what the engine reports, and what passed after that. `None` if it reports nothing.
    fn used(&self) -> Option<Usage> {
        let reported = self.usage.usage()?;
        Some(Usage {
            output_tokens: reported.output_tokens.saturating_add(self.passed_tokens()),
            ..reported
        })
    }

    fn on_gap(&mut self, now: Instant, tokens: u64) {
        let gap = now.saturating_duration_since(self.last);
        self.last = now;
        let series = &self.series;
        let gaps = self.gaps.get_or_insert_with(|| Gaps {
            counted: series.inter_token_latency.local(),
            since: now,
        });
        let count = tokens.clamp(1, LATE_TOKENS_MAX);
        let gap = gap.as_secs_f64() / count as f64;
        for _ in 0..count {
            gaps.counted.observe(gap);
        }
        if gaps.since + GAPS_TIME <= now {
            gaps.counted.flush();
            gaps.since = now;
            self.running.worker().load.on_answering();
        }
    }

    /// The connection broke. What else was cut in the same moment is not to blame for it.
    pub(super) fn on_cut(&self) {
        let ends = &self.running.worker().ends;
        ends.on_cut(observe::now(), self.count.started, None);
    }

    /// The worker is lost, and another one is looked for: the failure counts as that of any stream that breaks off.
    pub(super) fn on_lost(&mut self, now: Instant, outcome: Outcome) {
        let owner = FailureOwner::of_outcome(outcome);
        let worker = self.running.worker();
        let model = &self.count.model;
        // A trial has its result when its answer begins.
        model.report_failure(worker, self.client, false, owner, outcome.as_str());
        if let Some(span) = self.running.span() {
            let ended = (self.status, outcome);
            traced::end(span, now, ended, &self.passed, None);
        }
        self.running.on_lost();
        self.is_lost = true;
        self.first = None;
    }

    /// Another worker goes on.
    pub(super) fn on_next(&mut self, running: Running, reason: Reason, attempts: u32) {
        self.gaps = None;
        self.series = self.count.model.counts.series.of(running.worker());
        // The usage at the end is that of the client's prompt, with what was cached of it at first.
        let first = self.running.worker();
        self.computed_by.get_or_insert_with(|| first.clone());
        if let Some(summary) = &self.summary {
            summary.update(|summary| {
                summary.worker = Some(running.worker().name.clone());
                summary.rank = running.rank();
                summary.reason = Some(reason.as_str());
                summary.attempts += attempts;
                summary.continued += 1;
            });
        }
        self.running = running;
        self.is_lost = false;
        self.is_next = self.has_token;
    }

    pub(super) fn on_end(&mut self, now: Instant, outcome: Outcome) {
        self.gaps = None;
        self.count.end(now, &self.series, self.status, outcome);
        let (model, worker) = (self.count.model.clone(), self.running.worker());
        // A trial has its result when its answer begins, and so has a failure by its status.
        match FailureOwner::of_outcome(outcome) {
            FailureOwner::Unattributed if !self.status.is_server_error() => {
                model.report_success(worker, self.client, false, self.sent());
            }
            FailureOwner::Unattributed | FailureOwner::Client => {}
            _ if self.is_lost => {}
            owner => model.report_failure(worker, self.client, false, owner, outcome.as_str()),
        }
        let (usage, passed) = (self.used(), self.passed_tokens());
        let generated = match usage {
            Some(usage) => usage.output_tokens,
            None => self.at_limit(passed).unwrap_or(passed),
        };
        self.show_speed(now, generated);
        let worker = self.running.worker();
        if outcome == Outcome::Complete && generated > 0 {
            model.counts.answers.on_answer(generated);
            if let Some(ratio) = self
                .running
                .ratio(now, |expected| expected.end(generated as f64))
            {
                model.end_ratio.observe(ratio);
            }
        }
        self.count
            .settle(self.status, outcome, usage.as_ref(), passed);
        if let Some(entry) = self.entry.take() {
            entry.end(now, outcome, usage.as_ref(), passed);
        }
        if let Some(usage) = &usage {
            model.prompt_tokens.inc_by(usage.prompt_tokens);
            model.cached_tokens.inc_by(usage.cached_tokens);
            model.generation_tokens.inc_by(usage.output_tokens);
            let computed_by = self.computed_by.as_ref().unwrap_or(worker);
            computed_by
                .usage
                .add(usage.prompt_tokens, usage.cached_tokens);
        }
        if let Some(span) = self.running.span() {
            let ended = (self.status, outcome);
            traced::end(span, now, ended, &self.passed, usage.as_ref());
        }
        if let Some(summary) = self.summary.take() {
            let usage = usage.unwrap_or_default();
            summary.update(|summary| {
                summary.outcome = Some(outcome.as_str());
                summary.bytes += self.bytes;
                summary.prompt_tokens += usage.prompt_tokens;
                summary.cached_tokens += usage.cached_tokens;
                summary.generation_tokens += usage.output_tokens;
            });
        }
    }

    /// The tokens of an answer that ended at its limit, in a few pieces that do not show how many they have. Only for what is
    /// learnt of times: an engine may say the same of an answer that filled its context.
    fn at_limit(&self, passed: u64) -> Option<u64> {
        let is_at_limit = passed < MIN_TOKENS && self.unreported.is_at_limit;
        self.count.max_tokens.filter(|_| is_at_limit)
    }

    /// Reports how long the answer's tokens took. `generated`: all of them, however many came in a piece.
    fn show_speed(&mut self, now: Instant, generated: u64) {
        let (end, tokens) = match self.first {
            Some((first, before)) => {
                let time = self.last.saturating_duration_since(first);
                if self.is_read_late && time < LATE_TIME_MIN {
                    return;
                }
                (self.last, generated.saturating_sub(before))
            }
            None if self.is_events => return,
            None => (now, generated),
        };
        if tokens >= MIN_TOKENS {
            self.running.on_answered(end, tokens);
        }
    }

    /// When the request was sent to the worker, or before.
    fn sent(&self) -> Instant {
        let expected = self.running.expected.as_ref();
        expected.map_or(self.count.started, |(chosen, _)| *chosen)
    }

    pub(super) fn worker(&self) -> &Arc<Worker> {
        self.running.worker()
    }
}

/// A shorter answer shows nothing of how long tokens take.
const MIN_TOKENS: u64 = 16;
