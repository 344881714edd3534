//! The demo: the same conversations on two fresh fleets of simulated engines, and a table that compares them.
//!
//! By default it compares the policies round_robin and cache_aware, one after the other on one router, so that its
//! dashboard shows both. With `--disaggregated` it compares engines that do everything with a fleet of prefill and decode
//! engines, with `--replicas` one router with several, at the same time.
//!
//! Engines, router and users share this process and talk over real sockets. The engines' speeds are settings, so
//! the times show what routing changes and say nothing about any GPU.

mod deployment;
mod messages;
mod settings;
mod user;
mod workload;

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use self::deployment::{Deployment, Ports, Routers, Topology};
pub use self::settings::Settings;
use crate::app::App;
use crate::http::client::{self, Pool};
use crate::http::drain::{Tasks, stop_signal};
use crate::observe;
use crate::routing::Policy;
use crate::sim::progress::{Bars, Progress};
use crate::sim::report::{self, Outcome, Tally};

/// How often the progress display is updated.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Capacity of the channel from the users to the tally; a user waits while it is full.
const MAX_PENDING_RESULTS: usize = 256;

/// Runs the demo. Any failed request makes it fail.
pub async fn run(settings: Settings) -> io::Result<()> {
    let deployment = tokio::select! {
        deployment = compare(&settings) => deployment?,
        stopped = stop_signal() => {
            stopped?;
            return Err(io::Error::new(io::ErrorKind::Interrupted, "stopped before the end"));
        }
    };
    if !settings.exit {
        print(&messages::try_it(&settings, &deployment))?;
        tokio::select! {
            stopped = stop_signal() => stopped?,
            () = deployment.router().drain_requested() => {}
        }
    }
    deployment.stop().await;
    Ok(())
}

/// Runs both sides and prints their comparison. The second deployment is still running afterwards.
async fn compare(settings: &Settings) -> io::Result<Deployment> {
    match settings.replicas {
        _ if settings.disaggregated => compare_disaggregated(settings).await,
        Some(replicas) => compare_replicas(settings, replicas).await,
        None => compare_policies(settings).await,
    }
}

/// Runs one policy after the other on one router, with fresh engines for the second.
async fn compare_policies(settings: &Settings) -> io::Result<Deployment> {
    let (first, second) = (Policy::RoundRobin, Policy::CacheAware);
    let topology = Topology::Combined(first);
    let mut deployment =
        Deployment::start(&settings.deployment, topology, Routers::One, Ports::Default).await?;
    let admin = deployment.router().admin_address();
    eprintln!("Dashboard: http://{admin}/\n");
    eprintln!("{}", messages::introduction(settings));
    let bars = Bars::default();
    let before = measure(settings, first.as_str(), &deployment, &bars).await;
    deployment
        .replace_engines(&settings.deployment, second)
        .await?;
    let after = measure(settings, second.as_str(), &deployment, &bars).await;
    bars.end();
    let outcomes = [before, after];
    print_table(settings, &report::table(&outcomes), &outcomes)?;
    let [before, after] = &outcomes;
    print(&report::comparison(before, after))?;
    Ok(deployment)
}

async fn compare_disaggregated(settings: &Settings) -> io::Result<Deployment> {
    if settings.deployment.workers < 2 {
        let message = "--disaggregated needs two engines or more";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    eprintln!("{}", messages::introduction(settings));
    let bars = Bars::default();
    let start = |name, topology, ports| {
        start_and_measure(settings, name, topology, Routers::One, ports, &bars)
    };
    let combined = Topology::Combined(Policy::CacheAware);
    // At the same time, so that whatever else keeps this machine busy affects both alike.
    let (before, after) = tokio::join!(
        start("combined", combined, Ports::Ephemeral),
        start("disaggregated", Topology::Disaggregated, Ports::Default),
    );
    bars.end();
    let ((before, other), (after, deployment)) = (before?, after?);
    other.stop().await;

    let outcomes = [before, after];
    print_table(settings, &report::table(&outcomes), &outcomes)?;
    let [before, after] = &outcomes;
    print(&report::disaggregation_comparison(before, after))?;
    print(&messages::kv_transfers(&deployment, after))?;
    Ok(deployment)
}

/// One router, replicas that share, and replicas that do not, at the same time. Those that share are still running
/// afterwards.
async fn compare_replicas(settings: &Settings, replicas: u32) -> io::Result<Deployment> {
    eprintln!("{}", messages::introduction(settings));
    let bars = Bars::default();
    let topology = Topology::Combined(Policy::CacheAware);
    let start =
        |name, routers, ports| start_and_measure(settings, name, topology, routers, ports, &bars);
    let (one, apart, sharing) = tokio::join!(
        start("one router", Routers::One, Ports::Ephemeral),
        start("not sharing", Routers::Apart(replicas), Ports::Ephemeral),
        start("sharing", Routers::Sharing(replicas), Ports::Default),
    );
    bars.end();
    let ((one, first), (apart, second), (sharing, deployment)) = (one?, apart?, sharing?);
    first.stop().await;
    second.stop().await;
    let outcomes = [one, sharing, apart];
    let table = report::replica_table(replicas, &outcomes);
    print_table(settings, &table, &outcomes)?;
    Ok(deployment)
}

/// Runs the workload on a fresh deployment, which is still running afterwards.
async fn start_and_measure(
    settings: &Settings,
    name: &'static str,
    topology: Topology,
    routers: Routers,
    ports: Ports,
    bars: &Bars,
) -> io::Result<(Outcome, Deployment)> {
    let deployment = Deployment::start(&settings.deployment, topology, routers, ports).await?;
    let admin = deployment.router().admin_address();
    bars.write_line(&format!("dashboard of {name}: http://{admin}/"));
    let outcome = measure(settings, name, &deployment, bars).await;
    Ok((outcome, deployment))
}

/// Runs the workload and shows its progress.
async fn measure(
    settings: &Settings,
    name: &'static str,
    deployment: &Deployment,
    bars: &Bars,
) -> Outcome {
    let started = observe::now();
    let mut progress = Progress::start(bars, started, name, settings.workload.requests());
    let tally = run_users(&settings.workload, deployment, |tally| {
        let now = observe::now();
        progress.show(now, tally.requests(), || {
            messages::progress(now - started, tally)
        });
    })
    .await;
    let ended = observe::now();
    progress.finish(
        tally.requests(),
        messages::progress(ended - started, &tally),
    );
    Outcome {
        name,
        tally,
        requests_per_worker: deployment.requests_per_worker(),
        elapsed: ended.saturating_duration_since(started),
    }
}

/// Lets all users talk to the routers, and calls `show` with the results so far every [`PROGRESS_INTERVAL`].
async fn run_users(
    workload: &workload::Settings,
    deployment: &Deployment,
    mut show: impl FnMut(&Tally),
) -> Tally {
    let pool = |router: &App| {
        let address = router.api_address().to_string();
        Pool::new(address, client::Settings::default())
    };
    let routers: Arc<[Arc<Pool>]> = deployment.routers().iter().map(pool).collect();
    let tasks = Tasks::default();
    let (results, mut received) = mpsc::channel(MAX_PENDING_RESULTS);
    // Each user draws from a sequence of its own, the same on all sides.
    for (number, user) in (0..).zip(workload::users(workload)) {
        tasks.spawn(user::run(
            user,
            workload.answer_tokens,
            routers.clone(),
            fastrand::Rng::with_seed(workload.seed.wrapping_add(number)),
            results.clone(),
        ));
    }
    // The users hold the other senders: the channel closes when the last user is done.
    drop(results);
    let mut tally = Tally::default();
    let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
    loop {
        tokio::select! {
            result = received.recv() => match result {
                Some(result) => tally.add(result),
                None => return tally,
            },
            _ = ticks.tick() => show(&tally),
        }
    }
}

/// Prints the table of all sides. A failed request is an error: without its answer the sides have not done the same
/// work.
fn print_table(settings: &Settings, table: &str, outcomes: &[Outcome]) -> io::Result<()> {
    print(&format!("\n{}\n\n{table}", messages::caveat(settings)))?;
    let requests = settings.workload.requests();
    let failures: Vec<String> = outcomes
        .iter()
        .filter(|outcome| outcome.tally.failed() > 0)
        .map(|outcome| {
            let (name, tally) = (outcome.name, &outcome.tally);
            let (failed, unsent) = (tally.failed(), requests - tally.requests());
            let reasons = tally.failure_summary();
            format!("{name}: {failed} of {requests} requests failed, {unsent} were not sent because of that: {reasons}")
        })
        .collect();
    if failures.is_empty() {
        Ok(())
    } else {
        Err(io::Error::other(failures.join("\n")))
    }
}

fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout();
    writeln!(stdout, "{text}")?;
    stdout.flush()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn settings(disaggregated: bool) -> Settings {
        let number = |value| NonZeroU32::new(value).unwrap();
        Settings {
            disaggregated,
            replicas: None,
            deployment: deployment::Settings {
                workers: 2,
                prefill_tokens_per_second: number(1_000_000),
                decode_ms: 1,
                cache_blocks: number(256),
            },
            workload: workload::Settings {
                users: 5,
                groups: 5,
                conversations: 1,
                turns: 3,
                system_tokens: 400,
                question_tokens: 40,
                answer_tokens: 4,
                reading_ms: 10,
                seed: 7,
            },
            exit: true,
        }
    }

    #[test]
    fn disaggregated_changes_the_defaults_but_not_given_arguments() {
        #[derive(clap::Parser)]
        struct Arguments {
            #[command(flatten)]
            settings: Settings,
        }
        let read = |arguments: &[&str]| {
            let name = [&["demo"], arguments].concat();
            let settings = <Arguments as clap::Parser>::parse_from(name).settings;
            let workload = settings.workload;
            (
                workload.question_tokens,
                workload.turns,
                settings.deployment.cache_blocks.get(),
            )
        };
        assert_eq!(read(&[]), (200, 6, 2_048));
        assert_eq!(read(&["--disaggregated"]), (1_500, 4, 8_192));
        assert_eq!(
            read(&["--disaggregated", "--turns", "9"]),
            (1_500, 9, 8_192)
        );
    }

    #[tokio::test]
    async fn with_two_roles_prompts_are_transferred_and_every_request_is_answered() {
        let settings = settings(true);
        let deployment = Deployment::start(
            &settings.deployment,
            Topology::Disaggregated,
            Routers::One,
            Ports::Ephemeral,
        )
        .await
        .unwrap();
        let tally = run_users(&settings.workload, &deployment, |_| {}).await;
        assert_eq!(tally.failed(), 0, "{}", tally.failure_summary());
        assert_eq!(tally.requests(), settings.workload.requests());
        // At least the first request of each conversation: no decode engine has its system prompt cached.
        let transfers = deployment.kv_transfers();
        assert!(transfers >= 5, "{transfers}");
        deployment.stop().await;
    }

    #[tokio::test]
    async fn cache_aware_serves_more_prompt_tokens_from_cache_than_round_robin() {
        let settings = settings(false);
        let mut ratios = Vec::new();
        for policy in [Policy::RoundRobin, Policy::CacheAware] {
            let topology = Topology::Combined(policy);
            let (routers, ports) = (Routers::One, Ports::Ephemeral);
            let deployment = Deployment::start(&settings.deployment, topology, routers, ports)
                .await
                .unwrap();
            let tally = run_users(&settings.workload, &deployment, |_| {}).await;
            assert_eq!(tally.failed(), 0, "{}", tally.failure_summary());
            assert_eq!(tally.requests(), settings.workload.requests());
            let served: u64 = deployment.requests_per_worker().iter().sum();
            assert_eq!(served, settings.workload.requests());
            ratios.push(tally.cached_ratio());
            deployment.stop().await;
        }
        assert!(ratios[1] > ratios[0], "{ratios:?}");
    }

    #[tokio::test]
    async fn one_router_serves_both_policies_so_that_its_dashboard_shows_both() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let settings = settings(false);
        let deployment = compare(&settings).await.unwrap();
        let admin = deployment.router().admin_address();
        let mut connection = tokio::net::TcpStream::connect(admin).await.unwrap();
        let request =
            format!("GET /metrics HTTP/1.1\r\nhost: {admin}\r\nconnection: close\r\n\r\n");
        connection.write_all(request.as_bytes()).await.unwrap();
        let mut metrics = String::new();
        connection.read_to_string(&mut metrics).await.unwrap();
        for policy in ["round_robin", "cache_aware"] {
            let label = format!("policy=\"{policy}\"");
            let lines = metrics.lines().filter(|line| line.contains(&label));
            let decisions: u64 = lines
                .map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
                .sum();
            assert!(
                decisions >= settings.workload.requests(),
                "{policy}: {decisions}"
            );
        }
        // The engines of the second phase have served nothing else.
        let served: u64 = deployment.requests_per_worker().iter().sum();
        assert_eq!(served, settings.workload.requests());
        deployment.stop().await;
    }

    #[tokio::test]
    async fn replicas_that_share_answer_each_request_and_route_as_one() {
        let settings = Settings {
            replicas: Some(3),
            ..settings(false)
        };
        let deployment = compare(&settings).await.unwrap();
        assert_eq!(deployment.routers().len(), 3);
        for router in deployment.routers() {
            assert_eq!(router.connected_peers(), 2);
        }
        let served: u64 = deployment.requests_per_worker().iter().sum();
        assert_eq!(served, settings.workload.requests());
        deployment.stop().await;
    }
}
