//! An engine's answer to a background run: waits for a free worker, then reads in pieces worth storing.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper::{Response, StatusCode};
use tokio::time::sleep;

use crate::openai::error::ApiError;
use crate::responses::background::stored_request::StoredRequest;
use crate::responses::client_request::RequestContext;
use crate::responses::request::{CreateRequest, Truncation};
use crate::responses::service::Responses;
use crate::responses::{engine_body, engine_error, truncation};
use crate::{http, observe};

/// The first and the longest pause between attempts to find a worker.
const WORKER_PAUSE: Duration = Duration::from_millis(250);
const WORKER_PAUSE_MAX: Duration = Duration::from_secs(5);
/// A piece is stored when it reaches this size.
const PIECE_BYTES_MAX: usize = 64 << 10;
/// What an engine may send after its last event, and for how long.
const TRAILER_BYTES_MAX: usize = 16 << 10;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

impl Responses {
    /// An engine's answer. Retries while every worker is busy or unavailable.
    pub(super) async fn wait_for_engine(
        &self,
        create: &CreateRequest<'_>,
        request: &StoredRequest,
        id: &str,
        context: &RequestContext<'_>,
    ) -> Result<Response<http::Body>, ApiError> {
        let settings = &self.background.settings;
        let limit = settings.queue_timeout;
        let mut input = request.input().to_vec();
        let mut pause = WORKER_PAUSE;
        loop {
            let body = engine_body::streamed_body(create, &input, id, request.salt.as_deref());
            let error = match self.ask_response(context, body).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let may_shorten = create.truncation == Truncation::Auto && context.resumed.is_none();
            if error.code == engine_error::TOO_LONG && may_shorten {
                input = truncation::shortened(&input).ok_or(error)?;
                continue;
            }
            let may_help = matches!(
                error.status,
                StatusCode::TOO_MANY_REQUESTS
                    | StatusCode::BAD_GATEWAY
                    | StatusCode::SERVICE_UNAVAILABLE
                    | StatusCode::GATEWAY_TIMEOUT
            );
            let waited = observe::now().saturating_duration_since(context.started);
            if !may_help || waited + pause > limit {
                return Err(error);
            }
            sleep(pause).await;
            pause = (pause * 2).min(WORKER_PAUSE_MAX);
        }
    }
}

/// An engine's stream. Dropping it closes the connection, and the engine stops generating.
pub(super) struct EngineStream {
    engine: http::Body,
    piece: Vec<u8>,
    has_started: bool,
}

impl EngineStream {
    pub(super) fn new(engine: http::Body) -> Self {
        Self {
            engine,
            piece: Vec::new(),
            has_started: false,
        }
    }

    /// Collects what arrives within `flush` of the first bytes; the very first bytes of the stream are
    /// returned at once. True at the end of the stream.
    pub(super) async fn read(&mut self, flush: Duration) -> bool {
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
                        self.piece.extend_from_slice(&frame.into_data().unwrap_or_default());
                        if !std::mem::replace(&mut self.has_started, true) || self.piece.len() >= PIECE_BYTES_MAX {
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
        std::mem::take(&mut self.piece)
    }

    /// Reads the rest for a while; otherwise the engine would see a disconnected client.
    pub(super) async fn drain(mut self) {
        let rest = async {
            let mut bytes = 0;
            while let Some(Ok(frame)) = self.engine.frame().await {
                bytes += frame.into_data().map_or(0, |data| data.len());
                if bytes > TRAILER_BYTES_MAX {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, rest).await;
    }
}
