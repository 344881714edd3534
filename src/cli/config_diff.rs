//! `warmroute config diff`: what a file would change. Secrets are compared where both sides are known, and never shown.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::admin_client::{AdminAccess, AdminClient};
use crate::admin::RunningConfig;
use crate::config::diff::Comparable;
use crate::config::{Config, Effect};

/// The exit codes, which are those of `diff` and `kubectl diff`.
const SAME: u8 = 0;
const DIFFERS: u8 = 1;
const TROUBLE: u8 = 2;

/// Show what a file would change, and what of it a running router takes over without a restart. Exit code 0: nothing;
/// 1: something; 2: a file is wrong, or the router cannot be asked.
#[derive(Args)]
pub(super) struct ConfigDiff {
    /// The new configuration.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The configuration that it is compared with; without it, that of the running router.
    #[arg(long, value_name = "OTHER", conflicts_with = "url")]
    with: Option<PathBuf>,
    /// The admin listener of the running router; without it, `admin.listen` of FILE. Without --token, the token is one of
    /// FILE's `admin`, too.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    #[command(flatten)]
    access: AdminAccess,
}

impl ConfigDiff {
    pub(super) async fn run(self) -> ExitCode {
        let (text, differs) = match self.compare().await {
            Ok(compared) => compared,
            Err(problem) => {
                let _ = writeln!(io::stderr(), "{}", problem.trim_end());
                return ExitCode::from(TROUBLE);
            }
        };
        // The reader of the output may want no more of it.
        let _ = io::stdout().write_all(text.as_bytes());
        ExitCode::from(if differs { DIFFERS } else { SAME })
    }

    /// What is printed, and whether there is a difference.
    async fn compare(&self) -> Result<(String, bool), String> {
        let new = Config::load(&self.file).map_err(|problems| problems.to_string())?;
        let comparable = Comparable::of(&new);
        let changes = match &self.with {
            Some(other) => {
                let old = Config::load(other).map_err(|problems| problems.to_string())?;
                Comparable::of(&old).changes(&comparable)
            }
            None => {
                let running = self.running(&new).await?;
                running.changes(&comparable.without_digests())
            }
        };
        let mut text = String::new();
        for change in &changes {
            text += &format!("{change}\n");
        }
        let restarts = changes
            .iter()
            .filter(|change| change.effect == Effect::Restart);
        text += &match (changes.len(), restarts.count()) {
            (0, _) => "no changes".to_owned(),
            (count, 0) => format!("{count} to change, with a reload"),
            (count, restarts) => format!(
                "{count} to change; {restarts} of them need a restart, so that a reload refuses the file as a whole"
            ),
        };
        text += match self.with {
            Some(_) => "\n",
            None => " (secrets of the running router are not compared)\n",
        };
        Ok((text, !changes.is_empty()))
    }

    async fn running(&self, new: &Config) -> Result<Comparable, String> {
        let token = self.access.token()?;
        let client = AdminClient::new(
            self.url.as_deref(),
            Some(new),
            token.as_ref(),
            &self.access.tls,
        )?;
        let hint = "name the router's admin listener with --url (and --ca), or compare with a file by --with";
        let page: Result<RunningConfig, String> = client.read("/config").await;
        let page = page.map_err(|error| format!("{error}; {hint}"))?;
        Ok(Comparable::from_shown(page.config))
    }
}
