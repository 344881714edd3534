use std::time::Duration;

use super::*;
use crate::ids::{RequestId, ResponseId, Root};
use crate::limits::compiled::Kind;
use crate::limits::gcra::Rate;
use crate::store::charges::LimitCharge;

fn id(number: u128) -> ChargeId {
    ChargeId::Request(RequestId::new(number))
}

fn limit(per_minute: u64) -> Limit {
    Limit {
        kind: Kind::Requests,
        rate: Rate::new(per_minute, Duration::from_secs(60)),
        name: "r".into(),
        model: None,
    }
}

fn charge_of(limit: &Limit, cost: u64) -> LimitCharge {
    LimitCharge {
        limit: limit.name.clone(),
        burst: limit.rate.burst_micros,
        cost,
        believed: 0,
    }
}

fn granted(usage: &mut Use, limit: &Limit, tries: u128, replicas: u32, now: u64) -> usize {
    let cost = limit.rate.cost(1);
    let is_granted = |number: &u128| {
        let limits = [(limit, cost)];
        usage
            .decide_alone(id(now as u128 + number), &limits, 0, replicas, now)
            .is_granted
    };
    (0..tries).filter(is_granted).count()
}

#[test]
fn alone_a_replica_grants_its_share() {
    let limit = limit(600);
    assert_eq!(granted(&mut Use::default(), &limit, 1_000, 1, 0), 600);
    assert_eq!(granted(&mut Use::default(), &limit, 1_000, 3, 0), 200);
    let mut usage = Use::default();
    granted(&mut usage, &limit, 1_000, 3, 0);
    assert_eq!(granted(&mut usage, &limit, 1_000, 3, 60_000_000), 200);
}

#[test]
fn concurrent_requests_are_those_that_have_not_ended() {
    let mut usage = Use::default();
    let decide = |usage: &mut Use, number| usage.decide_alone(id(number), &[], 2, 1, 0).is_granted;
    assert!(decide(&mut usage, 1) && decide(&mut usage, 2));
    assert!(!decide(&mut usage, 3));
    let settlement = Settlement {
        id: id(1),
        is_refund: false,
        corrections: SmallVec::new(),
    };
    usage.end(settlement, 1, false, 0);
    assert!(decide(&mut usage, 3));
}

#[test]
fn lines_of_batches_do_not_count_as_running() {
    let mut usage = Use::default();
    let line = |number| ChargeId::Line(RequestId::new(number));
    for number in 1..5 {
        assert!(usage.decide_alone(line(number), &[], 0, 1, 0).is_granted);
    }
    assert_eq!((usage.running_here(), usage.running().len()), (0, 4));
    let decision = usage.decide_alone(id(9), &[], 1, 1, 0);
    assert!(decision.is_granted && decision.running == 1);
    for number in 1..5 {
        let settlement = Settlement {
            id: line(number),
            is_refund: false,
            corrections: SmallVec::new(),
        };
        usage.end(settlement, 1, false, 0);
    }
    assert_eq!((usage.running_here(), usage.running_everywhere()), (1, 1));
}

#[test]
fn a_background_response_that_runs_again_is_charged_and_settled_once() {
    let limit = limit(60);
    let mut usage = Use::default();
    let id = ChargeId::Response(ResponseId::new(Root(1), 1));
    let cost = limit.rate.cost(30);
    let mut run = |used: i64, is_refund| {
        let limits = [(&limit, cost)];
        assert!(usage.decide_alone(id, &limits, 0, 1, 0).is_granted);
        let corrections = [(limit.name.clone(), used - cost as i64)];
        let settlement = Settlement {
            id,
            is_refund,
            corrections: corrections.into_iter().collect(),
        };
        usage.end(settlement, 1, false, 0);
        usage.of("r", 0)
    };
    // It runs again after a run that was given back, which is charged anew, and after one that was not.
    assert_eq!(run(0, true), 0);
    assert_eq!(run(1_000_000, false), 1_000_000);
    assert_eq!(run(2_000_000, false), 1_000_000);
    assert_eq!(run(0, true), 1_000_000);
}

#[test]
fn a_refusal_charges_nothing() {
    let limit = limit(60);
    let mut usage = Use::default();
    let limits = [(&limit, limit.rate.cost(50))];
    assert!(usage.decide_alone(id(1), &limits, 0, 1, 0).is_granted);
    let before = usage.of("r", 0);
    assert!(!usage.decide_alone(id(2), &limits, 0, 1, 0).is_granted);
    assert_eq!(usage.of("r", 0), before);
    assert_eq!(usage.running_here(), 1);
}

#[test]
fn settlements_beyond_the_bound_are_dropped_oldest_first() {
    let mut usage = Use::default();
    let settlement = |number| Settlement {
        id: id(number),
        is_refund: false,
        corrections: SmallVec::new(),
    };
    for number in 0..5 {
        usage.end(settlement(number), 1, true, 0);
    }
    assert_eq!(usage.bound_unsettled(3), 2);
    let kept: Vec<_> = usage
        .take_unsettled(10)
        .iter()
        .map(|settlement| settlement.id)
        .collect();
    assert_eq!(kept, [id(2), id(3), id(4)]);
}

#[test]
fn what_charges_take_along_need_not_be_settled() {
    let mut usage = Use::default();
    let settlement = |number| Settlement {
        id: id(number),
        is_refund: false,
        corrections: SmallVec::new(),
    };
    let end = |usage: &mut Use, number| {
        usage.end(settlement(number), 1, true, 0);
        usage.note_unsettled()
    };
    assert!(end(&mut usage, 1));
    assert!(!end(&mut usage, 2));
    assert_eq!(usage.begin(&mut [], 0).len(), 2);
    assert!(!end(&mut usage, 3));
    // Charges come: the next one takes it along.
    assert!(usage.goes_along(false));
    assert!(!end(&mut usage, 4));
    // No more come.
    assert!(!usage.goes_along(false));
    assert_eq!(usage.take_unsettled(10).len(), 2);
    assert!(end(&mut usage, 5));
    assert!(!usage.goes_along(true));
    // Too much for the next one.
    usage.begin(&mut [], 0);
    for number in 0..=WITH_CHARGES as u128 {
        end(&mut usage, number);
    }
    assert!(!usage.goes_along(false));
    assert_eq!(usage.begin(&mut [], 0).len(), WITH_CHARGES);
}

#[test]
fn a_request_that_counts_in_nothing_makes_the_store_take_nothing_that_was_believed() {
    let mut usage = Use::default();
    // The tenant has a limit of batches alone, which the store counts.
    assert!(usage.decide_alone(id(1), &[], 0, 1, 0).is_granted);
    assert!(!usage.is_apart);
    assert!(usage.decide_alone(id(2), &[], 2, 1, 0).is_granted);
    assert!(usage.is_apart);
}

#[test]
fn what_the_store_says_replaces_what_was_believed() {
    let limit = limit(60);
    let mut usage = Use::default();
    usage.decide_alone(id(1), &[(&limit, 5_000_000)], 0, 1, 0);
    assert!(usage.is_apart);
    let mut charges = [Charge {
        id: id(2),
        limits: [charge_of(&limit, 1_000_000)].into_iter().collect(),
        max_concurrent: 0,
    }];
    assert!(usage.begin(&mut charges, 1_000_000).is_empty());
    assert_eq!(charges[0].limits[0].believed, 4_000_000);
    let reply = ChargeReply {
        is_granted: true,
        running: 7,
        used: [9_000_000].as_slice().into(),
    };
    usage.on_reply(&charges[0], &reply, 1_000_000);
    assert_eq!(usage.of("r", 2_000_000), 8_000_000);
    assert_eq!(usage.running_everywhere(), 7);
    assert!(!usage.is_apart);
    // It has just said so.
    assert!(!usage.must_recount());
    assert!(usage.must_recount());
    usage.on_recount(1);
    assert_eq!(usage.running_everywhere(), 2);
    assert!(!usage.must_recount());
}
