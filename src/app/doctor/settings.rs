//! Rules about the router's own settings, held against what it measures. Pure.

use std::time::Duration;

use serde_json::Value;

use super::finding::{Finding, listed};
use super::observed::Observed;
use crate::kv::tokenizer_check;
use crate::units::format_duration;

pub(super) fn examine(observed: &Observed) -> Vec<Finding> {
    let mut findings = tokenizers(observed);
    findings.extend(mismatches(observed));
    findings.extend(timeouts(observed));
    findings.extend(cut_by_timeouts(observed));
    findings.extend(names(observed));
    findings
}

/// The part of all requests that are for a model; an even part before the first request.
fn model_share(observed: &Observed, model: &str) -> f64 {
    let all = observed.sum("warmroute_requests_total", &[]);
    let workers = observed.fleet.workers.iter();
    if all > 0.0 {
        observed.sum("warmroute_requests_total", &[("model", model)]) / all
    } else {
        observed.share(workers.filter(|worker| worker.models.iter().any(|own| own == model)))
    }
}

fn served(observed: &Observed) -> Vec<&str> {
    let workers = observed.fleet.workers.iter();
    let mut models: Vec<&str> = workers
        .flat_map(|worker| worker.models.iter().map(String::as_str))
        .collect();
    models.sort_unstable();
    models.dedup();
    models
}

/// Models whose workers have KV events and whose prompts the router does not know as tokens.
fn tokenizers(observed: &Observed) -> Vec<Finding> {
    let is_listed_with_one = |model: &str| {
        let mut entries = observed.models().iter();
        entries.any(|entry| entry["name"] == model && !entry["tokenizer"].is_null())
    };
    // An adapter has the tokens of its base model.
    let has_tokenizer = |model: &str| {
        let mut bases = observed.fleet.bases_of(model);
        is_listed_with_one(model) || bases.any(is_listed_with_one)
    };
    let has_events = |model: &str| {
        let mut workers = observed.fleet.workers.iter();
        workers.any(|worker| {
            worker.facts.events.ranks > 0 && worker.models.iter().any(|own| own == model)
        })
    };
    let finding = |model: &str| {
        let requests = |api: &str| {
            let labels = [("model", model), ("api", api)];
            observed.sum("warmroute_requests_total", &labels)
        };
        let prompts: f64 = ["chat", "completions", "responses"]
            .map(requests)
            .iter()
            .sum();
        let all = observed.sum("warmroute_requests_total", &[("model", model)]);
        let share = if all > 0.0 { prompts / all } else { 1.0 };
        Finding {
            rule: "tokenizer_missing",
            cost: 0.3 * share * model_share(observed, model),
            problem: format!(
                "{model} has no tokenizer in the router, although its workers publish KV events; with it {:.0} % of \
                 its requests would be routed by what is cached exactly",
                share * 100.0
            ),
            effect: "prompts are routed by prediction; KV events count only for prompts that come as token ids",
            change: format!(
                "models: [{{name: \"{model}\", tokenizer: FOLDER}}], with the engine's model folder on the router's \
                 host; or tokenizer: {{from: engine}}, which asks the engines for token ids (simulated ones, too)"
            ),
            ..Finding::default()
        }
    };
    let models = served(observed).into_iter();
    models
        .filter(|model| has_events(model) && !has_tokenizer(model))
        .map(finding)
        .collect()
}

fn mismatches(observed: &Observed) -> Vec<Finding> {
    let checks = observed
        .kv
        .tokenizer_check
        .iter()
        .filter(|check| check.mismatch);
    let finding = |check: &tokenizer_check::Status| Finding {
        rule: "tokenizer_mismatch",
        cost: 0.5 * model_share(observed, &check.model),
        problem: format!(
            "the router and the engines of {} tokenize {} prompts differently",
            check.model,
            check.prompts.as_str()
        ),
        effect: "KV events of this model do not count",
        change: format!(
            "models: [{{name: \"{}\", tokenizer: the engine's own model folder and revision}}]; the log shows the \
             first token that differs",
            check.model
        ),
        ..Finding::default()
    };
    checks.map(finding).collect()
}

/// With fewer requests a quantile says nothing.
const MIN_REQUESTS: f64 = 100.0;
/// A time-out should be this many times what is measured.
const HEADROOM: f64 = 2.0;
const P99: f64 = 0.99;
const FIRST_TOKENS: &str = "warmroute_time_to_first_token_seconds";
const DURATIONS: &str = "warmroute_request_duration_seconds";
const QUEUE_WAITS: &str = "warmroute_queue_wait_seconds";

/// Time-outs near what 99 of 100 requests take.
fn timeouts(observed: &Observed) -> Vec<Finding> {
    let streams = observed.quantile(FIRST_TOKENS, P99);
    let streams = streams.map_or(0.0, |(_, count)| count);
    let checked = [
        ("first_byte_timeout", FIRST_TOKENS, "first tokens take"),
        ("response_timeout", DURATIONS, "requests take"),
        ("request_timeout", DURATIONS, "requests take"),
    ];
    let finding = |(key, metric, what): (&str, &str, &str)| {
        let timeout = observed.duration(&format!("/requests/{key}"))?;
        let (p99, count) = observed.quantile(metric, P99)?;
        // This time-out ends no stream, and the metric has streams, too: the longest may be theirs.
        if key == "response_timeout" && streams > (1.0 - P99) * count {
            return None;
        }
        // Only `request_timeout` goes on while a request waits in the router. Both metrics do, so that the longest may have
        // waited there.
        let waited = observed.above(QUEUE_WAITS, p99.start / 2.0);
        if key != "request_timeout" && waited > (1.0 - P99) * count {
            return None;
        }
        // How far beyond the last bucket is not known.
        let (than, seconds) = if p99.end.is_finite() {
            ("up to", p99.end)
        } else {
            ("more than", p99.start)
        };
        let enough = HEADROOM * seconds;
        let is_near = count >= MIN_REQUESTS && timeout.as_secs_f64() < enough;
        is_near.then(|| Finding {
            rule: "timeout_too_short",
            cost: 0.3,
            problem: format!(
                "{what} {than} {seconds} s (p99), and requests.{key} is {}",
                format_duration(timeout)
            ),
            effect: "slow requests are cut or computed twice under load",
            change: format!(
                "requests: {{{key}: {}}}",
                format_duration(Duration::from_secs_f64(enough.ceil()))
            ),
            ..Finding::default()
        })
    };
    checked.into_iter().filter_map(finding).collect()
}

/// Requests that a time-out has ended.
fn cut_by_timeouts(observed: &Observed) -> Vec<Finding> {
    let all = observed.sum("warmroute_requests_total", &[]);
    let keys = ["stream_idle_timeout", "request_timeout"];
    let finding = |key: &str| {
        let cut = observed.sum("warmroute_requests_total", &[("outcome", key)]);
        let timeout = observed.duration(&format!("/requests/{key}"))?;
        let share = cut / all.max(1.0);
        (cut >= 1.0 && share > 0.001).then(|| Finding {
            rule: "timeout_cuts_requests",
            cost: share.min(1.0),
            problem: format!(
                "requests.{key} ({}) has ended {cut:.0} of {all:.0} requests",
                format_duration(timeout)
            ),
            effect: "their clients got an error",
            change: format!(
                "requests: {{{key}: {}}}, unless an engine hangs",
                format_duration(timeout * 2)
            ),
            ..Finding::default()
        })
    };
    keys.into_iter().filter_map(finding).collect()
}

/// Configured names that lead nowhere, and models that no name leads to.
fn names(observed: &Observed) -> Vec<Finding> {
    let served = served(observed);
    let texts = |value: &Value| -> Vec<String> {
        let list = value.as_array().into_iter().flatten();
        list.filter_map(|item| item.as_str().map(str::to_owned))
            .collect()
    };
    let mut findings = Vec::new();
    for entry in observed.models() {
        let name = entry["name"].as_str().unwrap_or_default();
        let targets: Vec<(&str, f64)> = entry["targets"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|target| {
                (
                    target["model"].as_str().unwrap_or_default(),
                    target["weight"].as_f64().unwrap_or(0.0),
                )
            })
            .collect();
        let total: f64 = targets.iter().map(|(_, weight)| weight).sum();
        let missing = targets
            .iter()
            .filter(|(model, weight)| *weight > 0.0 && !served.contains(model));
        for (model, weight) in missing {
            findings.push(Finding {
                rule: "target_without_workers",
                cost: 0.8 * weight / total,
                problem: format!("{:.0} % of the requests for {name} are for {model}, which no worker serves", 100.0 * weight / total),
                effect: "they go to the fallback, or get 503",
                change: format!("models: [{{name: {name}, targets: [{{model: {model}, weight: 0}}, ...]}}], or start workers of {model}"),
                ..Finding::default()
            });
        }
        let is_target = targets.is_empty()
            || targets
                .iter()
                .any(|(model, weight)| *model == name && *weight > 0.0);
        let mut shadowed: Vec<String> = texts(&entry["aliases"]);
        shadowed.retain(|alias| served.contains(&alias.as_str()));
        if !is_target && served.contains(&name) {
            shadowed.push(name.to_owned());
        }
        if !shadowed.is_empty() {
            findings.push(Finding {
                rule: "name_hides_a_model",
                cost: 0.1,
                problem: format!(
                    "workers serve {}, and the configuration leads that name elsewhere ({name})",
                    listed(&shadowed)
                ),
                effect: "these workers get no requests by that name",
                change: "models: another alias or name, or the model among its own `targets`"
                    .to_owned(),
                ..Finding::default()
            });
        }
    }
    findings
}
