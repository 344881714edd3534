//! The stream of the dashboard's events, for its decisions. It is open only while they are shown: the router then samples
//! more of them, and counts a viewer.

use std::time::Duration;

use http_body_util::BodyExt;

use crate::cli::admin_client::AdminClient;
use crate::http::client::EngineBody;
use crate::http::sse::{Decoder, Event};

/// The first event has every worker, model and rank of the fleet.
const MAX_EVENT_BYTES: usize = 64 << 20;
/// Wait before the stream is opened again.
const RETRY: Duration = Duration::from_secs(2);
const PATH: &str = "/dashboard/events";

#[derive(Default)]
pub(super) struct Tail {
    stream: Option<(EngineBody, Decoder)>,
    has_failed: bool,
}

impl Tail {
    /// Opens the stream if it is not open, and resolves with its next events.
    pub(super) async fn next(mut self, client: &AdminClient) -> (Self, Result<Vec<Event>, String>) {
        let read = self.read(client).await;
        self.has_failed = read.is_err();
        if self.has_failed {
            self.stream = None;
        }
        (self, read)
    }

    async fn read(&mut self, client: &AdminClient) -> Result<Vec<Event>, String> {
        let failed = |why: &dyn std::fmt::Display| format!("{}{PATH}: {why}", client.base);
        let (body, decoder) = match &mut self.stream {
            Some(stream) => stream,
            None => {
                if self.has_failed {
                    tokio::time::sleep(RETRY).await;
                }
                let body = client.open(PATH).await?;
                let decoder = Decoder::bounded(MAX_EVENT_BYTES);
                self.stream.insert((body, decoder))
            }
        };
        let mut events = Vec::new();
        while events.is_empty() {
            match body.frame().await {
                Some(Ok(frame)) => {
                    let data = frame.data_ref().map_or(&[][..], |data| &data[..]);
                    decoder.push(data, &mut events);
                }
                Some(Err(error)) => return Err(failed(&error)),
                None => return Err(failed(&"the router has ended the stream")),
            }
            if decoder.overflowed {
                return Err(failed(&"an event is larger than 64 MiB"));
            }
        }
        Ok(events)
    }
}
