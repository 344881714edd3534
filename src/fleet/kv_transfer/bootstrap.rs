//! What a Mooncake bootstrap server reports about its prefill worker. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;

/// The address of a Mooncake prefill worker's bootstrap server, and the engine ids of its ranks. A restarted engine
/// has new ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootstrapInfo {
    /// `http://host:port`, as decode legs get it.
    pub url: Arc<str>,
    /// Dp rank -> engine id; never empty.
    engine_ids: BTreeMap<u32, Arc<str>>,
}

impl BootstrapInfo {
    /// Reads a bootstrap server's `GET /query`:
    /// `{"0":{"engine_id":"...","worker_addr":{"0":{"0":"tcp://..."}}}}`, one key per rank. `None` if
    /// there is no rank, or if any rank is malformed: an incomplete list is unusable.
    pub fn parse(page: &[u8], url: &str) -> Option<Self> {
        #[derive(Deserialize)]
        struct Entry {
            engine_id: String,
        }
        let entries: BTreeMap<String, Entry> = serde_json::from_slice(page).ok()?;
        let mut engine_ids = BTreeMap::new();
        for (rank, entry) in entries {
            if entry.engine_id.is_empty() {
                return None;
            }
            engine_ids.insert(rank.parse().ok()?, entry.engine_id.into());
        }
        let has_ranks = !engine_ids.is_empty();
        has_ranks.then(|| Self {
            url: url.into(),
            engine_ids,
        })
    }

    /// Reads the `GET /route` of SGLang's bootstrap server, which answers once its engine has registered. Its ranks have no
    /// ids. `None` if the page is malformed.
    pub fn of_route(page: &[u8], url: &str) -> Option<Self> {
        #[derive(Deserialize)]
        struct Route {
            dp_size: u32,
        }
        /// More than any engine has.
        const MAX_RANKS: u32 = 1_024;
        let route: Route = serde_json::from_slice(page).ok()?;
        let is_possible = (1..=MAX_RANKS).contains(&route.dp_size);
        is_possible.then(|| Self {
            url: url.into(),
            engine_ids: (0..route.dp_size).map(|rank| (rank, "".into())).collect(),
        })
    }

    pub fn engine_id(&self, rank: u32) -> Option<&str> {
        self.engine_ids.get(&rank).map(|id| &**id)
    }

    /// Its ranks, in ascending order.
    pub fn ranks(&self) -> impl ExactSizeIterator<Item = u32> {
        self.engine_ids.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_bootstrap_servers_page_has_the_engine_id_of_each_rank() {
        // Recorded from a real server.
        let page = br#"{"0":{"engine_id":"7a490732-5bda-4b2f-aa25-1317f9998686","worker_addr":{"0":{"0":"tcp://127.0.0.1:33165"}}}}"#;
        let info = BootstrapInfo::parse(page, "http://p:8998").unwrap();
        assert_eq!(&*info.url, "http://p:8998");
        assert_eq!(info.ranks().collect::<Vec<_>>(), [0]);
        let engine = Some("7a490732-5bda-4b2f-aa25-1317f9998686");
        assert_eq!(info.engine_id(0), engine);
        assert_eq!(info.engine_id(1), None);

        let two = br#"{"10":{"engine_id":"b"},"2":{"engine_id":"a"}}"#;
        let two = BootstrapInfo::parse(two, "").unwrap();
        assert_eq!(two.ranks().collect::<Vec<_>>(), [2, 10]);
    }

    #[test]
    fn a_page_without_ranks_or_with_a_malformed_rank_is_rejected() {
        for page in [
            "{}",
            "[]",
            "",
            r#"{"detail":"Not Found"}"#,
            r#"{"0":{"engine_id":""}}"#,
            r#"{"0":{"engine_id":"a"},"1":{}}"#,
            r#"{"0":{"engine_id":"a"},"-1":{"engine_id":"b"}}"#,
        ] {
            assert_eq!(BootstrapInfo::parse(page.as_bytes(), ""), None, "{page}");
        }
    }

    #[test]
    fn a_route_has_as_many_ranks_as_it_says() {
        // SGLang 0.5.23.
        let page = br#"{"attn_tp_size":1,"attn_cp_size":1,"dp_size":2,"pp_size":1,"page_size":16,"kv_cache_dtype":"auto","follow_bootstrap_room":true,"prefill_http_port":31001}"#;
        let info = BootstrapInfo::of_route(page, "http://p:8998").unwrap();
        assert_eq!(info.ranks().collect::<Vec<_>>(), [0, 1]);
        for page in ["{}", r#"{"dp_size":0}"#, r#"{"dp_size":4000000000}"#, ""] {
            assert_eq!(BootstrapInfo::of_route(page.as_bytes(), ""), None, "{page}");
        }
    }

    proptest! {
        #[test]
        fn no_page_makes_it_panic(page in "(\\{|\\}|\"0\"|\"engine_id\"|:|,|\"é\"|1){0,12}") {
            let _ = BootstrapInfo::parse(page.as_bytes(), "");
        }
    }
}
