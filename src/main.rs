//! The command line: arguments -> a router, a check, a demo, a replay, or one pretend engine.

use std::io;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use clap::Subcommand;
use tokio::runtime;
use warmroute::app::App;
use warmroute::config::Config;
use warmroute::config::document;
use warmroute::http::drain::stop_signal;
use warmroute::observe;
use warmroute::sim;

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
    },
    /// Start pretend engines and a router, send them conversations, and compare two policies.
    Demo(sim::demo::Settings),
    /// Run one pretend engine, which speaks vLLM's HTTP and keeps a prefix cache.
    Sim(sim::worker::Settings),
    /// Replay a trace of requests in virtual time, and compare policies.
    Replay(sim::replay::Settings),
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    let done = match arguments.command {
        Command::Serve { config } => with_config(&config, |config| {
            observe::start_logging(&config.log);
            run(serve(&config))
        }),
        Command::Check { config } => with_config(&config, |config| {
            let yaml = document::to_yaml(&config).map_err(io::Error::other)?;
            io::stdout().write_all(yaml.as_bytes())
        }),
        Command::Demo(settings) => run(sim::demo::run(settings)).map(|()| ExitCode::SUCCESS),
        Command::Sim(settings) => run(pretend(settings)).map(|()| ExitCode::SUCCESS),
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
        () = app.drain_asked() => {}
    }
    app.drain().await;
    Ok(())
}

async fn pretend(settings: sim::worker::Settings) -> io::Result<()> {
    let worker = sim::worker::bind(settings).await?;
    writeln!(io::stdout(), "listening on http://{}", worker.addr())?;
    worker
        .run(async {
            let _ = stop_signal().await;
        })
        .await;
    Ok(())
}
