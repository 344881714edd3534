use proptest::prelude::*;

use std::time::Duration;

use super::*;
use crate::kv::tokenizer_check::PromptSource;
use crate::observe;

const MODEL: &str = "m";

fn subject() -> Subject {
    Subject {
        model: MODEL.into(),
        source: PromptSource::Rendered,
    }
}

fn book() -> CheckResults {
    CheckResults::new(Settings::default())
}

/// What turned, for the model and for the worker. Each check begins after the one before.
fn take(book: &mut CheckResults, worker: u32, outcome: Outcome) -> (AlarmChange, AlarmChange) {
    thread_local! {
        static STARTED: std::cell::Cell<u64> = const { std::cell::Cell::new(1_000) };
    }
    STARTED.set(STARTED.get() + 1);
    take_of(book, STARTED.get(), worker, outcome)
}

/// Of a check that began at the given tick.
fn take_of(
    book: &mut CheckResults,
    started: u64,
    worker: u32,
    outcome: Outcome,
) -> (AlarmChange, AlarmChange) {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(observe::now);
    let started = *START + Duration::from_millis(started);
    let subject = subject();
    book.record(started, started, &subject, WorkerId(worker), outcome)
}

fn take_all(
    book: &mut CheckResults,
    worker: u32,
    outcome: Outcome,
    times: u32,
) -> Vec<(AlarmChange, AlarmChange)> {
    let turns = (0..times).map(|_| take(book, worker, outcome));
    turns
        .filter(|turn| *turn != (AlarmChange::None, AlarmChange::None))
        .collect()
}

fn trusts(book: &CheckResults, worker: u32) -> bool {
    book.trusts(&subject(), WorkerId(worker))
}

#[test]
fn misses_in_a_row_raise_the_alarm_and_confirmations_in_a_row_clear_it() {
    let mut book = book();
    assert_eq!(take_all(&mut book, 1, Outcome::Missing, 10), []);
    assert_eq!(take_all(&mut book, 1, Outcome::Partial, 9), []);
    assert!(trusts(&book, 1));
    let raised = (AlarmChange::Raised, AlarmChange::Raised);
    assert_eq!(take(&mut book, 1, Outcome::Missing), raised);
    assert!(!trusts(&book, 1) && !trusts(&book, 2));
    // It is raised once, however long it goes on, and a few that agree by chance do not clear it.
    for _ in 0..10 {
        assert_eq!(take_all(&mut book, 1, Outcome::Missing, 30), []);
        assert_eq!(take_all(&mut book, 1, Outcome::Confirmed, 4), []);
    }
    assert!(!trusts(&book, 1));
    let cleared = (AlarmChange::Cleared, AlarmChange::Cleared);
    assert_eq!(take(&mut book, 1, Outcome::Confirmed), cleared);
    assert!(trusts(&book, 1) && trusts(&book, 2));
}

#[test]
fn what_is_no_evidence_counts_for_nothing() {
    let mut book = book();
    assert_eq!(take_all(&mut book, 1, Outcome::Missing, 19), []);
    assert_eq!(take_all(&mut book, 1, Outcome::Inconclusive, 99), []);
    assert_eq!(take_all(&mut book, 1, Outcome::Skipped, 99), []);
    assert!(trusts(&book, 1));
    assert_eq!(take_all(&mut book, 1, Outcome::Missing, 1).len(), 1);
    take_all(&mut book, 1, Outcome::Confirmed, 4);
    take_all(&mut book, 1, Outcome::Inconclusive, 99);
    assert_eq!(take_all(&mut book, 1, Outcome::Confirmed, 1).len(), 1);
    let run = &book.of(&subject()).unwrap().all;
    assert_eq!(run.confirmed_ratio(), Some(5.0 / 25.0));
}

#[test]
fn one_worker_with_another_template_is_found_among_many_that_agree() {
    let mut book = book();
    for _ in 0..19 {
        for worker in 0..9 {
            take_all(&mut book, worker, Outcome::Confirmed, 1);
        }
        take_all(&mut book, 9, Outcome::Missing, 1);
    }
    let turn = take(&mut book, 9, Outcome::Missing);
    assert_eq!(turn, (AlarmChange::None, AlarmChange::Raised));
    assert!(!trusts(&book, 9));
    assert!((0..9).all(|worker| trusts(&book, worker)));
    let turns = take_all(&mut book, 9, Outcome::Confirmed, 5);
    assert_eq!(turns, [(AlarmChange::None, AlarmChange::Cleared)]);
    assert!(trusts(&book, 9));
}

/// What agrees is reported at once, and what does not only after its grace.
#[test]
fn a_burst_over_two_workers_of_which_one_differs_is_no_alarm_of_both() {
    let mut book = book();
    for _ in 0..19 {
        assert_eq!(
            take_of(&mut book, 100, 1, Outcome::Confirmed).0,
            AlarmChange::None
        );
    }
    // One of those that agree was evicted before it was looked for.
    for worker in [2, 1, 2].into_iter().chain([2; 28]) {
        assert_eq!(
            take_of(&mut book, 100, worker, Outcome::Missing).0,
            AlarmChange::None
        );
    }
    assert!(trusts(&book, 1) && !trusts(&book, 2) && trusts(&book, 3));
    // Then the first differs, too: two rows at most, since one is under way.
    let turns: Vec<AlarmChange> = (0..40)
        .map(|_| take_of(&mut book, 101, 1, Outcome::Missing).0)
        .filter(|turn| *turn != AlarmChange::None)
        .collect();
    assert_eq!(turns, [AlarmChange::Raised]);
    assert!(!trusts(&book, 1) && !trusts(&book, 3));
}

#[test]
fn a_worker_that_agreed_once_and_is_asked_no_more_keeps_no_alarm_down() {
    let mut book = book();
    let _ = take_of(&mut book, 7, 1, Outcome::Confirmed);
    // Started before that.
    let _ = take_of(&mut book, 6, 2, Outcome::Missing);
    let raised = (0..60).find(|at| {
        take_of(&mut book, 8 + at, 2 + *at as u32, Outcome::Missing).0 == AlarmChange::Raised
    });
    assert!(raised.is_some_and(|at| at < 2 * 20), "{raised:?}");
}

#[test]
fn where_all_differ_it_shows_before_each_has_been_asked_often() {
    let mut book = book();
    for worker in 0..1_000 {
        take_all(&mut book, worker, Outcome::Confirmed, 7);
    }
    for worker in 0..20 {
        take_all(&mut book, worker, Outcome::Missing, 1);
    }
    // Those that have not been asked again are still believed: they have shown it.
    assert!(!trusts(&book, 3) && !trusts(&book, 1_001));
    assert!(trusts(&book, 500));
    take_all(&mut book, 500, Outcome::Missing, 1);
    assert!(!trusts(&book, 500));
    // A worker that is started anew with the right template counts though the others do not.
    take_all(&mut book, 2, Outcome::Confirmed, 4);
    take_all(&mut book, 3, Outcome::Missing, 1);
    assert!(!trusts(&book, 2));
    take_all(&mut book, 2, Outcome::Confirmed, 1);
    take_all(&mut book, 3, Outcome::Missing, 9);
    assert!(trusts(&book, 2) && !trusts(&book, 3) && !trusts(&book, 999_999));
}

#[test]
fn a_template_that_differs_is_found_though_texts_as_they_are_agree() {
    let mut book = book();
    let text = Subject {
        source: PromptSource::Text,
        ..subject()
    };
    for _ in 0..20 {
        let now = observe::now();
        let _ = book.record(now, now, &text, WorkerId(1), Outcome::Confirmed);
        let _ = take(&mut book, 1, Outcome::Missing);
    }
    assert!(!trusts(&book, 1));
    assert!(book.trusts(&text, WorkerId(1)));
}

#[test]
fn workers_that_left_are_forgotten() {
    let mut book = book();
    take_all(&mut book, 1, Outcome::Missing, 20);
    take_all(&mut book, 2, Outcome::Missing, 1);
    assert_eq!(book.retain(|worker| worker == WorkerId(2), |_| true), []);
    assert_eq!(book.of(&subject()).unwrap().workers.len(), 1);
}

#[test]
fn an_alarm_goes_with_the_last_worker() {
    let mut book = book();
    take_all(&mut book, 1, Outcome::Missing, 20);
    take_all(&mut book, 2, Outcome::Missing, 1);
    assert!(!trusts(&book, 3));
    assert_eq!(book.retain(|_| false, |_| true), [subject()]);
    assert_eq!(book.iter().count(), 0);
    assert!(trusts(&book, 3));
}

/// An adapter that was unloaded.
#[test]
fn an_alarm_goes_with_its_model_though_the_worker_stays() {
    let mut book = book();
    take_all(&mut book, 1, Outcome::Missing, 20);
    assert_eq!(book.retain(|_| true, |model| model == MODEL), []);
    assert!(!trusts(&book, 1));
    assert_eq!(book.retain(|_| true, |model| model != MODEL), [subject()]);
    assert!(trusts(&book, 1));
}

#[test]
fn what_an_engine_tells_is_remembered_while_it_is_suspected() {
    let mut book = book();
    assert!(!book.suspects(WorkerId(1)));
    take_all(&mut book, 1, Outcome::Partial, 1);
    assert!(book.suspects(WorkerId(1)) && !book.suspects(WorkerId(2)));
    take_all(&mut book, 1, Outcome::Inconclusive, 1);
    assert!(book.suspects(WorkerId(1)));
    take_all(&mut book, 1, Outcome::Confirmed, 1);
    assert!(!book.suspects(WorkerId(1)));
}

fn outcome() -> impl Strategy<Value = Outcome> {
    (0..Outcome::ALL.len()).prop_map(|place| Outcome::ALL[place])
}

proptest! {
    /// Each check's outcome comes when it comes: what agrees at once, what does not 50 checks later.
    #[test]
    fn one_worker_that_agrees_among_those_that_do_not_is_believed(
        workers in proptest::collection::vec(0u32..4, 200..400),
    ) {
        let mut book = book();
        let mut workers = workers;
        workers.iter_mut().step_by(10).for_each(|worker| *worker = 0);
        for (now, worker) in workers.iter().enumerate() {
            if *worker == 0 {
                let turn = take_of(&mut book, now as u64, 0, Outcome::Confirmed);
                prop_assert_eq!(turn, (AlarmChange::None, AlarmChange::None));
            }
            if let Some(started) = now.checked_sub(50) && workers[started] != 0 {
                let (of_all, _) = take_of(&mut book, started as u64, workers[started], Outcome::Missing);
                prop_assert_eq!(of_all, AlarmChange::None);
            }
            prop_assert!(trusts(&book, 0) && trusts(&book, 9));
        }
        // It goes away; the others stay as they are, and those that begin after it show it.
        let last = workers.len() as u64;
        let turns = (0..200u64).map(|at| take_of(&mut book, last + at, 1 + at as u32 % 3, Outcome::Missing).0);
        prop_assert_eq!(turns.filter(|turn| *turn == AlarmChange::Raised).count(), 1);
    }

    /// Beside the plainest account of it: a list of all evidence.
    #[test]
    fn the_alarm_is_what_the_whole_list_says(outcomes in proptest::collection::vec((0u32..3, outcome()), 0..400),
        mismatch_threshold in 1u32..8, match_threshold in 1u32..5) {
        let settings = Settings { mismatch_threshold, match_threshold, ..Settings::default() };
        let mut book = CheckResults::new(settings);
        let mut evidence: Vec<(u32, bool)> = Vec::new();
        let is_raised = |evidence: &[bool]| {
            let mut is_raised = false;
            for end in 1..=evidence.len() {
                let tail = |len: u32, agrees: bool| {
                    end >= len as usize && evidence[end - len as usize..end].iter().all(|shown| *shown == agrees)
                };
                is_raised = (is_raised || tail(mismatch_threshold, false)) && !tail(match_threshold, true);
            }
            is_raised
        };
        for (worker, outcome) in outcomes {
            let _ = take(&mut book, worker, outcome);
            evidence.extend(outcome.agrees().map(|agrees| (worker, agrees)));
            let all: Vec<bool> = evidence.iter().map(|(_, agrees)| *agrees).collect();
            let results = book.of(&subject()).unwrap();
            prop_assert_eq!(results.all.is_raised(), is_raised(&all));
            for worker in 0..3 {
                let own: Vec<bool> = evidence.iter().filter(|piece| piece.0 == worker).map(|piece| piece.1).collect();
                let agrees = own.len() >= match_threshold as usize
                    && own[own.len() - match_threshold as usize..].iter().all(|agrees| *agrees);
                prop_assert_eq!(trusts(&book, worker), !is_raised(&own) && (agrees || !is_raised(&all)));
            }
        }
    }

    /// An engine that agrees is not suspected though a quarter of the evidence is against it, evicted before it
    /// was looked for, and much is none.
    #[test]
    fn evictions_and_lost_events_do_not_raise_it(seed in any::<u64>()) {
        let mut draw = fastrand::Rng::with_seed(seed);
        let mut book = book();
        for _ in 0..2_000 {
            let outcome = Outcome::ALL[match draw.u32(0..12) {
                0..6 => 0,
                6 => 1,
                7 => 2,
                _ => 3,
            }];
            // A run of 20 is one in a million millions.
            let turned = take(&mut book, draw.u32(0..4), outcome);
            prop_assert_eq!(turned, (AlarmChange::None, AlarmChange::None));
        }
    }
}
