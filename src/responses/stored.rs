//! Stored responses: retrieve, delete, cancel, list input items.

use std::sync::Arc;

use super::client_state::StateSigner;
use super::compact;
use super::members::{self, Members};
use super::object::{with_member, with_output};
use super::page::{self, Query};
use super::service::Responses;
use crate::ids::{ResponseId, Tenant};
use crate::openai::error::{Answer, ApiError};
use crate::store::{DeleteOutcome, Record, ResponseKey};
use crate::{http, observe};

/// The largest event number: JSON numbers and the store represent it exactly.
const NUMBER_MAX: u64 = 1 << 53;

impl Responses {
    pub(super) async fn retrieve(
        self: &Arc<Self>,
        tenant: Tenant,
        id: &str,
        query: &str,
    ) -> Answer {
        let includes_encrypted_reasoning = page::include(query)?;
        let is_stream = page::flag(query, "stream")?;
        let after = page::parameter(query, "starting_after");
        if !is_stream && after.is_some() {
            let why = "it needs `stream` set to true";
            return Err(ApiError::wrong_value("starting_after", why));
        }
        let after = match after.map(|after| after.parse::<u64>()) {
            None => None,
            Some(Ok(after)) if after > NUMBER_MAX => {
                let why = format!("it must be at most {NUMBER_MAX}");
                return Err(ApiError::wrong_value("starting_after", why));
            }
            Some(Ok(after)) => Some(after),
            Some(Err(_)) => return Err(ApiError::wrong_type("starting_after", "a number")),
        };
        let record = self.record(tenant, id).await?;
        if is_stream {
            return self.stream_events(key(tenant, id)?, record, after).await;
        }
        let object = object(&record);
        if !includes_encrypted_reasoning || !record.status.is_terminal() {
            return Ok(http::json(object));
        }
        Ok(http::json(
            self.with_encrypted_reasoning(tenant, id, object),
        ))
    }

    /// A Response object whose reasoning items have state tokens of themselves, as if its create had asked for them.
    fn with_encrypted_reasoning(&self, tenant: Tenant, id: &str, object: Vec<u8>) -> Vec<u8> {
        let Some(members) = Members::of_bytes(&object) else {
            return object;
        };
        let signer = StateSigner {
            key_ring: self.key_ring.clone(),
            tenant,
            now_s: observe::unix_s().unsigned_abs(),
            response: id.to_owned(),
            model: members.text("model").unwrap_or_default().into_owned(),
        };
        let output = members.get("output").and_then(members::list);
        let output = output.unwrap_or_default().into_iter().map(|raw| {
            let is_reasoning = Members::parse(raw).is_ok_and(|item| {
                item.get("type") == Some("\"reasoning\"") && item.get("encrypted_content").is_none()
            });
            // A token that would be too large is left out.
            let signed = is_reasoning
                .then(|| signer.reasoning(raw.as_bytes()))
                .flatten();
            signed.unwrap_or_else(|| raw.as_bytes().to_vec())
        });
        let output: Vec<Vec<u8>> = output.collect();
        let output = members::array(output.iter().map(Vec::as_slice));
        let output = String::from_utf8(output).unwrap_or_default();
        with_member(&object, "output", &output)
    }

    pub(super) async fn delete(&self, tenant: Tenant, id: &str) -> Answer {
        let key = key(tenant, id)?;
        match self.store.delete(key).await? {
            DeleteOutcome::Done { .. } => {
                let text = format!(r#"{{"id":"{id}","object":"response.deleted","deleted":true}}"#);
                Ok(http::json(text))
            }
            DeleteOutcome::Gone => Err(ApiError::unknown_response(id)),
        }
    }

    /// Cancels a background response. A foreground response ends with its connection.
    pub(super) async fn cancel(&self, tenant: Tenant, id: &str) -> Answer {
        let record = self.record(tenant, id).await?;
        if record.background.is_none() {
            return Err(ApiError::foreground_cancel());
        }
        if record.status.is_terminal() {
            return Ok(http::json(object(&record)));
        }
        self.cancel_in_background(key(tenant, id)?, &record).await?;
        // Read again: it may have ended before the cancel.
        Ok(http::json(object(&self.record(tenant, id).await?)))
    }

    pub(super) async fn input_items(&self, tenant: Tenant, id: &str, query: &str) -> Answer {
        let query = Query::read(query)?;
        let key = key(tenant, id)?;
        let items = self.store.input(key).await?;
        let items = items.ok_or_else(|| ApiError::unknown_response(id))?;
        Ok(http::json(page::of_list(&items, &query)?))
    }

    async fn record(&self, tenant: Tenant, id: &str) -> Result<Record, ApiError> {
        let record = self.store.get(key(tenant, id)?).await?;
        let record = record.filter(|record| !is_compaction(record));
        record.ok_or_else(|| ApiError::unknown_response(id))
    }
}

/// An id that the router never issued is answered like one that is not stored.
fn key(tenant: Tenant, id: &str) -> Result<ResponseKey, ApiError> {
    let id: ResponseId = id.parse().map_err(|_| ApiError::unknown_response(id))?;
    Ok(ResponseKey { tenant, id })
}

/// A compacted conversation can be continued by its id, but is no response.
fn is_compaction(record: &Record) -> bool {
    Members::of_bytes(&record.content.response)
        .is_some_and(|members| members.text("object").as_deref() == Some(compact::OBJECT))
}

fn object(record: &Record) -> Vec<u8> {
    let content = &record.content;
    if record.status.is_terminal() {
        return with_output(&content.response, &content.output);
    }
    // The stored object still has the status that it was created with.
    let status = format!("\"{}\"", record.status);
    let response = with_member(&content.response, "status", &status);
    with_output(&response, &content.output)
}
