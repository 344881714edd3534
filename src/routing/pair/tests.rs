use proptest::prelude::*;

use super::*;
use crate::routing::Settings as Routing;
use crate::routing::policy::tests::Table;

const SETTINGS: Settings = Settings {
    min_remote_tokens: 256,
};

fn request(prompt_tokens: u32) -> Request {
    Request {
        prompt_tokens,
        answer_tokens: 250.0,
        seed: 7,
        ..Request::default()
    }
}

/// The indices of the chosen decode and prefill worker, or why there is no prefill worker.
fn chosen(
    prompt_tokens: u32,
    prefill: &Table,
    decode: &Table,
) -> Option<(usize, Result<usize, LocalReason>)> {
    let any = |_, _| true;
    let pair = decide(
        &SETTINGS,
        &Routing::default(),
        &request(prompt_tokens),
        prefill,
        decode,
        any,
        |_| true,
    )?;
    Some((
        pair.decode.index.get(),
        pair.prefill.map(|prefill| prefill.index.get()),
    ))
}

#[test]
fn a_cold_prompt_goes_to_the_least_busy_worker_of_each_role() {
    let prefill = Table::new(&[(true, 3, 9_000, 0), (true, 1, 100, 0)]);
    let mut decode = Table::new(&[(true, 9, 0, 0), (true, 2, 0, 0)]);
    decode.states[0].context_tokens = 90_000;
    decode.states[1].context_tokens = 20_000;
    assert_eq!(chosen(4_000, &prefill, &decode), Some((1, Ok(1))));
}

#[test]
fn each_worker_is_chosen_for_its_own_cached_prefix() {
    let prefill = Table::new(&[(true, 0, 0, 0), (true, 0, 0, 3_000), (true, 0, 0, 0)]);
    let decode = Table::new(&[(true, 0, 0, 2_000), (true, 0, 0, 0)]);
    let pair = decide(
        &SETTINGS,
        &Routing::default(),
        &request(4_000),
        &prefill,
        &decode,
        |_, _| true,
        |_| true,
    )
    .unwrap();
    let prefill = pair.prefill.unwrap();
    assert_eq!((prefill.index.get(), prefill.new_tokens), (1, 1_000));
    assert_eq!(
        (pair.decode.index.get(), pair.decode.cached_tokens),
        (0, 2_000)
    );
    // 2,000 to receive, at a fifth each.
    assert_eq!(pair.decode.new_tokens, 400);
    assert_eq!(pair.decode.reason, Reason::LongestPrefix);
}

#[test]
fn a_pairs_decode_worker_is_explained_as_it_was_chosen() {
    let prefill = Table::new(&[(true, 3, 9_000, 0)]);
    let (routing, asked) = (Routing::default(), request(4_000));
    for (in_gpu, cpu) in [(0, 0), (3_900, 0), (0, 3_900)] {
        let mut decode = Table::new(&[(true, 9, 1_000, in_gpu)]);
        decode.cached[0].cpu = cpu;
        let any = |_, _| true;
        let alone = |_| true;
        let pair = decide(&SETTINGS, &routing, &asked, &prefill, &decode, any, alone).unwrap();
        let costs = Costs::new(&routing, &asked, &decode);
        let (state, cached) = (&decode.states[0], &decode.cached[0]);
        let leg = match pair.prefill {
            Ok(leg) => leg.expected,
            Err(_) => Expected::default(),
        };
        let (new_tokens, terms, expected) = explain_decode(&SETTINGS, &costs, state, cached, &leg);
        assert_eq!(new_tokens, pair.decode.new_tokens);
        assert_eq!(terms.sum(), pair.decode.cost);
        assert_eq!(expected, pair.decode.expected);
    }
}

#[test]
fn a_decode_worker_computes_a_short_rest_itself() {
    let prefill = Table::new(&[(true, 0, 0, 0)]);
    let lacking = |tokens: u32| Table::new(&[(true, 0, 0, 4_000 - tokens), (true, 0, 0, 0)]);
    assert_eq!(
        chosen(4_000, &prefill, &lacking(255)),
        Some((0, Err(LocalReason::PrefixCached)))
    );
    assert_eq!(chosen(4_000, &prefill, &lacking(256)), Some((0, Ok(0))));
    // A short prompt is little, whoever gets it.
    let idle = Table::new(&[(true, 0, 0, 0)]);
    assert_eq!(
        chosen(255, &prefill, &idle),
        Some((0, Err(LocalReason::ShortPrompt)))
    );
}

#[test]
fn a_decode_worker_loads_a_prompt_from_its_own_lower_tiers_without_a_prefill_worker() {
    let prefill = Table::new(&[(true, 0, 0, 4_000)]);
    let mut decode = Table::new(&[(true, 0, 0, 0)]);
    let cached = Err(LocalReason::PrefixCached);
    for (cpu, disk, expected) in [
        (3_745, 0, cached),
        (0, 3_745, cached),
        (3_744, 0, Ok(0)),
        (0, 3_744, Ok(0)),
    ] {
        decode.cached[0] = Cached { gpu: 0, cpu, disk };
        let found = chosen(4_000, &prefill, &decode);
        assert_eq!(found, Some((0, expected)), "{cpu} {disk}");
    }
}

#[test]
fn a_decode_worker_with_the_prefix_and_too_much_decoding_is_not_chosen() {
    let prefill = Table::new(&[(true, 0, 0, 4_000)]);
    let mut decode = Table::new(&[(true, 0, 0, 4_000), (true, 0, 0, 0)]);
    assert_eq!(
        chosen(4_000, &prefill, &decode),
        Some((0, Err(LocalReason::PrefixCached)))
    );
    // To receive 4,000 tokens takes as long as to compute 800, 67 ms. Among a hundred answers with contexts of 4,000 tokens
    // this one is slower by seconds.
    decode.states[0].requests = 100;
    decode.states[0].context_tokens = 400_000;
    assert_eq!(chosen(4_000, &prefill, &decode), Some((1, Ok(0))));
}

#[test]
fn without_a_prefill_worker_the_decode_worker_is_chosen_by_whole_cost() {
    let none = Table::default();
    let out = Table::new(&[(false, 0, 0, 4_000)]);
    let decode = Table::new(&[(true, 0, 0, 0), (true, 0, 0, 1_000), (false, 0, 0, 4_000)]);
    for prefill in [&none, &out] {
        assert_eq!(
            chosen(4_000, prefill, &decode),
            Some((1, Err(LocalReason::NoPrefillWorker)))
        );
    }
    assert_eq!(chosen(4_000, &none, &out), None);
}

#[test]
fn incompatible_workers_are_not_chosen_together() {
    let prefill = Table::new(&[(true, 0, 0, 3_000), (true, 0, 9_000, 0)]);
    let decode = Table::new(&[(true, 0, 0, 0)]);
    let index = |may_pair: fn(ViewIndex, ViewIndex) -> bool| {
        let routing = Routing::default();
        let request = request(4_000);
        let alone = |_| true;
        let pair = decide(
            &SETTINGS, &routing, &request, &prefill, &decode, may_pair, alone,
        );
        pair.unwrap().prefill.map(|prefill| prefill.index.get())
    };
    assert_eq!(index(|_, _| true), Ok(0));
    assert_eq!(index(|prefill, _| prefill.get() == 1), Ok(1));
    assert_eq!(index(|_, _| false), Err(LocalReason::NoPair));
}

#[test]
fn a_decode_worker_without_a_pair_comes_last_where_it_may_not_compute_alone() {
    let prefill = Table::new(&[(true, 0, 0, 0)]);
    let no_pair = Err(LocalReason::NoPair);
    // The first one is in another zone, and the third may compute alone.
    let rows = |cached: [u32; 3]| cached.map(|cached| (true, 0_u32, 0_u64, cached));
    let check = |policy, rows: &[(bool, u32, u64, u32)], alone: [bool; 3], expected| {
        let routing = Routing {
            policy,
            ..Routing::default()
        };
        let decode = Table::new(rows);
        let may_pair = |_, to: ViewIndex| to.get() == 1;
        let alone_at = |to: ViewIndex| alone[to.get()];
        let request = request(4_000);
        let pair = decide(
            &SETTINGS, &routing, &request, &prefill, &decode, may_pair, alone_at,
        );
        let found = pair.map(|pair| {
            let prefill = pair.prefill.map(|prefill| prefill.index.get());
            (pair.decode.index.get(), prefill)
        });
        assert_eq!(found, expected, "{policy:?} {rows:?} {alone:?}");
    };
    let by_cost = Policy::CacheAware;
    let nowhere = rows([3_000, 0, 0]);
    for policy in Policy::ALL {
        check(policy, &nowhere[..2], [false; 3], Some((1, Ok(0))));
        check(policy, &nowhere[..1], [false; 3], Some((0, no_pair)));
    }
    check(by_cost, &nowhere, [true; 3], Some((0, no_pair)));
    check(by_cost, &nowhere, [false; 3], Some((1, Ok(0))));
    let third = [false, false, true];
    check(by_cost, &rows([3_000, 0, 3_000]), third, Some((2, no_pair)));
    let mut busy = rows([3_000, 0, 3_000]);
    busy[2].2 = 1_000_000;
    check(by_cost, &busy, third, Some((1, Ok(0))));
    // It needs no prefill worker.
    let cached = Err(LocalReason::PrefixCached);
    check(by_cost, &rows([3_900, 0, 0]), [false; 3], Some((0, cached)));
    let mut busy = rows([3_000, 0, 3_900]);
    busy[2].2 = 1_000_000;
    busy[1].0 = false;
    check(by_cost, &busy, [false; 3], Some((2, cached)));
    busy[2].0 = false;
    check(by_cost, &busy, [false; 3], Some((0, no_pair)));
}

#[test]
fn the_only_decode_worker_with_a_pair_is_found_in_a_large_fleet() {
    let prefill = Table::new(&[(true, 0, 0, 0)]);
    let decode = Table::new(&[(true, 0, 0, 0); 100]);
    for policy in Policy::ALL {
        let routing = Routing {
            policy,
            ..Routing::default()
        };
        for last in [0, 50, 99] {
            let may_pair = |_, to: ViewIndex| to.get() == last;
            let alone = |_| false;
            let request = request(4_000);
            let pair = decide(
                &SETTINGS, &routing, &request, &prefill, &decode, may_pair, alone,
            );
            let pair = pair.unwrap();
            assert_eq!(pair.decode.index.get(), last, "{policy:?}");
            assert!(pair.prefill.is_ok(), "{policy:?}");
        }
    }
}

#[test]
fn the_prefill_workers_of_a_zone_get_equal_parts_whatever_the_order_of_the_workers() {
    const REQUESTS: u64 = 4_000;
    let (apart, alternating) = ([0, 0, 1, 1], [0, 1, 0, 1]);
    let table = Table::new(&[(true, 0, 0, 0); 4]);
    for policy in [Policy::RoundRobin, Policy::Random] {
        let routing = Routing {
            policy,
            ..Routing::default()
        };
        for (prefills, decodes) in [
            (apart, apart),
            (apart, alternating),
            (alternating, apart),
            (alternating, alternating),
        ] {
            let may_pair =
                |from: ViewIndex, to: ViewIndex| prefills[from.get()] == decodes[to.get()];
            let mut counts = [[0_u64; 4]; 2];
            for number in 0..REQUESTS {
                let request = Request {
                    ticket: number,
                    seed: number,
                    ..request(4_000)
                };
                let alone = |_| false;
                let pair = decide(
                    &SETTINGS, &routing, &request, &table, &table, may_pair, alone,
                );
                let pair = pair.unwrap();
                counts[0][pair.prefill.unwrap().index.get()] += 1;
                counts[1][pair.decode.index.get()] += 1;
            }
            let even = if policy == Policy::RoundRobin {
                REQUESTS / 4..=REQUESTS / 4
            } else {
                REQUESTS / 5..=REQUESTS * 3 / 10
            };
            assert!(
                counts.iter().flatten().all(|count| even.contains(count)),
                "{policy:?} {prefills:?} {decodes:?} {counts:?}"
            );
        }
    }
}

type Row = (bool, u32, u64, u32, u32, u64);

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let row = (
        proptest::bool::weighted(0.8),
        0u32..4,
        prop_oneof![Just(0u64), 0u64..8_000],
        0u32..=1_000,
        0u32..=400,
        prop_oneof![Just(0u64), 0u64..300_000],
    );
    proptest::collection::vec(row, 0..6)
}

fn table(rows: &[Row], bounds: bool) -> Table {
    let mut table = Table {
        bounds,
        ..Table::default()
    };
    for &(is_usable, requests, queued_tokens, gpu, cpu, context_tokens) in rows {
        table.states.push(State {
            is_usable,
            requests,
            delayed: f64::from(requests),
            queued_tokens,
            context_tokens,
            ..State::default()
        });
        table.cached.push(Cached { gpu, cpu, disk: 0 });
    }
    table.prefix_owners = ViewIndex::range(0..rows.len())
        .filter(|index| rows[index.get()].3 > 500)
        .collect();
    table
}

/// The cost formula of the module header, written independently: the decode worker's cost, whether the request
/// would be disaggregated, and the cost of every prefill worker. Decode workers that may not compute alone count only
/// where no other can be sent the request.
fn model(
    prompt_tokens: u32,
    prefill: &[Row],
    decode: &[Row],
    may_pair: impl Fn(ViewIndex, ViewIndex) -> bool,
    computes_alone: impl Fn(ViewIndex) -> bool,
) -> Option<f64> {
    let token = 1.0 / 12_000.0;
    let prompt = f64::from(prompt_tokens);
    let wait = |row: &Row| row.2 as f64 * token;
    let computes = |row: &Row, new: u32| f64::from(new) * token * (2.0 + 2.0 * f64::from(row.1));
    let answer = |row: &Row| {
        let n = f64::from(row.1);
        250.0 * (2.0 * 2e-5 * n + 3e-8 * (n * prompt + row.5 as f64))
    };
    let lacks = |row: &Row| prompt_tokens.saturating_sub(row.3 + (f64::from(row.4) * 0.8) as u32);
    let (mut costs, mut last) = (Vec::new(), Vec::new());
    for (to, decoder) in decode.iter().enumerate().filter(|(_, row)| row.0) {
        let local = wait(decoder) + computes(decoder, lacks(decoder)) + answer(decoder);
        let missing = prompt_tokens.saturating_sub(decoder.3 + decoder.4);
        let credit = (f64::from(decoder.4 + missing) * 0.8) as u32;
        let receives = prompt_tokens.saturating_sub(decoder.3 + credit);
        let mut pairs = Vec::new();
        for (from, prefiller) in prefill.iter().enumerate().filter(|(_, row)| row.0) {
            if may_pair(ViewIndex::new(from), ViewIndex::new(to)) {
                let leg = wait(prefiller) + computes(prefiller, lacks(prefiller));
                let received = f64::from(receives) * token;
                pairs.push(wait(decoder) + received + answer(decoder) + leg);
            }
        }
        if missing < 256 {
            costs.push(local);
        } else if !pairs.is_empty() {
            costs.extend(pairs);
        } else if computes_alone(ViewIndex::new(to)) {
            costs.push(local);
        } else {
            last.push(local);
        }
    }
    let costs = if costs.is_empty() { last } else { costs };
    costs.into_iter().min_by(f64::total_cmp)
}

proptest! {
    /// Compares with the cost of all pairs: the chosen one is the cheapest.
    #[test]
    fn no_pair_costs_less_than_the_one_that_is_chosen(
        prefill in rows(), decode in rows(), prompt_tokens in 0u32..1_500, seed in any::<u64>(),
        apart in any::<u64>(), alone in any::<u8>(), bounds in any::<bool>(),
    ) {
        let may_pair = |from: ViewIndex, to: ViewIndex| apart.rotate_left((from.get() * 6 + to.get()) as u32) & 1 == 0;
        let alone = |to: ViewIndex| (alone >> to.get()) & 1 == 0;
        let request = Request { prompt_tokens, answer_tokens: 250.0, seed, ..Request::default() };
        let (prefillers, decoders) = (table(&prefill, bounds), table(&decode, bounds));
        let routing = Routing::default();
        let found = decide(&SETTINGS, &routing, &request, &prefillers, &decoders, may_pair, alone);
        let expected = model(prompt_tokens, &prefill, &decode, may_pair, alone);
        prop_assert_eq!(found.is_some(), expected.is_some());
        let (Some(found), Some(expected)) = (found, expected) else { return Ok(()) };
        let cost = found.decode.cost + found.prefill.map_or(0.0, |prefill| prefill.cost);
        prop_assert!((cost - expected).abs() < 1e-6, "{} against {}: {:?}", cost, expected, found);
        let again = decide(&SETTINGS, &routing, &request, &prefillers, &decoders, may_pair, alone);
        prop_assert_eq!(again, Some(found));
    }

    /// With every policy, only usable and compatible workers are chosen, and the reason for a single worker is true.
    #[test]
    fn every_policy_keeps_the_rules(
        prefill in rows(), decode in rows(), prompt_tokens in 0u32..1_500, seed in any::<u64>(),
        ticket in any::<u64>(), affinity in any::<Option<u64>>(), apart in any::<u64>(), alone in any::<u8>(),
        policy in 0usize..6,
    ) {
        let may_pair = |from: ViewIndex, to: ViewIndex| apart.rotate_left((from.get() * 6 + to.get()) as u32) & 1 == 0;
        let alone = |to: ViewIndex| (alone >> to.get()) & 1 == 0;
        let request = Request { prompt_tokens, seed, ticket, affinity, ..Request::default() };
        let routing = Routing { policy: Policy::ALL[policy], ..Routing::default() };
        let (prefillers, decoders) = (table(&prefill, false), table(&decode, false));
        let found = decide(&SETTINGS, &routing, &request, &prefillers, &decoders, may_pair, alone);
        prop_assert_eq!(found.is_some(), decode.iter().any(|row| row.0));
        let Some(found) = found else { return Ok(()) };
        let to = found.decode.index;
        let decoder = decode[to.get()];
        prop_assert!(decoder.0);
        let lacks = |row: &Row| prompt_tokens.saturating_sub(row.3 + row.4);
        let has_pair = |to: ViewIndex| {
            let mut rows = prefill.iter().enumerate();
            rows.any(|(from, row)| row.0 && may_pair(ViewIndex::new(from), to))
        };
        let can_be_sent = |to: ViewIndex| {
            let row = &decode[to.get()];
            row.0 && (lacks(row) < 256 || has_pair(to) || alone(to))
        };
        let mut all = ViewIndex::range(0..decode.len());
        prop_assert_eq!(can_be_sent(to), all.any(can_be_sent));
        let lacks = lacks(&decoder);
        match found.prefill {
            Ok(chosen) => {
                prop_assert!(lacks >= 256 && prefill[chosen.index.get()].0 && may_pair(chosen.index, to));
            }
            Err(LocalReason::PrefixCached) => prop_assert!(lacks < 256 && decoder.3 + decoder.4 > 0),
            Err(LocalReason::ShortPrompt) => prop_assert!(lacks < 256 && decoder.3 + decoder.4 == 0),
            Err(LocalReason::NoPrefillWorker) => prop_assert!(!prefill.iter().any(|row| row.0)),
            Err(LocalReason::NoPair) => prop_assert!(!has_pair(to)),
        }
    }
}
