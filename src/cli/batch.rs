//! `warmroute batch`: a file of requests through a router's Batch API, for those who have no client of it.

mod api;
mod batch_answer;
mod fetch;
mod input;
mod places;
mod progress;
mod run;
mod saved_run;
mod sent_body;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use hyper::Method;
use indicatif::ProgressBar;
use serde_json::Value;

use self::api::ApiAccess;
use self::progress::write_line;
use self::run::RunBatch;
use self::sent_body::SentBody;

/// Run a file of requests as a batch, and look after it.
#[derive(Subcommand)]
pub(super) enum BatchCommand {
    Run(RunBatch),
    /// Print a batch as the router's API has it. Exit code 1: the router cannot be asked, or does not know it.
    Status(NamedBatch),
    /// Cancel a batch, and print it. What is done of it is kept, in its output file.
    Cancel(NamedBatch),
}

/// A batch of a router.
#[derive(Args)]
pub(super) struct NamedBatch {
    /// The batch's id, such as batch_0123.
    #[arg(value_name = "BATCH", value_parser = batch_id)]
    id: String,
    #[command(flatten)]
    access: ApiAccess,
}

/// An id that may stand in a path as it is.
fn batch_id(text: &str) -> Result<String, String> {
    let is_of_id = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    if text.is_empty() || !text.bytes().all(is_of_id) {
        return Err("expected the id of a batch, such as batch_0123".to_owned());
    }
    Ok(text.to_owned())
}

impl BatchCommand {
    pub(super) async fn run(self) -> ExitCode {
        let shown = match self {
            Self::Run(run) => return run.run().await,
            Self::Status(batch) => batch.ask(Method::GET, "").await,
            Self::Cancel(batch) => batch.ask(Method::POST, "/cancel").await,
        };
        match shown {
            Ok(batch) => {
                // The reader of the output may want no more of it.
                let _ = writeln!(io::stdout(), "{batch:#}");
                ExitCode::SUCCESS
            }
            Err(problem) => {
                write_line(&problem);
                ExitCode::FAILURE
            }
        }
    }
}

impl NamedBatch {
    async fn ask(&self, method: Method, action: &str) -> Result<Value, String> {
        let path = format!("/v1/batches/{}{action}", self.id);
        let client = self.access.client()?;
        let bar = ProgressBar::hidden();
        let asked = client.ask(method, &path, SentBody::empty(), &bar).await;
        asked.map_err(|error| error.to_string())
    }
}
