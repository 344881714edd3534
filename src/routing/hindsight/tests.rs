use proptest::prelude::*;

use super::*;
use crate::fleet::speed::Speed;
use crate::ids::BlockHash;
use crate::observe;

const SLOW_ANSWERS: Speed = Speed {
    prompt_token: 1.0 / 12_000.0,
    step: 0.01,
    batch: 1.0,
    overlap: 0.0,
};

fn workers(count: u32, slots: u32) -> Vec<Worker> {
    let worker = |number| Worker {
        id: WorkerId(number),
        speed: SLOW_ANSWERS,
        slots,
    };
    (0..count).map(worker).collect()
}

/// Blocks of 16 tokens; the first `shared` tokens are the same in all prompts, the rest is the prompt's own.
fn blocks(own: u64, shared: u32, tokens: u32) -> Vec<Block> {
    let block = |end: u32| {
        let of = if end <= shared { 0 } else { own + 1 };
        Block {
            path: BlockHash(of << 32 | u64::from(end)),
            end_tokens: end,
        }
    };
    (1..=tokens / 16).map(|number| block(16 * number)).collect()
}

/// Requests with one system prompt of 6,144 tokens, 20 ms apart, each sent to the worker that `to` says.
fn hot(count: u32, to: impl Fn(u32) -> u32) -> Vec<Sent> {
    let start = observe::now();
    let sent = |number: u32| Sent {
        at: start + Duration::from_millis(20) * number,
        worker: WorkerId(to(number)),
        prompt_tokens: 6_208,
        cached_tokens: 6_144,
        answer_tokens: 256.0,
        prefixes: prefixes(&blocks(u64::from(number), 6_144, 6_208)),
    };
    (0..count).map(sent).collect()
}

#[test]
fn prompts_are_compared_at_the_same_positions_whatever_comes_behind() {
    let [one, other] = [1, 2].map(|own| prefixes(&blocks(own, 2_048, 5_000)));
    let common = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
    assert_eq!(one[common - 1].1, 2_048);
    assert_eq!(one.last().unwrap().1, 4_992);
    assert!(prefixes(&[]).is_empty());
    assert!(prefixes(&blocks(1, 0, 100)).len() == 1);
}

#[test]
fn requests_that_all_went_to_one_worker_would_have_taken_less_time_elsewhere() {
    let took = play(&hot(300, |_| 0), &workers(4, 64));
    assert!(took.chosen > 1.3 * took.least_load, "{took:?}");
    assert!(took.chosen > 1.3 * took.round_robin, "{took:?}");
}

#[test]
fn requests_that_were_spread_took_no_longer_than_with_another_policy() {
    let took = play(&hot(300, |number| number % 4), &workers(4, 64));
    assert!(took.chosen <= 1.05 * took.least_load, "{took:?}");
}

#[test]
fn conversations_that_stay_with_their_caches_take_less_time_than_without() {
    let start = observe::now();
    let turn = |number: u32| {
        let (turn, session) = (number / 7, number % 7);
        let tokens = 4_096 * (turn + 1);
        Sent {
            at: start + Duration::from_millis(400) * number,
            worker: WorkerId(session % 4),
            prompt_tokens: tokens,
            cached_tokens: tokens - 4_096,
            answer_tokens: 50.0,
            prefixes: prefixes(&blocks(u64::from(session), 0, tokens)),
        }
    };
    let sent: Vec<Sent> = (0..42).map(turn).collect();
    let took = play(&sent, &workers(4, 64));
    assert!(took.chosen < 0.8 * took.least_load, "{took:?}");
}

#[test]
fn a_request_alone_takes_its_prompt_and_its_steps() {
    let mut one = hot(1, |_| 0);
    one[0].cached_tokens = 0;
    let took = play(&one, &workers(1, 4));
    let expected = 6_208.0 / 12_000.0 + 256.0 * 0.01 + 255.0 * (2e-5 + 3e-8 * (6_208.0 + 128.0));
    assert!((took.chosen - expected).abs() < 0.01, "{took:?} {expected}");
}

#[test]
fn who_is_worse_for_ten_minutes_is_said_once_and_so_is_its_end() {
    let minute = |chosen| Took {
        requests: 100,
        chosen,
        least_load: 100.0,
        round_robin: 120.0,
    };
    let mut verdict = Verdict::default();
    let mut changes = Vec::new();
    let minutes = [vec![150.0; 15], vec![100.0; 20]].concat();
    for (number, chosen) in minutes.into_iter().enumerate() {
        changes.extend(verdict.add(minute(chosen)).map(|change| (number, change)));
    }
    assert_eq!(changes[0], (9, Change::Worse));
    assert_eq!(changes.len(), 2);
    assert_eq!(changes[1].1, Change::AsGood);
    // Of a few requests nothing can be said.
    let mut verdict = Verdict::default();
    let few = Took {
        requests: 2,
        ..minute(900.0)
    };
    assert!((0..30).all(|_| verdict.add(few).is_none()));
}

#[test]
fn a_journal_takes_the_requests_of_a_minute_up_to_its_bound() {
    let (mut journal, sent) = (Journal::default(), hot(600, |_| 0));
    let mut taken = 0;
    for sent in &sent {
        if journal.is_open(sent.at) {
            journal.add(sent.clone());
            taken += 1;
        }
    }
    assert_eq!(taken, REQUESTS_MAX);
    assert_eq!(journal.take().len(), REQUESTS_MAX);
    journal.add(sent[0].clone());
    assert!(journal.is_open(sent[0].at));
    assert!(!journal.is_open(sent[0].at + TIME_MAX));
}

proptest! {
    /// Whatever was sent, each request ends once, and no run takes less than its own steps.
    #[test]
    fn every_request_ends(
        requests in proptest::collection::vec((0u64..5_000, 0u32..3, 0u32..40_000, 0u32..40_000, 0.0f64..2_000.0), 0..60),
        slots in 0u32..5,
    ) {
        let start = observe::now();
        let sent: Vec<Sent> = requests
            .iter()
            .enumerate()
            .map(|(number, (at, worker, prompt, cached, answer))| Sent {
                at: start + Duration::from_millis(*at),
                worker: WorkerId(*worker),
                prompt_tokens: *prompt,
                cached_tokens: *cached,
                answer_tokens: *answer,
                prefixes: prefixes(&blocks(number as u64 % 3, 512, *prompt)),
            })
            .collect();
        // One of three workers has left.
        let took = play(&sent, &workers(2, slots));
        let left: Vec<&Sent> = sent.iter().filter(|sent| sent.worker.0 < 2).collect();
        let least: f64 = left.iter().map(|sent| sent.answer_tokens.round().max(1.0) * 0.01).sum();
        prop_assert_eq!(took.requests, left.len());
        for seconds in [took.chosen, took.least_load, took.round_robin] {
            prop_assert!(seconds.is_finite() && seconds >= least - 1e-6, "{seconds} {least}");
        }
    }
}
