//! The demo: the same conversations through two policies, each on a fresh fleet of pretend engines; or through engines that do everything
//! and through as many of which some compute prompts and the others answer them.
//!
//! Engines, router and users share this process and talk over real sockets. What it shows is what the
//! router does; the engines' speeds are given, so its times say nothing about any GPU.

mod stage;
mod user;
mod workload;

use std::io::{self, Write};
use std::time::Duration;

use tokio::sync::mpsc;

use self::stage::{Cast, MODEL, Ports, Stage};
use crate::http::client::{self, Pool};
use crate::http::drain::{Tasks, stop_signal};
use crate::observe;
use crate::routing::Policy;
use crate::sim::progress::Progress;
use crate::sim::report::{self, Outcome, Tally};

/// Between two looks at how far a run has come.
const TICK: Duration = Duration::from_millis(200);
/// Results on their way to the tally; a user whose result finds no room waits.
const RESULTS_MAX: usize = 256;

/// Long enough to fill the first block of what the router remembers.
const QUESTION: &str =
    "How long was a ship at sea that left at dawn with the tide and came back at dusk?";

#[derive(clap::Args, Clone, Debug)]
pub struct Settings {
    /// Compare engines that each do everything with as many of which half compute prompts and the others
    /// answer them, over conversations about documents.
    #[arg(long)]
    disaggregated: bool,

    #[command(flatten)]
    stage: stage::Settings,

    #[command(flatten)]
    workload: workload::Settings,

    /// End after the table instead of leaving the last router running.
    #[arg(long)]
    exit: bool,
}

/// Plays the demo; an error if any request failed.
pub async fn run(settings: Settings) -> io::Result<()> {
    let stage = tokio::select! {
        stage = perform(&settings) => stage?,
        stopped = stop_signal() => {
            stopped?;
            return Err(io::Error::new(io::ErrorKind::Interrupted, "stopped before the end"));
        }
    };
    if !settings.exit {
        say(&invitation(&settings, &stage))?;
        tokio::select! {
            stopped = stop_signal() => stopped?,
            () = stage.router().drain_asked() => {}
        }
    }
    stage.stop().await;
    Ok(())
}

/// Both runs and their comparison. The second stage is still up afterwards.
async fn perform(settings: &Settings) -> io::Result<Stage> {
    let is_split = settings.disaggregated;
    if is_split && settings.stage.workers < 2 {
        let message = "--disaggregated needs two engines or more";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let acts = match is_split {
        false => [
            ("round_robin", Cast::Combined(Policy::RoundRobin)),
            ("cache_aware", Cast::Combined(Policy::CacheAware)),
        ],
        true => [
            ("combined", Cast::Combined(Policy::CacheAware)),
            ("split", Cast::Split),
        ],
    };
    eprintln!("{}", introduction(settings));
    let [(first, cast), (second, next)] = acts;
    let (before, stage) = act(settings, first, cast, Ports::Free).await?;
    stage.stop().await;
    let (after, stage) = act(settings, second, next, Ports::Usual).await?;

    let outcomes = [before, after];
    let table = match is_split {
        false => report::table(&outcomes),
        true => report::table_with_gaps(&outcomes),
    };
    say(&format!("\n{}\n\n{table}", caveat(settings)))?;
    // With answers missing, a comparison would be of unlike things.
    complain(&outcomes, settings.workload.requests())?;
    let [before, after] = &outcomes;
    match is_split {
        false => say(&report::comparison(before, after))?,
        true => {
            say(&report::comparison_of_gaps(before, after))?;
            say(&handed_over(&stage, after))?;
        }
    }
    Ok(stage)
}

fn handed_over(stage: &Stage, outcome: &Outcome) -> String {
    let (handed_over, all) = (stage.handed_over(), outcome.tally.requests());
    let number = report::grouped;
    if handed_over == all {
        return format!(
            "All {} prompts were computed by one engine and answered by another.",
            number(all)
        );
    }
    format!(
        "{} of {} prompts were computed by one engine and answered by another;\n\
         the engines that answered the rest held most of them already.",
        number(handed_over),
        number(all)
    )
}

/// One run, with its progress shown. The stage is still up afterwards.
async fn act(
    settings: &Settings,
    name: &'static str,
    cast: Cast,
    ports: Ports,
) -> io::Result<(Outcome, Stage)> {
    let stage = Stage::start(&settings.stage, cast, ports).await?;
    let started = observe::now();
    let mut progress = Progress::start(started, name, settings.workload.requests());
    let tally = play(&settings.workload, &stage, |tally| {
        let now = observe::now();
        progress.show(now, tally.requests(), || message(now - started, tally));
    })
    .await;
    let ended = observe::now();
    progress.finish(tally.requests(), message(ended - started, &tally));
    let outcome = Outcome {
        name,
        tally,
        requests_per_worker: stage.requests_per_worker(),
        elapsed: ended.saturating_duration_since(started),
    };
    Ok((outcome, stage))
}

/// What a progress bar says of a run.
fn message(elapsed: Duration, tally: &Tally) -> String {
    let mut text = format!(
        "{:>2} s  cached {:>6}  TTFT p50 {:>7}",
        elapsed.as_secs(),
        report::percent(tally.cached_share()),
        report::milliseconds(tally.first_token(50)),
    );
    if tally.failed() > 0 {
        text.push_str(&format!("  failed {}", tally.failed()));
    }
    text
}

/// Lets all users talk to the router, and calls `show` now and then.
async fn play(workload: &workload::Settings, stage: &Stage, mut show: impl FnMut(&Tally)) -> Tally {
    let router = Pool::new(
        stage.router().api_address().to_string(),
        client::Settings::default(),
    );
    let tasks = Tasks::default();
    let (results, mut received) = mpsc::channel(RESULTS_MAX);
    for user in workload::users(workload) {
        tasks.spawn(user::play(
            user,
            workload.answer_tokens,
            router.clone(),
            results.clone(),
        ));
    }
    // The users have the other ends: when the last of them is done, there is nothing more to receive.
    drop(results);
    let mut tally = Tally::default();
    let mut ticks = tokio::time::interval(TICK);
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

fn introduction(settings: &Settings) -> String {
    let workload = &settings.workload;
    let number = |value: u32| report::grouped(value.into());
    let engines = settings.stage.workers;
    let casts = match settings.disaggregated {
        false => format!(
            "on {} fresh pretend engines behind a fresh router",
            number(engines)
        ),
        true => format!(
            "behind a fresh router: on {} fresh pretend engines that do everything,\n\
             then on {} that compute prompts and {} that answer them",
            number(engines),
            number(engines / 2),
            number(engines - engines / 2),
        ),
    };
    format!(
        "{} users in {} groups; each group shares a system prompt of {} tokens.\n\
         Conversations a user: {}; turns a conversation: {}; requests in all: {} (seed {}).\n\
         All of it is played twice, {casts}.\n",
        number(workload.users),
        number(workload.groups.min(workload.users)),
        number(workload.system_tokens),
        number(workload.conversations),
        number(workload.turns),
        report::grouped(workload.requests()),
        workload.seed,
    )
}

fn caveat(settings: &Settings) -> String {
    let engine = settings.stage.engine();
    let cache_tokens = u64::from(engine.cache_blocks.get()) * u64::from(engine.block_tokens.get());
    let caveat = format!(
        "These are {} pretend engines with given speeds, not GPUs: {} prompt tokens/s,\n\
         {} ms for each token of an answer, a cache of {} tokens.",
        settings.stage.workers,
        report::grouped(engine.prefill_tokens_per_second.get().into()),
        engine.decode_ms,
        report::grouped(cache_tokens),
    );
    if !settings.disaggregated {
        return caveat;
    }
    let transfer = engine.handoff.tokens_per_second.get();
    format!(
        "{caveat}\n\
         Prompts computed beside answers delay them; answers do not delay each other, as they do on GPUs.\n\
         A prompt goes from one engine to another at {} tokens/s.",
        report::grouped(transfer.into())
    )
}

fn complain(outcomes: &[Outcome], requests: u64) -> io::Result<()> {
    let complaints: Vec<String> = outcomes
        .iter()
        .filter(|outcome| outcome.tally.failed() > 0)
        .map(|outcome| {
            let (name, tally) = (outcome.name, &outcome.tally);
            let (failed, unsent) = (tally.failed(), requests - tally.requests());
            let reasons = tally.reasons();
            format!("{name}: {failed} of {requests} requests failed, {unsent} that were to follow were not sent: {reasons}")
        })
        .collect();
    if complaints.is_empty() {
        Ok(())
    } else {
        Err(io::Error::other(complaints.join("\n")))
    }
}

fn invitation(settings: &Settings, stage: &Stage) -> String {
    let (api, admin) = (stage.router().api_address(), stage.router().admin_address());
    if settings.disaggregated {
        return format!(
            "\nThe router over prefill and decode engines is still running. Ask it something long, and see in\n\
             x-warmroute-decision which two engines answered; ask again, and one has it all:\n\n\
             \x20 curl -i http://{api}/v1/chat/completions \\\n\
             \x20   -H 'content-type: application/json' -H 'x-warmroute-decision: 1' \\\n\
             \x20   -d '{{\"model\":\"{MODEL}\",\"messages\":[{{\"role\":\"user\",\"content\":\"'\"$(seq -s ' ' 999)\"'\"}}]}}'\n\n\
             What it knows: http://{admin}/fleet and http://{admin}/metrics\n\
             Ctrl-C to stop."
        );
    }
    format!(
        "\nThe cache_aware router is still running. Ask it twice, and see in\n\
         x-warmroute-decision why it chose an engine:\n\n\
         \x20 curl -i http://{api}/v1/chat/completions \\\n\
         \x20   -H 'content-type: application/json' -H 'x-warmroute-decision: 1' \\\n\
         \x20   -d '{{\"model\":\"{MODEL}\",\"messages\":[{{\"role\":\"user\",\"content\":\"{QUESTION}\"}}]}}'\n\n\
         What it knows: http://{admin}/fleet and http://{admin}/metrics\n\
         Ctrl-C to stop."
    )
}

fn say(text: &str) -> io::Result<()> {
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
            stage: stage::Settings {
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
    fn a_fleet_of_two_roles_is_shown_with_other_conversations_unless_they_are_named() {
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
                settings.stage.cache_blocks.get(),
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
    async fn prompts_are_handed_over_where_there_are_two_roles_and_answered_as_ever() {
        let settings = settings(true);
        let stage = Stage::start(&settings.stage, Cast::Split, Ports::Free)
            .await
            .unwrap();
        let tally = play(&settings.workload, &stage, |_| {}).await;
        assert_eq!(tally.failed(), 0, "{}", tally.reasons());
        assert_eq!(tally.requests(), settings.workload.requests());
        // The first of each conversation at least: nobody holds its system prompt yet.
        assert!(stage.handed_over() >= 5, "{}", stage.handed_over());
        stage.stop().await;
    }

    #[tokio::test]
    async fn cache_aware_finds_more_in_caches_than_round_robin() {
        let settings = settings(false);
        let mut shares = Vec::new();
        for policy in [Policy::RoundRobin, Policy::CacheAware] {
            let stage = Stage::start(&settings.stage, Cast::Combined(policy), Ports::Free)
                .await
                .unwrap();
            let tally = play(&settings.workload, &stage, |_| {}).await;
            assert_eq!(tally.failed(), 0, "{}", tally.reasons());
            assert_eq!(tally.requests(), settings.workload.requests());
            let served: u64 = stage.requests_per_worker().iter().sum();
            assert_eq!(served, settings.workload.requests());
            shares.push(tally.cached_share());
            stage.stop().await;
        }
        assert!(shares[1] > shares[0], "{shares:?}");
    }
}
