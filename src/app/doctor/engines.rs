//! Rules about engines: what they were started with, and what of them the router can reach. Pure.

use super::finding::{Finding, listed};
use super::observed::Observed;
use super::transfers;
use super::versions;
use super::workers::{by_model, different, is_sglang, names, up, why_down};
use crate::admin::WorkerRow;
use crate::fleet::Role;
use crate::fleet::health::Health;
use crate::kv::subscriber;

/// The line that turns vLLM's KV events on, with replay.
const EVENTS_ON: &str = r#"engine: --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}'"#;
/// The line that turns SGLang's KV events on, with replay.
const SGLANG_EVENTS_ON: &str = r#"engine: --kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","topic":"kv-events"}'"#;

/// The line that turns KV events on for these workers.
fn events_on(workers: &[&WorkerRow]) -> String {
    by_engine(workers, EVENTS_ON, SGLANG_EVENTS_ON)
}

/// A line for each kind of engine that these workers run.
fn by_engine(workers: &[&WorkerRow], vllm: &str, sglang: &str) -> String {
    let sglang_workers = workers.iter().filter(|worker| is_sglang(worker)).count();
    match (sglang_workers == workers.len(), sglang_workers > 0) {
        (true, true) => sglang.to_owned(),
        (_, false) => vllm.to_owned(),
        (false, true) => format!("{vllm}\nof SGLang: {sglang}"),
    }
}

pub(super) fn examine(observed: &Observed) -> Vec<Finding> {
    let mut findings = Vec::new();
    findings.extend(workers_down(observed));
    findings.extend(prefix_caching_off(observed));
    findings.extend(no_events(observed));
    findings.extend(unusable_events(observed));
    findings.extend(events_disconnected(observed));
    findings.extend(no_replay(observed));
    findings.extend(cached_tokens_unreported(observed));
    findings.extend(slots_unknown(observed));
    findings.extend(slots_not_learnt(observed));
    findings.extend(block_sizes_differ(observed));
    findings.extend(versions::examine(observed));
    findings.extend(pairs(observed));
    findings.extend(transfers::examine(observed));
    findings
}

fn uses_events(observed: &Observed) -> bool {
    let policy = |value: &serde_json::Value| value.as_str() == Some("cache_aware");
    let common = observed.config.pointer("/routing/policy");
    let mut own = observed
        .models()
        .iter()
        .filter_map(|model| model.get("policy"));
    common.is_none_or(policy) || own.any(policy)
}

/// Engines that say nothing of their queues: whatever is sent waits inside them.
fn slots_unknown(observed: &Observed) -> Option<Finding> {
    let value =
        |metric: &str, worker: &WorkerRow| observed.value(metric, &[("worker", &worker.name)]);
    let is_unknown = |worker: &&WorkerRow| {
        let is_known = [
            "warmroute_worker_reported_running",
            "warmroute_worker_slots",
        ];
        // One whose health checks begin to fail is not asked for its load, and is about to be down.
        worker.last_error.is_none()
            && value("warmroute_worker_up", worker).is_some()
            && is_known
                .iter()
                .all(|metric| value(metric, worker).is_none())
    };
    let unknown: Vec<&WorkerRow> = up(observed).filter(is_unknown).collect();
    (!unknown.is_empty()).then(|| Finding {
        rule: "slots_unknown",
        cost: 0.2 * observed.share(unknown.iter().copied()),
        problem: format!(
            "{} report neither running nor waiting requests, and have no `slots`",
            names(&unknown)
        ),
        effect: "up to 256 requests are sent to each, and those beyond its true slots wait inside the engine, in the order in \
                 which they came: there priorities and turns do nothing, and one client's flood is before everybody else's",
        change: "workers: [{url: ..., slots: 64}], as many as the engine answers at the same time".to_owned(),
        ..Finding::default()
    })
}

/// Decode workers in which requests wait, and whose slots are not learnt: reports in which all that wait are deferred, for
/// blocks of prefill workers, teach nothing of them.
fn slots_not_learnt(observed: &Observed) -> Option<Finding> {
    let is_unknown = |worker: &&WorkerRow| {
        let value = |metric: &str| observed.value(metric, &[("worker", &worker.name)]);
        let waiting = value("warmroute_worker_reported_waiting").unwrap_or_default();
        let running = value("warmroute_worker_reported_running").unwrap_or_default();
        // A worker whose slots are known may get an eighth more.
        worker.role == Role::Decode
            && value("warmroute_worker_slots").is_none()
            && running >= 8.0
            && waiting > running / 8.0
    };
    let unknown: Vec<&WorkerRow> = up(observed).filter(is_unknown).collect();
    (!unknown.is_empty()).then(|| Finding {
        rule: "slots_unknown",
        cost: 0.1 * observed.share(unknown.iter().copied()),
        problem: format!(
            "requests wait inside the decode workers {}, which have no `slots`, and whose reports do not show them",
            names(&unknown)
        ),
        effect: "what is beyond their true slots is sent to them, too, and waits inside the engine, in the order in which it came",
        change: "workers: [{url: ..., slots: 64}], as many as the engine answers at the same time".to_owned(),
        ..Finding::default()
    })
}

fn workers_down(observed: &Observed) -> Option<Finding> {
    let all = &observed.fleet.workers;
    let down: Vec<&WorkerRow> = all
        .iter()
        .filter(|worker| worker.health == Health::Down)
        .collect();
    let first = down.first().filter(|_| down.len() < all.len())?;
    Some(Finding {
        rule: "worker_down",
        model: None,
        is_broken: 2 * down.len() >= all.len(),
        cost: down.len() as f64 / all.len() as f64,
        problem: match down.len() {
            1 => format!("1 of {} workers is down: {}", all.len(), first.name),
            count => format!(
                "{count} of {} workers are down: {}",
                all.len(),
                names(&down)
            ),
        },
        effect: "the others carry their load, and their caches are lost",
        change: why_down(&down),
    })
}

fn prefix_caching_off(observed: &Observed) -> Option<Finding> {
    let off: Vec<&WorkerRow> = up(observed)
        .filter(|worker| worker.facts.prefix_caching == Some(false))
        .collect();
    (!off.is_empty()).then(|| Finding {
        rule: "prefix_caching_off",
        cost: 0.9 * observed.share(off.iter().copied()),
        problem: format!("engines without a prefix cache: {}", names(&off)),
        effect: "every prompt is computed from its first token",
        change: by_engine(
            &off,
            "engine: --enable-prefix-caching (or take out --no-enable-prefix-caching)",
            "engine: take out --disable-radix-cache",
        ),
        ..Finding::default()
    })
}

fn no_events(observed: &Observed) -> Option<Finding> {
    if !uses_events(observed) {
        return None;
    }
    let has_none = |worker: &&WorkerRow| {
        worker.facts.events.ranks == 0 && worker.facts.events.unusable.is_empty()
    };
    let silent: Vec<&WorkerRow> = up(observed).filter(has_none).collect();
    (!silent.is_empty()).then(|| Finding {
        rule: "kv_events_off",
        cost: 0.4 * observed.share(silent.iter().copied()),
        problem: format!("no KV events of {}", names(&silent)),
        effect: "the caches of these workers are predicted, and evictions go unnoticed",
        change: format!(
            "{}\nif it does so already, give the worker its endpoints: events: {{endpoint: \"tcp://*:5557\", replay: \"tcp://*:5558\"}}",
            events_on(&silent)
        ),
        ..Finding::default()
    })
}

fn unusable_events(observed: &Observed) -> Option<Finding> {
    let unusable: Vec<&WorkerRow> = up(observed)
        .filter(|worker| !worker.facts.events.unusable.is_empty())
        .collect();
    let first = unusable.first()?;
    let source = first.facts.events.unusable.first()?;
    Some(Finding {
        rule: "kv_events_unusable",
        cost: 0.4 * observed.share(unusable.iter().copied()),
        problem: format!(
            "KV events of {} cannot be followed: rank {}, {}: {}",
            names(&unusable),
            source.rank,
            source.endpoint,
            source.reason
        ),
        effect: "the caches of these workers are predicted, and evictions go unnoticed",
        change: format!("engine: {}", source.fix),
        ..Finding::default()
    })
}

fn ranks_up(observed: &Observed) -> impl Iterator<Item = (&subscriber::Status, &WorkerRow)> {
    let worker = |name: &str| up(observed).find(|worker| worker.name == name);
    let ranks = observed.kv.ranks.iter();
    ranks.filter_map(move |rank| Some((rank, worker(&rank.worker)?)))
}

fn events_disconnected(observed: &Observed) -> Option<Finding> {
    let gone: Vec<_> = ranks_up(observed)
        .filter(|(rank, _)| !rank.connected)
        .collect();
    let (rank, _) = gone.first()?;
    let why = rank
        .disconnect_reason
        .as_deref()
        .unwrap_or("no connection yet");
    let mut workers: Vec<&WorkerRow> = gone.iter().map(|(_, worker)| *worker).collect();
    workers.dedup_by(|a, b| a.name == b.name);
    Some(Finding {
        rule: "kv_events_unreachable",
        cost: 0.4 * observed.share(workers.iter().copied()),
        problem: format!(
            "the KV events of {} are not connected: rank {}: {why}",
            names(&workers),
            rank.rank
        ),
        effect: "the caches of these workers are predicted, and evictions go unnoticed",
        change: format!(
            "let the router reach the port (NetworkPolicy, firewall), and have the engine listen on all addresses:\n{}",
            events_on(&workers)
        ),
        ..Finding::default()
    })
}

fn no_replay(observed: &Observed) -> Option<Finding> {
    let without: Vec<&WorkerRow> = up(observed)
        .filter(|worker| worker.facts.events.without_replay > 0)
        .collect();
    if without.is_empty() {
        let (rank, _) = ranks_up(observed).find(|(rank, _)| rank.replay_error.is_some())?;
        return Some(Finding {
            rule: "kv_replay_unreachable",
            cost: 0.1,
            problem: format!(
                "lost KV events of {} cannot be asked for again: {}",
                rank.worker,
                rank.replay_error.as_deref().unwrap_or_default()
            ),
            effect: "a gap or a lost connection clears what is known of its cache",
            change: "let the router reach the engine's replay_endpoint".to_owned(),
            ..Finding::default()
        });
    }
    Some(Finding {
        rule: "kv_replay_missing",
        cost: 0.1 * observed.share(without.iter().copied()),
        problem: format!("KV events without a replay endpoint: {}", names(&without)),
        effect: "a gap or a lost connection clears what is known of their caches",
        change: events_on(&without),
        ..Finding::default()
    })
}

/// So many prompt tokens say something.
const MIN_PROMPT_TOKENS: f64 = 100_000.0;

fn cached_tokens_unreported(observed: &Observed) -> Option<Finding> {
    let sum = |name: &str| observed.sum(name, &[]);
    let prompt = sum("warmroute_prompt_tokens_total");
    let expected = sum("warmroute_expected_cached_prompt_tokens_total");
    let is_unreported = prompt > MIN_PROMPT_TOKENS
        && expected > 0.1 * prompt
        && sum("warmroute_cached_prompt_tokens_total") == 0.0;
    is_unreported.then(|| Finding {
        rule: "cached_tokens_unreported",
        cost: 0.05,
        problem: format!("engines report no cached tokens, of {prompt:.0} prompt tokens"),
        effect: "usage, metrics and bills show no cache hits",
        change: by_engine(
            &up(observed).collect::<Vec<_>>(),
            "engine: --enable-prompt-tokens-details",
            "engine: --enable-cache-report",
        ),
        ..Finding::default()
    })
}

fn block_sizes_differ(observed: &Observed) -> Vec<Finding> {
    let finding = |(model, workers): (&str, Vec<&WorkerRow>)| {
        let sizes = different(&workers, |worker| worker.facts.block_size)?;
        let most = sizes.iter().max_by_key(|(_, workers)| workers.len())?.0;
        let others = sizes.iter().filter(|(size, _)| *size != most);
        let others: Vec<&String> = others.flat_map(|(_, workers)| workers).collect();
        let parts = sizes
            .iter()
            .map(|(size, workers)| format!("{size} at {}", listed(workers)));
        Some(Finding {
            rule: "block_sizes_differ",
            cost: 0.2 * observed.share(workers.iter().copied()),
            problem: format!(
                "block sizes of {model} differ: {}",
                parts.collect::<Vec<_>>().join("; ")
            ),
            effect: "each size has an index of its own, and KV blocks cannot be transferred between them",
            change: by_engine(
                &workers,
                &format!("engine, at {}: --block-size {most}", listed(&others)),
                &format!("engine, at {}: --page-size {most}", listed(&others)),
            ),
            ..Finding::default()
        })
    };
    by_model(observed).into_iter().filter_map(finding).collect()
}

fn pairs(observed: &Observed) -> Vec<Finding> {
    let Some(pairs) = &observed.fleet.pairs else {
        return Vec::new();
    };
    let connector = &pairs.connector;
    let is_unpaired = |worker: &&WorkerRow| pairs.unpaired.contains(&worker.name);
    // Where nobody answers, that is what is wrong.
    let has_answering = up(observed).any(|worker| worker.role != Role::Prefill);
    let unpaired: Vec<&WorkerRow> = up(observed)
        .filter(|_| has_answering)
        .filter(is_unpaired)
        .collect();
    let mut findings = Vec::new();
    if !unpaired.is_empty() {
        let why = pairs.incompatible.first().map(|pair| pair.message.as_str());
        let roles = listed(
            unpaired
                .iter()
                .map(|worker| format!("{} ({})", worker.name, worker.role)),
        );
        findings.push(Finding {
            rule: "unpaired_workers",
            cost: 0.6 * unpaired.len() as f64 / observed.fleet.workers.len() as f64,
            problem: format!("no partner for KV transfers by {connector}: {roles}"),
            effect: "prefill workers among them idle; what decode workers get is computed there",
            change: match why {
                Some(why) => format!("engine: {why}"),
                None => "start workers of the other role, or `role: both`".to_owned(),
            },
            ..Finding::default()
        });
    }
    let impossible: usize = pairs.incompatible.iter().map(|pair| pair.count).sum();
    if let Some(first) = pairs.incompatible.first().filter(|_| unpaired.is_empty()) {
        findings.push(Finding {
            rule: "incompatible_pairs",
            cost: 0.2 * impossible as f64 / pairs.count.max(1) as f64,
            problem: format!(
                "{impossible} of {} pairs cannot transfer KV blocks by {connector}",
                pairs.count
            ),
            effect: "fewer choices for disaggregated requests",
            change: format!("engine: {}", first.message),
            ..Finding::default()
        });
    }
    findings
}
