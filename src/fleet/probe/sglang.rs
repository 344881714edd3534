//! Parses the pages of SGLang that say what it is and how busy it is: `/server_info` and `/v1/loads`.

use std::collections::BTreeMap;

use serde::Deserialize;
use tracing::warn;

use super::engine::EngineMetrics;
use crate::fleet::events::{self, Endpoint, UnusableSource};
use crate::fleet::{Role, Worker};

/// What a bootstrap server says of its prefill worker; 503 until the engine has registered.
pub(super) const ROUTE: &str =
    "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";

/// The parts of `/server_info` that the router uses.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(super) struct ServerInfo {
    #[serde(default)]
    pub(super) version: Option<String>,
    #[serde(default)]
    pub(super) page_size: Option<u32>,
    /// LoRA adapters that are in the GPU at the same time.
    #[serde(default)]
    pub(super) max_loras_per_batch: Option<u32>,
    #[serde(default)]
    disable_radix_cache: Option<bool>,
    /// `null` as a text, `prefill` or `decode`.
    #[serde(default)]
    disaggregation_mode: Option<String>,
    #[serde(default)]
    disaggregation_decode_enable_radix_cache: Option<bool>,
    #[serde(default)]
    kv_events: Option<KvEvents>,
}

/// Where rank r publishes: at each port plus r.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct KvEvents {
    #[serde(default)]
    publisher: Option<String>,
    #[serde(default)]
    endpoint_host: Option<String>,
    endpoint_port_base: u16,
    #[serde(default)]
    replay_endpoint_port_base: Option<u16>,
    #[serde(default)]
    topic: String,
    #[serde(default)]
    dp_size: Option<u32>,
    /// With `--load-publish-endpoint`.
    #[serde(default)]
    load_endpoint_port_base: Option<u16>,
    #[serde(default)]
    load_topic: Option<String>,
}

impl KvEvents {
    fn ranks(&self) -> u32 {
        self.dp_size.unwrap_or(1).clamp(1, events::MAX_RANKS)
    }

    /// True if it has ranks that the router does not follow.
    fn has_further_ranks(&self) -> bool {
        self.dp_size > Some(events::MAX_RANKS)
    }

    /// On whatever address the worker has.
    fn at(base: u16, rank: u32) -> Option<String> {
        let port = u16::try_from(u32::from(base) + rank).ok()?;
        Some(format!("tcp://*:{port}"))
    }
}

impl ServerInfo {
    pub(super) fn parse(page: &[u8]) -> Result<Self, String> {
        let info: Self =
            serde_json::from_slice(page).map_err(|error| format!("/server_info: {error}"))?;
        Ok(Self {
            page_size: info.page_size.filter(|size| *size > 0),
            ..info
        })
    }

    /// A decode worker keeps no prefixes unless it was asked to.
    pub(super) fn prefix_caching(&self) -> Option<bool> {
        let is_off = self.disable_radix_cache?;
        let keeps = self.disaggregation_decode_enable_radix_cache == Some(true);
        Some(!is_off && (self.role() != Some(Role::Decode) || keeps))
    }

    /// The part of a request that the engine computes; `None` if it does not say.
    fn role(&self) -> Option<Role> {
        match self.disaggregation_mode.as_deref()? {
            "prefill" => Some(Role::Prefill),
            "decode" => Some(Role::Decode),
            "null" => Some(Role::Both),
            _ => None,
        }
    }

    /// Where each rank publishes KV events, and the publishers that cannot be followed.
    pub(super) fn event_sources(&self) -> (BTreeMap<u32, Endpoint>, Vec<UnusableSource>) {
        let Some(source) = &self.kv_events else {
            return Default::default();
        };
        let host = source.endpoint_host.as_deref().unwrap_or("*");
        let unusable = |reason: String| {
            let source = UnusableSource {
                rank: "0".to_owned(),
                endpoint: format!("tcp://{host}:{}", source.endpoint_port_base),
                reason,
            };
            (BTreeMap::new(), vec![source])
        };
        match source.publisher.as_deref() {
            Some("zmq") | None => {}
            Some("null") => return Default::default(),
            Some(other) => return unusable(format!("its publisher is `{other}`, not zmq")),
        }
        if !events::is_wildcard(host) {
            return unusable(
                "the engine connects to this endpoint instead of listening on it".to_owned(),
            );
        }
        let endpoint = |rank| {
            let replay = source.replay_endpoint_port_base;
            let endpoint = Endpoint::Zmq {
                publisher: KvEvents::at(source.endpoint_port_base, rank)?,
                replay: replay.and_then(|base| KvEvents::at(base, rank)),
                topic: source.topic.clone(),
            };
            Some((rank, endpoint))
        };
        let endpoints = (0..source.ranks()).filter_map(endpoint).collect();
        let mut not_followed = Vec::new();
        if source.has_further_ranks() {
            let rank = events::MAX_RANKS;
            let port = u32::from(source.endpoint_port_base) + rank;
            let address = format!("tcp://{host}:{port}");
            not_followed.push(UnusableSource::of_further_rank(rank.to_string(), address));
        }
        (endpoints, not_followed)
    }

    /// Where each rank publishes its load, if it does. Nothing if some ranks are not followed: the sum of the others is not the
    /// engine's load, which health checks ask for.
    pub(super) fn load_sources(&self) -> BTreeMap<u32, Endpoint> {
        let are_all_followed = |source: &&KvEvents| !source.has_further_ranks();
        let Some(source) = self.kv_events.as_ref().filter(are_all_followed) else {
            return BTreeMap::new();
        };
        let host = source.endpoint_host.as_deref().unwrap_or("*");
        let base = source.load_endpoint_port_base;
        let base = base.filter(|_| events::is_wildcard(host));
        let endpoint = |rank| {
            let endpoint = Endpoint::Zmq {
                publisher: KvEvents::at(base?, rank)?,
                replay: None,
                topic: source.load_topic.clone().unwrap_or_default(),
            };
            Some((rank, endpoint))
        };
        (0..source.ranks()).filter_map(endpoint).collect()
    }
}

/// A decode worker of SGLang refuses whole requests, and a prefill worker answers none, so a role that differs from the
/// engine's makes requests fail.
pub(super) fn check_role(worker: &Worker, info: &ServerInfo, is_new: bool) {
    if let Some(role) = info.role()
        && role != worker.role
        && is_new
    {
        warn!(
            worker = %worker.name,
            configured = %worker.role,
            engine = %role,
            "the worker's role is not that of its engine (--disaggregation-mode); its requests will fail"
        );
    }
}

/// The sums over the ranks of `/v1/loads?include=core`, the fullest rank's cache usage.
pub(super) fn loads(page: &[u8]) -> Option<EngineMetrics> {
    #[derive(Deserialize)]
    struct Page {
        loads: Vec<Rank>,
    }
    #[derive(Deserialize)]
    struct Rank {
        num_running_reqs: u32,
        num_waiting_reqs: u32,
        #[serde(default)]
        token_usage: f64,
        #[serde(default)]
        max_total_num_tokens: u64,
    }
    let page: Page = serde_json::from_slice(page).ok()?;
    let mut sum = EngineMetrics {
        has_load: true,
        ..EngineMetrics::default()
    };
    for rank in &page.loads {
        sum.running = sum.running.saturating_add(rank.num_running_reqs);
        sum.waiting = sum.waiting.saturating_add(rank.num_waiting_reqs);
        sum.kv_usage = sum.kv_usage.max(rank.token_usage).min(1.0);
        let tokens = sum.cache_tokens.unwrap_or(0);
        sum.cache_tokens = Some(tokens.saturating_add(rank.max_total_num_tokens));
    }
    (!page.loads.is_empty()).then_some(sum)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RECORDED: &str = include_str!("../../../tests/fixtures/sglang-0.5.23/server_info.json");

    fn zmq(publisher: u16, replay: u16) -> Endpoint {
        Endpoint::Zmq {
            publisher: format!("tcp://*:{publisher}"),
            replay: Some(format!("tcp://*:{replay}")),
            topic: "kv-events".to_owned(),
        }
    }

    #[test]
    fn a_recorded_server_says_where_its_events_are() {
        let info = ServerInfo::parse(RECORDED.as_bytes()).unwrap();
        assert_eq!(info.version.as_deref(), Some("0.5.23"));
        assert_eq!(info.page_size, Some(16));
        assert_eq!(info.prefix_caching(), Some(true));
        assert_eq!(info.role(), Some(Role::Both));
        let expected = BTreeMap::from([(0, zmq(5757, 5758))]);
        assert_eq!(info.event_sources(), (expected, Vec::new()));
        let load = Endpoint::Zmq {
            publisher: "tcp://*:5759".to_owned(),
            replay: None,
            topic: "load".to_owned(),
        };
        assert_eq!(info.load_sources(), BTreeMap::from([(0, load)]));
    }

    #[test]
    fn each_rank_has_ports_of_its_own() {
        let ranks = RECORDED
            .replace("\"dp_size\": 1", "\"dp_size\": 2")
            .replace("5758", "5858");
        let info = ServerInfo::parse(ranks.as_bytes()).unwrap();
        let (endpoints, _) = info.event_sources();
        let expected = [(0, zmq(5757, 5858)), (1, zmq(5758, 5859))];
        assert_eq!(endpoints, BTreeMap::from(expected));
    }

    #[test]
    fn an_engine_with_more_ranks_than_are_followed_says_that_some_are_not() {
        for (ranks, expected, loads) in [(64, vec![], 64), (72, vec!["64"], 0)] {
            let page = RECORDED.replace("\"dp_size\": 1", &format!("\"dp_size\": {ranks}"));
            let info = ServerInfo::parse(page.as_bytes()).unwrap();
            let (endpoints, unusable) = info.event_sources();
            assert_eq!(endpoints.len(), 64);
            let unusable: Vec<&str> = unusable.iter().map(|source| &*source.rank).collect();
            assert_eq!(unusable, expected, "{ranks}");
            // The loads of 64 ranks are not the load of all.
            assert_eq!(info.load_sources().len(), loads, "{ranks}");
        }
        let (_, unusable) = events::parse_sources(br#"{"64":{}}"#).unwrap();
        let (reason, fix) = (&unusable[0].reason, unusable[0].fix());
        assert!(reason.contains("0 to 63") && reason.contains("pinned to no rank"));
        assert!(fix.contains("at most 64 ranks"), "{fix}");
    }

    #[test]
    fn without_events_or_behind_another_publisher_nothing_is_followed() {
        for page in ["{}", r#"{"kv_events":null}"#] {
            let info = ServerInfo::parse(page.as_bytes()).unwrap();
            assert_eq!(info.event_sources(), Default::default(), "{page}");
            assert_eq!(info.load_sources(), BTreeMap::new());
        }
        let elsewhere = RECORDED.replace("\"*\"", "\"collector\"");
        let info = ServerInfo::parse(elsewhere.as_bytes()).unwrap();
        let (endpoints, unusable) = info.event_sources();
        assert!(endpoints.is_empty());
        assert_eq!(unusable[0].endpoint, "tcp://collector:5757");
        assert!(ServerInfo::parse(b"<html>").is_err());
    }

    #[test]
    fn a_decode_worker_caches_no_prefixes_unless_it_was_asked_to() {
        let decode = RECORDED.replace("\"null\"", "\"decode\"");
        let of = |page: &str| ServerInfo::parse(page.as_bytes()).unwrap();
        assert_eq!(of(&decode).role(), Some(Role::Decode));
        assert_eq!(of(&decode).prefix_caching(), Some(false));
        let keeps = decode.replace(
            "\"disaggregation_decode_enable_radix_cache\": false",
            "\"disaggregation_decode_enable_radix_cache\": true",
        );
        assert_eq!(of(&keeps).prefix_caching(), Some(true));
    }

    #[test]
    fn the_loads_of_all_ranks_are_added_up() {
        let recorded = include_str!("../../../tests/fixtures/sglang-0.5.23/loads.json");
        let one = loads(recorded.as_bytes()).unwrap();
        assert_eq!((one.running, one.cache_tokens), (0, Some(1_024)));
        let two = br#"{"loads":[{"num_running_reqs":2,"num_waiting_reqs":1,"token_usage":0.5,"max_total_num_tokens":10},
            {"num_running_reqs":1,"num_waiting_reqs":0,"token_usage":0.25,"max_total_num_tokens":10}]}"#;
        let two = loads(two).unwrap();
        assert_eq!((two.running, two.waiting, two.kv_usage), (3, 1, 0.5));
        assert_eq!(two.cache_tokens, Some(20));
        let odd = br#"{"loads":[{"num_running_reqs":1,"num_waiting_reqs":0,"token_usage":1e308}]}"#;
        assert_eq!(loads(odd).map(|load| load.kv_usage), Some(1.0));
        assert_eq!(loads(br#"{"loads":[]}"#), None);
        assert_eq!(loads(b"<html>"), None);
    }

    proptest! {
        #[test]
        fn no_page_makes_it_panic(page in "(\\{|\\}|\"kv_events\"|\"endpoint_port_base\"|\"dp_size\"|:|,|65535|99999999999|null){0,14}") {
            if let Ok(info) = ServerInfo::parse(page.as_bytes()) {
                let _ = (info.event_sources(), info.load_sources());
            }
            let _ = loads(page.as_bytes());
        }
    }
}
