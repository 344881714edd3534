//! What stands around every answer, whatever it is: the request's ids, the client's address, CORS, the shape of an error, the
//! headers of limits, the line of the access log.

use std::net::IpAddr;

use hyper::header::{CONNECTION, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Version};

use super::access_log::{self, AccessLine, LoggedBody};
use super::cors::Grant;
use super::health::without_body;
use super::route::api_of;
use super::{ApiServer, request_id};
use crate::http;
use crate::http::server::RequestBody;
use crate::ids::RequestId;
use crate::limits::Standing;
use crate::openai::error::{ApiError, ErrorShape};

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
    shape: ErrorShape,
    api: &'static str,
    is_head: bool,
    is_http1: bool,
}

impl Envelope {
    /// An error if the request's own id cannot be returned.
    pub(super) fn begin(
        server: &ApiServer,
        request: &Request<RequestBody>,
        peer: IpAddr,
    ) -> (Self, Result<(), ApiError>) {
        let id = RequestId::new(fastrand::u128(..));
        let headers = request.headers();
        let path = request.uri().path();
        let client = server.settings.trusted_proxies.client_of(peer, headers);
        let trace = server.relay.tracer().begin(headers);
        let mut line = (trace.is_some() || access_log::is_on()).then(|| {
            let head = (request.method().clone(), request.uri().clone(), headers);
            let tasks = server.tasks.clone();
            Box::new(AccessLine::begin(head, id, client, tasks, trace))
        });
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
            grant: server.cors.grant(headers),
            shape: ErrorShape::of_request(path, headers),
            api: api_of(path, &server.settings.extra_endpoints),
            is_head: request.method() == Method::HEAD,
            is_http1: request.version() < Version::HTTP_2,
        };
        (envelope, checked)
    }

    /// The response that the client gets.
    pub(super) fn finish(
        mut self,
        server: &ApiServer,
        answer: Result<Response<http::Body>, ApiError>,
    ) -> Response<LoggedBody> {
        let mut response = answer.unwrap_or_else(|error| {
            server.on_error(self.id, &error, self.api, self.line.as_deref_mut());
            error.shaped(self.shape)
        });
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
        if self.is_http1 && server.readiness.is_draining() && !is_upgraded {
            // Its next request should find another replica now, and not a connection that closes just then.
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if let Some(line) = &mut self.line {
            line.status = Some(status);
        }
        if self.is_head {
            response = without_body(response);
        }
        response.map(|body| LoggedBody::new(body, self.line))
    }
}
