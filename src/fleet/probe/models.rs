//! What an engine says about itself, beside its health and its load.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;
use tracing::{debug, warn};

use super::get::get;
use super::{engine, sglang};
use crate::fleet::engine::{Engine, SelfDescription};
use crate::fleet::events::{self, Events, UnusableSource};
use crate::fleet::{Facts, Worker};
use crate::ids::Model;

/// The engine's list of models, and the engine that it names.
pub(super) async fn fetch(worker: &Worker, limit: Duration) -> Result<Facts, String> {
    #[derive(Deserialize)]
    struct List {
        data: Vec<Box<RawValue>>,
    }
    #[derive(Deserialize)]
    struct Entry {
        id: String,
        #[serde(default)]
        owned_by: Option<String>,
        /// The base model's name, in an adapter's entry.
        #[serde(default)]
        parent: Option<String>,
        /// Where the weights are from. Its type is the engine's business.
        #[serde(default)]
        root: Option<Box<RawValue>>,
        /// What is no whole number of tokens, such as -1, is no reason to take an engine's models from it.
        #[serde(default)]
        max_model_len: Option<Box<RawValue>>,
    }
    let body = get(worker, "/v1/models", limit).await?;
    let list: List =
        serde_json::from_slice(&body).map_err(|error| format!("/v1/models: {error}"))?;
    let mut facts = Facts::default();
    for card in list.data {
        let entry: Entry =
            serde_json::from_str(card.get()).map_err(|error| format!("/v1/models: {error}"))?;
        let model: Model = entry.id.into();
        let length = entry.max_model_len.as_deref().map(RawValue::get);
        let max_model_len: Option<u64> = length.and_then(|length| length.parse().ok());
        if facts.models.is_empty() {
            facts.engine = Engine::owner(entry.owned_by.as_deref().unwrap_or_default());
        }
        if entry.parent.is_some() && !facts.capabilities().serves_adapter_names {
            continue;
        }
        if entry.parent.is_some() {
            facts.adapters.insert(model.clone());
        } else if facts.base.is_none() {
            facts.base = Some(model.clone());
            let tokens = max_model_len.filter(|tokens| *tokens > 0);
            facts.max_model_len = tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
        }
        // Without `created` and `permission`, which vLLM makes anew for each response.
        let root = entry.root.as_deref().map(RawValue::get);
        let (owner, parent) = (&entry.owned_by, &entry.parent);
        let mut hasher = DefaultHasher::new();
        (&model, owner, parent, root, max_model_len).hash(&mut hasher);
        // In whatever order the engine lists them.
        facts.entries_hash = facts.entries_hash.wrapping_add(hasher.finish());
        facts.models.insert(model, card);
    }
    Ok(facts)
}

/// Adds the engine's version, and where it publishes KV events unless the configuration says so. `before`: the facts
/// until now, which stay if the engine does not answer.
pub(super) async fn complete(worker: &Worker, limit: Duration, found: &mut Facts, before: &Facts) {
    let wants_events = worker.events == Events::Auto;
    let sources = match found.capabilities().self_description {
        SelfDescription::KvEventSources => {
            let page = get(worker, "/version", limit).await;
            found.version = match page {
                Ok(page) => engine::version(&page),
                Err(error) if error.is_status => None,
                // One lost response is no reason to pin no requests to ranks.
                Err(_) => before.version.clone(),
            };
            if !wants_events {
                return;
            }
            // Other engines, and vLLM before 0.29, have no such page.
            let page = get(worker, SelfDescription::KvEventSources.path(), limit).await;
            match page {
                // It may have taken the place of one that listed some.
                Err(error) if error.is_missing => Ok(Default::default()),
                page => page
                    .map_err(String::from)
                    .and_then(|page| events::parse_sources(&page)),
            }
        }
        SelfDescription::ServerInfo => {
            let page = get(worker, SelfDescription::ServerInfo.path(), limit).await;
            let info = page
                .map_err(String::from)
                .and_then(|page| sglang::ServerInfo::parse(&page));
            if let Ok(info) = &info {
                found.version = info.version.clone();
                worker
                    .adapters
                    .set_slots(info.max_loras_per_batch.unwrap_or_default());
                found.block_size = info.page_size;
                found.prefix_caching = info.prefix_caching();
                sglang::check_role(worker, info, before.version.is_none());
            } else {
                found.version = before.version.clone();
            }
            found.load_endpoints = match &info {
                Ok(info) if worker.events != Events::Off => info.load_sources(),
                Ok(_) => BTreeMap::new(),
                // One lost response is no reason to unsubscribe.
                Err(_) => before.load_endpoints.clone(),
            };
            info.map(|info| info.event_sources())
        }
    };
    if !wants_events {
        return;
    }
    match sources {
        Ok((endpoints, unusable)) => {
            warn_of_unusable(worker, &unusable, &before.unusable_events);
            (found.event_endpoints, found.unusable_events) = (endpoints, unusable);
        }
        Err(error) => {
            // One lost response is no reason to unsubscribe.
            debug!(worker = %worker.name, error, "engine does not list its KV event sources");
            found.event_endpoints = before.event_endpoints.clone();
            found.unusable_events = before.unusable_events.clone();
        }
    }
}

/// Only new ones are logged.
fn warn_of_unusable(worker: &Worker, unusable: &[UnusableSource], logged: &[UnusableSource]) {
    for source in unusable.iter().filter(|source| !logged.contains(source)) {
        warn!(
            worker = %worker.name,
            rank = source.rank,
            endpoint = source.endpoint,
            reason = source.reason,
            fix = source.fix(),
            "KV events of this worker cannot be used; routing predicts its cache instead"
        );
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use crate::fleet::Member;
    use crate::fleet::events::{Endpoint, Transport};
    use crate::fleet::registry::tests::{member, registry};

    const KNOWN: &str = "0.30.0";

    pub(in crate::fleet::probe) fn worker_at(listener: &TcpListener) -> Arc<Worker> {
        let fleet = registry(&[]);
        let listed = Member {
            address: listener.local_addr().unwrap().to_string(),
            ..member("a")
        };
        fleet.set_members("static", vec![listed]);
        fleet.snapshot().workers[0].worker.clone()
    }

    pub(in crate::fleet::probe) async fn give(listener: &TcpListener, answer: &str) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = [0; 4_096];
        assert!(stream.read(&mut head).await.unwrap() > 0);
        stream.write_all(answer.as_bytes()).await.unwrap();
    }

    /// Asks a worker of a known version for it, which gives this answer; `None`: it gives none.
    async fn check(answer: Option<&str>, expected: Option<&str>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let worker = worker_at(&listener);
        let before = Facts {
            version: Some(KNOWN.to_owned()),
            ..Facts::default()
        };
        let mut found = Facts::default();
        let limit = match answer {
            Some(_) => Duration::from_secs(60),
            None => Duration::from_millis(20),
        };
        let engine = async {
            if let Some(answer) = answer {
                give(&listener, answer).await;
            }
        };
        tokio::join!(complete(&worker, limit, &mut found, &before), engine);
        assert_eq!(found.version.as_deref(), expected, "{answer:?}");
    }

    #[tokio::test]
    async fn a_version_is_forgotten_only_if_the_engine_does_not_give_it() {
        check(None, Some(KNOWN)).await;
        let missing = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        check(Some(missing), None).await;
        let other = "HTTP/1.1 200 OK\r\ncontent-length: 20\r\nconnection: close\r\n\r\n{\"version\":\"0.31.0\"}";
        check(Some(other), Some("0.31.0")).await;
        // The connection is closed before the answer.
        check(Some(""), Some(KNOWN)).await;
    }

    #[tokio::test]
    async fn kv_event_sources_are_forgotten_only_if_the_engine_has_no_page_of_them() {
        for (status, is_kept) in [("404 Not Found", false), ("503 Service Unavailable", true)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let listed = Member {
                events: Events::Auto,
                address: listener.local_addr().unwrap().to_string(),
                ..member("a")
            };
            let fleet = registry(&[]);
            fleet.set_members("static", vec![listed]);
            let worker = fleet.snapshot().workers[0].worker.clone();
            let source = Endpoint::Grpc {
                address: "a.test:1".to_owned(),
                transport: Transport::Clear,
            };
            let before = Facts {
                event_endpoints: BTreeMap::from([(0, source)]),
                ..Facts::default()
            };
            let answer =
                format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            let mut found = Facts::default();
            let engine = async {
                // Its version, and then the page.
                give(&listener, &answer).await;
                give(&listener, &answer).await;
            };
            let limit = Duration::from_secs(60);
            tokio::join!(complete(&worker, limit, &mut found, &before), engine);
            assert_eq!(!found.event_endpoints.is_empty(), is_kept, "{status}");
        }
    }

    #[tokio::test]
    async fn an_engine_may_list_ten_thousand_adapters() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let worker = worker_at(&listener);
        // As long as those of vLLM.
        let permission = "x".repeat(450);
        let entries = (0..10_000).map(|number| {
            format!(
                r#"{{"id":"a{number}","owned_by":"vllm","parent":"m","permission":"{permission}"}}"#
            )
        });
        let entries: Vec<String> = entries.collect();
        let page = format!("{{\"data\":[{}]}}", entries.join(","));
        let bytes = page.len();
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {bytes}\r\n\r\n{page}");
        let limit = Duration::from_secs(60);
        let (facts, ()) = tokio::join!(fetch(&worker, limit), give(&listener, &answer));
        assert_eq!(facts.unwrap().adapters.len(), 10_000);
    }

    #[tokio::test]
    async fn a_model_whose_length_is_no_number_of_tokens_is_listed() {
        for (length, expected) in [
            ("-1", None),
            ("8192.5", None),
            ("\"auto\"", None),
            ("8192", Some(8_192)),
            ("18446744073709551615", Some(u32::MAX)),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let worker = worker_at(&listener);
            let page = format!("{{\"data\":[{{\"id\":\"m\",\"max_model_len\":{length}}}]}}");
            let bytes = page.len();
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {bytes}\r\n\r\n{page}");
            let limit = Duration::from_secs(60);
            let (facts, ()) = tokio::join!(fetch(&worker, limit), give(&listener, &answer));
            let facts = facts.unwrap();
            let listed = (facts.models.len(), facts.max_model_len);
            assert_eq!(listed, (1, expected), "{length}");
        }
    }
}
