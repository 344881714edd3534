//! Why a request got no response. Pure.

use std::io;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No connection could be opened, so nothing was sent.
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    /// A pooled connection broke before the response and soon after the request was sent, most likely because the
    /// server had closed it. The server may have read the request all the same. Or HTTP/2's server refused the request unread.
    #[error("connection closed before the response: {error}{}", cause(.error))]
    Stale {
        error: hyper::Error,
        /// How long the connection had been idle.
        idle: Duration,
    },
    /// The connection broke after the request was sent and before the response.
    #[error("connection closed before the response: {}{}", .0, cause(.0))]
    Broken(hyper::Error),
}

impl Error {
    /// True if this process or its host lacked something: a file descriptor, a port, memory. It says nothing about
    /// the server.
    pub fn is_local(&self) -> bool {
        matches!(self, Error::Connect(error) if is_local(error))
    }

    /// True if the server may have read the request. One that was never written, or that a server of HTTP/2 refused unread, is
    /// safe to send again.
    pub fn may_have_been_read(&self) -> bool {
        match self {
            Error::Connect(_) => false,
            Error::Stale { error, .. } | Error::Broken(error) => !is_unprocessed(error),
        }
    }
}

/// True if the request was never written, or if a server of HTTP/2 says that it has processed nothing of it: it refused the
/// stream, as one that has too many, or it goes away and has taken none so late (RFC 9113, sections 6.8 and 8.7).
pub(super) fn is_unprocessed(error: &hyper::Error) -> bool {
    let cause = std::error::Error::source(error);
    let cause = cause.and_then(|cause| cause.downcast_ref::<h2::Error>());
    let is_refused = cause.is_some_and(|cause| {
        let is_reason = cause.reason() == Some(h2::Reason::REFUSED_STREAM);
        cause.is_remote() && (cause.is_go_away() || is_reason)
    });
    is_refused || error.is_canceled()
}

/// True if an operation on a socket failed for lack of the host's or the process's own resources.
pub fn is_local(error: &io::Error) -> bool {
    const LOCAL: [i32; 7] = [
        libc::EMFILE,
        libc::ENFILE,
        libc::EADDRNOTAVAIL,
        libc::EADDRINUSE,
        libc::ENOBUFS,
        libc::ENOMEM,
        libc::EAGAIN,
    ];
    error
        .raw_os_error()
        .is_some_and(|code| LOCAL.contains(&code))
}

fn cause(error: &hyper::Error) -> String {
    let cause = std::error::Error::source(error);
    cause.map_or_else(String::new, |cause| format!(": {cause}"))
}
