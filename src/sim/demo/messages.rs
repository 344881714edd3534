//! The texts that the demo prints. Pure.

use std::time::Duration;

use super::deployment::{Deployment, MODEL};
use super::settings::Settings;
use crate::sim::report::{self, Outcome, Tally, grouped};

/// Longer than one block of the predicted index, so that the second request of the same question is a cache hit.
const QUESTION: &str =
    "How long was a ship at sea that left at dawn with the tide and came back at dusk?";

/// What is about to run.
pub(super) fn introduction(settings: &Settings) -> String {
    let workload = &settings.workload;
    let number = |value: u32| grouped(value.into());
    let engines = settings.deployment.workers;
    let fleets = match (settings.replicas, settings.disaggregated) {
        (Some(replicas), _) => format!(
            "to three fleets of {} fresh simulated engines: behind one router, behind {replicas} that\n\
             share what they know, and behind {replicas} that do not",
            number(engines)
        ),
        (None, false) => format!(
            "to one router twice: first with round_robin in front of {engines} simulated engines,\n\
             then with cache_aware in front of {engines} fresh ones",
            engines = number(engines)
        ),
        (None, true) => format!(
            "to two routers: one in front of {} simulated engines that do everything,\n\
             one in front of {} prefill engines and {} decode engines",
            number(engines),
            number(engines / 2),
            number(engines - engines / 2),
        ),
    };
    let when = if settings.replicas.is_some() || settings.disaggregated {
        "All requests are sent at the same time"
    } else {
        "All requests are sent"
    };
    format!(
        "{} users in {} groups; the users of a group share a system prompt of {} tokens.\n\
         {} conversations per user, {} turns per conversation, {} requests in all (seed {}).\n\
         {when} {fleets}.\n",
        number(workload.users),
        number(workload.groups.min(workload.users)),
        number(workload.system_tokens),
        number(workload.conversations),
        number(workload.turns),
        grouped(workload.requests()),
        workload.seed,
    )
}

/// The progress line of a run: elapsed time and the results so far.
pub(super) fn progress(elapsed: Duration, tally: &Tally) -> String {
    let mut text = format!(
        "{:>2} s  cached {:>6}  TTFT p50 {:>7}",
        elapsed.as_secs(),
        report::percent(tally.cached_ratio()),
        report::milliseconds(tally.time_to_first_token(50)),
    );
    if tally.failed() > 0 {
        text.push_str(&format!("  failed {}", tally.failed()));
    }
    text
}

/// The simulated engines' speeds, so that the table is not taken for a GPU benchmark.
pub(super) fn caveat(settings: &Settings) -> String {
    let engine = settings.deployment.engine();
    let cache_tokens = u64::from(engine.cache_blocks.get()) * u64::from(engine.block_tokens.get());
    let caveat = format!(
        "{} simulated engines with fixed speeds, not GPUs: {} prompt tokens/s,\n\
         {} ms and more for each step, which gives every running answer a token,\n\
         a prefix cache of {} tokens.",
        settings.deployment.workers,
        grouped(engine.prefill_tokens_per_second.get().into()),
        engine.decode_ms,
        grouped(cache_tokens),
    );
    if !settings.disaggregated {
        return caveat;
    }
    let transfer = engine.transfer.tokens_per_second.get();
    format!(
        "{caveat}\n\
         Prefill slows down decoding on the same engine. KV transfers run at {} tokens/s.",
        grouped(transfer.into())
    )
}

/// How many prompts went through a prefill engine.
pub(super) fn kv_transfers(deployment: &Deployment, outcome: &Outcome) -> String {
    let (transfers, requests) = (deployment.kv_transfers(), outcome.tally.requests());
    if transfers == requests {
        return format!(
            "All {} prompts were computed by a prefill engine and transferred to a decode engine.",
            grouped(requests)
        );
    }
    format!(
        "{} of {} prompts were computed by a prefill engine and transferred to a decode engine;\n\
         for the others the decode engine had most of the prompt cached.",
        grouped(transfers),
        grouped(requests)
    )
}

/// How to talk to the router that the demo leaves running.
pub(super) fn try_it(settings: &Settings, deployment: &Deployment) -> String {
    let router = deployment.router();
    let (api, admin) = (router.api_address(), router.admin_address());
    let (introduction, content) = match (settings.replicas, settings.disaggregated) {
        (Some(_), _) => (
            "The replicas that share are still running, and this is one of them. Send this twice: the\n\
             x-warmroute-decision header says which engine was chosen and why.",
            QUESTION,
        ),
        (None, false) => (
            "The cache_aware router is still running. Send this twice: the x-warmroute-decision header\n\
             says which engine was chosen and why.",
            QUESTION,
        ),
        (None, true) => (
            "The router of the prefill and decode engines is still running. Send a long prompt: the\n\
             x-warmroute-decision header says which two engines served it. Send it again, and the decode\n\
             engine has it cached.",
            "'\"$(seq -s ' ' 999)\"'",
        ),
    };
    format!(
        "\n{introduction}\n\n\
         \x20 curl -i http://{api}/v1/chat/completions \\\n\
         \x20   -H 'content-type: application/json' -H 'x-warmroute-decision: 1' \\\n\
         \x20   -d '{{\"model\":\"{MODEL}\",\"messages\":[{{\"role\":\"user\",\"content\":\"{content}\"}}]}}'\n\n\
         Dashboard: http://{admin}/  Workers: http://{admin}/fleet  Metrics: http://{admin}/metrics\n\
         Ctrl-C stops it."
    )
}
