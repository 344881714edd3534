//! `warmroute doctor`: what a running fleet leaves on the table, with the line to change.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use super::admin_client::{AdminAccess, AdminClient};
use crate::admin::{ResponsesReport, RunningConfig};
use crate::app::doctor::{self, Finding, Observed};
use crate::config::Config;
use crate::observe::metrics_text::Families;

const FINDINGS: u8 = 1;
const TROUBLE: u8 = 2;
const BROKEN: u8 = 3;
/// Until the second look: by then a health check has asked a worker again, and most requests of a burst have ended.
const SECOND_LOOK: Duration = Duration::from_secs(3);

/// Say what is broken in a running fleet and what it leaves on the table, from its own pages and metrics: the worst first,
/// each with the line to change. Exit code 0: nothing; 1: something to gain; 2: the router cannot be asked; 3: something is broken.
#[derive(Args)]
pub(super) struct Doctor {
    /// The router's admin listener; without it `admin.listen` of --config, or else http://127.0.0.1:9090.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// The router's configuration, for the address and the token of the admin listener.
    #[arg(short, long, value_name = "FILE", env = "WARMROUTE_CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    access: AdminAccess,
    /// One JSON list.
    #[arg(long)]
    json: bool,
}

impl Doctor {
    pub(super) async fn run(self) -> ExitCode {
        let (observed, findings) = match self.examine().await {
            Ok(examined) => examined,
            Err(problem) => {
                let _ = writeln!(io::stderr(), "{}", problem.trim_end());
                return ExitCode::from(TROUBLE);
            }
        };
        let text = if self.json {
            // Texts and numbers always serialize.
            serde_json::to_string_pretty(&findings).unwrap_or_default() + "\n"
        } else {
            doctor::text(&findings, &observed)
        };
        // The reader of the output may want no more of it.
        let _ = io::stdout().write_all(text.as_bytes());
        if findings.iter().any(|finding| finding.is_broken) {
            ExitCode::from(BROKEN)
        } else if findings.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::from(FINDINGS)
        }
    }

    /// What the router shows, and what is found in it. What may be so for a moment only is looked at twice.
    async fn examine(&self) -> Result<(Observed, Vec<Finding>), String> {
        let client = self.client()?;
        let observed = observe(&client).await?;
        let findings = doctor::examine(&observed);
        if !doctor::may_pass(&findings) {
            return Ok((observed, findings));
        }
        tokio::time::sleep(SECOND_LOOK).await;
        let later = observe(&client).await?;
        let findings = doctor::lasting(&findings, doctor::examine(&later));
        Ok((later, findings))
    }

    /// Made once for both looks: a configuration or a token from a pipe can be read once.
    fn client(&self) -> Result<AdminClient, String> {
        let config = self.config.as_deref().map(Config::load).transpose();
        let config = config.map_err(|problems| problems.to_string())?;
        let token = self.access.token()?;
        AdminClient::new(
            self.url.as_deref(),
            config.as_ref(),
            token.as_ref(),
            &self.access.tls,
        )
    }
}

async fn observe(client: &AdminClient) -> Result<Observed, String> {
    Ok(Observed {
        fleet: client.read("/fleet").await?,
        kv: client.read("/kv").await?,
        config: client.read::<RunningConfig>("/config").await?.config,
        store: client.read::<ResponsesReport>("/responses").await?.health,
        metrics: {
            let text = client.get("/metrics").await?;
            Families::parse(&String::from_utf8_lossy(&text), |_| true)
        },
    })
}
