//! The PROXY protocol, versions 1 (text) and 2 (binary): a header at the start of a connection in which
//! a load balancer names the client. <https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt>

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

/// A version 2 header with all its optional fields has a few hundred bytes.
const MAX_HEADER_BYTES: usize = 4096;
/// The specification's bound of a version 1 header.
const MAX_V1_BYTES: usize = 107;
const V2_SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";

/// What the bytes received so far contain.
#[derive(Debug, PartialEq, Eq)]
pub enum Parsed {
    /// A header may follow from more bytes.
    Incomplete,
    /// A whole header of `length` bytes. The client is unknown where the load balancer speaks for itself
    /// (health checks) or for a protocol that is not TCP over IP.
    Header {
        length: usize,
        client: Option<IpAddr>,
    },
    Malformed,
}

/// Looks for a header at the start of `bytes`.
pub fn parse(bytes: &[u8]) -> Parsed {
    let start = &bytes[..bytes.len().min(V2_SIGNATURE.len())];
    if V2_SIGNATURE.starts_with(start) {
        return parse_v2(bytes).unwrap_or(Parsed::Incomplete);
    }
    let line = &bytes[..bytes.len().min(MAX_V1_BYTES)];
    match line.iter().position(|byte| *byte == b'\n') {
        Some(end) => parse_v1(&line[..=end]).unwrap_or(Parsed::Malformed),
        None if line.len() < MAX_V1_BYTES && b"PROXY ".starts_with(&line[..line.len().min(6)]) => {
            Parsed::Incomplete
        }
        None => Parsed::Malformed,
    }
}

/// `line` is everything up to the first line feed. `None` if it is malformed.
fn parse_v1(line: &[u8]) -> Option<Parsed> {
    let text = std::str::from_utf8(line).ok()?;
    let text = text.strip_prefix("PROXY ")?.strip_suffix("\r\n")?;
    let fields: Vec<&str> = text.split(' ').collect();
    let is_port = |text: &str| text.parse::<u16>().is_ok();
    let client = match *fields.as_slice() {
        ["UNKNOWN", ..] => None,
        ["TCP4", source, destination, from, to] if is_port(from) && is_port(to) => {
            destination.parse::<Ipv4Addr>().ok()?;
            Some(IpAddr::V4(source.parse().ok()?))
        }
        ["TCP6", source, destination, from, to] if is_port(from) && is_port(to) => {
            destination.parse::<Ipv6Addr>().ok()?;
            Some(IpAddr::V6(source.parse().ok()?))
        }
        _ => return None,
    };
    Some(Parsed::Header {
        length: line.len(),
        client,
    })
}

/// `bytes` begin as the signature does. `None` if the header is not complete.
fn parse_v2(bytes: &[u8]) -> Option<Parsed> {
    let [command, family, length_high, length_low] = *bytes.get(12..)?.first_chunk::<4>()?;
    let length = 16 + usize::from(u16::from_be_bytes([length_high, length_low]));
    if !matches!(command, 0x20 | 0x21) || length > MAX_HEADER_BYTES {
        return Some(Parsed::Malformed);
    }
    let addresses = bytes.get(16..length)?;
    // The source address comes first; ports and the destination follow.
    let client = match (command, family) {
        // LOCAL: the load balancer's own connection.
        (0x20, _) => None,
        (_, 0x11) if addresses.len() >= 12 => addresses
            .first_chunk::<4>()
            .map(|source| IpAddr::from(*source)),
        (_, 0x21) if addresses.len() >= 36 => addresses
            .first_chunk::<16>()
            .map(|source| IpAddr::from(*source)),
        (_, 0x11 | 0x21) => return Some(Parsed::Malformed),
        _ => None,
    };
    Some(Parsed::Header { length, client })
}

/// Reads a header from a connection. Returns the client, if the header names one, and the bytes that
/// came after the header.
pub(super) async fn read(
    stream: &mut (impl AsyncRead + Unpin),
    timeout: Duration,
) -> io::Result<(Option<IpAddr>, Bytes)> {
    let mut received = BytesMut::with_capacity(512);
    let header = async {
        loop {
            match parse(&received) {
                Parsed::Incomplete => {}
                Parsed::Header { length, client } => {
                    received.advance(length);
                    return Ok((client, received.freeze()));
                }
                Parsed::Malformed => {
                    return Err(io::Error::other("malformed PROXY protocol header"));
                }
            }
            if stream.read_buf(&mut received).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    };
    tokio::time::timeout(timeout, header)
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A version 2 header for a connection from `source` to an IPv4 address.
    fn v2(source: &str) -> Vec<u8> {
        let (family, mut addresses) = match source.parse().unwrap() {
            IpAddr::V4(source) => (0x11, [source.octets(), [10, 0, 0, 1]].concat()),
            IpAddr::V6(source) => (0x21, [source.octets(), [1; 16]].concat()),
        };
        addresses.extend([0x12, 0x34, 1, 0xbb]);
        let length = addresses.len() as u8;
        [&V2_SIGNATURE[..], &[0x21, family, 0, length], &addresses].concat()
    }

    fn header(length: usize, client: Option<&str>) -> Parsed {
        let client = client.map(|client| client.parse().unwrap());
        Parsed::Header { length, client }
    }

    #[test]
    fn a_v1_header_names_the_client() {
        let check = |text: &str, client| {
            let bytes = format!("{text}GET / HTTP/1.1\r\n");
            assert_eq!(
                parse(bytes.as_bytes()),
                header(text.len(), client),
                "{text}"
            );
            for cut in 0..text.len() {
                assert_eq!(parse(&text.as_bytes()[..cut]), Parsed::Incomplete, "{cut}");
            }
        };
        check(
            "PROXY TCP4 203.0.113.9 10.0.0.1 56324 443\r\n",
            Some("203.0.113.9"),
        );
        check("PROXY TCP6 2001:db8::9 ::1 1 2\r\n", Some("2001:db8::9"));
        check("PROXY UNKNOWN\r\n", None);
        check("PROXY UNKNOWN ffff::1 ::1 1 2\r\n", None);
    }

    #[test]
    fn what_is_no_v1_header_is_malformed() {
        for text in [
            "GET / HTTP/1.1\r\n",
            "PROXY TCP4 203.0.113.9 10.0.0.1 56324 443\n",
            "PROXY TCP4 203.0.113.9 10.0.0.1 56324\r\n",
            "PROXY TCP4 203.0.113.256 10.0.0.1 1 2\r\n",
            "PROXY TCP4 ::1 10.0.0.1 1 2\r\n",
            "PROXY TCP4 203.0.113.9 10.0.0.1 1 65536\r\n",
            "PROXY UDP4 203.0.113.9 10.0.0.1 1 2\r\n",
            "PROXX",
        ] {
            assert_eq!(parse(text.as_bytes()), Parsed::Malformed, "{text}");
        }
        assert_eq!(parse(&[b'P'; 107]), Parsed::Malformed);
        let endless = format!("PROXY UNKNOWN {}", "x".repeat(107));
        assert_eq!(parse(endless.as_bytes()), Parsed::Malformed);
    }

    #[test]
    fn a_v2_header_names_the_client_and_may_carry_more_fields() {
        for client in ["203.0.113.9", "2001:db8::9"] {
            let mut bytes = v2(client);
            let length = bytes.len();
            assert_eq!(parse(&bytes), header(length, Some(client)));
            for cut in 0..length {
                assert_eq!(parse(&bytes[..cut]), Parsed::Incomplete, "{cut}");
            }
            // A field of three bytes behind the addresses.
            bytes[15] += 3;
            bytes.extend([4, 0, 0]);
            assert_eq!(parse(&bytes), header(length + 3, Some(client)));
        }
    }

    #[test]
    fn a_v2_header_of_the_load_balancer_itself_names_nobody() {
        let mut local = v2("10.0.0.2");
        local[12] = 0x20;
        assert_eq!(parse(&local), header(local.len(), None));
        let mut bare = V2_SIGNATURE.to_vec();
        bare.extend([0x20, 0, 0, 0]);
        assert_eq!(parse(&bare), header(16, None));
    }

    #[test]
    fn a_v2_header_of_another_version_or_with_too_little_in_it_is_malformed() {
        for (index, byte) in [(12, 0x31), (12, 0x22), (14, 0xff), (15, 11)] {
            let mut bytes = v2("203.0.113.9");
            bytes[index] = byte;
            assert_eq!(parse(&bytes), Parsed::Malformed, "{index}");
        }
    }

    #[tokio::test]
    async fn what_follows_the_header_is_left_to_read() {
        let mut bytes = &b"PROXY TCP4 203.0.113.9 10.0.0.1 1 2\r\nGET /"[..];
        let (client, rest) = read(&mut bytes, Duration::from_secs(9)).await.unwrap();
        assert_eq!(client, "203.0.113.9".parse().ok());
        assert_eq!([&rest[..], bytes].concat(), b"GET /");
        let cut = read(&mut &b"PROXY TCP4"[..], Duration::from_secs(9)).await;
        assert_eq!(cut.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    proptest! {
        /// Whatever comes, more bytes never change a verdict.
        #[test]
        fn a_verdict_is_final(
            signed: bool,
            tail in proptest::collection::vec(any::<u8>(), 0..80),
            cut in 0usize..100,
        ) {
            let start: &[u8] = if signed { V2_SIGNATURE } else { b"PROXY " };
            let bytes = [start, &tail].concat();
            let part = parse(&bytes[..cut.min(bytes.len())]);
            if part != Parsed::Incomplete {
                prop_assert_eq!(parse(&bytes), part);
            }
        }
    }
}
