//! One request over `ext_proc`: reads what the gateway sends, has the API answer the request, and sends the choice, the
//! body and the response back.

mod pieces;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Buf, Bytes, BytesMut};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::http::response;
use hyper::{Request, Response};
use prost::Message as _;
use tokio::sync::mpsc;
use tonic::codec::{DecodeBuf, Decoder};
use tonic::{Status, Streaming};
use tracing::{debug, warn};

use self::pieces::Pieces;
use super::gateway::{ExtProcGateway, HandedOver, Options};
use super::messages;
use super::metrics::{Metrics, Outcome};
use super::wire::processing_request::Request as Part;
use super::wire::processing_response::Response as Answer;
use super::wire::{BodySendMode, ProcessingRequest, ProcessingResponse};
use crate::api::ApiServer;
use crate::api::access_log::LoggedBody;
use crate::http::client::EngineBody;
use crate::http::grpc;
use crate::http::server::RequestBody;
use crate::observe;
use crate::openai::error::ApiError;
use crate::relay::{CarriedAnswer, CarriedBy, ServedBy};

/// The gateway's messages.
pub(super) type Incoming = Streaming<ProcessingRequest>;

/// Framed messages on their way to the gateway.
pub(super) type Outgoing = mpsc::Sender<Result<Bytes, Status>>;

/// Framed messages are sent together until they have so many bytes.
const TOGETHER_BYTES: usize = 64 << 10;

/// How an exchange ended before its end.
enum Failure {
    /// The gateway has ended the stream: its client has left, or the worker's connection broke.
    Left,
    /// It has opened the stream and sent nothing.
    Silent,
    /// It sent what makes no sense here.
    Status(Status),
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

/// Runs an exchange to its end. Dropped before that, the gateway has left.
pub(super) async fn run(
    api: Arc<ApiServer>,
    peer: IpAddr,
    incoming: Incoming,
    outgoing: Outgoing,
    options: Options,
    metrics: Arc<Metrics>,
) {
    let open = metrics.open();
    let exchange = Exchange {
        incoming,
        outgoing: &outgoing,
        unsent: BytesMut::new(),
        request: Pieces::default(),
        response: Pieces::default(),
        request_ended: None,
        has_request_trailers: false,
        has_response_trailers: false,
        is_response_seen: true,
        handed_over: None,
        from_worker: None,
        served: None,
        options,
        metrics: &metrics,
    };
    let outcome = match exchange.run(api, peer).await {
        Ok(outcome) => outcome,
        Err(Failure::Left) => Outcome::GatewayLeft,
        Err(Failure::Silent) => {
            let _ = outgoing.send(Err(grpc::no_message())).await;
            Outcome::Silent
        }
        Err(Failure::Status(status)) => {
            debug!(%status, "an exchange with a gateway failed");
            let _ = outgoing.send(Err(status)).await;
            Outcome::Malformed
        }
    };
    open.end(outcome);
}

struct Exchange<'a> {
    incoming: Incoming,
    outgoing: &'a Outgoing,
    /// Messages that go together with the next ones: each that goes alone wakes the connection.
    unsent: BytesMut,
    /// The body of the client's request, on its way to the API.
    request: Pieces,
    /// The body of the worker's answer, on its way to the relay.
    response: Pieces,
    request_ended: Option<Instant>,
    has_request_trailers: bool,
    has_response_trailers: bool,
    /// The gateway sends the response's body, too.
    is_response_seen: bool,
    /// What waits for the worker's answer.
    handed_over: Option<tokio::sync::oneshot::Sender<CarriedAnswer>>,
    /// The answer's head as the gateway received it.
    from_worker: Option<response::Parts>,
    served: Option<String>,
    options: Options,
    metrics: &'a Metrics,
}

impl Exchange<'_> {
    async fn run(mut self, api: Arc<ApiServer>, peer: IpAddr) -> Result<Outcome, Failure> {
        let first = tokio::time::timeout(grpc::FIRST_MESSAGE_TIMEOUT, self.incoming.message());
        let first = first.await.map_err(|_| Failure::Silent)?;
        let first = first?.ok_or(Failure::Left)?;
        if let Some(config) = &first.protocol_config {
            let has_body = !matches!(&first.request, Some(Part::RequestHeaders(headers)) if headers.end_of_stream);
            let (request, response) = (config.request_body_mode(), config.response_body_mode());
            let can_request = request == BodySendMode::FullDuplexStreamed || !has_body;
            self.is_response_seen = response == BodySendMode::FullDuplexStreamed;
            if !can_request || !self.is_response_seen && response != BodySendMode::None {
                warn!(
                    request_body_mode = request.as_str_name(),
                    response_body_mode = response.as_str_name(),
                    fix = "set both to FULL_DUPLEX_STREAMED in the gateway's ext_proc filter (or the response's to NONE)",
                    "a gateway sends bodies in a mode that the endpoint picker cannot serve"
                );
                let error = ApiError::wrong_body_mode();
                return self.refuse(error.into_response()).await;
            }
        }
        let metadata = first.metadata_context;
        let Some(Part::RequestHeaders(head)) = first.request else {
            return Err(
                Status::invalid_argument("the first message is not a request's headers").into(),
            );
        };
        let has_body = !head.end_of_stream;
        let request = match messages::request_head(head) {
            Ok(request) => request,
            Err(bad) => {
                let message = format!("`{}` cannot be read", bad.0);
                let error = ApiError::bad_header(bad.0, &message);
                return self.refuse(error.into_response()).await;
            }
        };
        let client = request.headers().clone();
        let (gateway, mut handover) = ExtProcGateway::new(client, &metadata, self.options);
        let body = self.request.open();
        if !has_body {
            self.end_request();
        }
        let mut request: Request<RequestBody> = request.map(|()| body.into());
        let carried = CarriedBy(Arc::new(gateway));
        request.extensions_mut().insert(carried);
        let mut handling = std::pin::pin!(api.handle(request, peer));
        let mut is_waiting = true;
        let answer = loop {
            tokio::select! {
                biased;
                answer = &mut handling => break answer,
                handed_over = &mut handover, if is_waiting => {
                    is_waiting = false;
                    if let Ok(handed_over) = handed_over {
                        self.hand_over(handed_over).await?;
                    }
                }
                read = read(&mut self.incoming, &mut self.request, &mut self.response) => {
                    self.on_read(read?)?;
                }
            }
        };
        match self.from_worker.take() {
            Some(head) if answer.extensions().get::<ServedBy>().is_some() => {
                self.pass_on(&head, answer).await?;
                Ok(Outcome::Picked)
            }
            _ => self.refuse(answer).await,
        }
    }

    /// Sends the choice and the request's body.
    async fn hand_over(&mut self, handed_over: HandedOver) -> Result<(), Failure> {
        let HandedOver {
            chosen,
            body,
            answer,
        } = handed_over;
        self.handed_over = Some(answer);
        self.write(&chosen).await?;
        if let Some(ended) = self.request_ended.take() {
            self.metrics.on_decision(ended.elapsed());
        }
        for piece in messages::pieces(&body, !self.has_request_trailers, Answer::RequestBody) {
            self.write(&piece).await?;
        }
        if self.has_request_trailers {
            self.write(&messages::trailers(Answer::RequestTrailers))
                .await?;
        }
        self.flush().await
    }

    fn end_request(&mut self) {
        self.request.end();
        self.request_ended = Some(observe::now());
    }

    /// Takes the gateway's next message. `None`: a piece that waited has been taken.
    fn on_read(&mut self, read: Option<ProcessingRequest>) -> Result<(), Failure> {
        let Some(message) = read else {
            return Ok(());
        };
        match message.request {
            Some(Part::RequestBody(body)) if !self.request.is_over => {
                self.request.push(body.body);
                if body.end_of_stream {
                    self.end_request();
                }
            }
            Some(Part::RequestTrailers(_)) if !self.request.is_over => {
                self.has_request_trailers = true;
                self.end_request();
            }
            Some(Part::ResponseHeaders(head)) => {
                let Some(waiting) = self.handed_over.take() else {
                    return Err(
                        Status::invalid_argument("a response before the request was sent").into(),
                    );
                };
                let is_over = head.end_of_stream || !self.is_response_seen;
                let Ok(head) = messages::response_head(head) else {
                    return Err(
                        Status::invalid_argument("a response whose head cannot be read").into(),
                    );
                };
                self.served = messages::served(&message.metadata_context);
                let body = self.response.open();
                if is_over {
                    self.is_response_seen = false;
                    self.response.end();
                }
                self.from_worker = Some(head.clone());
                let _ = waiting.send(CarriedAnswer {
                    head,
                    body: EngineBody::from(body),
                    served: self.served.clone(),
                });
            }
            Some(Part::ResponseBody(body)) if self.response.is_open() => {
                self.response.push(body.body);
                if body.end_of_stream {
                    self.response.end();
                }
            }
            Some(Part::ResponseTrailers(_)) if self.response.is_open() => {
                self.has_response_trailers = true;
                self.response.end();
            }
            // What later gateways send besides.
            None => {}
            Some(_) => return Err(Status::invalid_argument("a message out of order").into()),
        }
        Ok(())
    }

    /// Sends the response while the gateway sends the worker's.
    async fn pass_on(
        &mut self,
        from_worker: &response::Parts,
        answer: Response<LoggedBody>,
    ) -> Result<(), Failure> {
        let (head, body) = answer.into_parts();
        let served = self.served.take().filter(|_| self.options.has_hooks);
        let headers =
            messages::response_headers(&from_worker.headers, &head.headers, served.as_deref());
        self.write(&headers).await?;
        let mut body = std::pin::pin!(body);
        loop {
            let frame = tokio::select! {
                biased;
                frame = body.frame() => frame,
                // Nothing more is ready: what there is goes.
                sent = flush(self.outgoing, &mut self.unsent), if !self.unsent.is_empty() => {
                    sent?;
                    continue;
                }
                read = read(&mut self.incoming, &mut self.request, &mut self.response) => {
                    self.on_read(read?)?;
                    continue;
                }
            };
            let data = match frame {
                Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
                // The relay ends streams with an event of its own; what breaks off nevertheless is broken off.
                Some(Err(_)) => return Err(Failure::Left),
                None => Bytes::new(),
            };
            let is_over = body.is_end_stream() || data.is_empty();
            let ends = is_over && !self.has_response_trailers;
            if self.is_response_seen {
                for piece in messages::pieces(&data, ends, Answer::ResponseBody) {
                    self.write(&piece).await?;
                }
                if is_over && !ends {
                    self.write(&messages::trailers(Answer::ResponseTrailers))
                        .await?;
                }
            }
            if is_over {
                return self.flush().await;
            }
        }
    }

    /// Answers the request with a response of the router's own.
    async fn refuse<B>(&mut self, response: Response<B>) -> Result<Outcome, Failure>
    where
        B: http_body::Body<Data = Bytes>,
    {
        let (head, body) = response.into_parts();
        let body = body.collect().await.map_err(|_| Failure::Left)?.to_bytes();
        self.write(&messages::immediate(&head, body)).await?;
        self.flush().await?;
        Ok(Outcome::Refused)
    }

    /// Sends a message with the next ones.
    async fn write(&mut self, message: &ProcessingResponse) -> Result<(), Failure> {
        grpc::frame_into(message, &mut self.unsent);
        if self.unsent.len() < TOGETHER_BYTES {
            Ok(())
        } else {
            self.flush().await
        }
    }

    async fn flush(&mut self) -> Result<(), Failure> {
        flush(self.outgoing, &mut self.unsent).await
    }
}

/// Sends what was written. Nothing is lost if this is dropped.
async fn flush(outgoing: &Outgoing, unsent: &mut BytesMut) -> Result<(), Failure> {
    let room = outgoing.reserve().await.map_err(|_| Failure::Left)?;
    room.send(Ok(unsent.split().freeze()));
    Ok(())
}

/// The gateway's next message; `None` if a piece that waited for room has been taken instead.
async fn read(
    incoming: &mut Incoming,
    request: &mut Pieces,
    response: &mut Pieces,
) -> Result<Option<ProcessingRequest>, Failure> {
    if request.has_waiting() {
        request.deliver().await;
        return Ok(None);
    }
    if response.has_waiting() {
        response.deliver().await;
        return Ok(None);
    }
    match incoming.message().await {
        Ok(Some(message)) => Ok(Some(message)),
        // The gateway sends no more; it may still read.
        Ok(None) if response.is_over => std::future::pending().await,
        // A cancelled stream is a client that has left.
        Ok(None) | Err(_) => Err(Failure::Left),
    }
}

/// Decodes the gateway's messages.
#[derive(Debug, Default)]
pub(super) struct Messages;

impl Decoder for Messages {
    type Item = ProcessingRequest;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Self::Item>, Status> {
        // Bytes are read faster than a buffer that could grow, and parts of them are kept without a copy.
        let message = buffer.copy_to_bytes(buffer.remaining());
        let message = ProcessingRequest::decode(message);
        let malformed = |error: prost::DecodeError| Status::invalid_argument(error.to_string());
        message.map(Some).map_err(malformed)
    }
}
