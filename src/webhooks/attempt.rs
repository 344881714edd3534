//! How an attempt to deliver an event ended. Pure.

use std::fmt;
use std::io;
use std::net::IpAddr;

use hyper::StatusCode;

#[derive(Debug)]
pub(super) enum Attempt {
    Answered(StatusCode),
    /// The name has no address.
    NotResolved(io::Error),
    /// No address of the name may be connected to; one of them, and what it is.
    AddressRefused(IpAddr, &'static str),
    NotConnected(io::Error),
    /// The connection ended before the answer.
    Broken(String),
    TimedOut,
}

impl Attempt {
    pub(super) fn is_delivered(&self) -> bool {
        matches!(self, Self::Answered(status) if status.is_success())
    }

    /// The receiver wants no more events.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self, Self::Answered(status) if *status == StatusCode::GONE)
    }

    /// The value of the label `outcome`.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::Answered(status) => match status.as_u16() {
                200..300 => "delivered",
                300..400 => "redirect",
                410 => "gone",
                400..500 => "client_error",
                _ => "server_error",
            },
            Self::NotResolved(_) => "not_resolved",
            Self::AddressRefused(..) => "address_refused",
            Self::NotConnected(_) => "not_connected",
            Self::Broken(_) => "broken",
            Self::TimedOut => "timed_out",
        }
    }
}

/// In the words of operators.
impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Answered(status) if status.is_redirection() => write!(
                f,
                "the endpoint answered {status}; redirects are not followed: write the final URL in `url`"
            ),
            Self::Answered(status) => write!(f, "the endpoint answered {status}"),
            Self::NotResolved(error) => write!(f, "its name cannot be resolved: {error}"),
            Self::AddressRefused(address, what) => write!(
                f,
                "its address {address} is {what}; if that is intended, list its network in `allowed_networks`"
            ),
            Self::NotConnected(error) => write!(f, "cannot connect: {error}"),
            Self::Broken(error) => write!(f, "connection closed before the answer: {error}"),
            Self::TimedOut => f.write_str("no answer in time"),
        }
    }
}
