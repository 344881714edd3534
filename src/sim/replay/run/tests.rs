use proptest::prelude::*;

use super::*;
use crate::kv::predicted;
use crate::observe;
use crate::routing::{self, Policy};
use crate::sim::replay::formula::Formula;
use crate::sim::replay::line::Line;
use crate::sim::replay::router::Knowledge;
use crate::sim::replay::workload::Shape;
use crate::sim::replay::workload::tests::{entry, shape};

const OURS: Line = Line::Ours(Policy::CacheAware);

fn fleet() -> Fleet {
    Fleet {
        workers: 3,
        cache_blocks: 12,
        block_tokens: shape().block_tokens,
        prefill_tokens_per_second: 100.0,
        decode: Duration::from_millis(50),
        event_lag: Duration::ZERO,
        routers: 1,
        sync_lag: None,
    }
}

fn settings(line: Line, knowledge: Knowledge, fleet: &Fleet) -> router::Settings {
    router::Settings {
        line,
        routing: routing::Settings::default(),
        predicted: predicted::Settings::default(),
        knowledge,
        expects: true,
        workers: fleet.workers,
        cache_tokens: fleet.cache_blocks as u64 * 10,
    }
}

fn play(jobs: &[Job], fleet: Fleet, line: Line, knowledge: Knowledge) -> Outcome {
    let settings = settings(line, knowledge, &fleet);
    run(jobs, fleet, &settings, observe::now(), |_| {})
}

#[test]
fn the_second_turn_of_a_conversation_is_served_from_cache_where_the_first_went() {
    let turns = [
        entry(0, 40, &[1, 2, 3, 4]),
        entry(5_000, 55, &[1, 2, 3, 4, 5]),
    ];
    let jobs = workload::jobs(&turns, &shape());
    for knowledge in [Knowledge::Events, Knowledge::Predicted] {
        let outcome = play(&jobs, fleet(), OURS, knowledge);
        let times = [Duration::from_millis(400), Duration::from_millis(150)];
        assert_eq!(outcome.first_tokens, times);
        assert_eq!(outcome.cached_tokens, 40);
        // 55 tokens computed, and a second token decoded.
        assert_eq!(outcome.elapsed, Duration::from_millis(5_200));
    }
    let outcome = play(
        &jobs,
        fleet(),
        Line::Ours(Policy::RoundRobin),
        Knowledge::Events,
    );
    assert_eq!(outcome.cached_tokens, 0);
}

#[test]
fn siblings_of_one_moment_meet_only_where_blocks_count_as_held_at_once() {
    let siblings = [entry(0, 40, &[1, 2, 3, 4]), entry(1, 45, &[1, 2, 3, 4])];
    let jobs = workload::jobs(&siblings, &shape());
    let cached = |expects| {
        let fleet = fleet();
        let settings = router::Settings {
            expects,
            ..settings(OURS, Knowledge::Events, &fleet)
        };
        run(&jobs, fleet, &settings, observe::now(), |_| {}).cached_tokens
    };
    assert_eq!((cached(true), cached(false)), (40, 0));
}

#[test]
fn late_events_are_not_known_before_they_come() {
    let turns = [
        entry(0, 40, &[1, 2, 3, 4]),
        entry(9_000, 45, &[1, 2, 3, 4]),
        entry(20_000, 45, &[1, 2, 3, 4]),
    ];
    let jobs = workload::jobs(&turns, &shape());
    let of_lag = |seconds| {
        let fleet = Fleet {
            workers: 40,
            event_lag: Duration::from_secs(seconds),
            ..fleet()
        };
        play(&jobs, fleet, OURS, Knowledge::Events).cached_tokens
    };
    assert_eq!((of_lag(0), of_lag(10)), (80, 40));
}

/// Conversations that share a start, many at a time.
fn trace() -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
    proptest::collection::vec((0u64..4_000, 0u64..5, 1u64..8), 1..60)
}

fn jobs(trace: &[(u64, u64, u64)], routers: usize) -> Vec<Job> {
    let entries: Vec<_> = trace
        .iter()
        .map(|(at_ms, user, blocks)| {
            let blocks: Vec<u64> = (0..*blocks)
                .map(|block| {
                    if block < 2 {
                        block
                    } else {
                        100 * (user + 1) + block
                    }
                })
                .collect();
            entry(*at_ms, blocks.len() as u32 * 10 + 3, &blocks)
        })
        .collect();
    let shape = Shape { routers, ..shape() };
    let mut entries = entries;
    entries.sort_by_key(|entry| entry.at);
    workload::jobs(&entries, &shape)
}

proptest! {
    #[test]
    fn every_request_is_answered_once_and_no_policy_beats_the_infinite_cache(trace in trace(), line in 0usize..Line::ALL.len(), predicts in any::<bool>()) {
        let jobs = jobs(&trace, 1);
        let knowledge = if predicts { Knowledge::Predicted } else { Knowledge::Events };
        let outcome = play(&jobs, fleet(), Line::ALL[line], knowledge);
        prop_assert_eq!(outcome.requests_per_worker.iter().sum::<u64>(), jobs.len() as u64);
        let tokens: u64 = jobs.iter().map(|job| u64::from(job.input_tokens)).sum();
        prop_assert_eq!(outcome.computed_per_worker.iter().sum::<u64>() + outcome.cached_tokens, tokens);
        prop_assert!(outcome.cached_tokens as f64 <= workload::pooled_bound(&jobs, usize::MAX) * tokens as f64 + 0.5);
        prop_assert!(outcome.first_tokens.iter().all(|time| *time >= Duration::from_millis(10)));
        let again = play(&jobs, fleet(), Line::ALL[line], knowledge);
        prop_assert_eq!(outcome.first_tokens, again.first_tokens);
    }

    /// Routers that hear of each other at once are one router.
    #[test]
    fn without_a_lag_several_routers_choose_as_one(trace in trace(), predicts in any::<bool>(), formula in any::<bool>()) {
        let knowledge = if predicts { Knowledge::Predicted } else { Knowledge::Events };
        let line = if formula { Line::Theirs(Formula::DynamoDefault) } else { OURS };
        // One moment each: what happens at the same time may be heard in another order.
        let trace: Vec<_> = trace.iter().zip(0..).map(|(it, place)| (it.0 * 60 + place, it.1, it.2)).collect();
        let several = jobs(&trace, 3);
        let one: Vec<Job> = several.iter().cloned().map(|job| Job { router: 0, ..job }).collect();
        let synced = Fleet { routers: 3, sync_lag: Some(Duration::ZERO), ..fleet() };
        let several = play(&several, synced, line, knowledge);
        let one = play(&one, fleet(), line, knowledge);
        prop_assert_eq!(several.first_tokens, one.first_tokens);
    }
}
