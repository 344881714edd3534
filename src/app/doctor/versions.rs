//! Rules about the releases of engines: those that differ, and those that are known to lack something. Pure.

use super::finding::{Finding, listed};
use super::observed::Observed;
use super::workers::{by_model, different, is_sglang, names, up};
use crate::admin::WorkerRow;
use crate::fleet::ResponsesApi;

/// The first vLLM that this router was written for.
const OLDEST_VLLM: (u32, u32) = (0, 29);
/// The first vLLM that takes the router's token ids.
const TOKEN_IDS_SINCE: (u32, u32) = (0, 32);
/// The first vLLM that sends a request of the Responses API to the rank that it names.
const RESPONSES_PINNED_SINCE: (u32, u32) = (0, 33);

pub(super) fn examine(observed: &Observed) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (model, workers) in by_model(observed) {
        findings.extend(differ(observed, model, &workers));
        findings.extend(lacks_token_ids(observed, model, &workers));
    }
    findings.extend(unknown(observed));
    findings.extend(ignores_ranks(observed));
    findings
}

/// Older than a release of vLLM. SGLang counts its releases otherwise.
fn is_before(worker: &WorkerRow, since: (u32, u32)) -> bool {
    let version = worker.version.as_deref().and_then(release);
    !is_sglang(worker) && version.is_some_and(|release| release < since)
}

fn differ(observed: &Observed, model: &str, workers: &[&WorkerRow]) -> Option<Finding> {
    let versions = different(workers, |worker| worker.version.clone())?;
    let parts = versions
        .iter()
        .map(|(version, workers)| format!("{version} at {}", listed(workers)));
    Some(Finding {
        rule: "versions_differ",
        cost: 0.02 * observed.share(workers.iter().copied()),
        problem: format!(
            "engines of {model} differ: {}",
            parts.collect::<Vec<_>>().join("; ")
        ),
        effect: "answers, tokens and KV transfers may differ between them; normal during a rollout",
        change: "engine: one release for all workers of a model".to_owned(),
        ..Finding::default()
    })
}

fn lacks_token_ids(observed: &Observed, model: &str, workers: &[&WorkerRow]) -> Option<Finding> {
    let mut entries = observed.models().iter();
    if !entries.any(|entry| entry["name"] == model && entry["send_token_ids"] == true) {
        return None;
    }
    let is_old = |worker: &&WorkerRow| is_before(worker, TOKEN_IDS_SINCE);
    let old: Vec<&WorkerRow> = workers.iter().copied().filter(is_old).collect();
    (!old.is_empty()).then(|| Finding {
        rule: "version_too_old",
        cost: 0.5 * observed.share(old.iter().copied()),
        problem: format!(
            "{} do not take token ids (vLLM 0.32 and later does)",
            names(&old)
        ),
        effect: "these engines refuse requests, or tokenize them again",
        change: format!("models: [{{name: {model}, send_token_ids: false}}], or a newer engine"),
        ..Finding::default()
    })
}

fn unknown(observed: &Observed) -> Option<Finding> {
    let old: Vec<&WorkerRow> = up(observed)
        .filter(|worker| is_before(worker, OLDEST_VLLM))
        .collect();
    let first = old.first()?;
    Some(Finding {
        rule: "version_not_supported",
        cost: 0.2 * observed.share(old.iter().copied()),
        problem: format!(
            "{} run a vLLM before 0.29 ({})",
            names(&old),
            first.version.as_deref().unwrap_or_default()
        ),
        effect: "their KV events, token ids and metrics may be of another form; nothing was tried with them",
        change: "engine: vLLM 0.29 or later".to_owned(),
        ..Finding::default()
    })
}

/// Engines with several ranks that ignore which of them a request is for.
fn ignores_ranks(observed: &Observed) -> Option<Finding> {
    let requests = |labels: &[(&str, &str)]| observed.sum("warmroute_requests_total", labels);
    let ignores = |worker: &&WorkerRow| {
        worker.facts.events.ranks > 1
            && worker.facts.responses != ResponsesApi::Chat
            && is_before(worker, RESPONSES_PINNED_SINCE)
    };
    let old: Vec<&WorkerRow> = up(observed).filter(ignores).collect();
    let of_old = |worker: &&WorkerRow| requests(&[("worker", &worker.name), ("api", "responses")]);
    let affected: f64 = old.iter().map(of_old).sum();
    let share = affected / requests(&[]).max(1.0);
    (affected >= 1.0).then(|| Finding {
        rule: "ranks_ignored",
        cost: (0.3 * share).min(1.0),
        problem: format!(
            "{} have several data-parallel ranks, and ignore which of them a request of the Responses API is for ({:.0} % of all requests)",
            names(&old),
            100.0 * share
        ),
        effect: "these requests find their prefix on one rank in as many as there are",
        change: "workers: [{url: ..., responses: chat}], or engine: vLLM 0.33 or later".to_owned(),
        ..Finding::default()
    })
}

/// `0.32.1rc1` -> (0, 32)
fn release(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}
