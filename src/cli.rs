//! The command line: arguments -> a router, a check, a batch, a demo, a replay, one simulated engine, or a tap. It is
//! part of the library because whatever first polls a future compiles it: from `main.rs`, all of the router was compiled
//! after everything else, on its own.

mod admin_client;
mod batch;
mod config_diff;
mod doctor;
mod tips;
mod top;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use sd_notify::NotifyState;
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};
use tracing::warn;

use self::batch::BatchCommand;
use self::config_diff::ConfigDiff;
use self::doctor::Doctor;
use self::tips::explained;
use self::top::Top;
use crate::app::{App, check, kv_tap, metrics_reference, process_setup, warnings};
use crate::config::reader::{self, Problems};
use crate::config::{Config, Flags, reference};
use crate::http::drain::{StopSignal, StopSignals, stop_signal};
use crate::http::io_threads::OffloadThread;
use crate::kv::zmq;
use crate::{bridge, observe, sim};

/// Codes of sysexits.h, which service managers know.
const USAGE: u8 = 64;
const BAD_CONFIGURATION: u8 = 78;

/// A KV-cache-aware load balancer for LLM engines: each request goes to the worker with the longest cached prefix
/// of its prompt, unless that worker is too busy.
#[derive(Parser)]
#[command(version, max_term_width = 100, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the router.
    Serve(Configuration),
    /// Print the configuration with all its defaults, or everything that is wrong with it. Warnings and the verdict go
    /// to standard error.
    Check {
        #[command(flatten)]
        configuration: Configuration,
        /// Note each file that is missing (secrets, certificates, keys, tokenizers, folders of logs) instead of refusing
        /// the configuration, as on a laptop or in CI. All else is checked.
        #[arg(long, conflicts_with = "live")]
        allow_missing_files: bool,
        /// Ask every worker for its health and models instead, and print the answers. Exit code 1 if something is
        /// wrong.
        #[arg(long)]
        live: bool,
        /// Also transfer the KV cache of a short prompt from each prefill worker to a decode worker, and compare the
        /// text with what the decode worker generates alone.
        #[arg(long, requires = "live")]
        transfer: bool,
    },
    Doctor(Doctor),
    /// Print the reference or the JSON Schema of the configuration, or compare configurations.
    #[command(subcommand)]
    Config(ConfigCommand),
    Top(Top),
    /// Run a file of requests that can wait as a batch, or look after one.
    #[command(subcommand)]
    Batch(BatchCommand),
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
    /// Print completions for a shell: `source <(warmroute completions bash)`.
    Completions {
        /// The shell that completes.
        shell: clap_complete::Shell,
    },
}

#[derive(Subcommand)]
enum Metrics {
    /// Print a Markdown page of every metric: type, labels, meaning.
    Reference,
}

const CONFIG_VARIABLE: &str = "WARMROUTE_CONFIG";

/// Where the configuration comes from: a file, flags, or both.
#[derive(Args)]
struct Configuration {
    /// The configuration, as --config.
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// The configuration, a YAML file; - reads standard input. `warmroute config reference` describes its keys.
    #[arg(short, long, value_name = "FILE", env = CONFIG_VARIABLE)]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags,
}

impl Configuration {
    fn load(self, allow_missing_files: bool) -> Result<Config, Problems> {
        let flags = Flags {
            allow_missing_files,
            ..self.flags
        };
        // An argument counts before the environment.
        let file = self.file.or(self.config);
        Config::load_with(file.as_deref(), flags)
    }

    /// Whether the arguments name two files. One of the environment gives way to an argument.
    fn has_two_files(&self) -> bool {
        let of_environment = std::env::var_os(CONFIG_VARIABLE).map(PathBuf::from);
        self.file.is_some() && self.config.is_some() && self.config != of_environment
    }

    fn has_workers(&self) -> bool {
        self.file.is_some() || self.config.is_some() || !self.flags.workers.is_empty()
    }
}

impl Arguments {
    /// Refuses a command that neither a file nor a flag gives workers, and one with two files.
    fn check(self) -> Result<Self, clap::Error> {
        let (name, configuration) = match &self.command {
            Command::Serve(configuration) => ("serve", configuration),
            Command::Check { configuration, .. } => ("check", configuration),
            _ => return Ok(self),
        };
        let (kind, message) = if configuration.has_two_files() {
            let message = "give one configuration: either FILE or --config FILE";
            (ErrorKind::ArgumentConflict, message)
        } else if configuration.has_workers() {
            return Ok(self);
        } else {
            let message =
                "give a configuration FILE (or --config, or WARMROUTE_CONFIG), or --worker URL";
            (ErrorKind::MissingRequiredArgument, message)
        };
        let mut command = Self::command();
        command.build();
        let command = command.find_subcommand_mut(name).expect("is one of ours");
        Err(command.error(kind, message))
    }
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Print every key with its type, its default and what it does, as Markdown.
    Reference {
        /// Only the keys whose paths contain this, such as `batches.s3`.
        key: Option<String>,
    },
    /// Print the JSON Schema, by which editors complete and check configuration files.
    Schema,
    Diff(ConfigDiff),
}

#[derive(Subcommand)]
enum Kv {
    /// Print one engine's KV events as they come.
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

/// Does what the arguments of this process say.
pub fn run() -> ExitCode {
    process_setup::prepare();
    let given: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let parsed = Arguments::try_parse().map_err(|error| explained(error, &given));
    let arguments = match parsed.and_then(Arguments::check) {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    let prints = !matches!(arguments.command, Command::Serve(_) | Command::Bridge(_));
    let done = match arguments.command {
        Command::Serve(configuration) => block_on(async {
            // First of all: from then on SIGHUP does not end the process, also while it starts and drains. Nor is another
            // signal lost: a container's first process gets only those that it listens for.
            let _hangup = signal(SignalKind::hangup())?;
            let mut signals = StopSignals::listen()?;
            let Some(configuration) = load(configuration, &mut signals).await? else {
                return Ok(ExitCode::SUCCESS);
            };
            let starts = |config: &Config| observe::start_logging(&config.log);
            let _flush = configuration.as_ref().ok().map(starts).transpose()?;
            match configuration {
                Ok(config) => serve(&config, signals).await.map(|()| ExitCode::SUCCESS),
                Err(problems) => Ok(refuse(&problems)),
            }
        }),
        Command::Check {
            configuration,
            allow_missing_files,
            live: false,
            transfer: _,
        } => with_config(configuration.load(allow_missing_files), |config| {
            report(&config)?;
            let yaml = reader::to_yaml(&config).map_err(io::Error::other)?;
            io::stdout().write_all(yaml.as_bytes())?;
            writeln!(io::stderr(), "{}", config.summary())?;
            Ok(ExitCode::SUCCESS)
        }),
        Command::Check {
            configuration,
            live: true,
            transfer,
            ..
        } => with_config(configuration.load(false), |config| {
            report(&config)?;
            let is_good = block_on(check::run(&config, transfer, &mut io::stdout()))?;
            Ok(if is_good {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }),
        Command::Doctor(doctor) => block_on(async { Ok(doctor.run().await) }),
        Command::Config(ConfigCommand::Reference { key: None }) => print(&reference::markdown()),
        Command::Config(ConfigCommand::Reference { key: Some(key) }) => {
            match reference::rows(&key) {
                Some(rows) => print(&rows),
                None => {
                    let _ = writeln!(io::stderr(), "warmroute: no key has `{key}` in its path");
                    Ok(ExitCode::FAILURE)
                }
            }
        }
        Command::Config(ConfigCommand::Schema) => print(&reference::schema()),
        Command::Config(ConfigCommand::Diff(diff)) => block_on(async { Ok(diff.run().await) }),
        Command::Top(top) => block_on(async { Ok(top.run().await) }),
        Command::Batch(command) => block_on(async { Ok(command.run().await) }),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "warmroute", &mut script);
            io::stdout().write_all(&script).map(|()| ExitCode::SUCCESS)
        }
        Command::Demo(settings) => block_on(sim::demo::run(settings)).map(|()| ExitCode::SUCCESS),
        Command::Bridge(settings) => match settings.targets() {
            Err(problem) => {
                let _ = writeln!(io::stderr(), "warmroute bridge: {problem}; see --help");
                Ok(ExitCode::from(USAGE))
            }
            Ok(_) => {
                let logging = observe::start_logging(&observe::Settings::default());
                logging
                    .and_then(|_flush| block_on(bridge::run(settings)))
                    .map(|()| ExitCode::SUCCESS)
            }
        },
        Command::Sim(settings) => block_on(simulate(*settings)).map(|()| ExitCode::SUCCESS),
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
            block_on(tap(target, json)).map(|()| ExitCode::SUCCESS)
        }
        Command::Metrics(Metrics::Reference) => block_on(async {
            let page = metrics_reference::page().await?;
            io::stdout().write_all(page.as_bytes())
        })
        .map(|()| ExitCode::SUCCESS),
        Command::Replay(settings) => match &settings.config {
            Some(path) => with_config(Config::load(path), |config| {
                sim::replay::run(&settings, &config)?;
                Ok(ExitCode::SUCCESS)
            }),
            None => sim::replay::run(&settings, &Config::default()).map(|()| ExitCode::SUCCESS),
        },
    };
    done.unwrap_or_else(|error| {
        // The reader of the output wants no more of it, as in `warmroute config schema | head`.
        if !(prints && error.kind() == io::ErrorKind::BrokenPipe) {
            let _ = writeln!(io::stderr(), "warmroute: {error}");
        }
        ExitCode::FAILURE
    })
}

/// Writes missing files, warnings, and which kinds of requests each model's tokenizer can tokenize to standard error, so
/// that standard output is the configuration.
fn report(config: &Config) -> io::Result<()> {
    for missing in &config.source.missing_files {
        writeln!(io::stderr(), "note: {missing}")?;
    }
    for warning in warnings::of(config) {
        writeln!(io::stderr(), "warning: {warning}")?;
    }
    for line in config.tokenizer_report() {
        writeln!(io::stderr(), "{line}")?;
    }
    Ok(())
}

/// Does something with a configuration, or prints what is wrong with it.
fn with_config(
    loaded: Result<Config, Problems>,
    then: impl FnOnce(Config) -> io::Result<ExitCode>,
) -> io::Result<ExitCode> {
    match loaded {
        Ok(config) => then(config),
        Err(problems) => Ok(refuse(&problems)),
    }
}

fn refuse(problems: &Problems) -> ExitCode {
    let _ = writeln!(io::stderr(), "{}", problems.to_string().trim_end());
    ExitCode::from(BAD_CONFIGURATION)
}

fn print(text: &str) -> io::Result<ExitCode> {
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Connections are carried by threads of their own; this one accepts, probes, and waits.
fn block_on<T>(task: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(task)
}

/// Reads a configuration, on a thread that nobody waits for: its file system may hang. `None` if it shall stop before.
async fn load(
    configuration: Configuration,
    signals: &mut StopSignals,
) -> io::Result<Option<Result<Config, Problems>>> {
    let thread = OffloadThread::start("config")?;
    tokio::select! {
        loaded = thread.run(move || configuration.load(false)) => match loaded {
            Some(loaded) => Ok(Some(loaded)),
            None => Err(io::Error::other("the configuration was not read to its end")),
        },
        _ = signals.next() => Ok(None),
    }
}

async fn serve(config: &Config, mut signals: StopSignals) -> io::Result<()> {
    let app = tokio::select! {
        app = App::bind(config) => app?,
        _ = signals.next() => return Ok(()),
    };
    tell_systemd(NotifyState::Ready);
    let mut failed = None;
    let is_interrupt = tokio::select! {
        signal = signals.next() => signal == StopSignal::Interrupt,
        () = app.drain_requested() => false,
        task = app.task_failed() => {
            failed = Some(task);
            false
        }
    };
    tell_systemd(NotifyState::Stopping);
    let again = async {
        signals.next().await;
    };
    app.announce_drain(is_interrupt, again).await;
    app.drain().await;
    match failed {
        // A service manager that restarts what fails starts the router again.
        Some(task) => {
            let message = format!("ended because its task `{task}` panicked");
            Err(io::Error::other(message))
        }
        None => Ok(()),
    }
}

/// Tells a service manager that started this process with `Type=notify`, and nobody else.
fn tell_systemd(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        warn!(%error, "cannot notify the service manager");
    }
}

async fn simulate(settings: sim::worker::Settings) -> io::Result<()> {
    let worker = sim::worker::bind(settings).await?;
    let mut stdout = io::stdout();
    writeln!(stdout, "listening on http://{}", worker.addr())?;
    for (rank, bound) in worker.handle().kv_events().iter().enumerate() {
        write!(stdout, "KV events of rank {rank} on tcp://{}", bound.events)?;
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
