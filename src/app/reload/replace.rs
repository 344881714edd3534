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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::TcpListener;

    use super::*;

    /// A relay has the tokenizers of its configuration.
    #[tokio::test]
    async fn no_task_keeps_the_relay_of_a_configuration_that_was_replaced() {
        let listen = async || TcpListener::bind("127.0.0.1:0").await.unwrap();
        let config = Config::default();
        let app = App::start(&config, listen().await, listen().await).unwrap();
        let first = Arc::downgrade(&app.api_server.load().relay);
        let mut next = config.clone();
        next.requests.decision_header = !config.requests.decision_header;
        app.replace_config(next).await.unwrap();
        for _ in 0..1_000 {
            if first.upgrade().is_none() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the first relay is still there");
    }
}
