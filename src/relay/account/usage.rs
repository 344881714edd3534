//! What tenants use: counters by tenant and model, and a line for billing for each request that a worker answered.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use prometheus::IntCounter;
use rustc_hash::{FxHashMap, FxHashSet};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::usage_line::UsageLine;
use crate::ids::{Model, Tenant};
use crate::observe;
use crate::observe::line_log::{self, LineLog};
use crate::observe::metrics::{Registry, metric_table};
use crate::relay::answer::engine_answer;
use crate::relay::failure::types::Outcome;
use crate::units::SizeText;

/// Pairs of a tenant and a model with series of their own. Further ones share the series of their model with the label
/// `tenant="other"`, so that `/metrics` stays bounded.
const PAIRS_MAX: usize = 4_000;
const OTHER: &str = "other";

/// The usage log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Where a JSON line is written for each request that a worker answered, for billing: `stdout`, or the path of a
    /// file, which may be renamed or removed at any time to rotate it. Empty: nowhere.
    pub log: String,
    /// Lines that wait to be written; further ones are dropped and counted (`warmroute_usage_log_lines_dropped_total`).
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "4KiB"))]
    pub max_queued_size: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            log: String::new(),
            // About 40,000 lines, a minute of a disk that hangs at 600 requests a second.
            max_queued_size: 16 << 20,
        }
    }
}

impl Settings {
    /// Describes what is wrong with the log's place, if anything.
    pub fn check(&self) -> Result<(), String> {
        line_log::check(&self.log, "usage.jsonl")
    }
}

/// What outlives a configuration.
#[derive(Debug)]
pub struct Usage {
    families: Families,
    log: Option<LineLog>,
    pairs: AtomicUsize,
    /// The tenants of the newest configuration.
    tenants: ArcSwap<FxHashSet<Tenant>>,
}

metric_table! {
    #[derive(Debug)]
    struct Families {
        requests: counters "warmroute_usage_requests_total" ["tenant", "model"]
            "Requests that a worker answered with a status of success, however they ended, by tenant and served model.",
        incomplete: counters "warmroute_usage_incomplete_total" ["tenant", "model"]
            "Those of warmroute_usage_requests_total whose tokens the router counted, because the answer ended before the engine reported them.",
        prompt_tokens: counters "warmroute_usage_prompt_tokens_total" ["tenant", "model"]
            "Prompt tokens, cached ones among them.",
        cached_tokens: counters "warmroute_usage_cached_prompt_tokens_total" ["tenant", "model"]
            "Prompt tokens that the engine had cached.",
        generation_tokens: counters "warmroute_usage_generation_tokens_total" ["tenant", "model"] "Generated tokens.",
    }
}

impl Usage {
    pub fn new(log: Option<LineLog>, registry: &Registry) -> Arc<Self> {
        let dropped = registry.counter(
            "warmroute_usage_log_lines_dropped_total",
            "Lines of the usage log that were lost because its output was blocked or failed.",
        );
        if let Some(log) = log.clone() {
            registry.on_scrape(move || dropped.inc_by(log.dropped().saturating_sub(dropped.get())));
        }
        Arc::new(Self {
            families: Families::new(registry),
            log,
            pairs: AtomicUsize::new(0),
            tenants: ArcSwap::default(),
        })
    }

    /// The tenants of a new configuration.
    pub(in crate::relay) fn set_tenants(&self, tenants: impl IntoIterator<Item = Tenant>) {
        let tenants: FxHashSet<Tenant> = tenants.into_iter().collect();
        self.tenants.store(Arc::new(tenants));
    }

    pub(in crate::relay) fn has_log(&self) -> bool {
        self.log.is_some()
    }

    /// Writes the lines that are queued.
    pub fn flush(&self, limit: Duration) {
        if let Some(log) = &self.log {
            log.flush(limit);
        }
    }

    fn counters(&self, tenant: &str, model: &Model) -> Counters {
        let one_more = |pairs: usize| (pairs < PAIRS_MAX).then_some(pairs + 1);
        let is_own = self.pairs.fetch_update(Relaxed, Relaxed, one_more).is_ok();
        let tenant = if is_own { tenant } else { OTHER };
        let labels = [tenant, model];
        let families = &self.families;
        Counters {
            tenant: tenant.into(),
            is_own,
            requests: families.requests.with_label_values(&labels),
            incomplete: families.incomplete.with_label_values(&labels),
            prompt_tokens: families.prompt_tokens.with_label_values(&labels),
            cached_tokens: families.cached_tokens.with_label_values(&labels),
            generation_tokens: families.generation_tokens.with_label_values(&labels),
        }
    }

    fn has_free_place(&self) -> bool {
        self.pairs.load(Relaxed) < PAIRS_MAX
    }

    /// Removes the series with a value of the label `tenant`. There may be none.
    fn remove_series(&self, tenant: &str, model: &Model) {
        let labels = [tenant, &**model];
        let families = &self.families;
        for family in [
            &families.requests,
            &families.incomplete,
            &families.prompt_tokens,
            &families.cached_tokens,
            &families.generation_tokens,
        ] {
            let _ = family.remove_label_values(&labels);
        }
    }
}

#[derive(Debug)]
pub(in crate::relay) struct Counters {
    /// The value of the label.
    tenant: Box<str>,
    /// They count for no other tenant.
    is_own: bool,
    requests: IntCounter,
    incomplete: IntCounter,
    prompt_tokens: IntCounter,
    cached_tokens: IntCounter,
    generation_tokens: IntCounter,
}

/// One model's counters, resolved once for each tenant.
#[derive(Debug, Default)]
pub(in crate::relay) struct CountersByTenant {
    by_tenant: ArcSwap<FxHashMap<Tenant, Arc<Counters>>>,
    /// Taken by those who change `by_tenant`: two first requests of a tenant are one pair.
    writing: Mutex<()>,
}

impl CountersByTenant {
    pub(in crate::relay) fn of(
        &self,
        usage: &Usage,
        tenant: Tenant,
        name: &str,
        model: &Model,
    ) -> Arc<Counters> {
        if let Some(counters) = self.by_tenant.load().get(&tenant) {
            return counters.clone();
        }
        let _writing = self.writing.lock();
        let known = self.by_tenant.load();
        if let Some(counters) = known.get(&tenant) {
            return counters.clone();
        }
        let counters = Arc::new(usage.counters(name, model));
        let mut by_tenant = FxHashMap::clone(&known);
        by_tenant.insert(tenant, counters.clone());
        self.by_tenant.store(Arc::new(by_tenant));
        counters
    }

    /// Removes the series of tenants that the newest configuration lacks, if no place is free, and gives their places to
    /// others. A tenant whose request still runs keeps its series until then.
    pub(in crate::relay) fn release_removed(&self, usage: &Usage, model: &Model) {
        if usage.has_free_place() {
            return;
        }
        let _writing = self.writing.lock();
        let (known, tenants) = (self.by_tenant.load(), usage.tenants.load());
        let mut by_tenant = FxHashMap::clone(&known);
        by_tenant.retain(|tenant, counters| {
            // Both tables have it, and each running request.
            let is_idle = Arc::strong_count(counters) <= 2;
            let is_removed = counters.is_own && is_idle && !tenants.contains(tenant);
            if is_removed {
                usage.remove_series(&counters.tenant, model);
                usage.pairs.fetch_sub(1, Relaxed);
            }
            !is_removed
        });
        if by_tenant.len() < known.len() {
            self.by_tenant.store(Arc::new(by_tenant));
        }
    }

    /// Lets tenants that share a series with others enter again with their next request, if a place is free. The shared
    /// series stays.
    pub(in crate::relay) fn release_shared(&self, usage: &Usage) {
        let are_all_own = self
            .by_tenant
            .load()
            .values()
            .all(|counters| counters.is_own);
        if are_all_own || !usage.has_free_place() {
            return;
        }
        let _writing = self.writing.lock();
        let known = self.by_tenant.load();
        let mut by_tenant = FxHashMap::clone(&known);
        by_tenant.retain(|_, counters| counters.is_own);
        self.by_tenant.store(Arc::new(by_tenant));
    }

    /// Removes the series of a model of which no request runs, and gives the places of its pairs to others.
    pub(in crate::relay) fn remove(&self, usage: &Usage, model: &Model) {
        let _writing = self.writing.lock();
        let by_tenant = self.by_tenant.swap(Arc::default());
        for counters in by_tenant.values().filter(|counters| counters.is_own) {
            usage.remove_series(&counters.tenant, model);
            usage.pairs.fetch_sub(1, Relaxed);
        }
        // Tenants that shared a series may have left the table before.
        usage.remove_series(OTHER, model);
    }
}

#[derive(Debug)]
pub(in crate::relay) struct UsageEntry {
    counters: Arc<Counters>,
    /// As the router knows them: what counts if the engine does not report its own.
    expected: engine_answer::Usage,
    line: Option<Box<(LineLog, UsageLine)>>,
}

impl UsageEntry {
    /// `expected` has the prompt's tokens, and how many of them the worker should have cached.
    pub(in crate::relay) fn new(
        usage: &Usage,
        counters: Arc<Counters>,
        expected: engine_answer::Usage,
        line: impl FnOnce() -> UsageLine,
    ) -> Self {
        let log = usage.log.as_ref();
        Self {
            counters,
            expected,
            line: log.map(|log| Box::new((log.clone(), line()))),
        }
    }

    /// The answer has ended. `passed`: output tokens that went to the client, if the engine reported nothing.
    pub(in crate::relay) fn end(
        self,
        now: Instant,
        outcome: Outcome,
        reported: Option<&engine_answer::Usage>,
        passed: u64,
    ) {
        let is_complete = outcome == Outcome::Complete && reported.is_some();
        let unreported = engine_answer::Usage {
            output_tokens: passed,
            ..self.expected
        };
        let usage = reported.unwrap_or(&unreported);
        let counters = &self.counters;
        counters.requests.inc();
        counters.incomplete.inc_by(u64::from(!is_complete));
        counters.prompt_tokens.inc_by(usage.prompt_tokens);
        counters.cached_tokens.inc_by(usage.cached_tokens);
        counters.generation_tokens.inc_by(usage.output_tokens);
        if let Some(line) = self.line {
            let (log, line) = *line;
            log.push(&line.json(observe::wall_clock(), now, outcome, is_complete, usage));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_tenant_gives_its_place_away_once_places_are_short_and_its_requests_have_ended() {
        let registry = Registry::default();
        let usage = Usage::new(None, &registry);
        let (model, of_model) = (Model::from("m"), CountersByTenant::default());
        let enter = |name: &str| of_model.of(&usage, Tenant::of(name), name, &model);
        usage.set_tenants([Tenant::of("stays")]);
        let running = enter("runs");
        enter("gone");
        enter("stays");
        let release = |pairs: usize| {
            usage.pairs.store(pairs, Relaxed);
            of_model.release_removed(&usage, &model);
            let text = registry.text();
            let shown = |name: &str| text.contains(&format!("tenant=\"{name}\""));
            ["runs", "gone", "stays"].map(shown)
        };
        assert_eq!(release(PAIRS_MAX - 1), [true, true, true]);
        assert_eq!(release(PAIRS_MAX), [true, false, true]);
        assert_eq!(usage.pairs.load(Relaxed), PAIRS_MAX - 1);
        drop(running);
        assert_eq!(release(PAIRS_MAX), [false, false, true]);
    }

    #[test]
    fn a_tenant_beyond_the_bound_has_series_of_its_own_once_a_place_is_free() {
        let registry = Registry::default();
        let usage = Usage::new(None, &registry);
        let (old, new) = (Model::from("old"), Model::from("new"));
        let (of_old, of_new) = (CountersByTenant::default(), CountersByTenant::default());
        usage.pairs.store(PAIRS_MAX - 1, Relaxed);
        let tenant = Tenant::of("a");
        of_old.of(&usage, tenant, "a", &old);
        let count = || {
            of_new.release_shared(&usage);
            of_new.of(&usage, tenant, "a", &new).requests.inc();
            let text = registry.text();
            ["a", OTHER].map(|tenant| {
                let series =
                    format!("warmroute_usage_requests_total{{model=\"new\",tenant=\"{tenant}\"}} ");
                let mut values = text.lines().filter_map(|line| line.strip_prefix(&series));
                values.next().map(str::to_owned)
            })
        };
        let value = |value: &str| Some(value.to_owned());
        assert_eq!(count(), [None, value("1")]);
        assert_eq!(count(), [None, value("2")]);
        of_old.remove(&usage, &old);
        assert_eq!(count(), [value("1"), value("2")]);
        assert_eq!(usage.pairs.load(Relaxed), PAIRS_MAX);
        // Also the series that nobody shares any more.
        of_new.remove(&usage, &new);
        assert!(!registry.text().contains("\"new\""));
        assert_eq!(usage.pairs.load(Relaxed), PAIRS_MAX - 1);
    }
}
