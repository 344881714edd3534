use serde_json::{Value, json};

use super::*;
use crate::observe::metrics_text::Families;

/// A good fleet of two workers, after `change` of its pages.
fn observed(change: impl FnOnce(&mut Value, &mut Value, &mut Value), metrics: &str) -> Observed {
    let store = json!({"is_up": true, "reason": ""});
    observed_with(change, &store, metrics)
}

/// A good fleet of two workers, after `change` of its pages. `store`: what the page of responses says of their store.
fn observed_with(
    change: impl FnOnce(&mut Value, &mut Value, &mut Value),
    store: &Value,
    metrics: &str,
) -> Observed {
    let worker = |name: &str| {
        json!({"name": name, "role": "both", "health": "up", "version": "0.32.0", "models": ["m"], "requests_total": 50,
            "block_size": 16, "prefix_caching": true, "events": {"ranks": 1, "without_replay": 0}})
    };
    let mut fleet = json!({"workers": [worker("w0"), worker("w1")]});
    let rank = |worker: &str| json!({"worker": worker, "rank": 0, "connected": true});
    let mut kv = json!({"ranks": [rank("w0"), rank("w1")], "tokenizer_check": []});
    let mut config = json!({
        "requests": {"first_byte_timeout": "2m", "response_timeout": "10m", "stream_idle_timeout": "1m", "request_timeout": "30m"},
        "routing": {"policy": "cache_aware"},
        "models": [{"name": "m", "tokenizer": {"path": "/models/m"}}],
    });
    change(&mut fleet, &mut kv, &mut config);
    Observed {
        fleet: serde_json::from_value(fleet).unwrap(),
        kv: serde_json::from_value(kv).unwrap(),
        config,
        store: serde_json::from_value(store.clone()).unwrap(),
        metrics: Families::parse(metrics, |_| true),
    }
}

fn rules(observed: &Observed) -> Vec<&'static str> {
    examine(observed)
        .iter()
        .map(|finding| finding.rule)
        .collect()
}

#[test]
fn a_good_fleet_has_no_findings() {
    let good = observed(|_, _, _| {}, "");
    assert_eq!(examine(&good), []);
    assert_eq!(text(&[], &good), "2 workers: nothing found\n");
}

#[test]
fn first_tokens_that_came_late_from_the_queue_say_nothing_of_a_time_out() {
    let found = |waits: u32| {
        let metrics = format!(
            "warmroute_time_to_first_token_seconds_bucket{{le=\"0.5\"}} 50\n\
             warmroute_time_to_first_token_seconds_bucket{{le=\"2.5\"}} 200\n\
             warmroute_time_to_first_token_seconds_bucket{{le=\"+Inf\"}} 200\n\
             warmroute_queue_wait_seconds_bucket{{le=\"0.25\"}} 100\n\
             warmroute_queue_wait_seconds_bucket{{le=\"+Inf\"}} {}\n",
            100 + waits
        );
        rules(&observed(
            |_, _, config| config["requests"]["first_byte_timeout"] = "3s".into(),
            &metrics,
        ))
    };
    assert_eq!(found(2), ["timeout_too_short"]);
    assert!(found(3).is_empty());
}

#[test]
fn each_lack_is_found_with_the_line_to_change() {
    type Change = fn(&mut Value, &mut Value, &mut Value);
    let check = |rule: &str, change: Change, metrics: &str, named: &str| {
        let found = examine(&observed(change, metrics));
        let rules: Vec<&str> = found.iter().map(|finding| finding.rule).collect();
        assert_eq!(rules, [rule]);
        let whole = format!("{} {}", found[0].problem, found[0].change);
        assert!(whole.contains(named), "{rule}: {whole}");
        assert!(
            found[0].cost > 0.0 && found[0].cost <= 1.0,
            "{rule}: {}",
            found[0].cost
        );
    };
    check(
        "worker_down",
        |fleet, kv, _| {
            fleet["workers"][1]["health"] = "down".into();
            fleet["workers"][1]["last_error"] = "connection refused".into();
            // This follows from it, and is no finding of its own.
            kv["ranks"][1]["connected"] = false.into();
            kv["ranks"][1]["replay_error"] = "refused".into();
        },
        "",
        "connection refused",
    );
    check(
        "no_worker_up",
        |fleet, kv, _| {
            for worker in fleet["workers"].as_array_mut().unwrap() {
                worker["health"] = "down".into();
                worker["last_error"] = "connection refused".into();
            }
            kv["ranks"] = json!([]);
        },
        "",
        "none of 2 workers is up w0: connection refused",
    );
    check(
        "workers_without_models",
        |fleet, kv, _| {
            let other = &mut fleet["workers"][1];
            (other["models"], other["block_size"]) = (json!([]), Value::Null);
            other["events"] = json!({"ranks": 0, "without_replay": 0});
            kv["ranks"].as_array_mut().unwrap().pop();
        },
        // It reports no load either, which follows.
        "warmroute_worker_up{worker=\"w0\"} 1\nwarmroute_worker_up{worker=\"w1\"} 1\n\
         warmroute_worker_slots{worker=\"w0\"} 64\n",
        "are up: w1 let `url` be the engine's own host and port",
    );
    check(
        "prefill_workers_only",
        |fleet, _, _| {
            for worker in fleet["workers"].as_array_mut().unwrap() {
                worker["role"] = "prefill".into();
            }
            fleet["pairs"] = json!({"connector": "nixl", "count": 0, "unpaired": ["w0", "w1"]});
        },
        "",
        "only workers that compute their prompts: w0, w1 start workers with `role: decode`",
    );
    check(
        "kv_connector_missing",
        |fleet, _, _| {
            let transfers = json!({"circuit_breaker": "open", "legs_without_params": 3});
            fleet["workers"][0]["role"] = "prefill".into();
            fleet["workers"][0]["kv_transfers"] = transfers;
            fleet["pairs"] = json!({"connector": "nixl", "count": 1});
        },
        "",
        "prefill legs at w0 return no kv_transfer_params",
    );
    check(
        "kv_transfers_stopped",
        |fleet, _, _| {
            fleet["workers"][0]["role"] = "prefill".into();
            fleet["workers"][0]["kv_transfers"] = json!({"circuit_breaker": "open"});
            fleet["pairs"] = json!({"connector": "nixl", "count": 1});
        },
        "",
        "KV transfers from w0 failed in a row",
    );
    check(
        "kv_transfers_fail",
        |_, _, _| {},
        "warmroute_kv_transfers_total{model=\"m\",outcome=\"completed\"} 90\n\
         warmroute_kv_transfers_total{model=\"m\",outcome=\"failed\"} 10\n",
        "10 of 100 KV transfers have failed (10 %)",
    );
    check(
        "slots_unknown",
        |_, _, _| {},
        "warmroute_worker_up{worker=\"w0\"} 1\nwarmroute_worker_up{worker=\"w1\"} 1\n\
         warmroute_worker_slots{worker=\"w0\"} 64\n",
        "w1 report neither running nor waiting requests, and have no `slots` workers: [{url: ..., slots: 64}]",
    );
    let storage = "warmroute_batch_storage_usable{operation=\"write\"} 1\n\
                   warmroute_batch_storage_usable{operation=\"read\"} 1\n\
                   warmroute_batch_storage_usable{operation=\"delete\"} 0\n";
    check(
        "batch_storage_fails",
        |_, _, config| config["batches"] = json!({"folder": "/data"}),
        storage,
        "cannot do this: delete make `/data` a folder that the router's user owns",
    );
    check(
        "batch_storage_fails",
        |_, _, config| config["batches"] = json!({"folder": "", "s3": {"bucket": "b"}}),
        storage,
        "s3:DeleteObject and s3:ListBucket for the bucket `b`",
    );
    let another = "warmroute_batch_storage_usable{operation=\"write\"} 1\n\
                   warmroute_batch_storage_usable{operation=\"identity\"} 0\n";
    check(
        "batch_storage_differs",
        |_, _, config| config["batches"] = json!({"folder": "/data"}),
        another,
        "is not the one of the other replicas mount the folder of the other replicas at `/data`",
    );
    check(
        "batch_storage_differs",
        |_, _, config| config["batches"] = json!({"folder": "", "s3": {"bucket": "b"}}),
        another,
        "set `batches.s3` as the other replicas have it: `b`",
    );
    check(
        "configuration_refused",
        |_, _, _| {},
        "warmroute_config_last_reload_successful 0\n",
        "`warmroute check FILE`",
    );
    check(
        "replica_missing",
        |fleet, _, _| {
            fleet["peers"] = json!([
                {"name": "r1", "state": "connected"},
                {"address": "10.0.0.3:9701", "state": "unreachable", "error": "connection refused"},
            ]);
        },
        "",
        "1 of 2 other replicas are not connected: 10.0.0.3:9701 (unreachable)",
    );
    check(
        "tokenizer_refuses",
        |_, _, _| {},
        "warmroute_tokenizer_prompts_total{outcome=\"complete\"} 90\n\
         warmroute_tokenizer_prompts_total{outcome=\"template\"} 25\n\
         warmroute_tokenizer_prompts_total{outcome=\"image\"} 5\n",
        "25 % of 120 prompts of models with a tokenizer could not be tokenized, most of them for `template`",
    );
    check(
        "workers_never_chosen",
        |fleet, _, _| {
            fleet["workers"][0]["requests_total"] = 300.into();
            fleet["workers"][1]["requests_total"] = 0.into();
        },
        "",
        "1 of 2 workers of m never got one of its 300 requests, 100 % of which went to w0: w1",
    );
    check(
        "workers_idle_beside_busy",
        |fleet, _, _| fleet["workers"][0]["requests"] = 9.into(),
        "warmroute_worker_reported_waiting{worker=\"w0\"} 3\nwarmroute_worker_reported_waiting{worker=\"w1\"} 0\n",
        "w1 have no request of m, while requests wait for the slots of w0",
    );
    check(
        "workers_idle_beside_busy",
        |fleet, _, _| {
            fleet["workers"][0]["requests"] = 9.into();
            fleet["workers"][1]["circuit_breaker"] = "open".into();
        },
        "warmroute_worker_free_slots{worker=\"w0\"} 0\nwarmroute_worker_free_slots{worker=\"w1\"} 9\n",
        "the circuit breakers of w1 are open",
    );
    check(
        "workers_idle_beside_busy",
        |fleet, _, config| {
            fleet["workers"][0]["requests"] = 9.into();
            config["routing"]["policy"] = "consistent_hash".into();
        },
        "warmroute_worker_free_slots{worker=\"w0\"} 0\n",
        "policy: cache_aware",
    );
    check(
        "choice_worse_than_others",
        |_, _, _| {},
        "warmroute_hindsight_seconds{model=\"m\",policy=\"chosen\"} 8\nwarmroute_hindsight_seconds{model=\"m\",policy=\"least_load\"} 5.3\n\
         warmroute_hindsight_seconds{model=\"m\",policy=\"round_robin\"} 5.5\n",
        "take 8.00 s where they are sent, and would have taken 5.30 s with least_load",
    );
    check(
        "prefix_caching_off",
        |fleet, _, _| fleet["workers"][0]["prefix_caching"] = false.into(),
        "",
        "--enable-prefix-caching",
    );
    check(
        "kv_events_off",
        |fleet, _, _| fleet["workers"][1]["events"]["ranks"] = 0.into(),
        "",
        "--kv-events-config",
    );
    check(
        "kv_events_unusable",
        |fleet, _, _| {
            fleet["workers"][1]["events"]["unusable"] = json!([
        {"rank": "0", "endpoint": "tcp://127.0.0.1:5557", "reason": "it listens on loopback only", "fix": "start it with tcp://*:5557"}])
        },
        "",
        "start it with tcp://*:5557",
    );
    check(
        "kv_events_unreachable",
        |_, kv, _| {
            kv["ranks"][0]["connected"] = false.into();
            kv["ranks"][0]["disconnect_reason"] = "timed out".into();
        },
        "",
        "rank 0: timed out",
    );
    check(
        "kv_replay_missing",
        |fleet, _, _| fleet["workers"][0]["events"]["without_replay"] = 1.into(),
        "",
        "replay_endpoint",
    );
    check(
        "kv_replay_unreachable",
        |_, kv, _| kv["ranks"][1]["replay_error"] = "refused".into(),
        "",
        "replay_endpoint",
    );
    check(
        "block_sizes_differ",
        |fleet, _, _| fleet["workers"][1]["block_size"] = 32.into(),
        "",
        "--block-size",
    );
    check(
        "versions_differ",
        |fleet, _, _| fleet["workers"][1]["version"] = "0.33.1".into(),
        "",
        "0.33.1 at w1",
    );
    check(
        "version_too_old",
        |fleet, _, config| {
            for index in 0..2 {
                fleet["workers"][index]["version"] = "0.31.2".into();
            }
            config["models"][0]["send_token_ids"] = true.into();
        },
        "",
        "send_token_ids: false",
    );
    check(
        "version_not_supported",
        |fleet, _, _| {
            for index in 0..2 {
                fleet["workers"][index]["version"] = "0.28.0".into();
            }
        },
        "",
        "w0, w1 run a vLLM before 0.29 (0.28.0)",
    );
    check(
        "ranks_ignored",
        |fleet, _, _| fleet["workers"][0]["events"]["ranks"] = 2.into(),
        "warmroute_requests_total{worker=\"w0\",api=\"responses\"} 30\nwarmroute_requests_total{worker=\"w1\",api=\"chat\"} 70\n",
        "30 % of all requests) workers: [{url: ..., responses: chat}]",
    );
    check(
        "unpaired_workers",
        |fleet, _, _| {
            fleet["pairs"] = json!({"connector": "nixl", "count": 0, "unpaired": ["w0"],
        "incompatible": [{"message": "block sizes differ", "count": 1}]})
        },
        "",
        "block sizes differ",
    );
    check(
        "incompatible_pairs",
        |fleet, _, _| {
            fleet["pairs"] = json!({"connector": "nixl", "count": 4, "unpaired": [],
        "incompatible": [{"message": "versions differ", "count": 1}]})
        },
        "",
        "1 of 4 pairs",
    );
    check(
        "tokenizer_missing",
        |_, _, config| config["models"] = json!([]),
        "warmroute_requests_total{model=\"m\",api=\"chat\"} 30\nwarmroute_requests_total{model=\"m\",api=\"embeddings\"} 10\n",
        "75 % of its requests",
    );
    check(
        "tokenizer_mismatch",
        |_, kv, _| {
            kv["tokenizer_check"] = json!([{"model": "m", "prompts": "rendered", "mismatch": true}])
        },
        "",
        "rendered",
    );
    check(
        "timeout_too_short",
        |_, _, config| config["requests"]["first_byte_timeout"] = "3s".into(),
        "warmroute_time_to_first_token_seconds_bucket{le=\"0.5\"} 50\nwarmroute_time_to_first_token_seconds_bucket{le=\"2.5\"} 200\n\
         warmroute_time_to_first_token_seconds_bucket{le=\"+Inf\"} 200\n",
        "first_byte_timeout: 5s",
    );
    check(
        "timeout_cuts_requests",
        |_, _, _| {},
        "warmroute_requests_total{model=\"m\",outcome=\"complete\"} 90\nwarmroute_requests_total{model=\"m\",outcome=\"stream_idle_timeout\"} 10\n",
        "10 of 100 requests",
    );
    check(
        "cached_tokens_unreported",
        |_, _, _| {},
        "warmroute_prompt_tokens_total{model=\"m\"} 1000000\nwarmroute_expected_cached_prompt_tokens_total{model=\"m\"} 500000\n\
         warmroute_cached_prompt_tokens_total{model=\"m\"} 0\n",
        "--enable-prompt-tokens-details",
    );
    check(
        "target_without_workers",
        |_, _, config| {
            config["models"].as_array_mut().unwrap().push(
        json!({"name": "c", "targets": [{"model": "m", "weight": 3}, {"model": "gone", "weight": 1}]}))
        },
        "",
        "25 % of the requests for c are for gone",
    );
    check(
        "name_hides_a_model",
        |fleet, _, config| {
            fleet["workers"][1]["models"] = json!(["m", "old"]);
            config["models"] = json!([{"name": "m", "tokenizer": "x", "aliases": ["old"]}, {"name": "old", "tokenizer": "x"}]);
        },
        "",
        "workers serve old",
    );
}

/// The lines of a histogram: bounds with their cumulative counts.
fn histogram(name: &str, buckets: &[(&str, u32)]) -> String {
    let line = |(bound, count): &(&str, u32)| format!("{name}_bucket{{le=\"{bound}\"}} {count}\n");
    buckets.iter().map(line).collect()
}

#[test]
fn a_timeout_is_held_against_what_is_known_of_the_requests_that_it_ends() {
    let durations = histogram(
        "warmroute_request_duration_seconds",
        &[("60", 100), ("300", 150), ("+Inf", 200)],
    );
    let streams = histogram(
        "warmroute_time_to_first_token_seconds",
        &[("60", 150), ("+Inf", 200)],
    );
    let found = |response_timeout: &str, metrics: &str| {
        let change = |_: &mut Value, _: &mut Value, config: &mut Value| {
            config["requests"]["response_timeout"] = response_timeout.into();
        };
        let found = examine(&observed(change, metrics)).into_iter();
        found.map(|finding| finding.change).collect::<Vec<_>>()
    };
    // How far beyond the last bucket is not known: defaults are no finding, and neither is what a finding asks for.
    assert_eq!(found("10m", &(durations.clone() + &streams)), [""; 0]);
    assert_eq!(
        found("5m", &durations),
        ["requests: {response_timeout: 10m}"]
    );
    assert_eq!(found("10m", &durations), [""; 0]);
    // The time-out ends none of the streams.
    assert_eq!(found("5m", &(durations + &streams)), [""; 0]);
}

#[test]
fn an_adapter_needs_no_tokenizer_beside_that_of_its_base_model() {
    let rules_with = |base: &str| {
        let change = |fleet: &mut Value, _: &mut Value, _: &mut Value| {
            fleet["workers"][0]["models"] = json!(["m", "adapter"]);
            fleet["models"] = json!([{"name": "m"}, {"name": "adapter", "bases": [base]}]);
        };
        rules(&observed(change, ""))
    };
    assert_eq!(rules_with("m"), [] as [&str; 0]);
    assert_eq!(rules_with("other"), ["tokenizer_missing"]);
}

/// SGLang has other flags, and counts its releases otherwise.
#[test]
fn each_engine_is_told_its_own_flags() {
    let sglang = |fleet: &mut Value, index: usize| {
        fleet["workers"][index]["engine"] = "sglang".into();
        fleet["workers"][index]["version"] = "0.5.23".into();
    };
    let change_of = |change: &dyn Fn(&mut Value, &mut Value)| {
        let observed = observed(
            |fleet, _, config| {
                sglang(fleet, 0);
                sglang(fleet, 1);
                change(fleet, config);
            },
            "",
        );
        let found = examine(&observed);
        assert!(found.len() <= 1, "{found:?}");
        found.into_iter().next().map(|finding| finding.change)
    };
    let send_ids = |_: &mut Value, config: &mut Value| {
        config["models"][0]["send_token_ids"] = true.into();
    };
    assert_eq!(change_of(&send_ids), None);
    let no_cache = |fleet: &mut Value, _: &mut Value| {
        fleet["workers"][0]["prefix_caching"] = false.into();
    };
    let change = change_of(&no_cache).unwrap();
    assert_eq!(change, "engine: take out --disable-radix-cache");
    let pages = |fleet: &mut Value, _: &mut Value| fleet["workers"][1]["block_size"] = 32.into();
    assert!(change_of(&pages).unwrap().contains("--page-size"));
    let no_events = |fleet: &mut Value, _: &mut Value| {
        fleet["workers"][1]["events"]["ranks"] = 0.into();
    };
    let change = change_of(&no_events).unwrap();
    assert!(change.contains("\"topic\":\"kv-events\""), "{change}");
    assert!(!change.contains("enable_kv_cache_events"), "{change}");
    // A fleet of both is told both.
    let both = observed(
        |fleet, _, _| {
            sglang(fleet, 0);
            for index in 0..2 {
                fleet["workers"][index]["events"]["ranks"] = 0.into();
            }
            fleet["workers"][0]["version"] = Value::Null;
        },
        "",
    );
    let change = &examine(&both)[0].change;
    assert!(change.contains("\nof SGLang: engine: "), "{change}");
}

#[test]
fn a_worker_without_a_request_is_none_for_whose_slots_requests_wait() {
    // What the engine has reported and what the slots are is of another moment than the page of the fleet.
    let metrics = "warmroute_worker_reported_waiting{worker=\"w0\"} 3\nwarmroute_worker_free_slots{worker=\"w0\"} 0\n";
    for workers in 1..=2 {
        let drained = observed(
            |fleet, _, _| fleet["workers"].as_array_mut().unwrap().truncate(workers),
            metrics,
        );
        assert_eq!(rules(&drained), [""; 0]);
    }
}

#[test]
fn a_decode_worker_whose_slots_are_not_learnt_while_requests_wait_in_it_is_found() {
    let is_found = |waiting: u32, slots: &str| {
        let metrics = format!(
            "warmroute_worker_reported_running{{worker=\"w1\"}} 64\n\
             warmroute_worker_reported_waiting{{worker=\"w1\"}} {waiting}\n{slots}"
        );
        let decode = observed(
            |fleet, _, _| fleet["workers"][1]["role"] = "decode".into(),
            &metrics,
        );
        rules(&decode).contains(&"slots_unknown")
    };
    assert!(is_found(9, ""));
    assert!(!is_found(8, ""));
    assert!(!is_found(9, "warmroute_worker_slots{worker=\"w1\"} 64\n"));
}

#[test]
fn a_worker_whose_health_check_fails_is_none_that_reports_nothing() {
    let failing = observed(
        |fleet, _, _| fleet["workers"][1]["last_error"] = "connection refused".into(),
        "warmroute_worker_up{worker=\"w0\"} 1\nwarmroute_worker_up{worker=\"w1\"} 1\n\
         warmroute_worker_slots{worker=\"w0\"} 64\n",
    );
    assert_eq!(rules(&failing), [""; 0]);
}

#[test]
fn a_fleet_that_is_scaled_to_zero_is_not_broken_while_requests_wait_for_a_worker() {
    let check = |timeout: &str, has_workers: bool, is_broken: bool, effect: &str| {
        let change = |fleet: &mut Value, kv: &mut Value, config: &mut Value| {
            if has_workers {
                fleet["workers"][0]["health"] = "down".into();
                fleet["workers"][1]["health"] = "down".into();
            } else {
                fleet["workers"] = json!([]);
            }
            kv["ranks"] = json!([]);
            config["queue"] = json!({"no_worker_timeout": timeout});
        };
        let found = examine(&observed(change, ""));
        let [finding] = &found[..] else {
            panic!("{found:?}");
        };
        assert_eq!(finding.rule, "no_worker_up");
        assert_eq!(finding.is_broken, is_broken, "{timeout} {has_workers}");
        assert!(finding.effect.contains(effect), "{finding:?}");
    };
    check("0s", false, true, "every request is refused");
    check("5m", false, false, "wait for a worker");
    check("5m", true, true, "wait for a worker");
    // Models that workers served before they were down are known, too.
    let change = |fleet: &mut Value, _: &mut Value, config: &mut Value| {
        fleet["workers"][0]["health"] = "down".into();
        fleet["workers"][1]["health"] = "down".into();
        config["models"] = json!([]);
        config["queue"] = json!({"no_worker_timeout": "5m"});
    };
    let found = examine(&observed(change, ""));
    assert!(found[0].is_broken, "{found:?}");
    assert!(found[0].effect.contains("wait for a worker"), "{found:?}");
}

#[test]
fn a_fleet_whose_workers_all_lack_models_is_broken() {
    let found = observed(
        |fleet, kv, _| {
            for worker in fleet["workers"].as_array_mut().unwrap() {
                worker["models"] = json!([]);
            }
            kv["ranks"] = json!([]);
        },
        "",
    );
    let findings = examine(&found);
    assert_eq!(rules(&found), ["workers_without_models"]);
    assert!(findings[0].is_broken, "{findings:?}");
}

#[test]
fn each_worker_that_is_down_is_listed_with_its_reason() {
    let down = |reasons: &[&str]| {
        let found = observed(
            |fleet, kv, _| {
                let rows = reasons.iter().enumerate().map(|(index, reason)| {
                    json!({"name": format!("w{index}"), "health": "down", "last_error": reason})
                });
                fleet["workers"] = rows.collect();
                kv["ranks"] = json!([]);
            },
            "",
        );
        let found = examine(&found);
        assert_eq!(found[0].rule, "no_worker_up");
        found[0].change.clone()
    };
    assert_eq!(
        down(&["refused"]),
        "w0: refused; repair the engine, or take it out of `workers` or `discovery`"
    );
    assert_eq!(
        down(&["a", "b", "c", "d", "e", "f", "g"]),
        "w0: a; w1: b; w2: c; w3: d; w4: e; and 2 more; repair the engines, or take them out of `workers` or `discovery`"
    );
}

#[test]
fn what_may_pass_stands_only_if_two_looks_find_it() {
    let (busy, off) = ("workers_idle_beside_busy", "prefix_caching_off");
    let look = |is_idle: bool| {
        let found = observed(
            |fleet, _, _| {
                fleet["workers"][0]["requests"] = 9.into();
                fleet["workers"][1]["requests"] = u32::from(!is_idle).into();
                fleet["workers"][1]["prefix_caching"] = false.into();
            },
            "warmroute_worker_free_slots{worker=\"w0\"} 0\n",
        );
        examine(&found)
    };
    assert!(may_pass(&look(true)) && !may_pass(&look(false)));
    let check = |first, second, expected: &[&str]| {
        let found = lasting(&look(first), look(second));
        let found: Vec<&str> = found.iter().map(|finding| finding.rule).collect();
        assert_eq!(found, expected);
    };
    check(true, true, &[off, busy]);
    check(true, false, &[off]);
    check(false, true, &[off]);
}

#[test]
fn what_lasts_may_be_about_other_workers_of_the_model() {
    let look = |model: &str, idle: usize| {
        let busy = 1 - idle;
        let found = observed(
            |fleet, _, config| {
                fleet["workers"][busy]["requests"] = 9.into();
                for index in 0..2 {
                    fleet["workers"][index]["models"] = json!([model]);
                }
                config["models"][0]["name"] = model.into();
            },
            &format!("warmroute_worker_free_slots{{worker=\"w{busy}\"}} 0\n"),
        );
        let found = examine(&found);
        assert_eq!(found.len(), 1, "{found:?}");
        found
    };
    assert_eq!(lasting(&look("m", 0), look("m", 1)), look("m", 1));
    assert_eq!(lasting(&look("m", 0), look("n", 0)), []);
}

#[test]
fn other_policies_need_no_events() {
    let random = observed(
        |fleet, _, config| {
            fleet["workers"][1]["events"]["ranks"] = 0.into();
            config["routing"]["policy"] = "random".into();
        },
        "",
    );
    assert_eq!(rules(&random), [""; 0]);
}

#[test]
fn what_costs_most_comes_first() {
    let several = observed(
        |fleet, _, _| {
            fleet["workers"][0]["events"]["ranks"] = 0.into();
            fleet["workers"][0]["requests_total"] = 10.into();
            fleet["workers"][1]["prefix_caching"] = false.into();
            fleet["workers"][1]["version"] = "0.33.0".into();
        },
        "",
    );
    let found = examine(&several);
    assert_eq!(
        rules(&several),
        ["prefix_caching_off", "kv_events_off", "versions_differ"]
    );
    let text = text(&found, &several);
    assert!(
        text.starts_with("1. engines without a prefix cache: w1\n   costs:    every prompt"),
        "{text}"
    );
    assert!(
        text.ends_with("2 workers: 3 findings, the worst first\n"),
        "{text}"
    );
}

#[test]
fn a_worker_that_is_down_counts_among_those_of_its_model() {
    let change = |fleet: &mut Value, _: &mut Value, _: &mut Value| {
        let mut down = fleet["workers"][0].clone();
        down["name"] = "w2".into();
        down["health"] = "down".into();
        fleet["workers"].as_array_mut().unwrap().push(down);
        fleet["workers"][0]["requests_total"] = 300.into();
        fleet["workers"][1]["requests_total"] = 0.into();
    };
    let found = examine(&observed(change, ""));
    let never = found
        .iter()
        .find(|finding| finding.rule == "workers_never_chosen")
        .unwrap();
    let begin = "1 of 3 workers of m never got one of its 300 requests";
    assert!(never.problem.starts_with(begin), "{}", never.problem);
}

#[test]
fn what_is_broken_comes_first_and_says_so() {
    let change = |fleet: &mut Value, _: &mut Value, _: &mut Value| {
        fleet["workers"][1]["prefix_caching"] = false.into();
    };
    let down = json!({"is_up": false, "reason": "redis:6379: connection refused"});
    let found = observed_with(change, &down, "");
    assert_eq!(rules(&found), ["store_down", "prefix_caching_off"]);
    let text = text(&examine(&found), &found);
    assert!(
        text.starts_with(
            "1. BROKEN: the store of responses cannot be used: redis:6379: connection refused\n"
        ),
        "{text}"
    );
    assert!(
        text.contains("\n2. ") && !text.contains("2. BROKEN"),
        "{text}"
    );
    let evicts = json!({"is_up": true, "reason": "", "warning": "maxmemory-policy is allkeys-lru"});
    assert_eq!(
        rules(&observed_with(|_, _, _| {}, &evicts, "")),
        ["store_at_risk"]
    );
}
