//! What an engine says to a background response: asked for until one takes it, and heard in pieces that
//! are worth storing.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::StatusCode;
use tokio::time::sleep;

use super::Runner;
use crate::openai::error::ApiError;
use crate::responses::background::stored_request::StoredRequest;
use crate::responses::request::{CreateRequest, Truncation};
use crate::responses::{RequestContext, engine_body, engine_error, engine_input};
use crate::{http, observe};

/// Between two asks for a worker, the first and the longest.
const WORKER_PAUSE: Duration = Duration::from_millis(250);
const WORKER_PAUSE_MAX: Duration = Duration::from_secs(5);
/// Of an engine's words that are gathered.
const GATHERED_MAX: usize = 64 << 10;
/// What an engine may still say after its last event, and for how long.
const REST_BYTES_MAX: usize = 16 << 10;
const REST: Duration = Duration::from_secs(1);

impl Runner<'_> {
    /// An engine's answer, waited for while there is none to be had.
    pub(super) async fn answered(
        &self,
        create: &CreateRequest<'_>,
        kept: &StoredRequest,
        id: &str,
        context: &RequestContext<'_>,
    ) -> Result<hyper::Response<http::Body>, ApiError> {
        let settings = &self.responses.background.settings;
        let limit = Duration::from_millis(settings.queue_max_ms);
        let mut input = kept.input().to_vec();
        let mut pause = WORKER_PAUSE;
        loop {
            let body = engine_body::streamed_body(create, &input, id, kept.salt.as_deref());
            let error = match self.responses.ask_response(context, body).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            if error.code == engine_error::TOO_LONG && create.truncation == Truncation::Auto {
                input = engine_input::shortened(&input).ok_or(error)?;
                continue;
            }
            let may_help = matches!(
                error.status,
                StatusCode::TOO_MANY_REQUESTS
                    | StatusCode::BAD_GATEWAY
                    | StatusCode::SERVICE_UNAVAILABLE
                    | StatusCode::GATEWAY_TIMEOUT
            );
            let waited = observe::now().saturating_duration_since(context.begun);
            if !may_help || waited + pause > limit {
                return Err(error);
            }
            sleep(pause).await;
            pause = (pause * 2).min(WORKER_PAUSE_MAX);
        }
    }
}

/// An engine that speaks. Dropping it closes the connection, and the engine stops.
pub(super) struct EngineStream {
    engine: http::Body,
    gathered: Vec<u8>,
    has_begun: bool,
}

impl EngineStream {
    pub(super) fn new(engine: http::Body) -> Self {
        Self {
            engine,
            gathered: Vec::new(),
            has_begun: false,
        }
    }

    /// Gathers what comes within `flush` of the next word; the first words are not waited for. True if
    /// there is no more.
    pub(super) async fn hear(&mut self, flush: Duration) -> bool {
        let mut due = None;
        loop {
            let is_due = async {
                match due {
                    None => std::future::pending().await,
                    Some(due) => tokio::time::sleep_until(due).await,
                }
            };
            tokio::select! {
                biased;
                () = is_due => return false,
                frame = self.engine.frame() => match frame {
                    Some(Ok(frame)) => {
                        self.gathered.extend_from_slice(&frame.into_data().unwrap_or_default());
                        if !std::mem::replace(&mut self.has_begun, true) || self.gathered.len() >= GATHERED_MAX {
                            return false;
                        }
                        let now = tokio::time::Instant::from_std(observe::now());
                        due.get_or_insert(now + flush);
                    }
                    Some(Err(_)) | None => return true,
                },
            }
        }
    }

    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.gathered)
    }

    /// Hears it out, for a while: else it would look to the engine as if it was left.
    pub(super) async fn rest(mut self) {
        let heard = async {
            let mut bytes = 0;
            while let Some(Ok(frame)) = self.engine.frame().await {
                bytes += frame.into_data().map_or(0, |data| data.len());
                if bytes > REST_BYTES_MAX {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(REST, heard).await;
    }
}
