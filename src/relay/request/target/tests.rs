use proptest::prelude::*;

use super::*;
use crate::routing::rendezvous;

fn targets(listed: &[(&str, f64)]) -> Vec<Target> {
    let target = |(model, weight): &(&str, f64)| Target {
        model: (*model).to_owned(),
        weight: *weight,
    };
    listed.iter().map(target).collect()
}

fn texts(listed: &[&str]) -> Vec<String> {
    listed.iter().map(|text| (*text).to_owned()).collect()
}

fn split(weights: &[f64]) -> Names {
    let models: Vec<String> = (0..weights.len())
        .map(|index| format!("model-{index}"))
        .collect();
    let listed: Vec<(&str, f64)> = models
        .iter()
        .map(String::as_str)
        .zip(weights.iter().copied())
        .collect();
    Names::new(&[NameSettings {
        name: "llama".to_owned(),
        targets: targets(&listed),
        sticky: Sticky::Session,
        ..NameSettings::default()
    }])
}

fn of(names: &Names, requested: &str, session: Option<u64>) -> Vec<(String, TargetReason)> {
    let name = names.get(requested).unwrap();
    let candidates = names.candidates(name, session, 7, all);
    let pair = |candidate: &Candidate| (candidate.model.to_string(), candidate.reason);
    candidates.iter().map(pair).collect()
}

fn all(_: &str) -> bool {
    true
}

fn session(number: u32) -> Option<u64> {
    Some(rendezvous::key(&number.to_le_bytes()))
}

fn shares(names: &Names, keys: u32) -> Vec<(String, f64)> {
    let mut counts = std::collections::BTreeMap::new();
    for number in 0..keys {
        let chosen = of(names, "llama", session(number)).swap_remove(0).0;
        *counts.entry(chosen).or_insert(0u32) += 1;
    }
    let share = |(model, count)| (model, f64::from(count) / f64::from(keys));
    counts.into_iter().map(share).collect()
}

#[test]
fn names_lead_to_models() {
    let names = Names::new(&[
        NameSettings {
            name: "llama-3".to_owned(),
            aliases: texts(&["llama", "gpt-4o"]),
            fallback: texts(&["small", "chat"]),
            ..NameSettings::default()
        },
        NameSettings {
            name: "chat".to_owned(),
            aliases: texts(&["default"]),
            targets: targets(&[("llama-3", 1.0), ("off", 0.0)]),
            ..NameSettings::default()
        },
        NameSettings {
            name: "plain".to_owned(),
            ..NameSettings::default()
        },
    ]);
    let check = |requested: &str, expected: &[(&str, TargetReason)]| {
        let found = of(&names, requested, None);
        let found: Vec<(&str, TargetReason)> = found
            .iter()
            .map(|(model, reason)| (&**model, *reason))
            .collect();
        assert_eq!(found, expected, "{requested}");
    };
    let fallback = ("small", TargetReason::Fallback);
    // The second fallback leads to the model that was tried first.
    check("llama-3", &[("llama-3", TargetReason::Name), fallback]);
    check("llama", &[("llama-3", TargetReason::Alias), fallback]);
    check("gpt-4o", &[("llama-3", TargetReason::Alias), fallback]);
    // Without a fallback of its own it has that of its target.
    check("chat", &[("llama-3", TargetReason::Weight), fallback]);
    check("default", &[("llama-3", TargetReason::Weight), fallback]);
    for unknown in ["plain", "small", "off", ""] {
        assert!(names.get(unknown).is_none(), "{unknown}");
        assert_eq!(names.canonical(unknown), unknown);
    }
    assert_eq!(names.canonical("gpt-4o"), "llama-3");
    assert_eq!(names.canonical("default"), "chat");
}

#[test]
fn two_names_may_be_each_others_fallback() {
    let entry = |name: &str, fallback: &str| NameSettings {
        name: name.to_owned(),
        fallback: texts(&[fallback]),
        ..NameSettings::default()
    };
    let names = Names::new(&[entry("a", "b"), entry("b", "a")]);
    let expected = |first: &str, second: &str| {
        vec![
            (first.to_owned(), TargetReason::Name),
            (second.to_owned(), TargetReason::Fallback),
        ]
    };
    assert_eq!(of(&names, "a", None), expected("a", "b"));
    assert_eq!(of(&names, "b", None), expected("b", "a"));
}

#[test]
fn a_canary_falls_back_to_the_model_beside_it() {
    let names = Names::new(&[NameSettings {
        name: "llama".to_owned(),
        targets: targets(&[("llama", 0.0), ("canary", 1.0)]),
        fallback: texts(&["llama"]),
        ..NameSettings::default()
    }]);
    let expected = [
        ("canary".to_owned(), TargetReason::Weight),
        ("llama".to_owned(), TargetReason::Fallback),
    ];
    assert_eq!(of(&names, "llama", None), expected);
}

#[test]
fn only_models_that_may_be_used_are_tried() {
    let names = Names::new(&[
        NameSettings {
            name: "chat".to_owned(),
            targets: targets(&[("a", 1.0), ("b", 1.0), ("off", 0.0)]),
            fallback: texts(&["c", "d"]),
            ..NameSettings::default()
        },
        NameSettings {
            name: "d".to_owned(),
            targets: targets(&[("e", 1.0), ("f", 1.0)]),
            ..NameSettings::default()
        },
    ]);
    let name = names.get("chat").unwrap();
    let check = |allowed: &[&str], expected: &[&str]| {
        for draw in 0..20 {
            let found = names.candidates(name, None, draw, |model| allowed.contains(&model));
            let found: Vec<&str> = found.iter().map(|candidate| &*candidate.model).collect();
            assert_eq!(found, expected, "{allowed:?}");
        }
    };
    check(&["b", "c", "f"], &["b", "c", "f"]);
    check(&["b"], &["b"]);
    check(&["a", "e"], &["a", "e"]);
    check(&["c"], &["c"]);
    // What has no weight gets nothing, whoever asks.
    check(&["off"], &["a"]);
}

#[test]
fn the_rest_of_an_answer_is_for_the_model_that_began_it() {
    let names = Names::new(&[
        NameSettings {
            name: "chat".to_owned(),
            targets: targets(&[("a", 1.0), ("b", 0.0)]),
            fallback: texts(&["c"]),
            ..NameSettings::default()
        },
        NameSettings {
            name: "llama-3".to_owned(),
            aliases: texts(&["llama"]),
            fallback: texts(&["chat", "small"]),
            ..NameSettings::default()
        },
        NameSettings {
            name: "canary".to_owned(),
            targets: targets(&[("llama-3", 1.0), ("next", 1.0)]),
            ..NameSettings::default()
        },
    ]);
    let check = |requested: &str, model: &str, expected: Option<TargetReason>| {
        let name = names.get(requested).unwrap();
        let found = names.model_that(name, |known| known == model);
        let expected = expected.map(|reason| Candidate {
            model: Model::from(model),
            reason,
        });
        assert_eq!(found, expected, "{requested} {model}");
    };
    check("chat", "a", Some(TargetReason::Weight));
    check("chat", "b", Some(TargetReason::Weight));
    check("chat", "c", Some(TargetReason::Fallback));
    check("chat", "d", None);
    check("llama", "llama-3", Some(TargetReason::Alias));
    // A fallback that is a name is no model. Fallbacks of fallbacks are not followed.
    check("llama", "a", Some(TargetReason::Fallback));
    check("llama", "small", Some(TargetReason::Fallback));
    check("llama", "chat", None);
    check("llama", "c", None);
    // A name without a fallback has that of its target.
    check("canary", "next", Some(TargetReason::Weight));
    check("canary", "small", Some(TargetReason::Fallback));
    check("canary", "b", Some(TargetReason::Fallback));
}

#[test]
fn a_hundred_thousand_sessions_are_split_by_the_weights() {
    for weights in [&[90.0, 10.0][..], &[1.0, 1.0, 2.0], &[0.99, 0.01]] {
        let sum: f64 = weights.iter().sum();
        let found = shares(&split(weights), 100_000);
        assert_eq!(found.len(), weights.len());
        for ((model, share), weight) in found.iter().zip(weights) {
            let expected = weight / sum;
            // Five standard deviations.
            let bound = 5.0 * (expected * (1.0 - expected) / 100_000.0).sqrt();
            assert!(
                (share - expected).abs() < bound,
                "{model}: {share} is not {expected} within {bound}"
            );
        }
    }
}

#[test]
fn a_canary_that_grows_takes_only_what_it_gains() {
    let (before, after) = (split(&[95.0, 5.0]), split(&[80.0, 20.0]));
    let mut moved = 0;
    for number in 0..20_000 {
        let old = of(&before, "llama", session(number)).swap_remove(0).0;
        let new = of(&after, "llama", session(number)).swap_remove(0).0;
        if old != new {
            assert_eq!(new, "model-1", "only towards the one that grew");
            moved += 1;
        }
    }
    // From 5 % to 20 %.
    assert!((2_600..3_400).contains(&moved), "{moved}");
}

#[test]
fn without_a_session_requests_are_drawn() {
    let names = split(&[50.0, 50.0]);
    let name = names.get("llama").unwrap();
    let draws =
        (0..200u64).map(|draw| names.candidates(name, None, rendezvous::key(&[draw as u8]), all));
    let first = draws
        .filter(|candidates| &*candidates[0].model == "model-0")
        .count();
    assert!((60..140).contains(&first), "{first}");
    assert_eq!(
        names.candidates(name, None, 1, all)[0].reason,
        TargetReason::Weight
    );
    assert_eq!(
        names.candidates(name, Some(1), 1, all)[0].reason,
        TargetReason::Session
    );
}

proptest! {
    /// All replicas agree, however the targets are listed; a target without weight gets nothing; a target that is
    /// removed moves only its own sessions.
    #[test]
    fn sessions_stay(weights in proptest::collection::vec(0u32..20, 2..8), key in any::<u64>(), seed in any::<u64>()) {
        prop_assume!(weights.iter().filter(|weight| **weight > 0).count() > 1);
        let listed: Vec<(String, f64)> = weights
            .iter()
            .enumerate()
            .map(|(index, weight)| (format!("m{index}"), f64::from(*weight)))
            .collect();
        let names = |listed: &[(String, f64)]| {
            let listed: Vec<(&str, f64)> = listed.iter().map(|(model, weight)| (&**model, *weight)).collect();
            Names::new(&[NameSettings { name: "n".into(), targets: targets(&listed), sticky: Sticky::Session,
                ..NameSettings::default() }])
        };
        let chosen = |listed: &[(String, f64)], random| {
            let names = names(listed);
            let name = names.get("n").unwrap().clone();
            names.candidates(&name, Some(key), random, all)[0].model.to_string()
        };
        let first = chosen(&listed, 1);
        let mut shuffled = listed.clone();
        fastrand::Rng::with_seed(seed).shuffle(&mut shuffled);
        prop_assert_eq!(&first, &chosen(&shuffled, 2));
        let weight = listed.iter().find(|(model, _)| *model == first).map(|(_, weight)| *weight);
        prop_assert!(weight > Some(0.0));
        for gone in listed.iter().filter(|(model, _)| *model != first) {
            let rest: Vec<(String, f64)> = listed.iter().filter(|target| *target != gone).cloned().collect();
            prop_assert_eq!(&first, &chosen(&rest, 3));
        }
    }
}
