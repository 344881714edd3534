//! `warmroute batch`: a file of requests through a router's Batch API, for those who have no client of it.

mod api_access;
mod api_client;
mod batch_answer;
mod begun_run;
mod fetch;
mod file_form;
mod input;
mod line_rate;
mod patience;
mod run;
mod step_progress;
mod steps;
mod text;

use std::io::{self, Write};
use std::process::ExitCode;

use bytes::Bytes;
use clap::{Args, Subcommand};

use self::api_access::ApiAccess;
use self::batch_answer::BatchAnswer;
use self::run::RunBatch;

/// Run a file of requests as a batch, and look after it.
#[derive(Subcommand)]
pub(super) enum BatchCommand {
    Run(RunBatch),
    /// Print how far a batch is. Exit code 1: the router cannot be asked, or does not know it.
    Status {
        #[command(flatten)]
        batch: NamedBatch,
        /// The JSON that the router answers.
        #[arg(long)]
        json: bool,
    },
    /// Cancel a batch. What is done of it is kept, in its output file.
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
            Self::Status { batch, json } => batch.status(json).await,
            Self::Cancel(batch) => batch.cancel().await,
        };
        match shown {
            Ok(text) => {
                // The reader of the output may want no more of it.
                let _ = io::stdout().write_all(&text);
                ExitCode::SUCCESS
            }
            Err(problem) => {
                eprintln!("{problem}");
                ExitCode::FAILURE
            }
        }
    }
}

impl NamedBatch {
    async fn status(&self, json: bool) -> Result<Vec<u8>, String> {
        let client = self.access.client()?;
        let path = format!("/v1/batches/{}", self.id);
        let page = client.get_page(&path).await;
        let page = page.map_err(|error| error.to_string())?;
        if json {
            return Ok([&page[..], b"\n"].concat());
        }
        let batch: BatchAnswer = client
            .parse("GET", &path, &page)
            .map_err(|error| error.to_string())?;
        Ok(text::status(&batch).into_bytes())
    }

    async fn cancel(&self) -> Result<Vec<u8>, String> {
        let client = self.access.client()?;
        let path = format!("/v1/batches/{}/cancel", self.id);
        let answer: Result<BatchAnswer, _> = client.post(&path, Bytes::new()).await;
        let batch = answer.map_err(|error| error.to_string())?;
        Ok(text::status(&batch).into_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_no_characters_that_a_path_would_read_otherwise() {
        for id in ["batch_0123", "msgbatch-1"] {
            assert_eq!(batch_id(id).as_deref(), Ok(id));
        }
        for wrong in ["", "batch/../files", "batch 1", "batch_1?x", "bätch"] {
            assert!(batch_id(wrong).is_err(), "{wrong}");
        }
    }
}
