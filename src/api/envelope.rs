//! What stands around every answer, whatever it is: the request's ids, the client's address, CORS, the shape of an error, the
//! headers of limits, the line of the access log.

use std::net::IpAddr;
use std::sync::Arc;

use hyper::header::{CONNECTION, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Version};

use super::access_log::{AccessLine, LoggedBody};
use super::cors::{Cors, Grant};
use super::health::without_body;
use super::request_id;
use super::route::api_of;
use super::settings::Settings;
use crate::http;
use crate::http::drain::Tasks;
use crate::http::server::RequestBody;
use crate::ids::RequestId;
use crate::limits::Standing;
use crate::openai::error::{ApiError, ErrorShape};
use crate::traces::RequestTrace;

/// What is known of a request before it is answered, and what its answer is to carry.
#[derive(Debug)]
pub(super) struct Envelope {
    pub(super) id: RequestId,
    pub(super) client: IpAddr,
    /// The id that the response carries: the client's own, or ours.
    pub(super) echo: HeaderValue,
    /// `None` if the request is neither logged nor traced.
    pub(super) line: Option<Box<AccessLine>>,
    /// What the tenant's limits leave.
    pub(super) standing: Option<Standing>,
    pub(super) grant: Grant,
    pub(super) shape: ErrorShape,
    /// For metrics.
    pub(super) api: &'static str,
    is_head: bool,
    is_http1: bool,
}

impl Envelope {
    /// An error if the request's own id cannot be returned.
    pub(super) fn begin(
        settings: &Settings,
        cors: &Cors,
        tasks: &Tasks,
        trace: Option<Arc<RequestTrace>>,
        request: &Request<RequestBody>,
        peer: IpAddr,
    ) -> (Self, Result<(), ApiError>) {
        let id = RequestId::new(fastrand::u128(..));
        let headers = request.headers();
        let path = request.uri().path();
        let client = settings.trusted_proxies.client_of(peer, headers);
        let head = (request.method(), request.uri(), headers);
        let mut line = AccessLine::begin(head, id, client, tasks, trace);
        let (client_id, checked) = match request_id::of_client(headers) {
            Ok(client_id) => (client_id, Ok(())),
            Err(error) => (None, Err(error)),
        };
        if let Some(line) = &mut line {
            line.client_request_id.clone_from(&client_id);
        }
        let envelope = Self {
            id,
            client,
            echo: client_id.unwrap_or_else(|| request_id::header(id)),
            line,
            standing: None,
            grant: cors.grant(headers),
            shape: ErrorShape::of_request(path, headers),
            api: api_of(path, &settings.extra_endpoints),
            is_head: request.method() == Method::HEAD,
            is_http1: request.version() < Version::HTTP_2,
        };
        (envelope, checked)
    }

    /// The response that the client gets. `is_draining`: the process stops.
    pub(super) fn finish(
        self,
        mut response: Response<http::Body>,
        is_draining: bool,
    ) -> Response<LoggedBody> {
        let status = response.status();
        let headers = response.headers_mut();
        if self.shape == ErrorShape::Anthropic {
            headers.insert(request_id::OF_ANTHROPIC, self.echo.clone());
        }
        headers.insert(request_id::HEADER, self.echo);
        if let Some(standing) = self.standing {
            standing.write(headers);
        }
        self.grant.apply(headers);
        let is_upgraded = status == StatusCode::SWITCHING_PROTOCOLS;
        if self.is_http1 && is_draining && !is_upgraded {
            // Its next request should find another replica now, and not a connection that closes just then.
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if self.is_head {
            response = without_body(response);
        }
        LoggedBody::of(response, self.line)
    }
}
