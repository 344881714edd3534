//! Where a worker publishes its KV events, from the configuration or from the engine itself. Pure.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Dp ranks of one worker that are followed. Few engines have more behind one address.
pub(super) const MAX_RANKS: u32 = 64;

/// How a worker's KV events are received, as a configuration lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct EventsSpec {
    /// Where the KV events come from.
    pub from: From,
    /// zmq: `tcp://host:port`; grpc: `host:port`, over TLS if the worker's URL is `https://`, or `http://host:port` or
    /// `https://host:port` to say it. The host `*` is the worker's own, as in `tcp://*:5557`, and so is `0.0.0.0` or
    /// `[::]`. ZeroMQ has no TLS.
    pub endpoint: String,
    /// zmq: the engine's `replay_endpoint`, where lost batches are requested again. Without it a lost connection
    /// clears what is known of the worker's cache.
    pub replay: String,
    /// zmq: only topics with this prefix.
    pub topic: String,
    /// Data-parallel ranks. Over ZeroMQ the ports of rank r are those of the endpoints + r.
    #[schemars(range(min = 1, max = 64))]
    pub ranks: u32,
}

impl Default for EventsSpec {
    fn default() -> Self {
        Self {
            from: From::default(),
            endpoint: String::new(),
            replay: String::new(),
            topic: String::new(),
            ranks: 1,
        }
    }
}

/// Where a worker's KV events come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum From {
    /// As the engine says: vLLM 0.29 and later at `/kv_event_sources`, SGLang at `/server_info`. An engine without such
    /// a page has none.
    #[default]
    Auto,
    /// Not received; the router predicts what the worker has cached.
    Off,
    /// The engine's own ZeroMQ publisher.
    Zmq,
    /// The engine's gRPC service, or a `warmroute bridge`.
    Grpc,
}

/// How a worker's KV events are received, validated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Events {
    #[default]
    Auto,
    Off,
    /// One for each rank, in order. Hosts may still be `*` or another wildcard address.
    At(Vec<Endpoint>),
}

/// The KV events of one dp rank.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Endpoint {
    Zmq {
        /// `tcp://host:port`
        publisher: String,
        replay: Option<String>,
        topic: String,
    },
    /// `host:port`, the same for every rank.
    Grpc {
        address: String,
        transport: Transport,
    },
}

/// Whether KV events over gRPC are encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// As the worker's requests.
    #[default]
    OfWorker,
    Clear,
    /// With the credentials of the worker's requests.
    Tls,
}

impl EventsSpec {
    /// Whether keys are set that nothing reads: the engine says itself what it publishes, or nothing is received.
    pub fn has_unused_keys(&self) -> bool {
        let is_at_endpoint = matches!(self.from, From::Zmq | From::Grpc);
        !is_at_endpoint && (!self.topic.is_empty() || self.ranks != 1)
    }

    /// Validates the settings. An error is a key of this map and a message.
    pub fn check(&self) -> Result<Events, (&'static str, String)> {
        if self.ranks == 0 || self.ranks > MAX_RANKS {
            return Err(("ranks", format!("must be 1 to {MAX_RANKS}")));
        }
        match self.from {
            From::Auto | From::Off if !self.endpoint.is_empty() || !self.replay.is_empty() => {
                let message = "must be zmq or grpc if there is an endpoint".to_owned();
                Err(("from", message))
            }
            From::Auto => Ok(Events::Auto),
            From::Off => Ok(Events::Off),
            From::Zmq => {
                let zmq = |key, text: &str| {
                    let named = |error| (key, error);
                    if text.is_empty() {
                        return Err(named(
                            "is missing; write one such as tcp://*:5557".to_owned(),
                        ));
                    }
                    let address = text.strip_prefix("tcp://").ok_or_else(|| {
                        named(format!("`{text}` is not an address such as tcp://*:5557"))
                    })?;
                    split(address).map_err(named)
                };
                let endpoint = zmq("endpoint", &self.endpoint)?;
                let replay = (!self.replay.is_empty()).then(|| zmq("replay", &self.replay));
                let replay = replay.transpose()?;
                let of_rank = |(host, port): &(String, u16), rank: u32| {
                    let port = u32::from(*port) + rank;
                    match u16::try_from(port) {
                        Ok(port) => Ok(format!("tcp://{host}:{port}")),
                        Err(_) => Err(("ranks", format!("rank {rank} would have port {port}"))),
                    }
                };
                (0..self.ranks)
                    .map(|rank| {
                        Ok(Endpoint::Zmq {
                            publisher: of_rank(&endpoint, rank)?,
                            replay: replay
                                .as_ref()
                                .map(|replay| of_rank(replay, rank))
                                .transpose()?,
                            topic: self.topic.clone(),
                        })
                    })
                    .collect::<Result<_, _>>()
                    .map(Events::At)
            }
            From::Grpc => {
                if !self.replay.is_empty() || !self.topic.is_empty() {
                    return Err(("from", "grpc has neither replay nor topic".to_owned()));
                }
                if self.endpoint.is_empty() {
                    let message = "is missing; write one such as *:50051".to_owned();
                    return Err(("endpoint", message));
                }
                let (transport, address) = match self.endpoint.split_once("://") {
                    None => (Transport::OfWorker, self.endpoint.as_str()),
                    Some(("http", address)) => (Transport::Clear, address),
                    Some(("https", address)) => (Transport::Tls, address),
                    Some((other, _)) => {
                        let message = format!("the scheme must be http or https, not {other}");
                        return Err(("endpoint", message));
                    }
                };
                let (host, port) = split(address).map_err(|error| ("endpoint", error))?;
                let endpoint = Endpoint::Grpc {
                    address: format!("{host}:{port}"),
                    transport,
                };
                Ok(Events::At(vec![endpoint; self.ranks as usize]))
            }
        }
    }
}

/// A rank's publisher to which the router cannot subscribe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusableSource {
    /// As the engine lists it.
    pub rank: String,
    pub endpoint: String,
    pub reason: String,
}

impl UnusableSource {
    /// A rank that the router does not follow, because its number is too high. Requests are then pinned to no rank of the
    /// engine: those beyond would get none.
    pub(super) fn of_further_rank(rank: String, endpoint: String) -> Self {
        let reason = format!(
            "only ranks 0 to {} are followed, so requests are pinned to no rank",
            MAX_RANKS - 1
        );
        Self {
            rank,
            endpoint,
            reason,
        }
    }

    /// What to change so that the router can follow this publisher.
    pub fn fix(&self) -> String {
        if self.rank.parse().is_ok_and(|rank: u32| rank >= MAX_RANKS) {
            return format!("have at most {MAX_RANKS} ranks behind one address");
        }
        let port = self.endpoint.rsplit_once(':').map(|(_, port)| port);
        match port.filter(|_| self.endpoint.starts_with("tcp://")) {
            Some(port) => format!(
                "start the engine with \"endpoint\":\"tcp://*:{port}\" in --kv-events-config"
            ),
            None => "publish on tcp://*:PORT, or set events of this worker".to_owned(),
        }
    }
}

/// Parses the response to `GET /kv_event_sources`, which lists the publisher of each rank. Also returns the
/// publishers that cannot be used: the router can only subscribe to a ZeroMQ port that the engine itself opens.
pub fn parse_sources(
    page: &[u8],
) -> Result<(BTreeMap<u32, Endpoint>, Vec<UnusableSource>), String> {
    #[derive(Deserialize)]
    struct Source {
        #[serde(default)]
        enable_kv_cache_events: bool,
        #[serde(default)]
        publisher: Option<String>,
        #[serde(default)]
        endpoint: Option<String>,
        #[serde(default)]
        replay_endpoint: Option<String>,
        #[serde(default)]
        topic: Option<String>,
    }
    let sources: BTreeMap<String, Source> =
        serde_json::from_slice(page).map_err(|error| error.to_string())?;
    let mut endpoints = BTreeMap::new();
    let mut unusable = Vec::new();
    for (rank, source) in sources {
        let Some(number) = rank.parse().ok().filter(|rank| *rank < MAX_RANKS) else {
            let endpoint = source.endpoint.unwrap_or_default();
            unusable.push(UnusableSource::of_further_rank(rank, endpoint));
            continue;
        };
        if !source.enable_kv_cache_events || source.publisher.as_deref() == Some("null") {
            continue;
        }
        match (
            source.publisher.as_deref(),
            source.endpoint.as_deref().map(listening_port),
        ) {
            (Some("zmq"), Some(Some(publisher))) => {
                let replay = source.replay_endpoint.as_deref().and_then(listening_port);
                let topic = source.topic.unwrap_or_default();
                endpoints.insert(
                    number,
                    Endpoint::Zmq {
                        publisher,
                        replay,
                        topic,
                    },
                );
            }
            (publisher, _) => unusable.push(UnusableSource {
                reason: match publisher {
                    Some("zmq") => {
                        "the engine connects to this endpoint instead of listening on it".to_owned()
                    }
                    other => format!("its publisher is `{}`, not zmq", other.unwrap_or_default()),
                },
                rank,
                endpoint: source.endpoint.unwrap_or_default(),
            }),
        }
    }
    Ok((endpoints, unusable))
}

/// `tcp://*:port` if the engine listens at this endpoint; otherwise it connects to it, also to `0.0.0.0`.
fn listening_port(endpoint: &str) -> Option<String> {
    let (host, port) = split(endpoint.strip_prefix("tcp://")?).ok()?;
    (host.contains('*') || host.contains("::")).then(|| format!("tcp://*:{port}"))
}

/// True for an address that means all interfaces.
pub(super) fn is_wildcard(host: &str) -> bool {
    matches!(host, "*" | "0.0.0.0" | "[::]" | "::")
}

fn split(address: &str) -> Result<(String, u16), String> {
    let wrong = || format!("`{address}` is not host:port");
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    match port.parse() {
        Ok(port) if port > 0 && !host.is_empty() && !host.contains('/') => {
            Ok((host.to_owned(), port))
        }
        _ => Err(wrong()),
    }
}

impl Endpoint {
    /// Where the KV events come from: `tcp://host:port`, or `host:port` of a gRPC service.
    pub fn address(&self) -> &str {
        match self {
            Endpoint::Zmq { publisher, .. } => publisher,
            Endpoint::Grpc { address, .. } => address,
        }
    }

    /// Replaces `*` and other wildcard addresses by the worker's host, since connecting to them would reach the router's
    /// own host.
    pub fn with_host(&self, worker_host: &str) -> Self {
        let resolve = |text: &str| {
            let (scheme, address) = match text.strip_prefix("tcp://") {
                Some(address) => ("tcp://", address),
                None => ("", text),
            };
            match address.rsplit_once(':') {
                Some((host, port)) if is_wildcard(host) => format!("{scheme}{worker_host}:{port}"),
                _ => text.to_owned(),
            }
        };
        match self {
            Endpoint::Zmq {
                publisher,
                replay,
                topic,
            } => Endpoint::Zmq {
                publisher: resolve(publisher),
                replay: replay.as_deref().map(resolve),
                topic: topic.clone(),
            },
            Endpoint::Grpc { address, transport } => Endpoint::Grpc {
                address: resolve(address),
                transport: *transport,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(from: From, endpoint: &str, replay: &str, ranks: u32) -> EventsSpec {
        EventsSpec {
            from,
            endpoint: endpoint.to_owned(),
            replay: replay.to_owned(),
            ranks,
            ..EventsSpec::default()
        }
    }

    fn zmq(publisher: &str, replay: Option<&str>, topic: &str) -> Endpoint {
        Endpoint::Zmq {
            publisher: publisher.to_owned(),
            replay: replay.map(str::to_owned),
            topic: topic.to_owned(),
        }
    }

    #[test]
    fn every_rank_has_its_own_ports() {
        let events = listed(From::Zmq, "tcp://*:5557", "tcp://*:6557", 2).check();
        let expected = [
            zmq("tcp://*:5557", Some("tcp://*:6557"), ""),
            zmq("tcp://*:5558", Some("tcp://*:6558"), ""),
        ];
        assert_eq!(events, Ok(Events::At(expected.to_vec())));
    }

    #[test]
    fn invalid_settings_are_reported_with_their_key() {
        for (listed, key, message) in [
            (listed(From::Zmq, "", "", 1), "endpoint", "is missing"),
            (listed(From::Grpc, "", "", 1), "endpoint", "is missing"),
            (listed(From::Zmq, "a:1", "", 1), "endpoint", "tcp://*:5557"),
            (
                listed(From::Zmq, "tcp://a:b", "", 1),
                "endpoint",
                "not host:port",
            ),
            (
                listed(From::Zmq, "tcp://a:1", "ipc:///x", 1),
                "replay",
                "tcp://",
            ),
            (
                listed(From::Zmq, "tcp://a:65535", "", 2),
                "ranks",
                "port 65536",
            ),
            (
                listed(From::Auto, "tcp://a:1", "", 1),
                "from",
                "zmq or grpc",
            ),
            (listed(From::Auto, "", "", 0), "ranks", "1 to 64"),
            (
                listed(From::Grpc, "a:1", "tcp://a:2", 1),
                "from",
                "neither replay",
            ),
        ] {
            let (found, text) = listed.check().unwrap_err();
            assert_eq!(found, key);
            assert!(text.contains(message), "{text}");
        }
    }

    #[test]
    fn the_page_of_an_engine_is_parsed() {
        // vLLM 0.32.0, recorded.
        let page = br#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558","buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv-events"}}"#;
        let (endpoints, unusable) = parse_sources(page).unwrap();
        let expected = zmq("tcp://*:5557", Some("tcp://*:5558"), "kv-events");
        assert_eq!(endpoints, BTreeMap::from([(0, expected)]));
        assert!(unusable.is_empty());
        assert_eq!(parse_sources(b"{}"), Ok((BTreeMap::new(), Vec::new())));
        assert!(parse_sources(b"<html>").is_err());
    }

    #[test]
    fn an_engine_that_publishes_to_a_collector_is_unusable() {
        let page = br#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://collector:5557"}}"#;
        let (endpoints, unusable) = parse_sources(page).unwrap();
        assert!(endpoints.is_empty());
        let source = &unusable[0];
        assert_eq!(
            (source.rank.as_str(), source.endpoint.as_str()),
            ("0", "tcp://collector:5557")
        );
        assert!(source.reason.contains("instead of listening"), "{source:?}");
    }

    #[test]
    fn an_engine_that_publishes_to_its_own_loopback_connects_there_and_the_fix_is_the_line_to_change()
     {
        for host in ["127.0.0.1", "0.0.0.0", "10.0.0.7"] {
            let page = format!(
                r#"{{"0":{{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://{host}:5557"}}}}"#
            );
            let (endpoints, unusable) = parse_sources(page.as_bytes()).unwrap();
            assert!(endpoints.is_empty(), "{host}");
            let fix = unusable[0].fix();
            assert!(fix.contains(r#""endpoint":"tcp://*:5557""#), "{fix}");
        }
        let page = br#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://[::]:5557"}}"#;
        let (endpoints, _) = parse_sources(page).unwrap();
        assert_eq!(endpoints[&0].address(), "tcp://*:5557");
    }

    #[test]
    fn a_grpc_endpoint_may_say_whether_it_is_encrypted() {
        let check = |endpoint: &str| match listed(From::Grpc, endpoint, "", 1).check() {
            Ok(Events::At(endpoints)) => Ok(endpoints[0].clone()),
            Ok(other) => panic!("{endpoint}: {other:?}"),
            Err((key, _)) => Err(key),
        };
        for (endpoint, transport) in [
            ("*:50051", Transport::OfWorker),
            ("http://*:50051", Transport::Clear),
            ("https://*:50051", Transport::Tls),
        ] {
            let address = "*:50051".to_owned();
            assert_eq!(check(endpoint), Ok(Endpoint::Grpc { address, transport }));
        }
        assert_eq!(check("tcp://*:50051"), Err("endpoint"));
    }

    #[test]
    fn wildcard_addresses_become_the_workers_host() {
        assert_eq!(
            zmq("tcp://*:1", Some("tcp://other:2"), "").with_host("10.0.0.7"),
            zmq("tcp://10.0.0.7:1", Some("tcp://other:2"), "")
        );
        for any in ["*", "0.0.0.0", "[::]", "::"] {
            let events = listed(From::Zmq, &format!("tcp://{any}:5557"), "", 1).check();
            let Ok(Events::At(endpoints)) = events else {
                panic!("{any}: {events:?}");
            };
            assert_eq!(
                endpoints[0].with_host("[::1]"),
                zmq("tcp://[::1]:5557", None, "")
            );
            let grpc = |host| Endpoint::Grpc {
                address: format!("{host}:50051"),
                transport: Transport::Tls,
            };
            assert_eq!(grpc(any).with_host("w1"), grpc("w1"));
        }
    }
}
