//! `check --live`: asks every worker how it is, and tries handing over between them.

mod transfer_check;

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::Arc;

use tokio::task::JoinSet;

use super::discoveries::Discoveries;
use crate::config::Config;
use crate::fleet::discovery::Discovery;
use crate::fleet::handoff::pairs::Pairs;
use crate::fleet::handoff::{Connector, mismatch};
use crate::fleet::health::Health;
use crate::fleet::registry::Registry;
use crate::fleet::{Role, Snapshot, Status, Worker, probe};
use crate::ids::WorkerId;

/// Workers that are asked at a time.
const ASKED_AT_ONCE: usize = 64;
/// Up to so many pairs, each is tried; of more, each worker once.
const PAIRS_MAX: usize = 16;

/// Prints what was found to `out`, progress and what is wrong included. Whether all is well.
pub async fn run(config: &Config, hands_over: bool, out: &mut impl Write) -> io::Result<bool> {
    let settings = &config.prefill_decode;
    let fleet = Registry::new(
        config.fleet.advanced.connections.clone(),
        config.fleet.circuit_breaker.clone(),
        config.fleet.advanced.max_workers as usize,
        &settings.topology,
    );
    let mut is_good = list(config, &fleet, out).await?;
    let wrong = ask_all(config, &fleet).await;
    let snapshot = fleet.snapshot().clone();
    table(&snapshot, &wrong, out)?;
    is_good &= wrong.is_empty() && !snapshot.workers.is_empty();
    let Some(connector) = settings.connector else {
        if hands_over {
            writeln!(
                out,
                "\nnothing is handed over: prefill_decode.connector is not set"
            )?;
        }
        return Ok(is_good && !hands_over);
    };
    let pairs = Pairs::of(&snapshot, connector, &settings.topology);
    tell(connector, &pairs, hands_over, out)?;
    is_good &= pairs.alone.is_empty() && pairs.not_proved() > 0;
    if hands_over {
        let limit = settings.advanced.transfer_timeout;
        for (prefill, decode, model) in chosen(&snapshot, connector, &settings.topology) {
            write!(out, "  {} -> {} ({model}): ", prefill.name, decode.name)?;
            out.flush()?;
            match transfer_check::run(connector, &prefill, &decode, &model, limit).await {
                Ok(proof) => {
                    let received = match proof.received_tokens {
                        Some(received) => format!("received {received}"),
                        None => "does not tell what it received".to_owned(),
                    };
                    let (tokens, took) = (proof.prompt_tokens, proof.took.as_secs_f64());
                    writeln!(
                        out,
                        "ok; of {tokens} tokens the decode worker {received}, and says the same as alone; {took:.2} s"
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

/// Finds the workers, once. Whether everybody who lists some could be asked.
async fn list(config: &Config, fleet: &Registry, out: &mut impl Write) -> io::Result<bool> {
    let Discoveries {
        members,
        files,
        names,
    } = Discoveries::of(config);
    fleet.set_members("static", members);
    let mut is_good = true;
    let mut take = |name: &str, listed| match listed {
        Ok(members) => fleet.set_members(name, members),
        Err(error) => {
            is_good = false;
            // It is told again by the exit code.
            let _ = writeln!(out, "cannot list workers: {error}");
        }
    };
    for mut file in files {
        let listed = file.next().await;
        take(file.name(), listed);
    }
    for mut dns in names {
        let listed = dns.next().await;
        take(dns.name(), listed);
    }
    Ok(is_good)
}

/// Asks every worker once. What is wrong with whom.
async fn ask_all(config: &Config, fleet: &Arc<Registry>) -> Vec<(WorkerId, String)> {
    let settings = &config.prefill_decode;
    let needs_peer = settings.connector.is_some_and(Connector::needs_peer);
    let bootstrap = needs_peer.then_some(settings.advanced.bootstrap_port);
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
        if asked.len() >= ASKED_AT_ONCE
            && let Some(answer) = asked.join_next().await
        {
            answered(answer);
        }
        let (worker, fleet) = (status.worker.clone(), fleet.clone());
        asked.spawn(async move {
            let told = probe::once(&worker, &fleet, limit, bootstrap).await;
            (worker.id, told)
        });
    }
    while let Some(answer) = asked.join_next().await {
        answered(answer);
    }
    wrong
}

fn table(
    snapshot: &Snapshot,
    wrong: &[(WorkerId, String)],
    out: &mut impl Write,
) -> io::Result<()> {
    let mut rows = vec![
        [
            "worker", "address", "role", "model", "version", "block", "health",
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

/// What is known of the pairs without trying.
fn tell(
    connector: Connector,
    pairs: &Pairs,
    hands_over: bool,
    out: &mut impl Write,
) -> io::Result<()> {
    let not_proved = pairs.not_proved();
    writeln!(out, "\nPairs, by {connector}: {}", pairs.count)?;
    for unable in &pairs.unable {
        let all: Vec<String> = unable
            .such_as
            .iter()
            .map(|(from, to)| format!("{from} -> {to}"))
            .collect();
        let more = match unable.count - all.len() {
            0 => String::new(),
            more => format!(", and {more} more"),
        };
        writeln!(
            out,
            "  cannot hand over, {}: {}{more}",
            unable.why,
            all.join(", ")
        )?;
    }
    for name in &pairs.alone {
        writeln!(out, "  {name} has nobody to hand over to, or to take from")?;
    }
    match hands_over {
        true => Ok(()),
        false => writeln!(
            out,
            "  {not_proved} not proved: nothing is known against them, and --transfer tries them"
        ),
    }
}

/// The pairs to try: all of them if they are few, else so many that each worker is in one.
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
            .filter(move |it| it.worker.role != role)
    };
    let prefills: Vec<&Status> = with(Role::Decode).collect();
    let decodes: Vec<&Status> = with(Role::Prefill).collect();
    let (prefill_count, decode_count) = (prefills.len(), decodes.len());
    let is_small = prefill_count * decode_count <= PAIRS_MAX;
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
