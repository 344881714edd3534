//! The request of a background response, stored so that another replica can start it again. Pure.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::responses::members::put;
use crate::responses::request::CreateRequest;
use crate::responses::template::ResponseMeta;

/// Stored until the response ends. Does not contain the client's headers, which have its API key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StoredRequest {
    /// Unix seconds.
    created_at: u64,
    previous: Option<String>,
    conversation: Option<String>,
    store: bool,
    /// The JSON member that separates the tenant's prefix cache from other tenants'.
    pub(super) salt: Option<String>,
    /// Whether another replica can run it: no conversation lock and no client state, which only the first
    /// replica has.
    pub(super) is_portable: bool,
    /// The client's body without its input.
    client: Box<RawValue>,
    /// The whole list of items for the engine.
    input: Box<RawValue>,
}

impl StoredRequest {
    pub(super) fn new(
        create: &CreateRequest<'_>,
        meta: &ResponseMeta<'_>,
        salt: Option<&str>,
        is_portable: bool,
        input: Vec<u8>,
    ) -> Option<Self> {
        let mut client = vec![b'{'];
        for (name, value) in create.members.iter().filter(|(name, _)| *name != "input") {
            put(&mut client, name, value);
        }
        client.push(b'}');
        let raw = |json| RawValue::from_string(String::from_utf8(json).ok()?).ok();
        Some(Self {
            created_at: meta.created_at,
            previous: meta.previous.map(str::to_owned),
            conversation: meta.conversation.map(str::to_owned),
            store: meta.store,
            salt: salt.map(str::to_owned),
            is_portable,
            client: raw(client)?,
            input: raw(input)?,
        })
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    pub(super) fn write(&self) -> Bytes {
        serde_json::to_vec(self).unwrap_or_default().into()
    }

    pub(super) fn client(&self) -> &[u8] {
        self.client.get().as_bytes()
    }

    pub(super) fn input(&self) -> &[u8] {
        self.input.get().as_bytes()
    }

    pub(super) fn meta<'a>(&'a self, id: &'a str) -> ResponseMeta<'a> {
        ResponseMeta {
            id,
            created_at: self.created_at,
            previous: self.previous.as_deref(),
            conversation: self.conversation.as_deref(),
            store: self.store,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_replica_reads_the_stored_request() {
        let body = br#"{"model":"m","input":"long","background":true,"temperature":0.50}"#;
        let create = CreateRequest::read(body).unwrap();
        let meta = ResponseMeta {
            id: "resp_1",
            created_at: 7,
            previous: Some("resp_0"),
            conversation: None,
            store: true,
        };
        let stored =
            StoredRequest::new(&create, &meta, Some("\"s\":1"), true, b"[1]".to_vec()).unwrap();
        let read = StoredRequest::read(&stored.write()).unwrap();
        assert_eq!(
            read.client(),
            br#"{"model":"m","background":true,"temperature":0.50}"#
        );
        assert_eq!(
            (read.input(), read.salt.as_deref()),
            (&b"[1]"[..], Some("\"s\":1"))
        );
        assert_eq!(read.meta("resp_1").previous, Some("resp_0"));
        assert!(StoredRequest::read(b"{}").is_none());
    }
}
