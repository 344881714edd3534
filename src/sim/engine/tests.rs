//! The engine by itself, in virtual time.

#![expect(
    clippy::disallowed_methods,
    reason = "virtual time has to start somewhere"
)]

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::sim::step_time::{AnswerTimes, StepTimes};

fn settings() -> Settings {
    let number = |value| NonZeroU32::new(value).unwrap();
    Settings {
        block_tokens: number(4),
        capacity_blocks: number(100),
        running_max: number(4),
        queue_max: 3,
        batch_tokens_max: number(50),
        step_times: StepTimes::new(Duration::from_millis(10), AnswerTimes::NONE, 1_000.0),
    }
}

fn request(prompt: impl IntoIterator<Item = u32>, answer_tokens: u32) -> Request {
    Request {
        prompt: prompt.into_iter().collect(),
        answer: (0..answer_tokens).map(|token| 1000 + token).collect(),
        ..Request::default()
    }
}

/// Runs until nothing is left to do; each output with the milliseconds since `start`.
fn run(engine: &mut Engine, start: Instant) -> Vec<(u128, Event)> {
    let mut seen = Vec::new();
    while let Some(due) = engine.next_timeout() {
        for output in engine.on_timeout(due) {
            seen.push(((due - start).as_millis(), output.event));
        }
    }
    seen
}

#[test]
fn a_prompt_takes_a_step_and_its_tokens_and_an_answer_a_step_a_token() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    engine.submit(start, request(0..20, 3)).unwrap();
    let cached_tokens = 0;
    let expected = [
        (
            30,
            Event::First {
                token: 1000,
                cached_tokens,
            },
        ),
        (40, Event::Token { token: 1001 }),
        (50, Event::Token { token: 1002 }),
        (50, Event::Done { cached_tokens }),
    ];
    assert_eq!(run(&mut engine, start), expected);
}

#[test]
fn a_long_prompt_is_computed_in_chunks_that_decoding_requests_wait_for() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    engine.submit(start, request(0..10, 4)).unwrap();
    engine.submit(start, request(100..190, 1)).unwrap();
    // The first step has room for 10 + 40 tokens, the second for a decode and 49, the third for a
    // decode and the last one.
    let times: Vec<u128> = run(&mut engine, start).iter().map(|(at, _)| *at).collect();
    assert_eq!(times, [60, 119, 130, 130, 130, 140, 140]);
}

#[test]
fn a_step_takes_longer_with_more_answers_and_longer_contexts() {
    let last = |answers: u32, prompt: u32| {
        let times = AnswerTimes {
            decode_time_per_answer: Duration::from_millis(2),
            decode_time_per_context_token: Duration::from_millis(1),
        };
        let start = Instant::now();
        let mut engine = Engine::new(Settings {
            step_times: StepTimes::new(Duration::from_millis(10), times, 1_000.0),
            ..settings()
        });
        for answer in 0..answers {
            let first = 1_000 * (answer + 1);
            let prompt = first..first + prompt;
            engine.submit(start, request(prompt, 2)).unwrap();
        }
        let prompts = 10 + u128::from(answers * prompt);
        run(&mut engine, start).last().unwrap().0 - prompts
    };
    assert_eq!(last(1, 4), 10 + 2 + 5);
    assert_eq!(last(1, 9), 10 + 2 + 10);
    assert_eq!(last(3, 9), 10 + 3 * (2 + 10));
}

#[test]
fn a_repeated_prompt_starts_sooner_and_says_how_much_was_cached() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    engine.submit(start, request(0..20, 1)).unwrap();
    run(&mut engine, start);
    engine.submit(start, request(0..20, 1)).unwrap();
    let seen = run(&mut engine, start);
    let first = Event::First {
        token: 1000,
        cached_tokens: 16,
    };
    assert_eq!(seen[0], (14, first));
    assert_eq!(engine.counters().prefix_queries, 40);
    assert_eq!(engine.counters().prefix_hits, 16);
}

#[test]
fn the_next_turn_finds_the_answer_in_the_cache_too() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    engine.submit(start, request(0..8, 9)).unwrap();
    run(&mut engine, start);
    let next_turn = (0..8).chain(1000..1009).chain([7]);
    engine.submit(start, request(next_turn, 1)).unwrap();
    run(&mut engine, start);
    assert_eq!(engine.counters().prefix_hits, 16);
}

#[test]
fn blocks_are_hits_only_once_they_are_computed() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    engine.submit(start, request(0..20, 1)).unwrap();
    engine.submit(start, request(0..20, 1)).unwrap();
    run(&mut engine, start);
    assert_eq!(engine.counters().prefix_hits, 0);
}

#[test]
fn a_full_queue_refuses() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    for _ in 0..3 {
        engine.submit(start, request(0..4, 1)).unwrap();
    }
    assert_eq!(engine.submit(start, request(0..4, 1)), Err(Refused::Busy));
    assert_eq!(engine.submit(start, request([], 1)), Err(Refused::Empty));
    assert_eq!(
        engine.submit(start, request(0..400, 1)),
        Err(Refused::TooLong)
    );
}

#[test]
fn a_request_that_came_in_the_middle_of_a_step_waits_for_the_next() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    engine.submit(start, request(0..20, 1)).unwrap();
    let _ = engine.on_timeout(start);
    let later = start + Duration::from_millis(5);
    engine.submit(later, request(50..60, 1)).unwrap();
    let seen = run(&mut engine, start);
    assert_eq!(seen.last().unwrap().0, 50);
}

#[test]
fn a_late_call_gives_what_timely_calls_would_have_given() {
    let start = Instant::now();
    let mut timely = Engine::new(settings());
    let mut late = Engine::new(settings());
    for engine in [&mut timely, &mut late] {
        engine.submit(start, request(0..20, 3)).unwrap();
        let after_a_pause = start + Duration::from_millis(500);
        engine.submit(after_a_pause, request(0..30, 3)).unwrap();
    }
    let timely: Vec<Event> = run(&mut timely, start)
        .into_iter()
        .map(|(_, event)| event)
        .collect();
    let outputs = late.on_timeout(start + Duration::from_secs(9));
    let late: Vec<Event> = outputs.into_iter().map(|output| output.event).collect();
    assert_eq!(late, timely);
}

#[test]
fn a_cancelled_request_gives_its_blocks_back_and_says_nothing_more() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    let running = engine.submit(start, request(0..20, 9)).unwrap();
    let _ = engine.on_timeout(start);
    let waiting = engine.submit(start, request(0..20, 9)).unwrap();
    assert!(!engine.reset(), "blocks are in use");
    assert!(engine.cancel(running));
    assert!(engine.cancel(waiting));
    assert!(!engine.cancel(running));
    assert_eq!(run(&mut engine, start), []);
    assert_eq!(engine.gauges(), Gauges::default());
    assert!(engine.reset());
    assert_eq!(engine.cached_blocks(), []);
}

#[test]
fn what_a_step_did_is_reported_when_it_ends_and_what_it_took_before_what_it_stored() {
    let start = Instant::now();
    let mut engine = Engine::new(Settings {
        capacity_blocks: NonZeroU32::new(10).unwrap(),
        ..settings()
    });
    engine.submit(start, request(0..38, 1)).unwrap();
    run(&mut engine, start);
    assert_eq!(kinds(engine.drain_steps()), [["stored"]]);
    engine.submit(start, request(50..66, 1)).unwrap();
    let _ = engine.on_timeout(start);
    assert_eq!(engine.drain_steps(), Vec::<Vec<Change>>::new());
    run(&mut engine, start);
    assert_eq!(kinds(engine.drain_steps()), [["removed", "stored"]]);
    assert!(engine.reset());
    assert_eq!(engine.drain_steps(), Vec::<Vec<Change>>::new());
    engine.submit(start, request(0..4, 1)).unwrap();
    run(&mut engine, start);
    assert_eq!(kinds(engine.drain_steps()), [["cleared", "stored"]]);
}

fn kinds(steps: Vec<Vec<Change>>) -> Vec<Vec<&'static str>> {
    let kind = |change: &Change| match change {
        Change::Stored { .. } => "stored",
        Change::Removed { .. } => "removed",
        Change::Cleared => "cleared",
    };
    let kinds = |changes: &Vec<Change>| changes.iter().map(kind).collect();
    steps.iter().map(kinds).collect()
}

#[test]
fn when_blocks_run_out_the_youngest_is_sent_back_and_still_finishes() {
    let start = Instant::now();
    let mut engine = Engine::new(Settings {
        capacity_blocks: NonZeroU32::new(10).unwrap(),
        ..settings()
    });
    engine.submit(start, request(0..16, 16)).unwrap();
    engine.submit(start, request(50..66, 16)).unwrap();
    let seen = run(&mut engine, start);
    assert!(engine.counters().preemptions > 0);
    assert_eq!(engine.counters().finished, 2);
    assert_eq!(engine.counters().generation_tokens, 32);
    let firsts = seen
        .iter()
        .filter(|(_, event)| matches!(event, Event::First { .. }));
    assert_eq!(firsts.count(), 2);
}

#[test]
fn a_request_without_an_answer_is_done_when_it_is_read() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    engine.submit(start, request(0..20, 0)).unwrap();
    let done = Event::Done { cached_tokens: 0 };
    assert_eq!(run(&mut engine, start), [(30, done)]);
}

proptest! {
    #[test]
    fn every_request_gets_its_whole_answer_in_order_whatever_the_load(
        arrivals in prop::collection::vec((0..200u64, 0..3u32, 1..60u32, 0..20u32, any::<bool>()), 1..40)
    ) {
        let start = Instant::now();
        let mut engine = Engine::new(Settings {
            capacity_blocks: NonZeroU32::new(24).unwrap(),
            queue_max: 1000,
            ..settings()
        });
        let mut wanted = BTreeMap::new();
        let mut cancelled = Vec::new();
        let mut generated: BTreeMap<RequestKey, (Vec<u32>, bool)> = BTreeMap::new();
        let mut now = start;
        let mut hear = |outputs: Vec<Output>| {
            for Output { key, event } in outputs {
                let (tokens, done) = generated.entry(key).or_default();
                assert!(!*done, "something was said after the end");
                match event {
                    Event::First { token, .. } => {
                        assert!(tokens.is_empty(), "a second first token");
                        tokens.push(token);
                    }
                    Event::Token { token } => tokens.push(token),
                    Event::Done { .. } => *done = true,
                }
            }
        };
        for (pause_ms, family, prompt, answer, cancel) in arrivals {
            now += Duration::from_millis(pause_ms);
            hear(engine.on_timeout(now));
            let request = request((0..prompt).map(|token| token + family), answer);
            let key = engine.submit(now, request.clone()).unwrap();
            if cancel {
                hear(engine.on_timeout(now + Duration::from_millis(15)));
                engine.cancel(key);
                cancelled.push(key);
            } else {
                wanted.insert(key, (request.answer, true));
            }
        }
        while let Some(due) = engine.next_timeout() {
            hear(engine.on_timeout(due));
            prop_assert!(engine.gauges().kv_usage <= 1.0);
        }
        generated.retain(|key, _| !cancelled.contains(key));
        prop_assert_eq!(generated, wanted);
        prop_assert_eq!(engine.gauges(), Gauges::default());
        prop_assert!(engine.reset(), "a block was left in use");
    }
}

#[test]
fn what_is_kept_is_in_use_until_it_is_released_or_its_time_is_up() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    let keep_for = Some(Duration::from_millis(500));
    let kept = |first: u32| Request {
        keep_for,
        ..request(first..first + 20, 1)
    };
    let fetched = engine.submit(start, kept(0)).unwrap();
    let left = engine.submit(start, kept(100)).unwrap();
    while engine.counters().finished < 2 {
        let due = engine.next_timeout().unwrap();
        engine.on_timeout(due);
    }
    let blocks = engine.kept_blocks(fetched).unwrap().len();
    assert_eq!(engine.gauges().kept_blocks, 2 * blocks);
    assert!(!engine.reset());
    assert!(engine.release_kept(fetched));
    assert!(!engine.release_kept(fetched));
    let ends = engine.next_timeout().unwrap();
    assert!(ends >= start + Duration::from_millis(500));
    engine.on_timeout(ends);
    assert_eq!(engine.kept_blocks(left), None);
    assert_eq!(engine.next_timeout(), None);
    assert_eq!(engine.counters().kept_expired, 1);
    assert_eq!(engine.counters().kept_blocks_peak, 2 * blocks as u64);
    assert_eq!(engine.gauges(), Gauges::default());
}

#[test]
fn a_request_that_what_is_kept_leaves_no_room_for_waits_until_it_is_freed() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    let tokens = settings().block_tokens.get() * settings().capacity_blocks.get();
    let all = Request {
        keep_for: Some(Duration::from_millis(700)),
        ..request(0..tokens - 1, 1)
    };
    engine.submit(start, all).unwrap();
    engine.submit(start, request(1000..1020, 1)).unwrap();
    run(&mut engine, start);
    assert_eq!(engine.counters().finished, 2);
    assert_eq!(engine.counters().kept_expired, 1);
}

#[test]
fn a_received_prompt_costs_a_step_of_decoding_and_is_stored() {
    let start = Instant::now();
    let mut engine = Engine::new(settings());
    let received = Request {
        received_tokens: 20,
        ..request(0..20, 2)
    };
    engine.submit(start, received).unwrap();
    let seen = run(&mut engine, start);
    let times: Vec<u128> = seen.iter().map(|(ms, _)| *ms).collect();
    assert_eq!(times, [10, 20, 20]);
    assert_eq!(engine.counters().received_tokens, 20);
    let stored = engine.cached_blocks().len();
    assert_eq!(stored, 20 / settings().block_tokens.get() as usize);
}

#[test]
fn a_prompt_that_is_computed_meanwhile_delays_every_token_of_the_others() {
    let gaps = |others: u32| {
        let start = Instant::now();
        let mut engine = Engine::new(settings());
        let talker = engine.submit(start, request(0..4, 8)).unwrap();
        for other in 0..others {
            let first = 1000 * (other + 1);
            engine.submit(start, request(first..first + 50, 1)).unwrap();
        }
        let mut times = Vec::new();
        while let Some(due) = engine.next_timeout() {
            let outputs = engine.on_timeout(due);
            let said = outputs.iter().filter(|output| output.key == talker);
            times.extend(said.map(|_| due));
        }
        times
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .max()
            .unwrap()
    };
    // 49 tokens of another prompt at 1000 a second beside the talker's own.
    assert_eq!(gaps(0), Duration::from_millis(10));
    assert!(gaps(2) >= Duration::from_millis(49), "{:?}", gaps(2));
}
