//! A line of the usage log: who asked for what, and what it took. Pure.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use serde::Serialize;

use crate::ids::{Model, RequestId, ResponseId};
use crate::prompt::Api;
use crate::relay::answer::engine_answer::Usage;
use crate::relay::failure::types::Outcome;

/// What is known when the answer begins.
#[derive(Debug)]
pub(in crate::relay) struct UsageLine {
    pub(in crate::relay) id: RequestId,
    pub(in crate::relay) response: Option<ResponseId>,
    pub(in crate::relay) tenant: Arc<str>,
    /// The name that the client asked for, if it is not the model's.
    pub(in crate::relay) requested: Option<Model>,
    pub(in crate::relay) model: Model,
    pub(in crate::relay) api: Api,
    pub(in crate::relay) worker: Arc<str>,
    pub(in crate::relay) batch: Option<Arc<str>>,
    /// When the request's head was received.
    pub(in crate::relay) started: Instant,
}

#[derive(Serialize)]
struct Fields<'a> {
    time: String,
    request_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_id: Option<String>,
    tenant: &'a str,
    requested_model: &'a str,
    model: &'a str,
    api: &'static str,
    worker: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<&'a str>,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    complete: bool,
    outcome: &'static str,
    duration_ms: f64,
}

impl UsageLine {
    /// The line with its line break. `at` is the time of day of `now`.
    pub(in crate::relay) fn json(
        &self,
        at: SystemTime,
        now: Instant,
        outcome: Outcome,
        is_complete: bool,
        usage: &Usage,
    ) -> Vec<u8> {
        let took = now.saturating_duration_since(self.started);
        let fields = Fields {
            time: humantime::format_rfc3339_millis(at).to_string(),
            request_id: self.id.as_str(),
            response_id: self.response.map(|id| id.to_string()),
            tenant: &self.tenant,
            requested_model: self.requested.as_ref().unwrap_or(&self.model),
            model: &self.model,
            api: self.api.as_str(),
            worker: &self.worker,
            batch: self.batch.as_deref(),
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            output_tokens: usage.output_tokens,
            complete: is_complete,
            outcome: outcome.as_str(),
            duration_ms: took.as_micros() as f64 / 1e3,
        };
        // Texts and numbers always serialize.
        let mut line = serde_json::to_vec(&fields).unwrap_or_default();
        line.push(b'\n');
        line
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::observe;

    #[test]
    fn a_line_has_who_what_and_how_much() {
        check(None, "");
        check(Some("batch_1"), r#""batch":"batch_1","#);
    }

    fn check(batch: Option<&str>, shown: &str) {
        let started = observe::now();
        let line = UsageLine {
            id: RequestId::new(7),
            response: None,
            tenant: "a".into(),
            requested: Some("gpt-4o".into()),
            model: "org/\"llama\"".into(),
            api: Api::Chat,
            worker: "w0".into(),
            batch: batch.map(Arc::from),
            started,
        };
        let usage = Usage {
            prompt_tokens: 33,
            cached_tokens: 32,
            output_tokens: 4,
            reasoning_tokens: None,
        };
        let at = SystemTime::UNIX_EPOCH + Duration::from_millis(1_000_000_000_042);
        let now = started + Duration::from_micros(1_234_567);
        let json = line.json(at, now, Outcome::Complete, true, &usage);
        let expected = [
            r#"{"time":"2001-09-09T01:46:40.042Z","request_id":"wr-700000000000000000000000","tenant":"a","#,
            r#""requested_model":"gpt-4o","model":"org/\"llama\"","api":"chat","worker":"w0","#,
            shown,
            r#""prompt_tokens":33,"cached_tokens":32,"output_tokens":4,"complete":true,"#,
            r#""outcome":"complete","duration_ms":1234.567}"#,
            "\n",
        ];
        assert_eq!(str::from_utf8(&json).unwrap(), expected.concat());
    }
}
