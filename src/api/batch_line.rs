//! Lines of batches: each is a request like any other, with a request id, a log line, limits and a place in the queue
//! of its own. No client is connected, and the whole answer is collected.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use tracing::debug;

use super::access_log::{AccessLine, LoggedBody};
use super::{ApiServer, Caller, request_id};
use crate::batches::line::LineEndpoint;
use crate::batches::{HeldAnswer, LineAnswer, LineRequest, LookUpFuture, SendFuture, SendLine};
use crate::ids::{ClientKey, RequestId, WorkerId};
use crate::limits::ChargeId;
use crate::openai::body_budget::Claim;
use crate::openai::error::{ApiError, ErrorShape, SHOULD_RETRY};
use crate::openai::tenant::Admitted;
use crate::prompt::{self, Api};
use crate::relay::{AnswerRoom, BatchLine, LinesByWorker, RequestContext, RequestKind, SpareRoom};
use crate::responses::{ClientRequest, Endpoint, Mode};
use crate::{http, observe};

/// What the access log has as the method of a line.
const METHOD: &[u8] = b"BATCH";
/// And as its client: there is none.
const NO_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// A longer answer is not kept. 16 MiB are four million tokens, or the embeddings of a thousand texts. It is the half of
/// what one answer may take in memory.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Milliseconds; more exact than `retry-after`.
static RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// Sends lines by the server of the latest configuration.
#[derive(Debug)]
struct BatchSender {
    latest: Arc<ArcSwap<Weak<ApiServer>>>,
}

impl BatchSender {
    /// `None`: the router ends.
    fn server(&self) -> Option<Arc<ApiServer>> {
        self.latest.load().upgrade()
    }
}

impl SendLine for BatchSender {
    fn send(&self, line: LineRequest) -> SendFuture<'_> {
        let server = self.server();
        Box::pin(async move {
            match server {
                Some(server) => server.send_line(line).await,
                None => LineAnswer {
                    status: 503,
                    request_id: String::new(),
                    retry_after: Some(Duration::from_secs(1)),
                    may_retry: true,
                    is_locked: false,
                    body: Bytes::new(),
                },
            }
        })
    }

    fn room(&self, model: &str, lines: &LinesByWorker) -> SpareRoom {
        let server = self.server();
        server.map_or_else(SpareRoom::default, |server| {
            server.relay.spare_room(model, lines)
        })
    }

    fn to_give_way(&self, lines: &LinesByWorker, entering: u32) -> Vec<(WorkerId, u32)> {
        let server = self.server();
        server.map_or_else(Vec::new, |server| {
            server.relay.lines_to_give_way(lines, entering)
        })
    }

    fn knows_tenant(&self, tenant: &str) -> bool {
        let server = self.server();
        server.is_some_and(|server| server.tenants.of_name(tenant).is_some())
    }

    fn refusal(
        &self,
        tenant: &str,
        model: &str,
        _endpoint: LineEndpoint,
    ) -> Option<(String, String)> {
        let server = self.server()?;
        let admitted = server.tenants.of_name(tenant)?;
        // A model that the tenant may not use does not exist for it.
        let exists = server.relay.may_use(admitted.tenant, model) && server.relay.may_know(model);
        if exists {
            return None;
        }
        let message = format!(
            "The provided model '{}' is not available.",
            observe::shortened(model)
        );
        Some(("model_not_found".to_owned(), message))
    }

    fn look_up<'a>(&'a self, tenant: &'a str, model: &'a str) -> LookUpFuture<'a> {
        let server = self.server();
        Box::pin(async move {
            let Some(server) = server else {
                return false;
            };
            let known = server.tenants.of_name(tenant);
            let Some(owner) = known.map(|admitted| admitted.tenant) else {
                return false;
            };
            server.relay.check_model(owner, model).await.is_ok()
        })
    }

    fn tokens_queued_max(&self, tenant: &str) -> Option<u64> {
        let server = self.server()?;
        let admitted = server.tenants.of_name(tenant)?;
        let profile = server.relay.tenants().of(admitted.tenant);
        profile.limits.as_ref()?.batch_tokens_queued()
    }
}

impl ApiServer {
    /// Sends the lines of batches from now on, with the settings of the configuration that is the latest then.
    pub fn batch_sender(&self) -> Arc<dyn SendLine> {
        Arc::new(BatchSender {
            latest: self.latest.clone(),
        })
    }

    async fn send_line(&self, line: LineRequest) -> LineAnswer {
        let id = RequestId::new(fastrand::u128(..));
        let api = api_of(line.endpoint);
        let shape = ErrorShape::of_path(line.endpoint.path());
        let head = head_of(line.endpoint);
        let trace = self.relay.tracer.begin(&head.headers);
        let mut access = {
            let method = Method::from_bytes(METHOD).unwrap_or(Method::POST);
            let request = (&method, &head.uri, &head.headers);
            AccessLine::begin(request, id, NO_ADDRESS, &self.tasks, trace)
        };
        let held = line.held.clone();
        let answer = self
            .answer_line(line, id, &head, access.as_deref_mut())
            .await;
        if answer.as_ref().is_err_and(ApiError::is_locked_conversation) {
            // It waits for its turn, and no request has failed. The try that runs has a log line.
            if let Some(access) = &mut access {
                access.is_unlogged = true;
                access.error_code = answer.as_ref().err().map(|error| error.code);
            }
            return LineAnswer {
                status: StatusCode::SERVICE_UNAVAILABLE.as_u16(),
                request_id: id.as_str().to_owned(),
                retry_after: None,
                may_retry: true,
                is_locked: true,
                body: Bytes::new(),
            };
        }
        let response = answer.unwrap_or_else(|error| {
            self.on_error(id, &error, api.as_str(), access.as_deref_mut());
            error.shaped(shape)
        });
        let (answer_head, body) = LoggedBody::of(response, access).into_parts();
        let collected = collect(body, &held).await;
        let (error, may_retry) = match collected {
            Ok(body) => {
                // More than a limit of the tenant ever has room for.
                let is_final = answer_head.status == StatusCode::TOO_MANY_REQUESTS
                    && answer_head
                        .headers
                        .get(SHOULD_RETRY)
                        .is_some_and(|value| value == "false");
                return LineAnswer {
                    status: answer_head.status.as_u16(),
                    request_id: id.as_str().to_owned(),
                    retry_after: retry_after(&answer_head.headers),
                    may_retry: !is_final,
                    is_locked: false,
                    body,
                };
            }
            Err(failed) => failed,
        };
        let status = error.status.as_u16();
        let text = error.shaped(shape).into_body().collect().await;
        LineAnswer {
            status,
            request_id: id.as_str().to_owned(),
            retry_after: None,
            may_retry,
            is_locked: false,
            body: text.map(|text| text.to_bytes()).unwrap_or_default(),
        }
    }

    async fn answer_line(
        &self,
        line: LineRequest,
        id: RequestId,
        head: &Parts,
        access: Option<&mut AccessLine>,
    ) -> Result<Response<http::Body>, ApiError> {
        let tenant = self.tenants.of_name(&line.tenant);
        let tenant = tenant
            .ok_or_else(|| self.refused_line(line.endpoint, ApiError::no_tenant_of_batch()))?;
        let admitted: &Admitted = &tenant;
        let mut summary = None;
        if let Some(access) = access {
            access.tenant = Some(admitted.name.clone());
            summary = Some(access.summary.clone());
        }
        debug!(
            %id, tenant = %admitted.tenant, batch = &*line.batch, endpoint = line.endpoint.path(),
            bytes = line.body.len(), "line of a batch"
        );
        // The line was checked when its batch was validated, perhaps with a newer configuration, or with an older one:
        // then it waits until its batch expires. Who validates a batch, or begins a line of a Message Batch, with a
        // configuration that lacks the right has refused it for good in `refusal`.
        if !self.relay.may_use(admitted.tenant, &line.model) {
            let error = ApiError::no_model_of_batch(&line.model);
            return Err(self.refused_line(line.endpoint, error));
        }
        let batch_line = BatchLine::new(line.batch, line.entering).with_room(line.held);
        let client = ClientKey::of_tenant(admitted.tenant);
        let context = RequestContext {
            charge: ChargeId::Line(id),
            kind: RequestKind::Batch(Arc::new(batch_line)),
            summary,
            ..RequestContext::new(id, client, admitted.tenant, observe::now())
        };
        let api = api_of(line.endpoint);
        if api == Api::Responses && self.responses.mode() == Mode::Stateful {
            prompt::check_nesting(&line.body)?;
            // The batch has memory for the line itself, but not for the history that it continues.
            let claim = Claim {
                owner: client,
                tenant: admitted.tenant,
                headers: &head.headers,
                relay: None,
            };
            let mut reserved = self.bodies.start(claim, 0).await?;
            let call = ClientRequest {
                headers: &head.headers,
                query: "",
                body: line.body,
                context,
                admitted,
                standing: None,
                turn: None,
            };
            let create = &Endpoint::Create;
            let answer = self.responses.answer(create, &call, &mut reserved);
            // Boxed, so that other lines do not carry its state.
            return Box::pin(answer).await;
        }
        let client_id = request_id::header(id);
        let caller = Box::new(Caller {
            context,
            admitted,
            client_id: &client_id,
            standing: None,
        });
        self.forward_body(api, head, line.body, caller).await
    }

    /// Counts a line as refused that waits for another configuration: the router has not failed.
    fn refused_line(&self, endpoint: LineEndpoint, mut error: ApiError) -> ApiError {
        self.relay.count_unsent(api_of(endpoint).as_str(), true);
        error.is_counted = true;
        error
    }
}

fn api_of(endpoint: LineEndpoint) -> Api {
    match endpoint {
        LineEndpoint::ChatCompletions => Api::Chat,
        LineEndpoint::Completions => Api::Completions,
        LineEndpoint::Responses => Api::Responses,
        LineEndpoint::Embeddings => Api::Embeddings,
        LineEndpoint::Messages => Api::Messages,
    }
}

/// The head that a client would send.
fn head_of(endpoint: LineEndpoint) -> Parts {
    let mut request = Request::new(());
    *request.method_mut() = Method::POST;
    *request.uri_mut() = Uri::from_static(endpoint.path());
    let json = HeaderValue::from_static("application/json");
    request.headers_mut().insert(CONTENT_TYPE, json);
    request.into_parts().0
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let number = |name: &HeaderName| {
        let text = headers.get(name)?.to_str().ok()?;
        text.trim().parse::<u64>().ok()
    };
    let millis = number(&RETRY_AFTER_MS).map(Duration::from_millis);
    millis.or_else(|| number(&RETRY_AFTER).map(Duration::from_secs))
}

/// Goes on reading as there is room for what comes. An error comes with whether another answer may be better.
async fn collect(mut body: LoggedBody, held: &HeldAnswer) -> Result<Bytes, (ApiError, bool)> {
    let broken = || ApiError::invalid_engine_response("the engine's answer ended early");
    let mut first = Bytes::new();
    let mut whole = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| (broken(), true))?;
        let data = frame.into_data().unwrap_or_default();
        let bytes = first.len() + whole.len() + data.len();
        if bytes > MAX_ANSWER_BYTES {
            // The next one would be as long.
            let error = ApiError::too_long_line_answer(MAX_ANSWER_BYTES as u64);
            return Err((error, false));
        }
        held.grow_to(bytes).await;
        // An answer in one piece, as most are, is not copied.
        if first.is_empty() && whole.is_empty() {
            first = data;
            continue;
        }
        if whole.is_empty() {
            whole.extend_from_slice(&first);
            first = Bytes::new();
        }
        whole.extend_from_slice(&data);
    }
    Ok(if whole.is_empty() {
        first
    } else {
        whole.into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_says_when_to_come_back_in_either_unit() {
        let check = |lines: &[(&'static str, &'static str)], expected: Option<Duration>| {
            let mut headers = HeaderMap::new();
            for (name, value) in lines {
                headers.insert(*name, HeaderValue::from_static(value));
            }
            assert_eq!(retry_after(&headers), expected, "{lines:?}");
        };
        check(&[], None);
        check(&[("retry-after", "2")], Some(Duration::from_secs(2)));
        let both = [("retry-after", "2"), ("retry-after-ms", "1500")];
        check(&both, Some(Duration::from_millis(1_500)));
        check(&[("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT")], None);
    }

    #[tokio::test]
    async fn an_answer_is_collected_up_to_its_bound() {
        let body = |bytes: usize| {
            let response = Response::new(http::full(vec![b'x'; bytes]));
            LoggedBody::of(response, None).into_body()
        };
        let held = || HeldAnswer::new(&Arc::default());
        let whole = collect(body(MAX_ANSWER_BYTES), &held()).await;
        assert_eq!(whole.ok().map(|whole| whole.len()), Some(MAX_ANSWER_BYTES));
        let long = collect(body(MAX_ANSWER_BYTES + 1), &held()).await;
        let expected = ApiError::too_long_line_answer(MAX_ANSWER_BYTES as u64);
        let (error, may_retry) = long.unwrap_err();
        assert_eq!((error.code, may_retry), (expected.code, false));
    }

    #[test]
    fn a_line_has_the_head_of_its_endpoint() {
        for endpoint in LineEndpoint::ALL {
            let head = head_of(endpoint);
            assert_eq!(head.uri, endpoint.path());
            assert_eq!(head.method, Method::POST);
            assert_eq!(head.headers[CONTENT_TYPE], "application/json");
        }
    }
}
