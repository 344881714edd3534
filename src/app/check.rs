//! `check --live`: probes every worker and the store of responses, and with `--transfer` tries KV transfers between them.

mod transfer_check;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::discoveries;
use crate::config::{Config, DiscoveryEntry};
use crate::fleet::discovery::Discovery;
#[cfg(feature = "kubernetes")]
use crate::fleet::discovery::kubernetes;
use crate::fleet::health::Health;
use crate::fleet::kv_transfer::pairs::Pairs;
use crate::fleet::kv_transfer::{Connector, mismatch};
use crate::fleet::registry::Registry;
use crate::fleet::{Role, Snapshot, Status, Worker, probe};
#[cfg(feature = "jwt")]
use crate::http::tls::Clients;
use crate::ids::WorkerId;
#[cfg(feature = "jwt")]
use crate::jwt;
use crate::observe::metrics;
use crate::store;

/// Workers that are probed at a time.
const MAX_CONCURRENT_PROBES: usize = 64;
/// Up to this many pairs, each is tried; of more, only enough that each worker takes part.
const MAX_PAIRS: usize = 16;

/// Prints results and progress to `out`. Returns true if no problem was found.
pub async fn run(config: &Config, checks_transfer: bool, out: &mut impl Write) -> io::Result<bool> {
    let settings = &config.prefill_decode;
    let connections = config.fleet.advanced.clone();
    let fleet = Registry::new(connections, config.registry_settings());
    let mut is_good = list(config, &fleet, out).await?;
    let wrong = ask_all(config, &fleet).await;
    let snapshot = fleet.snapshot().clone();
    let kv_events = kv_events(&snapshot, config.fleet.health.timeout).await;
    table(&snapshot, &wrong, &kv_events, out)?;
    is_good &= wrong.is_empty() && !snapshot.workers.is_empty();
    is_good &= check_store(config, out).await?;
    #[cfg(feature = "jwt")]
    {
        is_good &= check_token_keys(config, fleet.tls(), out).await?;
    }
    is_good &= kv_events.values().all(Result::is_ok);
    let Some(connector) = settings.connector else {
        if checks_transfer {
            writeln!(
                out,
                "\nno KV transfer to check: prefill_decode.connector is not set"
            )?;
        }
        return Ok(is_good && !checks_transfer);
    };
    let pairs = Pairs::of(&snapshot, connector, &settings.topology);
    print_pairs(connector, &pairs, checks_transfer, out)?;
    is_good &= pairs.unpaired.is_empty() && pairs.unverified() > 0;
    if checks_transfer {
        let limit = settings.advanced.transfer_timeout;
        for (prefill, decode, model) in chosen(&snapshot, connector, &settings.topology) {
            write!(out, "  {} -> {} ({model}): ", prefill.name, decode.name)?;
            out.flush()?;
            match transfer_check::run(connector, &prefill, &decode, &model, limit).await {
                Ok(proof) => {
                    let received = match proof.received_tokens {
                        Some(received) => format!("received {received}"),
                        None => "does not report what it received".to_owned(),
                    };
                    let (tokens, took) = (proof.prompt_tokens, proof.took.as_secs_f64());
                    writeln!(
                        out,
                        "ok; of {tokens} tokens the decode worker {received}; same text as from one worker; {took:.2} s"
                    )?;
                }
                Err(why) => {
                    is_good = false;
                    writeln!(out, "FAILED: {why}")?;
                }
            }
        }
    }
    Ok(is_good)
}

/// Whether Redis answers, and keeps what is stored. Returns true if there is nothing to check, or nothing is wrong.
async fn check_store(config: &Config, out: &mut impl Write) -> io::Result<bool> {
    let settings = &config.responses.store;
    // Batches and limits are in it, too, where no responses are stored.
    if settings.redis.is_none() {
        return Ok(true);
    }
    let store = store::open(settings, 0, &metrics::Registry::default())?.responses;
    // The report asks for the server's settings, which an operation does not wait for.
    let asked = match store.admit().await {
        Ok(()) => store.report().await,
        Err(error) => Err(error),
    };
    let warning = match asked {
        Ok(report) => report.health.warning,
        Err(error) => {
            writeln!(out, "\nresponse store: FAILED: {error}")?;
            return Ok(false);
        }
    };
    if warning.is_empty() {
        writeln!(out, "\nresponse store: Redis answers")?;
    } else {
        writeln!(out, "\nresponse store: WRONG: {warning}")?;
    }
    Ok(warning.is_empty())
}

/// Whether the public keys of the tokens' issuers can be read. Returns true if there is nothing to check, or nothing is
/// wrong.
#[cfg(feature = "jwt")]
async fn check_token_keys(
    config: &Config,
    clients: &Clients,
    out: &mut impl Write,
) -> io::Result<bool> {
    let mut is_good = true;
    let Some(settings) = &config.jwt else {
        return Ok(is_good);
    };
    for (issuer, found) in jwt::look_once(settings, clients).await {
        match found {
            Ok(keys) => writeln!(out, "\nkeys of {issuer}: {keys} can verify tokens")?,
            Err(error) => {
                is_good = false;
                writeln!(out, "\nkeys of {issuer}: FAILED: {error}")?;
            }
        }
    }
    Ok(is_good)
}

/// Asks each discovery once. Returns false if one failed.
async fn list(config: &Config, fleet: &Registry, out: &mut impl Write) -> io::Result<bool> {
    fleet.set_members("static", config.members());
    let has_roles = config.prefill_decode.connector.is_some();
    let mut is_good = true;
    let mut take = |name: &str, listed| match listed {
        Ok(members) => fleet.set_members(name, members),
        Err(error) => {
            is_good = false;
            // A failed write does not matter: the exit code reports the error too.
            let _ = writeln!(out, "cannot list workers: {error}");
        }
    };
    for entry in &config.discovery {
        match entry {
            DiscoveryEntry::Static(_) => {}
            DiscoveryEntry::File(listed) => {
                let mut file = discoveries::file(listed, has_roles, fleet.tls())?;
                let listed = file.next().await;
                take(file.name(), listed);
            }
            DiscoveryEntry::Dns(listed) => {
                let mut dns = discoveries::dns(listed);
                let listed = dns.next().await;
                take(dns.name(), listed);
            }
            #[cfg(feature = "kubernetes")]
            DiscoveryEntry::Kubernetes(listed) => {
                let metrics = kubernetes::Metrics::new(&metrics::Registry::default());
                let listed = listed.as_ref().clone();
                let mut discovery = discoveries::kubernetes(listed, config, &metrics)?;
                let failures = discovery.try_requests().await;
                if failures.is_empty() {
                    let listed = discovery.next().await;
                    take(discovery.name(), listed);
                }
                for failure in failures {
                    take(discovery.name(), Err(failure));
                }
            }
            #[cfg(not(feature = "kubernetes"))]
            DiscoveryEntry::Kubernetes(_) => {}
        }
    }
    Ok(is_good)
}

/// Probes every worker once. Returns the workers that are down, with the reason.
async fn ask_all(config: &Config, fleet: &Arc<Registry>) -> Vec<(WorkerId, String)> {
    let settings = &config.prefill_decode;
    let connector = settings
        .connector
        .filter(|connector| connector.needs_bootstrap());
    let bootstrap = connector.map(|connector| (connector, settings.advanced.bootstrap_port));
    let limit = config.fleet.health.timeout;
    let mut asked = JoinSet::new();
    let mut wrong = Vec::new();
    let mut answered = |answer: Result<(WorkerId, Result<(), String>), _>| {
        if let Ok((id, Err(error))) = answer {
            wrong.push((id, error));
        }
    };
    let snapshot = fleet.snapshot().clone();
    for status in &snapshot.workers {
        if asked.len() >= MAX_CONCURRENT_PROBES
            && let Some(answer) = asked.join_next().await
        {
            answered(answer);
        }
        let (worker, fleet) = (status.worker.clone(), fleet.clone());
        asked.spawn(async move {
            let probed = probe::once(&worker, &fleet, limit, bootstrap).await;
            (worker.id, probed)
        });
    }
    while let Some(answer) = asked.join_next().await {
        answered(answer);
    }
    wrong
}

/// What is known of each worker's KV events, or which of its ports cannot be connected to.
async fn kv_events(
    snapshot: &Snapshot,
    limit: Duration,
) -> BTreeMap<WorkerId, Result<String, String>> {
    let mut found = BTreeMap::new();
    let is_up = |status: &&Status| status.health == Health::Up;
    for status in snapshot.workers.iter().filter(is_up) {
        if let Some(source) = status.facts.unusable_events.first() {
            let (rank, reason) = (&source.rank, &source.reason);
            let text = format!(
                "rank {rank}, {}: {reason}; {}",
                source.endpoint,
                source.fix()
            );
            found.insert(status.worker.id, Err(text));
            continue;
        }
        let endpoints = status.event_endpoints();
        let Some((_, first)) = endpoints.first() else {
            continue;
        };
        let ranks = match endpoints.len() {
            1 => String::new(),
            ranks => format!(", {ranks} ranks"),
        };
        let mut result = Ok(format!("{}{ranks}", first.address()));
        for (rank, endpoint) in &endpoints {
            let address = endpoint.address();
            let connecting = TcpStream::connect(address.trim_start_matches("tcp://"));
            let problem = match tokio::time::timeout(limit, connecting).await {
                Ok(Ok(_)) => continue,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "no connection in time".to_owned(),
            };
            result = Err(format!("rank {rank}, {address}: {problem}"));
            break;
        }
        found.insert(status.worker.id, result);
    }
    found
}

fn table(
    snapshot: &Snapshot,
    wrong: &[(WorkerId, String)],
    kv_events: &BTreeMap<WorkerId, Result<String, String>>,
    out: &mut impl Write,
) -> io::Result<()> {
    let mut rows = vec![
        [
            "worker",
            "address",
            "role",
            "model",
            "version",
            "block",
            "KV events",
            "health",
        ]
        .map(str::to_owned),
    ];
    for status in &snapshot.workers {
        let worker = &status.worker;
        let unknown = || "-".to_owned();
        let models: Vec<&str> = status.facts.models.keys().map(|model| &**model).collect();
        let why = wrong.iter().find(|(id, _)| *id == worker.id);
        rows.push([
            worker.name.to_string(),
            worker.pool.address().to_owned(),
            worker.role.to_string(),
            if models.is_empty() {
                unknown()
            } else {
                models.join(",")
            },
            status.facts.version.clone().unwrap_or_else(unknown),
            status
                .facts
                .block_size
                .map_or_else(unknown, |size| size.to_string()),
            match kv_events.get(&worker.id) {
                None => "none".to_owned(),
                Some(Ok(address)) => address.clone(),
                Some(Err(why)) => format!("FAILED: {why}"),
            },
            match why {
                Some((_, why)) => format!("down: {why}"),
                None => status.health.to_string(),
            },
        ]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|column| width(column).unwrap_or(0))
        .collect();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line += &format!("{cell:width$}  ");
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Prints what is known about the pairs without a KV transfer.
fn print_pairs(
    connector: Connector,
    pairs: &Pairs,
    checks_transfer: bool,
    out: &mut impl Write,
) -> io::Result<()> {
    writeln!(out, "\nPairs, by {connector}: {}", pairs.count)?;
    for incompatible in &pairs.incompatible {
        let examples: Vec<String> = incompatible
            .examples
            .iter()
            .map(|(from, to)| format!("{from} -> {to}"))
            .collect();
        let more = match incompatible.count - examples.len() {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        writeln!(
            out,
            "  incompatible, {}: {}{more}",
            incompatible.reason,
            examples.join(", ")
        )?;
    }
    for name in &pairs.unpaired {
        writeln!(out, "  {name} has no compatible partner")?;
    }
    if checks_transfer {
        Ok(())
    } else {
        writeln!(
            out,
            "  {} unverified: no reason against a KV transfer is known, but whether engines have the KV connector \
             shows only when they are asked for one; --transfer tries them",
            pairs.unverified()
        )
    }
}

/// The pairs to try: all of them if they are few, else enough that each worker is in one.
fn chosen(
    snapshot: &Snapshot,
    connector: Connector,
    topology: &str,
) -> Vec<(Arc<Worker>, Arc<Worker>, String)> {
    let with = |role: Role| {
        let workers = snapshot.workers.iter();
        let is_up = |status: &&Status| status.health == Health::Up;
        workers
            .filter(is_up)
            .filter(move |status| status.worker.role != role)
    };
    let prefills: Vec<&Status> = with(Role::Decode).collect();
    let decodes: Vec<&Status> = with(Role::Prefill).collect();
    let (prefill_count, decode_count) = (prefills.len(), decodes.len());
    let is_small = prefill_count * decode_count <= MAX_PAIRS;
    let mut all = Vec::new();
    let (mut gave, mut took) = (BTreeSet::new(), BTreeSet::new());
    // Diagonals: each has everybody once, or as often as there are too few of the others.
    let longer = prefill_count.max(decode_count);
    for shift in 0..prefill_count.min(decode_count) {
        for place in 0..longer {
            let from = prefills[place % prefill_count];
            let to = decodes[(place + shift) % decode_count];
            let (prefill, decode) = (&from.worker, &to.worker);
            let is_wanted = is_small || !gave.contains(&prefill.id) || !took.contains(&decode.id);
            if prefill.id == decode.id
                || !is_wanted
                || mismatch(connector, topology, from, to).is_some()
            {
                continue;
            }
            let Some(model) = common_model(from, to) else {
                continue;
            };
            gave.insert(prefill.id);
            took.insert(decode.id);
            all.push((prefill.clone(), decode.clone(), model));
        }
    }
    all
}

/// A model of both, no adapter if there is another.
fn common_model(prefill: &Status, decode: &Status) -> Option<String> {
    let models = prefill.facts.models.keys();
    let common = models.filter(|model| decode.facts.models.contains_key(*model));
    let least = common.min_by_key(|model| prefill.facts.adapters.contains(*model));
    least.map(|model| model.to_string())
}

#[cfg(test)]
mod tests;
