//! What is broken now: clients get errors, or will at the next failure. Pure.

use serde_json::Value;

use super::finding::{Finding, listed};
use super::observed::Observed;
use super::workers;
use crate::admin::WorkerRow;
use crate::batches::StorageOperation;
use crate::fleet::Role;
use crate::peers::status::PeerRow;

pub(super) fn examine(observed: &Observed) -> Vec<Finding> {
    let one = [
        no_worker_up(observed),
        workers_without_models(observed),
        store_down(observed),
        store_at_risk(observed),
        batch_storage_fails(observed),
        batch_storage_differs(observed),
        configuration_refused(observed),
        replica_missing(observed),
        tokenizer_refuses(observed),
    ];
    let mut findings: Vec<Finding> = one.into_iter().flatten().collect();
    findings.extend(prefill_workers_only(observed));
    findings.extend(workers_never_chosen(observed));
    findings
}

fn no_worker_up(observed: &Observed) -> Option<Finding> {
    let all = &observed.fleet.workers;
    if workers::healthy(observed).next().is_some() {
        return None;
    }
    let down: Vec<&WorkerRow> = all.iter().collect();
    let (problem, change) = match &down[..] {
        [] => (
            "there are no workers".to_owned(),
            "what `discovery` finds: GET /fleet, and the router's log".to_owned(),
        ),
        [only] => (
            format!("the only worker, {}, is not up", only.name),
            workers::why_down(&down),
        ),
        several => (
            format!("none of {} workers is up", several.len()),
            workers::why_down(&down),
        ),
    };
    let timeout = observed.duration("/queue/no_worker_timeout");
    // Models are known from the configuration, and from workers that have been up.
    let has_models =
        !observed.models().is_empty() || all.iter().any(|worker| !worker.models.is_empty());
    let is_waited_for = has_models && timeout.is_some_and(|timeout| !timeout.is_zero());
    Some(Finding {
        rule: "no_worker_up",
        model: None,
        // A fleet that scales from zero has none at times.
        is_broken: !all.is_empty() || !is_waited_for,
        cost: 1.0,
        problem,
        effect: if is_waited_for {
            "requests for models that are known wait for a worker (`queue.no_worker_timeout`), and get 503 if none comes"
        } else {
            "every request is refused with 503"
        },
        change,
    })
}

/// Workers that answer health checks and list no models, such as another service on the port of `url`.
fn workers_without_models(observed: &Observed) -> Option<Finding> {
    let serves_none = |worker: &&WorkerRow| worker.models.is_empty();
    let without: Vec<&WorkerRow> = workers::healthy(observed).filter(serves_none).collect();
    (!without.is_empty()).then(|| Finding {
        rule: "workers_without_models",
        model: None,
        is_broken: workers::up(observed).next().is_none(),
        cost: without.len() as f64 / observed.fleet.workers.len() as f64,
        problem: format!(
            "no models are known of workers that are up: {}",
            workers::names(&without)
        ),
        effect: "they get no requests",
        change: "let `url` be the engine's own host and port: `warmroute check --live` shows what its /v1/models answers"
            .to_owned(),
    })
}

/// Models of which only prefill workers are up: nobody answers their requests.
fn prefill_workers_only(observed: &Observed) -> Vec<Finding> {
    let of_model = |(model, up): (&str, Vec<&WorkerRow>)| {
        if up.iter().any(|worker| worker.role != Role::Prefill) {
            return None;
        }
        Some(Finding {
            rule: "prefill_workers_only",
            model: None,
            is_broken: true,
            cost: 1.0,
            problem: format!(
                "no worker that answers requests for {model} is up, only workers that compute their prompts: {}",
                workers::names(&up)
            ),
            effect: "every request for the model is refused with 503",
            change: "start workers with `role: decode` or `role: both` (the default)".to_owned(),
        })
    };
    let models = workers::by_model(observed).into_iter();
    models.filter_map(of_model).collect()
}

fn store_down(observed: &Observed) -> Option<Finding> {
    let health = &observed.store;
    (!health.is_up).then(|| Finding {
        rule: "store_down",
        model: None,
        is_broken: true,
        cost: 0.9,
        problem: format!("the store of responses cannot be used: {}", health.reason),
        effect: "stored responses and conversations are refused with 503, or served unstored (`responses.on_store_down`)",
        change:
            "repair Redis, its address or its user's rights: `warmroute check --live` tries them"
                .to_owned(),
    })
}

fn store_at_risk(observed: &Observed) -> Option<Finding> {
    let health = &observed.store;
    let warns = health.is_up && !health.warning.is_empty();
    warns.then(|| Finding {
        rule: "store_at_risk",
        cost: 0.5,
        problem: format!("the store of responses: {}", health.warning),
        effect: "responses that clients rely on may be lost",
        change: "the settings of Redis that are named".to_owned(),
        ..Finding::default()
    })
}

/// By operation, whether the replica may use its storage of batches.
const STORAGE_USABLE: &str = "warmroute_batch_storage_usable";

/// The bucket of batches, or else their folder, as configured.
fn batch_storage(observed: &Observed) -> (Option<&str>, &str) {
    let text = |pointer: &str| {
        let value = observed.config.pointer(pointer).and_then(Value::as_str);
        value.filter(|text| !text.is_empty())
    };
    let folder = text("/batches/folder").unwrap_or("batches.folder");
    (text("/batches/s3/bucket"), folder)
}

fn batch_storage_fails(observed: &Observed) -> Option<Finding> {
    let operations = StorageOperation::ALL.map(StorageOperation::as_str);
    let fails =
        |operation: &str| observed.value(STORAGE_USABLE, &[("operation", operation)]) == Some(0.0);
    let operation = operations.into_iter().find(|operation| fails(operation))?;
    let place = match batch_storage(observed) {
        (Some(bucket), _) => format!(
            "give the router's credentials s3:PutObject, s3:GetObject, s3:DeleteObject and s3:ListBucket for the bucket \
             `{bucket}`, and let the router reach it"
        ),
        (None, folder) => format!(
            "make `{folder}` a folder that the router's user owns (`chown`, mode 0700), on a disk with room"
        ),
    };
    Some(Finding {
        rule: "batch_storage_fails",
        model: None,
        is_broken: true,
        cost: 0.7,
        problem: format!("the storage of batches cannot do this: {operation}"),
        effect: "uploads and results are answered with 503, and batches wait",
        change: format!("{place}; the router's log says why it failed"),
    })
}

fn batch_storage_differs(observed: &Observed) -> Option<Finding> {
    let is_same = observed.value(STORAGE_USABLE, &[("operation", "identity")])?;
    if is_same != 0.0 {
        return None;
    }
    let place = match batch_storage(observed) {
        (Some(bucket), _) => format!(
            "set `batches.s3` as the other replicas have it: `{bucket}`, with the `prefix` and `endpoint` beside it, is not \
             theirs"
        ),
        (None, folder) => format!("mount the folder of the other replicas at `{folder}`"),
    };
    Some(Finding {
        rule: "batch_storage_differs",
        model: None,
        is_broken: true,
        cost: 0.7,
        problem: "the storage of batches is not the one of the other replicas".to_owned(),
        effect: "uploads, new batches and results are answered with 503 here, and other replicas run the batches",
        change: format!("{place}; the router's log names the object that it lacks"),
    })
}

fn configuration_refused(observed: &Observed) -> Option<Finding> {
    let successful = observed.value("warmroute_config_last_reload_successful", &[])?;
    (successful == 0.0).then(|| Finding {
        rule: "configuration_refused",
        model: None,
        is_broken: true,
        cost: 0.6,
        problem: "the configuration file was refused: the router runs with the one before it"
            .to_owned(),
        effect: "changes do not count; with a mistake in the file the router would not start again",
        change: "`POST /reload` lists what is wrong, with the lines: mistakes, which `warmroute check FILE` \
                 finds, too, or keys that need a restart"
            .to_owned(),
    })
}

fn replica_missing(observed: &Observed) -> Option<Finding> {
    let peers = &observed.fleet.replicas.as_ref()?.peers;
    let missing: Vec<_> = peers
        .iter()
        .filter(|peer| peer.state != "connected")
        .collect();
    let first = missing.first()?;
    let name = |peer: &PeerRow| {
        let name = peer.name.as_ref().or(peer.address.as_ref());
        format!("{} ({})", name.map_or("one", String::as_str), peer.state)
    };
    let why = first.error.as_deref().unwrap_or("it is silent");
    Some(Finding {
        rule: "replica_missing",
        model: None,
        is_broken: true,
        cost: 0.4,
        problem: format!(
            "{} of {} other replicas are not connected: {}",
            missing.len(),
            peers.len(),
            listed(missing.iter().map(|peer| name(peer)))
        ),
        effect: "choices do not count its requests, and limits are shared without it",
        change: format!(
            "start it, let it be reached, or take it out of `peers.discovery`; {}: {why}",
            name(first)
        ),
    })
}

/// The share of prompts that is worth a finding.
const REFUSED_MIN: f64 = 0.01;
/// With fewer prompts a share says nothing.
const MIN_PROMPTS: f64 = 100.0;

fn tokenizer_refuses(observed: &Observed) -> Option<Finding> {
    let metric = "warmroute_tokenizer_prompts_total";
    let all = observed.sum(metric, &[]);
    let known =
        ["complete", "partial"].map(|outcome| observed.sum(metric, &[("outcome", outcome)]));
    let refused = all - known.iter().sum::<f64>();
    if all < MIN_PROMPTS || refused < REFUSED_MIN * all {
        return None;
    }
    let (reason, _) = observed
        .by_label(metric, "outcome")
        .into_iter()
        .filter(|(outcome, _)| !["complete", "partial"].contains(&outcome.as_str()))
        .max_by(|left, right| left.1.total_cmp(&right.1))?;
    Some(Finding {
        rule: "tokenizer_refuses",
        cost: 0.5 * refused / all,
        problem: format!(
            "{:.0} % of {all:.0} prompts of models with a tokenizer could not be tokenized, most of them for `{reason}`",
            100.0 * refused / all
        ),
        effect: "they are routed by prediction, not by what is cached exactly",
        change: "`warmroute check FILE` says which kinds of requests a model's tokenizer cannot do, and why; POST /explain \
                 says it for one request (`tokens_unknown_reason`)"
            .to_owned(),
        ..Finding::default()
    })
}

/// Requests to a model after which a worker without any is worth a finding.
const MIN_REQUESTS: u64 = 200;
/// A worker without any request is worth a finding only if its model got so many for each of its workers.
const REQUESTS_EACH: u64 = 20;

fn workers_never_chosen(observed: &Observed) -> Vec<Finding> {
    let of_model = |(model, all): (&str, Vec<&WorkerRow>)| {
        let total: u64 = all.iter().map(|worker| worker.requests_total).sum();
        let is_never = |worker: &&WorkerRow| {
            worker.requests_total == 0
                && !worker.is_draining
                && worker.peers.iter().all(|peer| peer.requests == 0)
        };
        let never: Vec<&WorkerRow> = all.iter().copied().filter(is_never).collect();
        let is_enough = total >= MIN_REQUESTS && total >= REQUESTS_EACH * all.len() as u64;
        // Decode workers get the second leg of a pair.
        let alone = never.iter().all(|worker| worker.role == Role::Both);
        if never.is_empty() || !is_enough || !alone {
            return None;
        }
        let busiest = all.iter().max_by_key(|worker| worker.requests_total)?;
        let share = 100 * busiest.requests_total / total;
        Some(Finding {
            rule: "workers_never_chosen",
            cost: 0.6 * never.len() as f64 / all.len() as f64,
            problem: format!(
                "{} of {} workers of {model} never got one of its {total} requests, {share} % of which went to {}: {}",
                never.len(),
                workers::listed_with(observed, model),
                busiest.name,
                workers::names(&never)
            ),
            effect: "their GPUs do nothing",
            change: "if requests never wait, fewer workers would do; else POST /explain with one of the requests shows what each \
                     worker would cost, and why"
                .to_owned(),
            ..Finding::default()
        })
    };
    workers::by_model(observed)
        .into_iter()
        .filter_map(of_model)
        .collect()
}
