//! Rules about KV transfers that were tried: engines without a connector, transfers that fail. Pure.

use serde_json::Value;

use super::finding::Finding;
use super::observed::Observed;
use super::workers::{names, up};
use crate::admin::{KvTransfersRow, WorkerRow};
use crate::fleet::Role;
use crate::fleet::kv_transfer::Connector;
use crate::http::circuit_breaker::State;

pub(super) fn examine(observed: &Observed) -> Vec<Finding> {
    let found = [
        connector_missing(observed),
        stopped(observed),
        fail(observed),
    ];
    found.into_iter().flatten().collect()
}

/// So many prefill legs in a row without parameters are no chance: one may have had a prompt shorter than a block.
const MIN_LEGS: u64 = 2;

fn lacks_connector(transfers: &KvTransfersRow) -> bool {
    transfers.legs_without_params >= MIN_LEGS
}

/// The workers that are up and whose KV transfers have the property.
fn with_transfers(
    observed: &Observed,
    property: impl Fn(&KvTransfersRow) -> bool,
) -> Vec<&WorkerRow> {
    let has = |worker: &&WorkerRow| worker.kv_transfers.as_ref().is_some_and(&property);
    up(observed).filter(has).collect()
}

/// The part that these are of the workers that compute prompts only.
fn part_of_prefill(observed: &Observed, workers: &[&WorkerRow]) -> f64 {
    let prefill = up(observed).filter(|worker| worker.role == Role::Prefill);
    (workers.len() as f64 / prefill.count().max(1) as f64).min(1.0)
}

/// Engines whose prefill legs return nothing that a decode worker could fetch.
fn connector_missing(observed: &Observed) -> Option<Finding> {
    let connector = observed.fleet.pairs.as_ref()?.connector;
    let lacking = with_transfers(observed, lacks_connector);
    if lacking.is_empty() {
        return None;
    }
    let policy = observed
        .config
        .pointer("/prefill_decode/on_prefill_failure");
    let part = part_of_prefill(observed, &lacking);
    let is_refused = policy.and_then(Value::as_str) == Some("fail") && part >= 1.0;
    Some(Finding {
        rule: "kv_connector_missing",
        model: None,
        is_broken: is_refused,
        cost: 0.6 * part,
        problem: format!(
            "prefill legs at {} return no kv_transfer_params: these engines have no KV connector, or another one than \
             {connector}",
            names(&lacking)
        ),
        effect: "each prompt that is tried there is computed again elsewhere, or refused (`on_prefill_failure: fail`)",
        change: format!(
            "engine: {}; simulated: sim --kv-connector {connector}",
            connector_flag(connector)
        ),
    })
}

/// What turns an engine's connector on.
fn connector_flag(connector: Connector) -> &'static str {
    match connector {
        Connector::Nixl => {
            r#"--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' (decode: kv_consumer)"#
        }
        Connector::Mooncake => {
            r#"--kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}' (decode: kv_consumer)"#
        }
        Connector::Moriio => {
            "--kv-transfer-config with the kv_connector MoRIIOConnector, and its read_mode on"
        }
        Connector::Sglang => "--disaggregation-mode prefill (decode where it decodes)",
    }
}

/// Prefill workers that get no prefill legs, because transfers from them failed.
fn stopped(observed: &Observed) -> Option<Finding> {
    let is_stopped = |transfers: &KvTransfersRow| {
        transfers.circuit_breaker != State::Closed && !lacks_connector(transfers)
    };
    let stopped = with_transfers(observed, is_stopped);
    (!stopped.is_empty()).then(|| Finding {
        rule: "kv_transfers_stopped",
        cost: 0.5 * part_of_prefill(observed, &stopped),
        problem: format!(
            "KV transfers from {} failed in a row: their transfer circuit breakers are open",
            names(&stopped)
        ),
        effect: "prompts are computed by other workers",
        change: TRY_PAIRS.to_owned(),
        ..Finding::default()
    })
}

const TRY_PAIRS: &str = "`warmroute check --config FILE --live --transfer` tries each pair and says what fails; the decode \
                         engines' logs say why";

/// With fewer transfers a share says nothing.
const MIN_TRANSFERS: f64 = 20.0;
/// The share of failed transfers that is worth a finding.
const FAILED_MIN: f64 = 0.05;

/// Transfers that fail where no prefill worker stands out.
fn fail(observed: &Observed) -> Option<Finding> {
    let ended = |outcome| observed.sum("warmroute_kv_transfers_total", &[("outcome", outcome)]);
    let failed = ended("failed");
    let all = ended("completed") + failed;
    (all >= MIN_TRANSFERS && failed >= FAILED_MIN * all).then(|| Finding {
        rule: "kv_transfers_fail",
        cost: (0.4 * failed / all).min(1.0),
        problem: format!(
            "{failed:.0} of {all:.0} KV transfers have failed ({:.0} %)",
            100.0 * failed / all
        ),
        effect: "their prompts were computed twice, and their first tokens came late",
        change: TRY_PAIRS.to_owned(),
        ..Finding::default()
    })
}
