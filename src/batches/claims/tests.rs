use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::batches::shards::Shard;

const LEASE_MS: u64 = 30_000;
const WINDOW_MS: u64 = 120_000;
const RETENTION_MS: u64 = 3 * 86_400_000;
/// Lines of a shard.
const LINES: u32 = 4;

const A: u64 = 1;
const B: u64 = 2;

fn new_record() -> BatchRecord {
    let [window, retention] = [WINDOW_MS, RETENTION_MS].map(Duration::from_millis);
    BatchRecord {
        id: "batch_1".to_owned(),
        ..BatchRecord::new(0, window, retention)
    }
}

fn validated(shard_count: u32) -> Plan {
    Plan {
        shards: vec![Shard::default(); shard_count as usize],
        total: shard_count * LINES,
        model: Some("m".to_owned()),
        tokens: 0,
    }
}

/// A batch whose shards are known.
fn running(shard_count: u32) -> BatchRecord {
    let mut record = new_record();
    assert_eq!(record.claim(0, A, LEASE_MS), Some(Work::Validate));
    assert!(record.end_validation(A, Ok(validated(shard_count)), 1));
    record
}

fn counts(completed: u32, failed: u32) -> LineCounts {
    LineCounts { completed, failed }
}

fn assembled(completed: u32, failed: u32) -> Assembled {
    Assembled {
        output: Some(("file-1".to_owned(), 9)),
        counts: counts(completed, failed),
        ..Assembled::default()
    }
}

#[test]
fn a_batch_goes_its_way() {
    let mut record = new_record();
    assert_eq!(record.due_ms(0), Some(0));
    assert_eq!(record.claim(0, A, LEASE_MS), Some(Work::Validate));
    assert_eq!(record.claim(0, B, LEASE_MS), None);
    assert_eq!(record.due_ms(0), Some(LEASE_MS));
    assert!(record.end_validation(A, Ok(validated(2)), 5));
    assert_eq!(record.status, BatchStatus::InProgress);
    assert_eq!(record.model.as_deref(), Some("m"));
    assert_eq!(record.claim(5, A, LEASE_MS), Some(Work::Shard(0)));
    assert_eq!(record.claim(5, B, LEASE_MS), Some(Work::Shard(1)));
    assert_eq!(record.claim(5, B, LEASE_MS), None);
    assert!(record.end_shard(B, 1, 6));
    assert_eq!(record.status, BatchStatus::InProgress);
    assert!(record.end_shard(A, 0, 7));
    assert_eq!(record.status, BatchStatus::Finalizing);
    assert_eq!(record.claim(8, B, LEASE_MS), Some(Work::Finalize));
    assert!(record.end_assembly(B, assembled(7, 1), 9));
    assert_eq!(record.status, BatchStatus::Completed);
    assert_eq!(record.output_file_id.as_deref(), Some("file-1"));
    let times = [
        record.in_progress_ms,
        record.finalizing_ms,
        record.completed_ms,
        record.ended_ms(),
    ];
    assert_eq!(times, [Some(5), Some(7), Some(9), Some(9)]);
    assert_eq!(record.claim(10, A, LEASE_MS), None);
    assert!(!record.cancel(10));
}

#[test]
fn batches_are_due_by_their_creation_for_validation_after_what_ends_and_before_shards() {
    let of = |created_ms| {
        let window = Duration::from_millis(WINDOW_MS);
        BatchRecord::new(created_ms, window, Duration::ZERO)
    };
    let (older, newer) = (of(10_000), of(10_002));
    let now_ms = 10_003;
    let mut runs = of(0);
    assert_eq!(runs.claim(now_ms, A, LEASE_MS), Some(Work::Validate));
    let mut ends = runs.clone();
    assert!(runs.end_validation(A, Ok(validated(1)), now_ms));
    assert!(ends.end_validation(A, Ok(validated(0)), now_ms));
    let due = [&ends, &older, &newer, &runs].map(|record| record.due_ms(now_ms).unwrap());
    assert!(due.is_sorted_by(|first, next| first < next), "{due:?}");
}

#[test]
fn a_file_that_is_wrong_fails_the_batch() {
    let mut record = new_record();
    assert_eq!(record.claim(0, A, LEASE_MS), Some(Work::Validate));
    let errors = vec![LineError::new("empty_file", "empty", None)];
    assert!(record.end_validation(A, Err(errors.clone()), 3));
    assert_eq!(record.status, BatchStatus::Failed);
    assert_eq!((record.failed_ms, &record.errors), (Some(3), &errors));
    assert_eq!(record.claim(4, B, LEASE_MS), None);
}

#[test]
fn the_assembly_knows_the_counts_and_the_usage() {
    let mut record = running(1);
    assert_eq!(record.claim(0, A, LEASE_MS), Some(Work::Shard(0)));
    let usage = Usage {
        input_tokens: 5,
        output_tokens: 3,
        cached_tokens: 2,
    };
    for _ in 0..3 {
        assert!(record.progress(A, Work::Shard(0), counts(2, 1), usage));
    }
    assert_eq!((record.counts.completed, record.counts.failed), (3, 1));
    assert_eq!(record.usage.input_tokens, 15);
    assert!(record.end_shard(A, 0, 1));
    assert_eq!(record.claim(1, B, LEASE_MS), Some(Work::Finalize));
    assert!(record.end_assembly(B, assembled(2, 1), 2));
    // One of those that failed is a line whose result was lost.
    assert_eq!((record.counts.completed, record.counts.failed), (2, 2));
    assert_eq!(record.usage, Usage::default());
}

#[test]
fn a_cancelled_batch_ends_once_nothing_runs() {
    let mut record = running(3);
    assert_eq!(record.claim(0, A, LEASE_MS), Some(Work::Shard(0)));
    assert!(!record.is_stopping(1));
    assert!(record.cancel(1) && record.cancel(2));
    assert_eq!(record.cancelling_ms, Some(1));
    assert!(record.is_stopping(1));
    assert_eq!(record.claim(2, B, LEASE_MS), None);
    assert!(record.progress(A, Work::Shard(0), counts(1, 0), Usage::default()));
    assert!(record.end_shard(A, 0, 3));
    assert_eq!(record.claim(4, B, LEASE_MS), Some(Work::Finalize));
    assert_eq!(record.shown_status(), BatchStatus::Cancelling);
    assert!(!record.is_stopping(4), "the assembly goes on");
    assert!(record.cancel(5));
    assert!(record.end_assembly(B, assembled(1, 0), 6));
    assert_eq!(record.status, BatchStatus::Cancelled);
    assert_eq!((record.counts.completed, record.counts.not_run), (1, 11));
    assert!(!record.cancel(7));
}

#[test]
fn a_batch_that_is_cancelled_early_is_validated_for_its_lines() {
    let mut record = new_record();
    assert!(record.cancel(0));
    assert!(!record.is_stopping(0));
    assert_eq!(record.claim(1, A, LEASE_MS), Some(Work::Validate));
    let mut wrong = record.clone();
    assert!(record.end_validation(A, Ok(validated(2)), 2));
    assert_eq!(record.in_progress_ms, None);
    assert_eq!(record.claim(2, A, LEASE_MS), Some(Work::Finalize));
    assert!(record.end_assembly(A, assembled(0, 0), 3));
    assert_eq!(record.status, BatchStatus::Cancelled);
    assert_eq!(record.counts.not_run, 8);
    // If the file is wrong, that is said too.
    let errors = vec![LineError::new("empty_file", "empty", None)];
    assert!(wrong.end_validation(A, Err(errors), 2));
    assert_eq!(wrong.status, BatchStatus::Cancelled);
    assert_eq!((wrong.cancelled_ms, wrong.errors.len()), (Some(2), 1));
}

#[test]
fn expiry_stops_what_runs_and_leaves_what_is_done() {
    let mut record = running(2);
    let late = WINDOW_MS - 1;
    assert_eq!(record.claim(late, A, LEASE_MS), Some(Work::Shard(0)));
    assert_eq!(record.claim(late, A, LEASE_MS), Some(Work::Shard(1)));
    assert_eq!(record.due_ms(late), Some(WINDOW_MS));
    assert!(!record.is_stopping(late) && record.is_stopping(WINDOW_MS));
    assert_eq!(record.claim(WINDOW_MS, B, LEASE_MS), None);
    assert_eq!(record.due_ms(WINDOW_MS), Some(late + LEASE_MS));
    assert!(record.end_shard(A, 0, WINDOW_MS));
    // The replica dies with the other one.
    let now_ms = late + LEASE_MS;
    assert_eq!(record.claim(now_ms, B, LEASE_MS), Some(Work::Finalize));
    let mut in_time = record.clone();
    assert!(record.end_assembly(B, assembled(5, 1), now_ms));
    assert_eq!(record.status, BatchStatus::Expired);
    assert_eq!((record.counts.failed, record.counts.not_run), (1, 2));
    assert_eq!(record.ended_ms(), Some(now_ms));
    // All lines have a result.
    assert!(in_time.end_assembly(B, assembled(7, 1), now_ms));
    assert_eq!(in_time.status, BatchStatus::Completed);
}

#[test]
fn shards_that_were_given_back_come_after_all_others() {
    let mut record = running(3);
    assert_eq!(record.claim(0, A, LEASE_MS), Some(Work::Shard(0)));
    assert_eq!(record.claim(0, B, LEASE_MS), Some(Work::Shard(1)));
    assert!(record.give_back(A, Work::Shard(0)));
    // The other replica dies.
    let now_ms = LEASE_MS;
    for shard in [1, 2, 0] {
        let work = Work::Shard(shard);
        assert_eq!(record.claim(now_ms, A, LEASE_MS), Some(work));
    }
    for shard in [2, 1] {
        assert!(record.give_back(A, Work::Shard(shard)));
    }
    assert!(record.end_shard(A, 0, now_ms));
    for shard in [2, 1] {
        let work = Work::Shard(shard);
        assert_eq!(record.claim(now_ms, A, LEASE_MS), Some(work));
        assert!(record.end_shard(A, shard, now_ms));
    }
    assert_eq!(record.status, BatchStatus::Finalizing);
}

#[test]
fn an_end_that_nobody_has_reported_is_due() {
    let mut record = new_record();
    assert_eq!(record.claim(0, A, LEASE_MS), Some(Work::Validate));
    assert!(record.end_validation(A, Err(Vec::new()), 3));
    let due_ms = 3 + WEBHOOK_GRACE_MS;
    assert_eq!(record.due_ms(3), Some(due_ms));
    assert!(!record.is_webhook_due(due_ms - 1) && record.is_webhook_due(due_ms));
    record.webhooks_sent = true;
    assert!(!record.is_webhook_due(due_ms));
    assert_eq!(record.due_ms(due_ms), Some(RETENTION_MS));
}

#[test]
fn results_that_cannot_be_put_together_end_the_batch() {
    let check = |is_cancelled: bool, expected: BatchStatus| {
        let mut record = running(1);
        assert_eq!(record.claim(2, A, LEASE_MS), Some(Work::Shard(0)));
        if is_cancelled {
            assert!(record.cancel(3));
        }
        assert!(record.end_shard(A, 0, 4));
        assert_eq!(record.claim(5, A, LEASE_MS), Some(Work::Finalize));
        let error = LineError::new("results_too_large", "large", None);
        assert!(!record.fail_assembly(B, error.clone(), 6));
        assert!(record.fail_assembly(A, error, 6));
        assert_eq!((record.status, record.ended_ms()), (expected, Some(6)));
        assert_eq!(record.errors.len(), 1);
        assert_eq!(record.claim(7, A, LEASE_MS), None);
    };
    check(false, BatchStatus::Failed);
    check(true, BatchStatus::Cancelled);
}

#[test]
fn the_parts_of_a_batch_stay_for_a_while_after_its_end() {
    let mut record = running(1);
    assert_eq!(record.claim(2, A, LEASE_MS), Some(Work::Shard(0)));
    assert!(record.end_shard(A, 0, 3));
    assert_eq!(record.claim(4, A, LEASE_MS), Some(Work::Finalize));
    assert!(record.end_assembly(A, assembled(4, 0), 5));
    let due_ms = 5 + PARTS_KEPT_MS;
    assert!(!record.are_parts_due(due_ms), "the end is not reported");
    record.webhooks_sent = true;
    assert_eq!(record.due_ms(5), Some(due_ms));
    assert!(!record.are_parts_due(due_ms - 1) && record.are_parts_due(due_ms));
    assert!(!record.end_parts_deletion(due_ms - 1, true));
    // The storage failed.
    assert!(record.end_parts_deletion(due_ms, false));
    let retry_ms = due_ms + PARTS_RETRY_MS;
    assert_eq!(record.due_ms(due_ms), Some(retry_ms));
    assert!(record.end_parts_deletion(retry_ms, true));
    assert!(!record.are_parts_due(retry_ms));
    assert_eq!(record.due_ms(retry_ms), Some(RETENTION_MS));
}

#[test]
fn results_that_were_counted_are_waited_for_before_they_are_taken_for_lost() {
    let mut record = running(1);
    assert_eq!(record.claim(2, A, LEASE_MS), Some(Work::Shard(0)));
    assert!(record.progress(A, Work::Shard(0), counts(2, 1), Usage::default()));
    assert!(record.end_shard(A, 0, 3));
    assert!(record.awaits_results(counts(2, 0), 3 + LATE_LIST_MS - 1));
    assert!(!record.awaits_results(counts(2, 0), 3 + LATE_LIST_MS));
    // A line that nobody has counted has no result.
    assert!(!record.awaits_results(counts(2, 1), 3));
    record.ending = Ending::Cancelled;
    assert!(!record.awaits_results(counts(2, 0), 3));
}

#[test]
fn a_batch_is_deleted_in_the_end_even_if_it_never_ended() {
    let mut record = running(1);
    assert_eq!(record.claim(0, A, LEASE_MS), Some(Work::Shard(0)));
    assert!(record.renew(RETENTION_MS - 1, A, LEASE_MS));
    assert_eq!(record.claim(RETENTION_MS, B, LEASE_MS), None);
    let now_ms = RETENTION_MS + LEASE_MS;
    assert_eq!(record.claim(now_ms, B, LEASE_MS), Some(Work::Delete));
    assert!(!record.owns(A, Work::Shard(0)));
    assert_eq!(record.claim(now_ms, A, LEASE_MS), None);
    assert_eq!(record.due_ms(now_ms), Some(now_ms + LEASE_MS));
}

#[test]
fn a_batch_that_is_not_confirmed_never_runs_and_goes() {
    let new = new_record();
    let mut record = new.unconfirmed();
    let limit_ms = record.delete_ms;
    assert_eq!(record.due_ms(0), Some(limit_ms));
    assert_eq!(record.claim(limit_ms - 1, A, LEASE_MS), None);
    let mut confirmed = record.clone();
    assert!(confirmed.confirm(&new));
    assert_eq!(confirmed, new);
    assert!(!confirmed.confirm(&new));
    assert_eq!(record.claim(limit_ms, A, LEASE_MS), Some(Work::Delete));
    assert!(!record.confirm(&new), "it is being deleted");
}

#[test]
fn a_batch_that_is_taken_back_is_deleted_whatever_runs_of_it() {
    let mut record = running(2);
    assert_eq!(record.claim(2, A, LEASE_MS), Some(Work::Shard(0)));
    assert!(record.take_back(3));
    assert!(!record.owns(A, Work::Shard(0)));
    assert_eq!(record.due_ms(3), Some(0));
    assert_eq!(record.claim(3, B, LEASE_MS), Some(Work::Delete));
    assert!(!record.take_back(4));
}

/// A replica with what it believes to have: a work, and until when.
struct Replica {
    owner: u64,
    works: VecDeque<(Work, u64)>,
}

/// A batch, its replicas and the results that they wrote.
struct World {
    record: BatchRecord,
    /// As it was written with the record.
    due_ms: Option<u64>,
    now_ms: u64,
    replicas: Vec<Replica>,
    next_owner: u64,
    is_valid: bool,
    shard_count: u32,
    /// The first result of each line, and whether it is a good one.
    results: BTreeMap<u32, bool>,
    ended_shards: BTreeSet<u32>,
    terminal: Option<BatchStatus>,
}

#[derive(Clone, Debug)]
enum Event {
    Pass(u64),
    Claim,
    Renew,
    /// Runs lines of a shard.
    Run(usize),
    /// Does all of a work, and says so.
    Finish,
    GiveBack,
    /// Another process takes the replica's place.
    Die,
    Cancel,
}

impl World {
    fn new(replicas: u64, is_valid: bool, shard_count: u32) -> Self {
        let record = new_record();
        let replica = |owner| Replica {
            owner,
            works: VecDeque::new(),
        };
        Self {
            due_ms: record.due_ms(0),
            record,
            now_ms: 0,
            replicas: (0..replicas).map(replica).collect(),
            next_owner: replicas,
            is_valid,
            shard_count,
            results: BTreeMap::new(),
            ended_shards: BTreeSet::new(),
            terminal: None,
        }
    }

    fn on_event(&mut self, replica: usize, event: &Event) {
        match event {
            Event::Pass(ms) => self.now_ms += ms,
            Event::Claim => {
                self.claim(replica);
            }
            Event::Renew => self.renew(replica),
            Event::Run(lines) => {
                let works = self.replicas[replica].works.iter();
                let mut shards = works.filter_map(|(work, _)| match work {
                    Work::Shard(shard) => Some(*shard),
                    _ => None,
                });
                if let Some(shard) = shards.next() {
                    self.run(replica, shard, *lines);
                }
            }
            Event::Finish => {
                if let Some((work, _)) = self.replicas[replica].works.pop_front() {
                    let before = self.record.clone();
                    self.finish(replica, work);
                    // Who has no claim any more changes nothing.
                    let is_own = before.owns(self.replicas[replica].owner, work);
                    assert!(is_own || self.record == before, "{work:?}");
                }
            }
            Event::GiveBack => {
                let replica = &mut self.replicas[replica];
                if let Some((work, _)) = replica.works.pop_front() {
                    let is_own = self.record.owns(replica.owner, work);
                    assert_eq!(self.record.give_back(replica.owner, work), is_own);
                    self.write();
                }
            }
            Event::Die => {
                self.replicas[replica] = Replica {
                    owner: self.next_owner,
                    works: VecDeque::new(),
                };
                self.next_owner += 1;
            }
            Event::Cancel => {
                let was = self.record.status;
                let is_cancelled = self.record.cancel(self.now_ms);
                assert!(!(was.is_terminal() && is_cancelled));
                self.write();
            }
        }
        self.check();
    }

    fn claim(&mut self, index: usize) -> Option<Work> {
        let before = self.record.clone();
        let replica = &mut self.replicas[index];
        let Some(work) = self.record.claim(self.now_ms, replica.owner, LEASE_MS) else {
            assert_eq!(self.record, before);
            return None;
        };
        assert!(!before.owns(replica.owner, work));
        replica.works.retain(|(other, _)| *other != work);
        replica.works.push_back((work, self.now_ms + LEASE_MS));
        self.write();
        Some(work)
    }

    fn renew(&mut self, index: usize) {
        let replica = &mut self.replicas[index];
        let has_any = self.record.renew(self.now_ms, replica.owner, LEASE_MS);
        replica
            .works
            .retain(|(work, _)| self.record.owns(replica.owner, *work));
        assert_eq!(has_any, !replica.works.is_empty());
        for (_, until_ms) in &mut replica.works {
            *until_ms = self.now_ms + LEASE_MS;
        }
        self.write();
    }

    /// Runs the next lines of a shard that have no result.
    fn run(&mut self, replica: usize, shard: u32, lines: usize) {
        if self.record.is_stopping(self.now_ms) {
            return;
        }
        let numbers =
            (shard * LINES..(shard + 1) * LINES).filter(|line| !self.results.contains_key(line));
        let mut done = LineCounts::default();
        for line in numbers.take(lines).collect::<Vec<_>>() {
            let is_ok = line % 3 != 0;
            self.results.insert(line, is_ok);
            done += counts(u32::from(is_ok), u32::from(!is_ok));
        }
        let owner = self.replicas[replica].owner;
        let usage = Usage::default();
        self.record.progress(owner, Work::Shard(shard), done, usage);
        self.write();
    }

    fn finish(&mut self, replica: usize, work: Work) {
        let owner = self.replicas[replica].owner;
        let now_ms = self.now_ms;
        match work {
            Work::Validate => {
                let result = if self.is_valid {
                    Ok(validated(self.shard_count))
                } else {
                    Err(vec![LineError::new("empty_file", "empty", None)])
                };
                self.record.end_validation(owner, result, now_ms);
            }
            Work::Shard(shard) => {
                self.run(replica, shard, LINES as usize);
                if self.record.end_shard(owner, shard, now_ms) {
                    assert!(self.ended_shards.insert(shard), "shard {shard} ended twice");
                }
            }
            Work::Finalize => {
                let completed = self.results.values().filter(|is_ok| **is_ok).count() as u32;
                let failed = self.results.len() as u32 - completed;
                if self
                    .record
                    .end_assembly(owner, assembled(completed, failed), now_ms)
                {
                    assert!(self.record.status.is_terminal());
                    assert_eq!(self.record.counts.completed, completed);
                }
            }
            Work::Delete => panic!("deleted too early"),
        }
        self.write();
    }

    fn write(&mut self) {
        self.record = BatchRecord::from_json(&self.record.to_json()).unwrap();
        self.due_ms = self.record.due_ms(self.now_ms);
    }

    fn check(&mut self) {
        let record = &self.record;
        if let Some(terminal) = self.terminal {
            assert_eq!(record.status, terminal);
        }
        self.terminal = Some(record.status).filter(|status| status.is_terminal());
        let found = record.counts;
        assert!(found.completed + found.failed + found.not_run <= found.total);
        self.check_claims();
        // A replica that looks when it is due misses nothing.
        if record
            .clone()
            .claim(self.now_ms, u64::MAX, LEASE_MS)
            .is_some()
        {
            assert!(self.due_ms.is_some_and(|due_ms| due_ms <= self.now_ms));
        }
    }

    fn check_claims(&self) {
        let record = &self.record;
        let works: Vec<_> = record.claims.iter().map(|claim| claim.work).collect();
        for (index, work) in works.iter().enumerate() {
            assert!(!works[..index].contains(work), "{work:?} has two claims");
            let believers = self.replicas.iter().filter(|replica| {
                let mut works = replica.works.iter();
                works.any(|(other, until_ms)| other == work && self.now_ms < *until_ms)
            });
            assert!(believers.count() <= 1, "{work:?} is done twice");
        }
        let runs_shards = matches!(
            record.status,
            BatchStatus::InProgress | BatchStatus::Cancelling
        );
        let shards = if runs_shards { record.shard_count } else { 0 };
        for shard in 0..shards {
            let places = [
                self.ended_shards.contains(&shard),
                works.contains(&Work::Shard(shard)),
                record.returned.contains(&shard),
                record.next_shard <= shard,
            ];
            let count = places.into_iter().filter(|is_there| *is_there).count();
            assert_eq!(count, 1, "shard {shard}: {places:?}");
        }
    }

    /// One replica that lives works on alone.
    fn settle(&mut self) {
        self.on_event(0, &Event::Die);
        for _ in 0..100 {
            if self.record.status.is_terminal() {
                return;
            }
            if self.claim(0).is_some() {
                self.on_event(0, &Event::Finish);
            } else {
                let due_ms = self.record.due_ms(self.now_ms).unwrap();
                assert!(self.now_ms < due_ms, "due, but nothing to do");
                self.on_event(0, &Event::Pass(due_ms - self.now_ms));
            }
        }
        panic!("the batch does not end: {:?}", self.record);
    }
}

fn event() -> impl Strategy<Value = (usize, Event)> {
    let event = prop_oneof![
        4 => (1..20_000_u64).prop_map(Event::Pass),
        8 => Just(Event::Claim),
        4 => Just(Event::Renew),
        6 => (0..=LINES as usize).prop_map(Event::Run),
        5 => Just(Event::Finish),
        2 => Just(Event::GiveBack),
        1 => Just(Event::Die),
        1 => prop_oneof![3 => Just(Event::Renew), 1 => Just(Event::Cancel)],
    ];
    (0..3_usize, event)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn every_batch_ends_once_and_counts_each_line(
        is_valid in prop::sample::select(vec![true, true, true, false]),
        shard_count in 0..5_u32,
        events in proptest::collection::vec(event(), 0..100),
    ) {
        let mut world = World::new(3, is_valid, shard_count);
        for (replica, event) in &events {
            world.on_event(*replica, event);
        }
        world.settle();
        let record = &mut world.record;
        let found = record.counts;
        prop_assert_eq!(found.completed + found.failed + found.not_run, found.total);
        if record.status == BatchStatus::Completed {
            prop_assert_eq!((found.total, found.not_run), (shard_count * LINES, 0));
        }
        if record.status == BatchStatus::Failed {
            prop_assert!(!is_valid);
        }
        prop_assert!(record.claims.is_empty());
        prop_assert_eq!(record.claim(record.delete_ms - 1, u64::MAX, LEASE_MS), None);
        prop_assert_eq!(record.claim(record.delete_ms, u64::MAX, LEASE_MS), Some(Work::Delete));
    }
}
