//! The dashboard's panel of tenants and their limits.

use std::collections::BTreeMap;

use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;
use serde_json::{Value, json};

use super::counts::{gauge, label, series};
use crate::limits::Report;
use crate::observe::metrics::Registry;
use crate::relay::TenantTable;

/// Tenants with a row: those with the most requests.
const MAX_TENANTS: usize = 200;

const REQUESTS: &str = "warmroute_usage_requests_total";
const PROMPT: &str = "warmroute_usage_prompt_tokens_total";
const CACHED: &str = "warmroute_usage_cached_prompt_tokens_total";
const GENERATED: &str = "warmroute_usage_generation_tokens_total";
const ADMITTED: &str = "warmroute_limit_admitted_total";
const REFUSALS: &str = "warmroute_limit_refusals_total";

#[derive(Debug, Default, Serialize)]
struct Counts {
    requests: u64,
    prompt: u64,
    cached: u64,
    generated: u64,
    admitted: u64,
    refused: BTreeMap<String, u64>,
}

impl Counts {
    /// By which tenants are ordered: what a tenant sent, whether or not it was refused.
    fn sent(&self) -> u64 {
        self.requests + self.refused.values().sum::<u64>()
    }
}

/// `null` without tenants and without requests of any.
pub(super) fn read(table: &TenantTable, registry: &Registry) -> Value {
    let counts = counts(registry);
    let mut names: Vec<String> = table
        .listed()
        .map(|tenant| tenant.name.to_string())
        .collect();
    if names.is_empty() && counts.is_empty() {
        return Value::Null;
    }
    names.extend(counts.keys().cloned());
    names.sort_unstable();
    names.dedup();
    let all = names.len();
    let sent = |name: &String| counts.get(name).map_or(0, Counts::sent);
    names.sort_by_key(|name| std::cmp::Reverse(sent(name)));
    names.truncate(MAX_TENANTS);
    let shown: FxHashSet<&str> = names.iter().map(String::as_str).collect();
    let reports: FxHashMap<&str, Report> = table
        .listed()
        .filter(|tenant| shown.contains(&*tenant.name))
        .filter_map(|tenant| Some((&*tenant.name, tenant.limits.as_ref()?.report())))
        .collect();
    let none = Counts::default();
    let rows = names.iter().map(|name| {
        let of_tenant = counts.get(name).unwrap_or(&none);
        json!({"name": name, "counts": of_tenant, "limits": reports.get(&**name)})
    });
    let sum = |name: &str| -> u64 {
        let values = series(registry, name).into_iter();
        values
            .map(|metric| metric.get_counter().get_value() as u64)
            .sum()
    };
    json!({
        "tenants": rows.collect::<Vec<_>>(),
        "all": all,
        "has_limits": !reports.is_empty(),
        "without_store": gauge(registry, "warmroute_limits_without_store") > 0,
        "store_failures": sum("warmroute_limit_store_failures_total"),
        "dropped": sum("warmroute_limit_settlements_dropped_total"),
    })
}

fn counts(registry: &Registry) -> FxHashMap<String, Counts> {
    let mut counts: FxHashMap<String, Counts> = FxHashMap::default();
    let mut add = |name: &str, to: &dyn Fn(&mut Counts, &str, u64)| {
        for metric in series(registry, name) {
            let of_tenant = counts.entry(label(&metric, "tenant").to_owned());
            let value = metric.get_counter().get_value() as u64;
            to(of_tenant.or_default(), label(&metric, "reason"), value);
        }
    };
    add(REQUESTS, &|counts, _, value| counts.requests += value);
    add(PROMPT, &|counts, _, value| counts.prompt += value);
    add(CACHED, &|counts, _, value| counts.cached += value);
    add(GENERATED, &|counts, _, value| counts.generated += value);
    add(ADMITTED, &|counts, _, value| counts.admitted += value);
    add(REFUSALS, &|counts, reason, value| {
        *counts.refused.entry(reason.to_owned()).or_default() += value;
    });
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_are_ordered_by_what_they_sent_refused_or_not() {
        let registry = Registry::default();
        assert_eq!(read(&TenantTable::default(), &registry), Value::Null);
        let requests = registry.counters(REQUESTS, "R.", &["tenant", "model"]);
        requests.with_label_values(&["calm", "m"]).inc_by(5);
        requests.with_label_values(&["loud", "m"]).inc_by(2);
        requests.with_label_values(&["loud", "n"]).inc_by(2);
        let refusals = registry.counters(REFUSALS, "R.", &["tenant", "reason"]);
        let reason = "requests_per_minute";
        refusals.with_label_values(&["loud", reason]).inc_by(9);
        let found = read(&TenantTable::default(), &registry);
        assert_eq!(found["tenants"][0]["name"], "loud");
        assert_eq!(found["tenants"][0]["counts"]["requests"], 4);
        assert_eq!(found["tenants"][0]["counts"]["refused"][reason], 9);
        assert_eq!(found["tenants"][1]["name"], "calm");
        assert_eq!(
            (&found["all"], &found["has_limits"]),
            (&json!(2), &json!(false))
        );
    }

    #[test]
    fn no_more_tenants_than_the_bound_are_sent() {
        let registry = Registry::default();
        let requests = registry.counters(REQUESTS, "R.", &["tenant", "model"]);
        for number in 0..300 {
            let name = format!("t{number}");
            requests.with_label_values(&[&*name, "m"]).inc_by(number);
        }
        let found = read(&TenantTable::default(), &registry);
        assert_eq!(found["tenants"].as_array().unwrap().len(), MAX_TENANTS);
        assert_eq!(found["tenants"][0]["name"], "t299");
        assert_eq!(found["all"], 300);
    }
}
