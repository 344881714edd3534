//! How a response ended, and its output items. Pure.

use std::borrow::Cow;

use bytes::Bytes;
use serde::Deserialize;

use super::client_state::StateSigner;
use super::engine_error;
use super::fail_reason::FailReason;
use super::item::Ids;
use super::known_json;
use super::members::{Members, array, put, put_number};
use super::output_item::put_item;
use crate::relay;
use crate::store::Status;

/// How a response ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outcome {
    pub(super) status: Status,
    /// JSON array of items, as stored.
    pub(super) output: Vec<u8>,
    /// The items as the client gets them, if they differ: with state tokens.
    pub(super) client_output: Option<Vec<u8>>,
    pub(super) usage: Option<Usage>,
    pub(super) incomplete_reason: Option<String>,
    pub(super) error: Option<Failure>,
}

/// The item that the output of a compacted response begins with.
#[derive(Clone, Debug)]
pub(super) struct CompactionItem {
    pub(super) id: String,
    pub(super) json: Bytes,
    /// What the summary took.
    pub(super) usage: Option<Usage>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Failure {
    pub(super) code: &'static str,
    pub(super) message: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Usage {
    pub(super) input_tokens: u64,
    pub(super) input_tokens_details: InputDetails,
    pub(super) output_tokens: u64,
    pub(super) output_tokens_details: OutputDetails,
    pub(super) total_tokens: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct InputDetails {
    pub(super) cached_tokens: u64,
    pub(super) cache_write_tokens: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct OutputDetails {
    pub(super) reasoning_tokens: u64,
}

impl Usage {
    pub(super) fn plus(&self, more: &Self) -> Self {
        let sum = |of: fn(&Self) -> u64| of(self).saturating_add(of(more));
        Self {
            input_tokens: sum(|usage| usage.input_tokens),
            input_tokens_details: InputDetails {
                cached_tokens: sum(|usage| usage.input_tokens_details.cached_tokens),
                cache_write_tokens: sum(|usage| usage.input_tokens_details.cache_write_tokens),
            },
            output_tokens: sum(|usage| usage.output_tokens),
            output_tokens_details: OutputDetails {
                reasoning_tokens: sum(|usage| usage.output_tokens_details.reasoning_tokens),
            },
            total_tokens: sum(|usage| usage.total_tokens),
        }
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.push(b'{');
        put_number(out, "input_tokens", self.input_tokens);
        put(out, "input_tokens_details", "{");
        let input = &self.input_tokens_details;
        put_number(out, "cached_tokens", input.cached_tokens);
        put_number(out, "cache_write_tokens", input.cache_write_tokens);
        out.push(b'}');
        put_number(out, "output_tokens", self.output_tokens);
        put(out, "output_tokens_details", "{");
        let output = &self.output_tokens_details;
        put_number(out, "reasoning_tokens", output.reasoning_tokens);
        out.push(b'}');
        put_number(out, "total_tokens", self.total_tokens);
        out.push(b'}');
    }
}

impl Outcome {
    /// Whether it failed because the connection to the engine was lost.
    pub(super) fn is_engine_lost(&self) -> bool {
        let error = self.error.as_ref();
        error.is_some_and(|error| relay::is_engine_lost(&error.message))
    }

    /// Without any output.
    pub(super) fn empty(status: Status) -> Self {
        Self {
            status,
            output: b"[]".to_vec(),
            client_output: None,
            usage: None,
            incomplete_reason: None,
            error: None,
        }
    }

    pub(super) fn failed(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            error: Some(Failure {
                code,
                message: message.into(),
            }),
            ..Self::empty(Status::Failed)
        }
    }

    /// It fails after all, and keeps its output.
    pub(super) fn refuse(&mut self, reason: FailReason) {
        let failed = Self::failed(reason.code, reason.message);
        let (output, usage) = (std::mem::take(&mut self.output), self.usage);
        *self = Self {
            output,
            usage,
            ..failed
        };
    }

    /// The outcome in an engine's Response object, without the output. `None` if it has not ended or is not a
    /// Response object.
    pub(super) fn of_engine(members: &Members<'_>) -> Option<Self> {
        let status = match Status::parse(&members.text("status")?)? {
            // The router did not cancel it.
            Status::Cancelled => Status::Failed,
            Status::Queued | Status::InProgress => return None,
            ended => ended,
        };
        let text_in = |object: &str, name: &str| {
            let object = Members::parse(members.get(object)?).ok()?;
            object.text(name).map(Cow::into_owned)
        };
        let reason =
            || text_in("incomplete_details", "reason").unwrap_or("max_output_tokens".into());
        let message = || text_in("error", "message").unwrap_or("the engine failed".into());
        let code = || text_in("error", "code").unwrap_or_default();
        Some(Self {
            usage: members
                .get("usage")
                .and_then(|raw| serde_json::from_str(raw).ok()),
            incomplete_reason: (status == Status::Incomplete).then(reason),
            error: (status == Status::Failed).then(|| Failure {
                code: engine_error::known_failure_code(&code()),
                message: message(),
            }),
            ..Self::empty(status)
        })
    }

    /// Reads the output of an engine's Response object and returns the number of items, with `compaction` before them.
    pub(super) fn read_output(
        &mut self,
        members: &Members<'_>,
        ids: &Ids,
        compaction: Option<&CompactionItem>,
        signer: Option<&StateSigner>,
    ) -> Option<usize> {
        let items = members.get("output").and_then(known_json::list);
        let items = items.unwrap_or_default();
        let mut list = OutputItems::default();
        if let Some(item) = compaction {
            list.push(item.json.to_vec(), None);
        }
        let first = list.len();
        for (index, raw) in items.iter().enumerate() {
            // Only the last item can be incomplete.
            let is_cut = self.status != Status::Completed && index + 1 == items.len();
            let status = if is_cut { "incomplete" } else { "completed" };
            let mut item = Vec::with_capacity(raw.len() + 192);
            let kind = put_item(&mut item, raw, ids, first + index, status)?;
            let signed = signer.filter(|_| kind == "reasoning");
            let signed = signed.and_then(|signer| signer.reasoning(&item));
            list.push(item, signed);
        }
        (self.output, self.client_output) = list.finish();
        Some(list.len())
    }

    /// The items as the client gets them.
    pub(super) fn client_output(&self) -> &[u8] {
        self.client_output.as_deref().unwrap_or(&self.output)
    }
}

/// Output items, each as stored and, if different, as the client gets it.
#[derive(Clone, Debug, Default)]
pub(super) struct OutputItems {
    items: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

impl OutputItems {
    pub(super) fn push(&mut self, stored: Vec<u8>, client: Option<Vec<u8>>) {
        self.items.push((stored, client));
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// The stored list, and the client's if it differs.
    pub(super) fn finish(&self) -> (Vec<u8>, Option<Vec<u8>>) {
        let items = self.items.iter();
        let stored = array(items.clone().map(|(stored, _)| stored.as_slice()));
        let differs = items.clone().any(|(_, client)| client.is_some());
        let client = items.map(|(stored, client)| client.as_ref().unwrap_or(stored).as_slice());
        (stored, differs.then(|| array(client)))
    }
}
