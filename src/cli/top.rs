//! `warmroute top`: a router in a terminal, from the pages of its admin listener. Numbers are those of `/fleet` and
//! `/metrics`, read once an interval; rates and percentiles are of the last samples.

mod admin;
#[cfg(feature = "top")]
mod decisions;
mod figures;
mod plain;
#[cfg(feature = "top")]
mod screen;
mod state;
#[cfg(feature = "top")]
mod tail;
#[cfg(feature = "top")]
mod view;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use self::figures::Samples;
use self::state::State;
use super::admin_client::{AdminAccess, AdminClient, LOCAL};
use crate::units::parse_duration;

/// Show a router's fleet, rates and latencies in the terminal, from its admin listener.
#[derive(Args)]
pub(super) struct Top {
    /// The admin listener.
    #[arg(long, value_name = "URL", default_value = LOCAL)]
    url: String,
    #[command(flatten)]
    access: AdminAccess,
    /// Time between two looks at the router, at least 250ms.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// Print one table and end, as if the output were no terminal. Rates are those of one interval.
    #[arg(long)]
    once: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    if interval >= Duration::from_millis(250) {
        Ok(interval)
    } else {
        Err("expected at least `250ms`".to_owned())
    }
}

impl Top {
    pub(super) async fn run(self) -> ExitCode {
        let done = if self.once || !io::stdout().is_terminal() {
            self.print().await
        } else {
            self.show().await
        };
        match done {
            Ok(()) => ExitCode::SUCCESS,
            Err(problem) => {
                let _ = writeln!(io::stderr(), "{problem}");
                ExitCode::FAILURE
            }
        }
    }

    fn client(&self) -> Result<AdminClient, String> {
        let token = self.access.token()?;
        AdminClient::new(Some(&self.url), None, token.as_ref(), &self.access.tls)
    }

    /// Two samples, so that there are rates.
    async fn print(&self) -> Result<(), String> {
        let client = self.client()?;
        let mut samples = Samples::default();
        samples.add(admin::sample(&client).await?);
        tokio::time::sleep(self.interval).await;
        samples.add(admin::sample(&client).await?);
        let text = plain::table(&samples, &State::default());
        // The reader of the output may want no more of it.
        let _ = io::stdout().write_all(text.as_bytes());
        Ok(())
    }

    #[cfg(feature = "top")]
    async fn show(&self) -> Result<(), String> {
        screen::run(self.client()?, self.interval).await
    }

    #[cfg(not(feature = "top"))]
    async fn show(&self) -> Result<(), String> {
        Err(
            "warmroute top: this build has no screen: it was made without the feature `top`; build from source with \
             `make dist` or `cargo build --release --features top`, or print one table with --once"
                .to_owned(),
        )
    }
}
