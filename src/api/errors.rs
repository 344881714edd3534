//! Errors that the router answers: counted, logged.

use tracing::debug;

use super::access_log::AccessLine;
use super::route::NO_API;
use super::{ApiServer, request_id};
use crate::http::server::OnMalformed;
use crate::ids::RequestId;
use crate::openai::error::ApiError;

impl ApiServer {
    /// `api`: what the path is of, in metrics.
    pub(super) fn on_error(
        &self,
        id: RequestId,
        error: &ApiError,
        api: &'static str,
        line: Option<&mut AccessLine>,
    ) {
        if !error.is_from_engine && !error.is_counted {
            let is_refused = error.status.is_client_error();
            self.relay.count_unsent(api, is_refused);
        }
        if !error.is_from_engine {
            let counter = [error.status.as_str(), error.code];
            self.errors.with_label_values(&counter).inc();
            if let Some(line) = line {
                line.error_code = Some(error.code);
            }
        }
        debug!(%id, status = error.status.as_u16(), message = error.message, "request refused");
    }

    /// Answers request heads that cannot be parsed, with an id of ours.
    pub fn on_malformed(&self) -> OnMalformed {
        let (latest, errors) = (self.latest.clone(), self.errors.clone());
        OnMalformed::new(move |status| {
            let id = RequestId::new(fastrand::u128(..));
            let error = ApiError::malformed(status);
            let counter = [error.status.as_str(), error.code];
            errors.with_label_values(&counter).inc();
            if let Some(server) = latest.load().upgrade() {
                server.relay.count_unsent(NO_API, true);
            }
            debug!(%id, status = status.as_u16(), message = error.message, "request refused");
            let mut response = error.into_text();
            let headers = response.headers_mut();
            headers.insert(request_id::HEADER, request_id::header(id));
            response
        })
    }
}
