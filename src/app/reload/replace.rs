//! A configuration that replaces the one that runs without a file, for programs that start a router themselves.

use std::io;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Outcome, Reloader, Request, Trigger};
use crate::app::App;
use crate::config::diff::Comparable;
use crate::config::{Config, Effect};

impl App {
    /// Uses another configuration from now on, as a reload of a file does. It must differ only in what a reload may
    /// change.
    pub async fn replace_config(&self, config: Config) -> io::Result<()> {
        let (sender, outcome) = oneshot::channel();
        let request = Request {
            config: Some(Box::new(config)),
            outcome: sender,
        };
        let draining = || io::Error::other("the router is draining");
        let sent = self.reload.requests.send(request).await;
        sent.map_err(|_| draining())?;
        match outcome.await.map_err(|_| draining())? {
            Outcome::Applied(_) | Outcome::Unchanged => Ok(()),
            Outcome::Refused(refused) => Err(io::Error::other(refused.problems().to_string())),
            Outcome::Failed(error) => Err(io::Error::other(error)),
            Outcome::NoFile => Err(io::Error::other("there is no file to read")),
        }
    }
}

impl Reloader {
    pub(super) async fn replace(&mut self, config: Config) -> Outcome {
        let changes = Comparable::of(&self.running).changes(&Comparable::of(&config));
        let mut restarts = changes
            .iter()
            .filter(|change| change.effect == Effect::Restart);
        let outcome = match restarts.next() {
            Some(change) => Outcome::Failed(format!("`{}` needs a restart: {change}", change.path)),
            None => self.apply(Arc::new(config), changes).await,
        };
        self.note(Trigger::Request, &outcome);
        outcome
    }
}
