//! The command line: arguments -> a router, a check, a demo, a replay, one simulated engine, or a tap.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::runtime;
use warmroute::app::{App, check, kv_tap, metrics_reference, process_setup};
use warmroute::config::{Config, document};
use warmroute::http::drain::stop_signal;
use warmroute::kv::zmq;
use warmroute::{bridge, observe, sim};

/// Codes of sysexits.h, which service managers know.
const USAGE: u8 = 64;
const BAD_CONFIGURATION: u8 = 78;

/// Routes each request to the LLM engine that is already warm for it.
#[derive(Parser)]
#[command(version, max_term_width = 100, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the router.
    Serve {
        /// The configuration; config.yaml in the source tree documents every key.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Print the configuration as it would be used, or everything that is wrong with it.
    Check {
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Ask every worker how it is, instead, and print what they say. Exit code 1 if something is wrong.
        #[arg(long)]
        live: bool,
        /// Also have prefill workers hand a short prompt over to decode workers, and compare the text with what
        /// those say alone.
        #[arg(long, requires = "live")]
        handoff: bool,
    },
    /// Compare two routing policies on simulated engines; needs no GPU and no configuration.
    Demo(sim::demo::Settings),
    Bridge(bridge::Settings),
    /// Run one simulated engine, which speaks vLLM's HTTP API and has a prefix cache.
    Sim(Box<sim::worker::Settings>),
    /// Replay a recorded request trace in virtual time and compare routing policies.
    Replay(Box<sim::replay::Settings>),
    /// Look at engines' KV events.
    #[command(subcommand)]
    Kv(Kv),
    /// Describe the metrics.
    #[command(subcommand)]
    Metrics(Metrics),
}

#[derive(Subcommand)]
enum Metrics {
    /// Print a Markdown page of every metric: type, labels, meaning.
    Reference,
}

#[derive(Subcommand)]
enum Kv {
    /// Print one engine's cache events as they come.
    Tap {
        /// Where it publishes, as tcp://HOST:PORT.
        #[arg(long, value_name = "ENDPOINT")]
        zmq: zmq::Endpoint,
        /// Where it can be asked for what it published before; that is shown first.
        #[arg(long, value_name = "ENDPOINT")]
        replay: Option<zmq::Endpoint>,
        /// What topics must begin with.
        #[arg(long, default_value = "")]
        topic: String,
        /// One JSON object a line.
        #[arg(long)]
        json: bool,
    },
}

fn main() -> ExitCode {
    process_setup::prepare();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    let done = match arguments.command {
        Command::Serve { config } => with_config(&config, |config| {
            let _flush = observe::start_logging(&config.log)?;
            run(serve(&config))
        }),
        Command::Check {
            config,
            live: false,
            handoff: _,
        } => with_config(&config, |config| {
            let yaml = document::to_yaml(&config).map_err(io::Error::other)?;
            io::stdout().write_all(yaml.as_bytes())
        }),
        Command::Check {
            config,
            live: true,
            handoff,
        } => {
            let mut is_good = false;
            let checked = with_config(&config, |config| {
                run(async {
                    is_good = check::run(&config, handoff, &mut io::stdout()).await?;
                    Ok(())
                })
            });
            match checked {
                Ok(ExitCode::SUCCESS) if !is_good => Ok(ExitCode::FAILURE),
                checked => checked,
            }
        }
        Command::Demo(settings) => run(sim::demo::run(settings)).map(|()| ExitCode::SUCCESS),
        Command::Bridge(settings) => match settings.targets() {
            Err(problem) => {
                eprintln!("warmroute bridge: {problem}; see --help");
                Ok(ExitCode::from(USAGE))
            }
            Ok(_) => {
                let logging = observe::start_logging(&observe::Settings::default());
                logging
                    .and_then(|_flush| run(bridge::run(settings)))
                    .map(|()| ExitCode::SUCCESS)
            }
        },
        Command::Sim(settings) => run(simulate(*settings)).map(|()| ExitCode::SUCCESS),
        Command::Kv(Kv::Tap {
            zmq,
            replay,
            topic,
            json,
        }) => {
            let target = zmq::Target {
                endpoint: zmq,
                topic,
                replay,
            };
            run(tap(target, json)).map(|()| ExitCode::SUCCESS)
        }
        Command::Metrics(Metrics::Reference) => run(async {
            let page = metrics_reference::page().await?;
            io::stdout().write_all(page.as_bytes())
        })
        .map(|()| ExitCode::SUCCESS),
        Command::Replay(settings) => match &settings.config {
            Some(config) => with_config(config, |config| sim::replay::run(&settings, &config)),
            None => sim::replay::run(&settings, &Config::default()).map(|()| ExitCode::SUCCESS),
        },
    };
    done.unwrap_or_else(|error| {
        eprintln!("warmroute: {error}");
        ExitCode::FAILURE
    })
}

/// Reads a configuration and goes on with it, or prints what is wrong.
fn with_config(
    path: &std::path::Path,
    then: impl FnOnce(Config) -> io::Result<()>,
) -> io::Result<ExitCode> {
    match Config::load(path) {
        Ok(config) => then(config).map(|()| ExitCode::SUCCESS),
        Err(problems) => {
            eprintln!("{}", problems.to_string().trim_end());
            Ok(ExitCode::from(BAD_CONFIGURATION))
        }
    }
}

/// Connections are carried by threads of their own; this one accepts, probes, and waits.
fn run(task: impl Future<Output = io::Result<()>>) -> io::Result<()> {
    runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(task)
}

async fn serve(config: &Config) -> io::Result<()> {
    let app = App::bind(config).await?;
    tokio::select! {
        stopped = stop_signal() => stopped?,
        () = app.drain_requested() => {}
    }
    app.drain().await;
    Ok(())
}

async fn simulate(settings: sim::worker::Settings) -> io::Result<()> {
    let worker = sim::worker::bind(settings).await?;
    let mut stdout = io::stdout();
    writeln!(stdout, "listening on http://{}", worker.addr())?;
    for (rank, bound) in worker.handle().kv_events().iter().enumerate() {
        write!(
            stdout,
            "cache events of rank {rank} on tcp://{}",
            bound.events
        )?;
        match bound.replay {
            Some(replay) => writeln!(stdout, ", replays on tcp://{replay}")?,
            None => writeln!(stdout)?,
        }
    }
    if let Some(bootstrap) = worker.handle().bootstrap() {
        writeln!(stdout, "bootstrap on http://{bootstrap}")?;
    }
    worker
        .run(async {
            let _ = stop_signal().await;
        })
        .await;
    Ok(())
}

async fn tap(target: zmq::Target, json: bool) -> io::Result<()> {
    tokio::select! {
        ended = kv_tap::run(target, json) => ended,
        stopped = stop_signal() => stopped,
    }
}
