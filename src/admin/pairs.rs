//! Who can hand over to whom, as JSON.

use std::sync::Arc;

use serde::Serialize;

use crate::fleet::handoff::Connector;
use crate::fleet::handoff::pairs::Pairs;

#[derive(Debug, Serialize)]
pub(super) struct PairsRow {
    connector: Connector,
    /// Of a prefill and a decode worker, both up.
    count: usize,
    /// Nothing is known to keep these from handing over.
    not_proved: usize,
    unable: Vec<UnableRow>,
    /// Workers for whom there is nobody.
    alone: Vec<String>,
}

#[derive(Debug, Serialize)]
struct UnableRow {
    reason: &'static str,
    why: String,
    count: usize,
    /// Some of them, prefill's name first.
    such_as: Vec<[String; 2]>,
}

impl PairsRow {
    pub(super) fn new(connector: Connector, pairs: Pairs) -> Self {
        let named = |(from, to): (Arc<str>, Arc<str>)| [from.to_string(), to.to_string()];
        let not_proved = pairs.not_proved();
        let unable = pairs.unable.into_iter().map(|it| UnableRow {
            reason: it.why.as_str(),
            why: it.why.to_string(),
            count: it.count,
            such_as: it.such_as.into_iter().map(named).collect(),
        });
        Self {
            connector,
            count: pairs.count,
            not_proved,
            unable: unable.collect(),
            alone: pairs.alone.iter().map(|name| name.to_string()).collect(),
        }
    }
}
