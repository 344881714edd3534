//! Which address a request comes from: the connection's, or behind trusted proxies the one that they
//! report in `X-Forwarded-For`. Pure.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use hyper::HeaderMap;
use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// IP addresses and networks, such as those of proxies whose `X-Forwarded-For` is believed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct Networks(Vec<IpNet>);

/// The schema's `format` of an address or network.
pub const NETWORK: &str = "address or network";

impl JsonSchema for Networks {
    fn schema_name() -> Cow<'static, str> {
        "Networks".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "array", "items": {"type": "string", "format": NETWORK}})
    }

    fn inline_schema() -> bool {
        true
    }
}

impl TryFrom<Vec<String>> for Networks {
    type Error = String;

    fn try_from(texts: Vec<String>) -> Result<Self, String> {
        texts
            .iter()
            .map(|text| parse(text))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl From<Networks> for Vec<String> {
    fn from(proxies: Networks) -> Self {
        proxies.0.iter().map(IpNet::to_string).collect()
    }
}

/// A network, or an address as the network of itself alone.
pub fn parse(text: &str) -> Result<IpNet, String> {
    let network = IpNet::from_str(text).or_else(|_| IpAddr::from_str(text).map(IpNet::from));
    network.map_err(|_| {
        format!("`{text}` is neither an IP address nor a network such as `10.0.0.0/8`")
    })
}

impl Networks {
    /// The client's address of a request over a connection from `peer`.
    ///
    /// Each proxy appends the address it was connected from, so the list is read from its end: the first
    /// address that is not a trusted proxy's is the client's. What stands before that one is the client's
    /// own claim. An entry that is no address ends the search at the proxy that reported it.
    pub fn client_of(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut client = peer.to_canonical();
        if self.0.is_empty() {
            return client;
        }
        let values = headers.get_all("x-forwarded-for").iter().rev();
        let entries = values.flat_map(|value| value.to_str().unwrap_or("?").rsplit(','));
        for entry in entries {
            if !self.contains(client) {
                break;
            }
            match address(entry.trim()) {
                Some(address) => client = address,
                None => break,
            }
        }
        client
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(&address))
    }
}

/// An entry of `X-Forwarded-For`: an address, with a port from some proxies.
fn address(entry: &str) -> Option<IpAddr> {
    let bare = || entry.trim_matches(['[', ']']).parse();
    let with_port = |_| entry.parse::<SocketAddr>().map(|address| address.ip());
    let address = bare().or_else(with_port).ok()?;
    Some(address.to_canonical())
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    fn check(trusted: &[&str], peer: &str, lines: &[&str], expected: &str) {
        let trusted = trusted.iter().map(ToString::to_string).collect::<Vec<_>>();
        let trusted = Networks::try_from(trusted).unwrap();
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append("x-forwarded-for", HeaderValue::from_str(line).unwrap());
        }
        let client = trusted.client_of(peer.parse().unwrap(), &headers);
        assert_eq!(client.to_string(), expected, "{peer} {lines:?}");
    }

    #[test]
    fn the_header_of_somebody_who_is_not_trusted_is_ignored() {
        check(&[], "10.0.0.1", &["203.0.113.9"], "10.0.0.1");
        check(&["10.0.0.0/8"], "192.0.2.1", &["203.0.113.9"], "192.0.2.1");
        check(&["10.0.0.2"], "10.0.0.1", &["203.0.113.9"], "10.0.0.1");
    }

    #[test]
    fn the_client_is_the_last_address_that_is_not_a_trusted_proxys() {
        let trusted = &["10.0.0.0/8", "fd00::/8"];
        check(trusted, "10.0.0.1", &[], "10.0.0.1");
        check(trusted, "10.0.0.1", &["203.0.113.9"], "203.0.113.9");
        check(
            trusted,
            "10.0.0.1",
            &["1.1.1.1, 203.0.113.9"],
            "203.0.113.9",
        );
        check(
            trusted,
            "10.0.0.1",
            &["203.0.113.9, 10.0.0.7,fd00::1"],
            "203.0.113.9",
        );
        check(
            trusted,
            "10.0.0.1",
            &["1.1.1.1", "203.0.113.9", "10.0.0.7"],
            "203.0.113.9",
        );
        check(trusted, "10.0.0.1", &["10.0.0.8, 10.0.0.7"], "10.0.0.8");
        check(
            trusted,
            "10.0.0.1",
            &["1.1.1.1, unknown, 10.0.0.7"],
            "10.0.0.7",
        );
    }

    #[test]
    fn an_entry_may_have_a_port_brackets_or_be_ipv4_mapped() {
        let trusted = &["10.0.0.1"];
        check(trusted, "10.0.0.1", &["203.0.113.9:4711"], "203.0.113.9");
        check(trusted, "10.0.0.1", &["[2001:db8::9]:4711"], "2001:db8::9");
        check(trusted, "10.0.0.1", &["[2001:db8::9]"], "2001:db8::9");
        check(
            trusted,
            "::ffff:10.0.0.1",
            &["::ffff:203.0.113.9"],
            "203.0.113.9",
        );
    }

    #[test]
    fn a_list_is_written_as_it_is_read() {
        let texts = vec!["10.0.0.0/8".to_owned(), "2001:db8::/32".to_owned()];
        let proxies = Networks::try_from(texts.clone()).unwrap();
        assert_eq!(Vec::from(proxies), texts);
        let wrong = Networks::try_from(vec!["10.0.0/8".to_owned()]);
        assert!(wrong.unwrap_err().contains("`10.0.0/8`"));
    }
}
