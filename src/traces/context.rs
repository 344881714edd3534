//! The W3C trace context of a request: the headers `traceparent` and `tracestate`. Pure.

use std::fmt;

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};

pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub(super) const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Version, trace id, parent id and flags, with three dashes.
const LENGTH: usize = 55;
const SAMPLED: u8 = 1;

/// A span, as others name it: by its trace, its id, and whether it is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// Not 0.
    pub trace_id: u128,
    /// Not 0.
    pub span_id: u64,
    pub is_sampled: bool,
}

impl TraceContext {
    /// The one `traceparent` of a request; with several of them there is none.
    pub fn of_headers(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let value = values.next()?;
        match values.next() {
            None => Self::parse(value.as_bytes()),
            Some(_) => None,
        }
    }

    pub fn parse(text: &[u8]) -> Option<Self> {
        // Later versions may append fields; version ff is invalid.
        let is_long = match text.len() {
            LENGTH => false,
            length if length > LENGTH && text[LENGTH] == b'-' => true,
            _ => return None,
        };
        if [text[2], text[35], text[52]] != [b'-'; 3] {
            return None;
        }
        let version = hex(&text[..2])?;
        if version == 0xff || (version == 0 && is_long) {
            return None;
        }
        let trace_id = hex(&text[3..35])?;
        let span_id = hex(&text[36..52])? as u64;
        let flags = hex(&text[53..LENGTH])? as u8;
        (trace_id != 0 && span_id != 0).then_some(Self {
            trace_id,
            span_id,
            is_sampled: flags & SAMPLED != 0,
        })
    }

    pub fn header(&self) -> HeaderValue {
        HeaderValue::from_str(&self.to_string()).expect("hex digits and dashes")
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = u8::from(self.is_sampled);
        write!(
            f,
            "00-{:032x}-{:016x}-{flags:02x}",
            self.trace_id, self.span_id
        )
    }
}

/// Hex digits, of which capitals are none here.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |value: u128, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(value << 4 | u128::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    #[test]
    fn a_traceparent_that_is_not_valid_is_none() {
        let check = |text: &str, expected: Option<bool>| {
            let found = TraceContext::parse(text.as_bytes());
            assert_eq!(found.map(|context| context.is_sampled), expected, "{text}");
        };
        check(&format!("00-{TRACE}-00f067aa0ba902b7-01"), Some(true));
        check(&format!("00-{TRACE}-00f067aa0ba902b7-00"), Some(false));
        check(&format!("00-{TRACE}-00f067aa0ba902b7-03"), Some(true));
        check(&format!("cc-{TRACE}-00f067aa0ba902b7-01-more"), Some(true));
        check(&format!("00-{TRACE}-00f067aa0ba902b7-01-more"), None);
        check(&format!("cc-{TRACE}-00f067aa0ba902b7-01.more"), None);
        check(&format!("ff-{TRACE}-00f067aa0ba902b7-01"), None);
        check(&format!("00-{TRACE}-0000000000000000-01"), None);
        check(&format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)), None);
        let capitals = TRACE.to_uppercase();
        check(&format!("00-{capitals}-00f067aa0ba902b7-01"), None);
        check(TRACE, None);
        check("", None);
    }

    #[test]
    fn of_two_traceparents_none_counts() {
        let value = HeaderValue::from_str(&format!("00-{TRACE}-00f067aa0ba902b7-01")).unwrap();
        let mut headers = HeaderMap::new();
        assert_eq!(TraceContext::of_headers(&headers), None);
        headers.append(TRACEPARENT, value.clone());
        assert!(TraceContext::of_headers(&headers).is_some());
        headers.append(TRACEPARENT, value);
        assert_eq!(TraceContext::of_headers(&headers), None);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(trace_id in 1u128.., span_id in 1u64.., is_sampled: bool) {
            let context = TraceContext { trace_id, span_id, is_sampled };
            prop_assert_eq!(TraceContext::parse(context.header().as_bytes()), Some(context));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = TraceContext::parse(&bytes);
        }
    }
}
