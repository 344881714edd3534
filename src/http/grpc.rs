//! gRPC over HTTP/2: framing, bodies of messages, and the status at the end of a response.
//!
//! Not tonic's server, which copies each message into a buffer of each stream. Here a message is framed once,
//! and the streams of all subscribers send the same bytes.

pub mod health;
mod raw;

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures_core::Stream;
use http_body::Frame;
use http_body_util::{BodyExt, Limited};
use hyper::{HeaderMap, Request, Response, header};
use tonic::Status;
use tonic::metadata::GRPC_CONTENT_TYPE;

pub use self::raw::Raw;
use super::{Body, BodyError};

/// The compression flag and the length.
const HEAD_BYTES: usize = 5;

/// Clients send the first message of a call together with its head. A call without one would keep its connection busy.
pub const FIRST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// The end of a call whose first message does not come.
pub fn no_message() -> Status {
    Status::deadline_exceeded("no message came")
}

/// Adds a message in its gRPC frame to `buffer`.
pub fn frame_into(message: &impl prost::Message, buffer: &mut BytesMut) {
    let bytes = message.encoded_len();
    let length = u32::try_from(bytes).expect("no message comes near 4 GiB");
    buffer.reserve(HEAD_BYTES + bytes);
    buffer.put_u8(0);
    buffer.put_u32(length);
    message.encode_raw(buffer);
}

pub fn frame(message: &[u8]) -> Bytes {
    let length = u32::try_from(message.len()).expect("no message comes near 4 GiB");
    let mut framed = BytesMut::with_capacity(HEAD_BYTES + message.len());
    framed.put_u8(0);
    framed.put_u32(length);
    framed.put_slice(message);
    framed.freeze()
}

/// The one message of a request.
pub async fn question<B>(request: Request<B>, bytes_max: usize) -> Result<Bytes, Status>
where
    B: http_body::Body<Data = Bytes, Error: std::error::Error + Send + Sync + 'static>,
{
    question_within(request, bytes_max, FIRST_MESSAGE_TIMEOUT).await
}

async fn question_within<B>(
    request: Request<B>,
    bytes_max: usize,
    limit: Duration,
) -> Result<Bytes, Status>
where
    B: http_body::Body<Data = Bytes, Error: std::error::Error + Send + Sync + 'static>,
{
    let body = Limited::new(request.into_body(), HEAD_BYTES + bytes_max).collect();
    let body = tokio::time::timeout(limit, body).await;
    let body = body.map_err(|_| no_message())?;
    let body = body.map_err(|error| Status::invalid_argument(error.to_string()))?;
    unframe(body.to_bytes())
}

fn unframe(mut framed: Bytes) -> Result<Bytes, Status> {
    let bad = || Status::invalid_argument("the request must contain exactly one message");
    let head = framed.first_chunk::<HEAD_BYTES>().ok_or_else(bad)?;
    let [compressed, length @ ..] = *head;
    if compressed != 0 {
        return Err(Status::unimplemented(
            "compressed messages are not supported",
        ));
    }
    if u32::from_be_bytes(length) as usize != framed.len() - HEAD_BYTES {
        return Err(bad());
    }
    Ok(framed.split_off(HEAD_BYTES))
}

/// Whether a request's content type is gRPC's.
pub fn is_grpc<B>(request: &Request<B>) -> bool {
    let kind = request.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// A response that sends framed messages as the stream yields them; the headers are sent at once. An error
/// ends it with that status, the end of the stream with success.
pub fn answer(
    messages: impl Stream<Item = Result<Bytes, Status>> + Send + 'static,
) -> Response<Body> {
    let messages = Messages {
        stream: Box::pin(messages),
        has_status: true,
        is_over: false,
    };
    let mut response = Response::new(messages.boxed_unsync());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
    response
}

/// A response of one framed message.
pub fn answer_once(message: Bytes) -> Response<Body> {
    answer(Once(Some(message)))
}

struct Once(Option<Bytes>);

impl Stream for Once {
    type Item = Result<Bytes, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.take().map(Ok))
    }
}

/// The body of a request that sends framed messages as the stream yields them. An error breaks it off.
pub fn request_body(messages: impl Stream<Item = Result<Bytes, Status>> + Send + 'static) -> Body {
    let messages = Messages {
        stream: Box::pin(messages),
        has_status: false,
        is_over: false,
    };
    messages.boxed_unsync()
}

struct Messages<S> {
    is_over: bool,
    /// The status follows the last message, as in a response; nothing does in a request.
    has_status: bool,
    stream: Pin<Box<S>>,
}

impl<S: Stream<Item = Result<Bytes, Status>>> http_body::Body for Messages<S> {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let next = std::task::ready!(self.stream.as_mut().poll_next(cx));
        if let Some(Ok(framed)) = next {
            return Poll::Ready(Some(Ok(Frame::data(framed))));
        }
        self.is_over = true;
        let failed = next.and_then(Result::err);
        if !self.has_status {
            return Poll::Ready(failed.map(|status| Err(status.into())));
        }
        let status = failed.unwrap_or_else(|| Status::ok(""));
        let mut trailers = HeaderMap::new();
        let added = status.add_header(&mut trailers);
        added.expect("a status escapes its message");
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tonic::Code;

    use super::*;
    use crate::http::server::RequestBody;

    #[test]
    fn a_framed_message_is_read_as_it_was() {
        for message in [&b""[..], b"a", &[7; 70_000]] {
            assert_eq!(unframe(frame(message)).unwrap(), message);
        }
    }

    #[test]
    fn an_incomplete_or_second_message_is_refused() {
        let framed = frame(b"abc");
        assert!(unframe(framed.slice(..framed.len() - 1)).is_err());
        assert!(unframe(framed.slice(..3)).is_err());
        assert!(unframe([&framed[..], b"x"].concat().into()).is_err());
        assert!(unframe(Bytes::from_static(&[1, 0, 0, 0, 0])).is_err());
    }

    #[tokio::test]
    async fn a_call_without_a_message_ends() {
        let (_open, body) = mpsc::channel(1);
        let request = Request::new(RequestBody::from(body));
        let asked = question_within(request, 10, Duration::from_millis(20)).await;
        assert_eq!(asked.unwrap_err().code(), Code::DeadlineExceeded);
    }

    #[tokio::test]
    async fn a_response_ends_with_its_status() {
        struct Two(u8);
        impl Stream for Two {
            type Item = Result<Bytes, Status>;
            fn poll_next(
                mut self: Pin<&mut Self>,
                _: &mut Context<'_>,
            ) -> Poll<Option<Self::Item>> {
                self.0 += 1;
                Poll::Ready(Some(match self.0 {
                    1 => Ok(frame(b"x")),
                    _ => Err(Status::data_loss("gone\n")),
                }))
            }
        }
        let body = answer(Two(0)).into_body().collect().await.unwrap();
        let trailers = body.trailers().unwrap().clone();
        assert_eq!(body.to_bytes(), frame(b"x"));
        assert_eq!(trailers["grpc-status"], "15");
        assert_eq!(trailers["grpc-message"], "gone%0A");
        let mut request = request_body(Two(0));
        let first = request.frame().await.unwrap().unwrap();
        assert_eq!(first.into_data().unwrap(), frame(b"x"));
        assert!(request.frame().await.unwrap().is_err());
        assert!(request.frame().await.is_none());
        let refused = Status::out_of_range("no").into_http::<Body>();
        assert_eq!(refused.headers()["grpc-status"], "11");
    }
}
