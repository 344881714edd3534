//! How busy one worker is: the requests of this router, counted immediately, and the engine's last load report.

pub mod pinned;
mod prompt_share;
pub mod ranks;
mod report;
mod share;
mod tried_requests;

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI64, AtomicU16, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::SmallVec;

use self::prompt_share::PromptShare;
pub use self::report::LoadReport;
pub use self::share::LoadShare;
pub use self::tried_requests::TriedRequests;
use super::speed::{LoadNow, SharedF32, SharedSpeed};

/// Slots of an engine of which nothing is known: vLLM's `--max-num-seqs` on most GPUs.
pub const DEFAULT_SLOTS: u32 = 256;

/// In [`Load::slots`]: the engine has reported what it runs.
const REPORTS: u16 = 1 << 15;
/// In [`Load::slots`]: this router has seen the number, which counts before what other replicas have seen.
const SEEN: u16 = 1 << 14;
/// The number in [`Load::slots`]. Whatever it is, one that was [`SEEN`] is more.
const NUMBER: u16 = SEEN - 1;

/// Prompt tokens that any engine computes in one step: the least that vLLM and SGLang have by default.
const STEP_TOKENS: u64 = 2_048;

/// An engine that computes prompts for a smaller part of its time does not let requests wait for a step. Of two thirds on
/// it may: with 2,048 tokens of prompts in each step, 20,000 of them a second and 50 ms for the answers of a step.
const BUSY_WITH_PROMPTS: f64 = 0.6;

/// An engine whose slots are taken runs the same number of requests at so many reports. Where requests wait for something else
/// (a step with room for their prompts, memory), the number varies.
const FULL_REPORTS: usize = 4;

/// Fewer slots are not learnt. Few requests are often the same number by chance: an engine that computes short prompts one
/// after the other runs one or two, and lets the others wait.
const FEWEST_LEARNT: u32 = 8;

const MILLION: f64 = 1e6;

/// What the averages of the requests move by each second: the last two count for two thirds.
const USUAL_STEP: f64 = 0.4;

/// A replica reports a request within this time, usually within 10 ms; an engine may report it before.
const PEER_REPORT_DELAY: Duration = Duration::from_millis(100);

/// Requests that may be sent to an engine before all of its slots are taken: a few more than it was seen to have, which it runs
/// if it can, and then it is seen to have more.
pub fn free_slots(slots: u32, requests: u32) -> u32 {
    let most = slots.saturating_add(slots.div_ceil(8));
    most.saturating_sub(requests)
}

/// One worker's load. Everything that a routing decision reads is in one cache line, because with a thousand
/// workers each line is a cache miss. Nothing else that is written often shares the line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Load {
    requests: AtomicU32,
    /// Requests that the engine reports beyond ours and the other replicas', as of its last report.
    foreign_requests: AtomicU32,
    /// Uncached prompt tokens of requests without a first token yet. Signed, because two threads may add and
    /// subtract in either order.
    queued_tokens: AtomicI64,
    /// Prompt tokens of all requests.
    context_tokens: AtomicI64,
    /// What the other replicas have here, as they last reported it.
    peers_queued_tokens: AtomicU64,
    peers_context_tokens: AtomicU64,
    peers_requests: AtomicU32,
    /// The most requests that its engine was last seen to run while others waited, 0 if none ever waited; with [`REPORTS`]
    /// and [`SEEN`].
    slots: AtomicU16,
    /// Requests that wait inside the engine for a slot or for memory, as of its last report.
    waiting: AtomicU16,
    /// Requests in flight on average over the last seconds.
    usual_requests: SharedF32,
    pub speed: SharedSpeed,
    reported: Reported,
}

/// The engine's last report, and what else is not read for decisions.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Reported {
    total: AtomicU64,
    /// Uncached prompt tokens of requests that have had their first token.
    computed_tokens: AtomicU64,
    /// How often tokens of its answers were seen.
    answering: AtomicU64,
    report: Mutex<Option<LoadReport>>,
    /// What the engine ran at the last reports of requests that wait inside it.
    full: Mutex<SmallVec<[u32; FULL_REPORTS]>>,
    tried: Mutex<TriedRequests>,
    prompt_share: Mutex<PromptShare>,
    /// Requests that the report has beyond this router's own.
    beyond_own: AtomicU32,
    /// Of the prompts of this router, the parts that are not computed yet, in millionths of a prompt. Signed, as the tokens are.
    own_waiting: AtomicI64,
    /// Of the prompts of the other replicas, as they last reported it.
    peers_waiting: AtomicU64,
    /// Prompts that are not computed yet, on average over the last seconds.
    usual_waiting_prompts: SharedF32,
}

impl Load {
    /// Requests in flight: those of this router, those of other replicas, and others that the engine reported.
    pub fn requests(&self) -> u32 {
        self.own_requests()
            .saturating_add(self.peers_requests())
            .saturating_add(self.foreign_requests())
    }

    /// Queued tokens of this router and of other replicas.
    pub fn queued_tokens(&self) -> u64 {
        self.own_queued_tokens()
            .saturating_add(self.peers_queued_tokens())
    }

    /// Context tokens of this router and of other replicas.
    pub fn context_tokens(&self) -> u64 {
        self.own_context_tokens()
            .saturating_add(self.peers_context_tokens())
    }

    /// That of this router and of other replicas.
    pub fn share(&self) -> LoadShare {
        LoadShare {
            requests: self.requests(),
            queued_tokens: self.queued_tokens(),
            context_tokens: self.context_tokens(),
        }
    }

    pub fn own(&self) -> LoadShare {
        LoadShare {
            requests: self.own_requests(),
            queued_tokens: self.own_queued_tokens(),
            context_tokens: self.own_context_tokens(),
        }
    }

    pub fn peers(&self) -> LoadShare {
        LoadShare {
            requests: self.peers_requests(),
            queued_tokens: self.peers_queued_tokens(),
            context_tokens: self.peers_context_tokens(),
        }
    }

    pub fn own_requests(&self) -> u32 {
        self.requests.load(Relaxed)
    }

    pub fn own_queued_tokens(&self) -> u64 {
        self.queued_tokens.load(Relaxed).max(0) as u64
    }

    pub fn own_context_tokens(&self) -> u64 {
        self.context_tokens.load(Relaxed).max(0) as u64
    }

    pub fn peers_requests(&self) -> u32 {
        self.peers_requests.load(Relaxed)
    }

    pub fn peers_queued_tokens(&self) -> u64 {
        self.peers_queued_tokens.load(Relaxed)
    }

    pub fn peers_context_tokens(&self) -> u64 {
        self.peers_context_tokens.load(Relaxed)
    }

    /// Requests of neither this router nor another replica, as of the engine's last report.
    pub fn foreign_requests(&self) -> u32 {
        self.foreign_requests.load(Relaxed)
    }

    /// Answers that the engine generates at the same time, if that was seen: only an engine that has let requests wait shows it.
    pub fn learnt_slots(&self) -> Option<u32> {
        let slots = self.slots.load(Relaxed) & NUMBER;
        Some(slots.into()).filter(|slots| *slots > 0)
    }

    /// Whether its engine has ever reported what it runs.
    pub fn has_reported(&self) -> bool {
        self.slots.load(Relaxed) & REPORTS != 0
    }

    /// As seen, or what most engines have.
    #[inline]
    pub fn slots(&self) -> u32 {
        self.learnt_slots().unwrap_or(DEFAULT_SLOTS)
    }

    /// Another replica has seen so many. Of several replicas the most count, while this router has seen none itself.
    pub(super) fn on_peer_slots(&self, slots: u32) {
        self.raise_slots(slots, REPORTS);
    }

    /// There are so many or more. Of what is known so far the `kept` flags stay.
    fn raise_slots(&self, slots: u32, kept: u16) {
        let flags = self.slots.load(Relaxed) & kept;
        self.slots.fetch_max(flags | number(slots), Relaxed);
    }

    /// The engine may be another one.
    pub(super) fn forget_slots(&self) {
        self.slots.store(0, Relaxed);
        self.reported.full.lock().clear();
        *self.reported.tried.lock() = TriedRequests::default();
        *self.reported.prompt_share.lock() = PromptShare::default();
    }

    /// Requests that wait inside the engine for a slot or for memory, of all its clients, as of its last report.
    #[inline]
    pub fn waiting(&self) -> u32 {
        self.waiting.load(Relaxed).into()
    }

    /// Requests in flight on average over the last seconds, of all replicas.
    #[inline]
    pub fn usual_requests(&self) -> f64 {
        self.usual_requests.get()
    }

    /// Prompts of this router that are not computed yet, in millionths: of each the part that is not cached.
    pub fn own_uncomputed_prompts(&self) -> u64 {
        self.reported.own_waiting.load(Relaxed).max(0) as u64
    }

    /// As the other replicas report theirs.
    pub fn set_peers_uncomputed_prompts(&self, millionths: u64) {
        self.reported.peers_waiting.store(millionths, Relaxed);
    }

    /// Prompts that are not computed yet, of all replicas.
    fn waiting_prompts(&self) -> f64 {
        let peers = self.reported.peers_waiting.load(Relaxed);
        self.own_uncomputed_prompts().saturating_add(peers) as f64 / MILLION
    }

    /// Prompts that are not computed yet on average over the last seconds, of all replicas.
    pub fn usual_waiting_prompts(&self) -> f64 {
        self.reported.usual_waiting_prompts.get()
    }

    /// To be called once a second: takes part in the averages.
    pub fn see_requests(&self) {
        let see = |usual: &SharedF32, now: f64| {
            let before = usual.get();
            usual.set(before + USUAL_STEP * (now - before));
        };
        see(&self.usual_requests, self.requests().into());
        see(&self.reported.usual_waiting_prompts, self.waiting_prompts());
    }

    /// For what is learnt of the worker's speed.
    pub(super) fn now(&self, slots: u32) -> LoadNow {
        let requests = self.requests();
        LoadNow {
            requests,
            next_waits: requests >= slots || self.waiting() > 0,
            is_full: requests > slots || self.waiting() > 0,
            context_tokens: self.context_tokens(),
            peers_queued_tokens: self.peers_queued_tokens(),
        }
    }

    /// What all other replicas together have at this worker.
    pub fn set_peers(&self, requests: u32, queued_tokens: u64, context_tokens: u64) {
        self.peers_requests.store(requests, Relaxed);
        self.peers_queued_tokens.store(queued_tokens, Relaxed);
        self.peers_context_tokens.store(context_tokens, Relaxed);
    }

    /// Requests that the engine reported before the replica was known that sent them are not foreign.
    pub fn recount_foreign(&self) {
        let beyond_own = self.reported.beyond_own.load(Relaxed);
        let foreign = beyond_own.saturating_sub(self.peers_requests());
        self.foreign_requests.fetch_min(foreign, Relaxed);
    }

    /// As [`Self::recount_foreign`], if the engine's report is so new that another replica's report of the same requests
    /// may have come after it.
    pub fn recount_new_foreign(&self, now: Instant) {
        let is_new =
            |report: LoadReport| now.saturating_duration_since(report.at) < PEER_REPORT_DELAY;
        if self.reported().is_some_and(is_new) {
            self.recount_foreign();
        }
    }

    /// Requests sent to the worker since it joined.
    pub fn total(&self) -> u64 {
        self.reported.total.load(Relaxed)
    }

    /// Prompt tokens that the worker has computed for requests of this router since it joined.
    pub fn computed_tokens(&self) -> u64 {
        self.reported.computed_tokens.load(Relaxed)
    }

    /// How often tokens of its answers were seen in this router since it joined: about once a second for each stream.
    pub fn answering(&self) -> u64 {
        self.reported.answering.load(Relaxed)
    }

    /// Tokens of a stream were seen. To be called about once a second for each stream.
    pub fn on_answering(&self) {
        self.reported.answering.fetch_add(1, Relaxed);
    }

    pub fn reported(&self) -> Option<LoadReport> {
        *self.reported.report.lock()
    }

    /// Stores an engine's report. Requests beyond our own and the other replicas' came from other clients of the engine.
    pub fn report(&self, reported: LoadReport) {
        let all = reported.running.saturating_add(reported.waiting);
        let beyond_own = all.saturating_sub(self.own_requests());
        let foreign = beyond_own.saturating_sub(self.peers_requests());
        self.foreign_requests.store(foreign, Relaxed);
        self.reported.beyond_own.store(beyond_own, Relaxed);
        self.slots.fetch_or(REPORTS, Relaxed);
        let slots = self.learnt_slots();
        // Behind that many tokens of prompts a request waits for a step, however many slots are free.
        let has_room_in_step = self.queued_tokens() < STEP_TOKENS;
        // But those that wait for a slot have prompts as well.
        let for_capacity = reported.waiting_for_capacity(slots);
        let share = self.prompt_share(reported.at, for_capacity > 0);
        let has_time = share.is_some_and(|share| share < BUSY_WITH_PROMPTS);
        let has_all_slots_taken = reported.has_all_taken(slots);
        let mut waiting = for_capacity;
        let waits_for_slot = waiting > 0 && (has_room_in_step || has_time || has_all_slots_taken);
        if waits_for_slot {
            let full = self.see_full(reported.running);
            let most = full.iter().copied().max().unwrap_or_default();
            let spread = most - full.iter().copied().min().unwrap_or_default();
            let is_steady = spread <= most / 8 && most >= FEWEST_LEARNT;
            // In an engine of a few slots one request may have ended whose slot is not taken yet.
            let knows_slots = slots.is_some() && spread <= 1;
            if is_steady && full.len() == FULL_REPORTS {
                // They may be fewer than before: what fits into its memory.
                self.slots.store(REPORTS | SEEN | number(most), Relaxed);
            } else if !is_steady && !knows_slots {
                waiting = 0;
                // A few of the same number were chance.
                self.slots.store(REPORTS, Relaxed);
            }
        } else {
            waiting = 0;
        }
        self.waiting.store(short(waiting), Relaxed);
        // A report may be from before requests of ours ended, and requests may wait for prompts of others to be
        // computed. Such a report shows neither that slots are free nor that none is. Nor does one in which all that
        // wait are deferred: a full engine of which no slots are known looks like that, too. `foreign` counts what
        // others have in the engine, running and deferred requests with it: any of them may be among those that wait
        // for a slot.
        let is_full = waits_for_slot && for_capacity > foreign;
        if is_full || reported.waiting == 0 {
            let requests = self.requests();
            let mut tried = self.reported.tried.lock();
            tried.on_report(reported.at, reported.running, is_full, requests);
        }
        // An engine whose memory was full ran fewer than it does now.
        if slots.is_some_and(|slots| reported.running > slots) {
            self.raise_slots(reported.running, REPORTS | SEEN);
        }
        *self.reported.report.lock() = Some(reported);
    }

    /// The part of its time in which the engine computes prompts, 0 to 1. `None`: that is not known now. It is only where
    /// this router has sent half of the requests or more, of whose prompts it sees that they are computed.
    fn prompt_share(&self, now: Instant, has_waiting: bool) -> Option<f64> {
        let (own, all) = (self.own_requests(), self.requests());
        // Prompts of others are supposed to be as long as those of this router.
        let all_by_own = f64::from(all) / f64::from(own.max(1));
        let seconds_each = all_by_own * self.speed.prompt_token();
        let mut share = self.reported.prompt_share.lock();
        share
            .see(now, has_waiting, self.computed_tokens(), seconds_each)
            .filter(|_| u64::from(own) * 2 >= u64::from(all))
    }

    /// The engine runs so many requests while others wait. Returns the numbers of the last such reports, up to [`FULL_REPORTS`].
    fn see_full(&self, running: u32) -> SmallVec<[u32; FULL_REPORTS]> {
        let mut full = self.reported.full.lock();
        if full.len() == FULL_REPORTS {
            full.remove(0);
        }
        full.push(running);
        full.clone()
    }

    pub fn tried(&self) -> TriedRequests {
        *self.reported.tried.lock()
    }

    /// Discards the report if it is older than `then`.
    pub fn expire_report_before(&self, then: Instant) {
        if self.reported().is_some_and(|reported| reported.at < then) {
            self.expire_report();
        }
    }

    pub fn expire_report(&self) {
        self.foreign_requests.store(0, Relaxed);
        self.reported.beyond_own.store(0, Relaxed);
        self.waiting.store(0, Relaxed);
        *self.reported.report.lock() = None;
    }

    pub(super) fn begin_request(&self, prompt_tokens: u32, uncached_tokens: u32) {
        self.requests.fetch_add(1, Relaxed);
        self.reported.total.fetch_add(1, Relaxed);
        self.queued_tokens
            .fetch_add(i64::from(uncached_tokens), Relaxed);
        self.context_tokens
            .fetch_add(i64::from(prompt_tokens), Relaxed);
        self.add_waiting(part(uncached_tokens, prompt_tokens));
    }

    fn add_waiting(&self, part: i64) {
        if part != 0 {
            self.reported.own_waiting.fetch_add(part, Relaxed);
        }
    }

    /// The prompt is computed.
    pub(super) fn begin_decoding(&self, prompt_tokens: u32, uncached_tokens: u32, computed: u64) {
        self.add_waiting(-part(uncached_tokens, prompt_tokens));
        self.queued_tokens
            .fetch_sub(i64::from(uncached_tokens), Relaxed);
        self.reported.computed_tokens.fetch_add(computed, Relaxed);
    }

    /// `uncached_tokens`: those that still count as queued.
    pub(super) fn end_request(&self, prompt_tokens: u32, uncached_tokens: u32) {
        self.add_waiting(-part(uncached_tokens, prompt_tokens));
        self.queued_tokens
            .fetch_sub(i64::from(uncached_tokens), Relaxed);
        self.context_tokens
            .fetch_sub(i64::from(prompt_tokens), Relaxed);
        self.requests.fetch_sub(1, Relaxed);
    }
}

/// Of a prompt in millionths.
fn part(uncached_tokens: u32, prompt_tokens: u32) -> i64 {
    let part = f64::from(uncached_tokens) / f64::from(prompt_tokens.max(1));
    (part * MILLION) as i64
}

/// No engine has more slots.
fn short(count: u32) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

/// As it stands in [`Load::slots`].
fn number(slots: u32) -> u16 {
    short(slots).min(NUMBER)
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;
    use crate::observe;

    fn reported(running: u32) -> LoadReport {
        LoadReport {
            at: observe::now(),
            running,
            waiting: 0,
            deferred: 0,
            kv_usage: 0.0,
        }
    }

    #[test]
    fn what_a_decision_reads_is_one_cache_line() {
        for offset in [
            offset_of!(Load, requests),
            offset_of!(Load, foreign_requests),
            offset_of!(Load, queued_tokens),
            offset_of!(Load, context_tokens),
            offset_of!(Load, peers_requests),
            offset_of!(Load, peers_queued_tokens),
            offset_of!(Load, peers_context_tokens),
            offset_of!(Load, slots),
            offset_of!(Load, waiting),
            offset_of!(Load, usual_requests),
            offset_of!(Load, speed),
        ] {
            assert!(offset < 64, "{offset}");
        }
        assert!(offset_of!(Load, reported) >= 64);
    }

    #[test]
    fn load_is_our_own_and_that_of_other_replicas() {
        let load = Load::default();
        load.begin_request(170, 100);
        load.set_peers(2, 1_000, 50);
        assert_eq!((load.requests(), load.own_requests()), (3, 1));
        assert_eq!(
            (load.queued_tokens(), load.own_queued_tokens()),
            (1_100, 100)
        );
        load.begin_decoding(170, 100, 100);
        assert_eq!(
            (load.context_tokens(), load.own_context_tokens()),
            (220, 170)
        );
        assert_eq!(load.own_queued_tokens(), 0);
        load.set_peers(0, 0, 0);
        assert_eq!((load.requests(), load.queued_tokens()), (1, 0));
    }

    #[test]
    fn requests_of_other_replicas_are_not_foreign() {
        let load = Load::default();
        load.begin_request(1, 1);
        load.set_peers(3, 0, 0);
        load.report(reported(6));
        assert_eq!((load.foreign_requests(), load.requests()), (2, 6));
        // Another replica's next request is no foreign one that ended.
        load.set_peers(4, 0, 0);
        assert_eq!(load.requests(), 7);
    }

    #[test]
    fn a_request_that_the_engine_reports_before_its_replica_is_not_counted_twice() {
        let load = Load::default();
        let report = reported(1);
        load.report(report);
        assert_eq!(load.requests(), 1);
        load.set_peers(1, 0, 0);
        load.recount_new_foreign(report.at + Duration::from_millis(20));
        assert_eq!((load.foreign_requests(), load.requests()), (0, 1));
        // Much later, a replica's request is a new one.
        load.report(reported(3));
        load.set_peers(2, 0, 0);
        load.recount_new_foreign(report.at + Duration::from_secs(2));
        assert_eq!((load.foreign_requests(), load.requests()), (2, 4));
    }

    #[test]
    fn a_replica_that_connects_is_not_counted_twice() {
        let load = Load::default();
        load.report(reported(5));
        assert_eq!(load.requests(), 5);
        load.set_peers(4, 0, 0);
        load.recount_foreign();
        assert_eq!((load.foreign_requests(), load.requests()), (1, 5));
    }

    #[test]
    fn the_usual_requests_are_the_average_of_the_last_seconds() {
        let load = Load::default();
        for second in 0..20 {
            // Eight in every other second, of another replica.
            load.set_peers(8 * (second % 2), 0, 0);
            load.see_requests();
        }
        let usual = load.usual_requests();
        assert!((4.0..6.0).contains(&usual), "{usual}");
        load.set_peers(0, 0, 0);
        load.see_requests();
        load.see_requests();
        assert!(load.usual_requests() < usual / 2.0);
    }

    #[test]
    fn slots_are_seen_only_while_requests_wait() {
        let load = Load::default();
        load.report(reported(300));
        assert_eq!((load.learnt_slots(), load.slots()), (None, DEFAULT_SLOTS));
        let full = |running, waiting| LoadReport {
            waiting,
            ..reported(running)
        };
        for _ in 1..FULL_REPORTS {
            load.report(full(64, 3));
            assert_eq!((load.learnt_slots(), load.waiting()), (None, 3));
        }
        load.report(full(64, 3));
        load.report(full(60, 1));
        assert_eq!((load.slots(), load.waiting()), (64, 1));
        load.report(reported(66));
        assert_eq!((load.slots(), load.waiting()), (66, 0));
        load.forget_slots();
        assert!(!load.has_reported());
        load.on_peer_slots(66);
        assert!(!load.has_reported());
        load.expire_report();
        assert_eq!((load.slots(), load.waiting()), (66, 0));
        load.on_peer_slots(70);
        load.on_peer_slots(60);
        assert_eq!(load.slots(), 70);
        load.report(reported(72));
        assert_eq!(load.slots(), 72);
        load.on_peer_slots(u32::MAX);
        assert_eq!((load.slots(), load.has_reported()), (16_383, true));
        load.forget_slots();
        assert_eq!(load.slots(), DEFAULT_SLOTS);
    }

    #[test]
    fn what_waits_for_an_adapter_or_for_blocks_waits_for_no_slot() {
        let load = Load::default();
        let report = |running, waiting, deferred| LoadReport {
            waiting,
            deferred,
            ..reported(running)
        };
        for _ in 0..2 * FULL_REPORTS {
            load.report(report(20, 3, 3));
        }
        assert_eq!((load.learnt_slots(), load.waiting()), (None, 0));
        // It is in the engine all the same.
        assert_eq!((load.requests(), load.foreign_requests()), (23, 23));
        for _ in 0..FULL_REPORTS {
            load.report(report(64, 5, 3));
        }
        assert_eq!((load.learnt_slots(), load.waiting()), (Some(64), 2));
        // Fewer run while some wait for something else: the slots stay.
        for _ in 0..2 * FULL_REPORTS {
            load.report(report(20, 3, 3));
        }
        assert_eq!((load.learnt_slots(), load.waiting()), (Some(64), 0));
        // An engine never has more of them than wait.
        load.report(report(63, 1, 9));
        assert_eq!(load.waiting(), 0);
    }

    #[test]
    fn what_a_full_engine_calls_deferred_waits_for_a_slot() {
        let load = Load::default();
        let report = |running, waiting, deferred| LoadReport {
            waiting,
            deferred,
            ..reported(running)
        };
        for _ in 0..FULL_REPORTS {
            load.report(report(16, 3, 0));
        }
        assert_eq!((load.learnt_slots(), load.waiting()), (Some(16), 3));
        // Blocks came while all slots were taken.
        load.report(report(16, 5, 5));
        assert_eq!((load.learnt_slots(), load.waiting()), (Some(16), 5));
        load.report(report(15, 5, 5));
        assert_eq!((load.learnt_slots(), load.waiting()), (Some(16), 0));
        let table = [
            (None, 2),
            (Some(17), 2),
            (Some(16), 5),
            (Some(15), 5),
            (Some(0), 5),
        ];
        for (slots, expected) in table {
            let found = report(16, 5, 3).waiting_for_capacity(slots);
            assert_eq!(found, expected, "{slots:?}");
        }
    }

    #[test]
    fn a_report_of_deferred_requests_alone_shows_neither_free_slots_nor_that_none_is() {
        // So many run and are deferred, all of them requests of this router.
        let tried = |running: u32, deferred: u32| {
            let load = Load::default();
            for _ in 0..running + deferred {
                load.begin_request(1, 1);
            }
            load.report(LoadReport {
                waiting: deferred,
                deferred,
                ..reported(running)
            });
            load.tried()
        };
        for (running, deferred) in [(4, 4), (8, 4), (100, 1)] {
            let found = tried(running, deferred);
            assert_eq!(found, TriedRequests::FIRST, "{running}, {deferred}");
        }
        assert_eq!((tried(8, 0).most, tried(5, 0).most), (12, 8));
    }

    #[test]
    fn what_others_have_deferred_may_be_what_waits_for_a_slot() {
        // So many of the requests in the engine are of this router. Eight run, two wait for a slot, three are deferred.
        let shown = |own: u32| {
            let load = Load::default();
            for _ in 0..own {
                load.begin_request(1, 1);
            }
            load.report(LoadReport {
                waiting: 5,
                deferred: 3,
                ..reported(8)
            });
            load.tried().shown
        };
        assert_eq!((shown(13), shown(12)), (Some(8), Some(8)));
        assert_eq!((shown(11), shown(10)), (None, None));
    }

    #[test]
    fn an_engine_that_runs_steadily_fewer_while_requests_wait_has_fewer_slots() {
        let load = Load::default();
        let full = |running| LoadReport {
            waiting: 3,
            ..reported(running)
        };
        // Its memory fills slowly.
        for running in (40..=64).rev() {
            load.report(full(running));
        }
        assert_eq!(load.slots(), 43);
        for _ in 1..FULL_REPORTS {
            load.report(full(40));
        }
        assert_eq!((load.learnt_slots(), load.waiting()), (Some(40), 3));
        // Or it is full at once. Another replica does not know it yet.
        for _ in 0..FULL_REPORTS {
            load.report(full(20));
            load.on_peer_slots(64);
        }
        assert_eq!((load.learnt_slots(), load.waiting()), (Some(20), 3));
    }

    /// Short texts may be many tokens: then the router does not know how much its engine has to compute.
    #[test]
    fn an_engine_that_runs_now_more_and_now_fewer_while_requests_wait_shows_no_slots() {
        let load = Load::default();
        let full = |running| LoadReport {
            waiting: 3,
            ..reported(running)
        };
        for running in [5, 9, 7, 5, 5, 6] {
            load.report(full(running));
            assert_eq!(load.learnt_slots(), None, "{running}");
        }
        for few in [1, 7] {
            for _ in 0..=FULL_REPORTS {
                load.report(full(few));
                assert_eq!(load.learnt_slots(), None, "{few}");
            }
        }
        assert_eq!(load.waiting(), 0);
        // By chance it is the same number some times.
        for _ in 0..FULL_REPORTS {
            load.report(full(8));
        }
        assert_eq!((load.learnt_slots(), load.waiting()), (Some(8), 3));
        load.report(full(4));
        assert_eq!((load.learnt_slots(), load.waiting()), (None, 0));
    }

    #[test]
    fn a_slot_of_a_few_that_is_free_for_a_moment_is_no_reason_to_forget_them() {
        let load = Load::default();
        let full = |running| LoadReport {
            waiting: 3,
            ..reported(running)
        };
        for _ in 0..FULL_REPORTS {
            load.report(full(8));
        }
        for running in [7, 8, 8, 7, 8] {
            load.report(full(running));
            assert_eq!((load.learnt_slots(), load.waiting()), (Some(8), 3));
        }
        load.report(full(2));
        assert_eq!((load.learnt_slots(), load.waiting()), (None, 0));
    }

    #[test]
    fn what_waits_behind_long_prompts_waits_for_no_slot() {
        let load = Load::default();
        let full = |running| LoadReport {
            waiting: 3,
            ..reported(running)
        };
        load.begin_request(STEP_TOKENS as u32, STEP_TOKENS as u32);
        load.report(full(5));
        assert_eq!((load.learnt_slots(), load.waiting()), (None, 0));
        assert_eq!(load.tried(), TriedRequests::FIRST);
        load.end_request(STEP_TOKENS as u32, STEP_TOKENS as u32);
        for _ in 0..FULL_REPORTS {
            load.report(full(64));
        }
        assert_eq!((load.learnt_slots(), load.waiting()), (Some(64), 3));
        // All of the slots that it is known to have are taken.
        load.begin_request(STEP_TOKENS as u32, STEP_TOKENS as u32);
        load.report(full(64));
        assert_eq!(load.waiting(), 3);
        load.report(full(63));
        assert_eq!(load.waiting(), 0);
    }

    /// Whatever it is flooded with: those that wait for a slot have prompts, too.
    #[test]
    fn an_engine_that_computes_prompts_for_a_small_part_of_its_time_lets_requests_wait_for_a_slot()
    {
        let start = observe::now();
        // At 12,000 tokens a second, of which nothing else is known.
        for (tokens_in_a_second, slots) in [(5_000, Some(16)), (11_000, None)] {
            let load = Load::default();
            for _ in 0..32 {
                load.begin_request(500, 500);
            }
            for second in 0..6 {
                load.report(LoadReport {
                    at: start + Duration::from_secs(second),
                    running: 16,
                    waiting: 16,
                    deferred: 0,
                    kv_usage: 0.0,
                });
                load.begin_decoding(0, 0, tokens_in_a_second);
            }
            assert_eq!(load.learnt_slots(), slots, "{tokens_in_a_second}");
        }
    }
}
