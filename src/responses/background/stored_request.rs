//! The request of a background response, stored so that another replica can start it again. Pure.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::responses::members::put_read;
use crate::responses::request::CreateRequest;
use crate::responses::template::ResponseMeta;
use crate::store::{IdempotencyToken, Item};
use crate::traces::TraceContext;

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
    /// Whether another replica can run it without more: no conversation, and no client state, which only the first
    /// replica has.
    pub(super) is_portable: bool,
    /// The lock of its conversation, which goes with the response. Then `is_portable` is false, so that a replica of
    /// release 0.2, which does not know this field, fails the response and does not run it without its conversation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lock: Option<StoredLock>,
    /// The span of the create, as a `traceparent`, if it was traced: the run's trace links to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trace: Option<String>,
    /// The client's body without its input.
    client: Box<RawValue>,
    /// The whole list of items for the engine.
    input: Box<RawValue>,
}

/// What the conversation of a response needs at its end.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct StoredLock {
    token: u64,
    /// The new input items: id and JSON.
    items: Vec<(String, Box<RawValue>)>,
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
            put_read(&mut client, name, value);
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
            lock: None,
            trace: None,
            client: raw(client)?,
            input: raw(input)?,
        })
    }

    /// The create is a traced request.
    pub(super) fn link_to(&mut self, create: TraceContext) {
        self.trace = Some(create.to_string());
    }

    /// The span of the create, if it was traced.
    pub(super) fn create_span(&self) -> Option<TraceContext> {
        TraceContext::parse(self.trace.as_ref()?.as_bytes())
    }

    pub(super) fn conversation_id(&self) -> Option<&str> {
        self.conversation.as_deref()
    }

    /// The response runs in a conversation that is locked with this token, and that gets these items.
    pub(super) fn in_conversation(&mut self, token: IdempotencyToken, items: &[Item]) {
        let raw = |item: &Item| {
            let json = String::from_utf8(item.json.to_vec()).ok()?;
            Some((item.id.to_string(), RawValue::from_string(json).ok()?))
        };
        let items: Option<Vec<_>> = items.iter().map(raw).collect();
        self.lock = items.map(|items| StoredLock {
            token: token.0,
            items,
        });
    }

    /// The token of its conversation's lock, and the items that the conversation gets, for another replica.
    pub(super) fn conversation(&self) -> Option<(&str, IdempotencyToken, Vec<Item>)> {
        let (lock, conversation) = (self.lock.as_ref()?, self.conversation.as_deref()?);
        let item = |(id, json): &(String, Box<RawValue>)| Item {
            id: id.as_str().into(),
            json: Bytes::copy_from_slice(json.get().as_bytes()),
        };
        let items = lock.items.iter().map(item).collect();
        Some((conversation, IdempotencyToken(lock.token), items))
    }

    /// With another list of items for the engine.
    pub(super) fn with_input(&self, input: Vec<u8>) -> Option<Self> {
        let input = RawValue::from_string(String::from_utf8(input).ok()?).ok()?;
        Some(Self {
            input,
            ..self.clone()
        })
    }

    /// Whether any replica can run it.
    pub(super) fn may_move(&self) -> bool {
        self.is_portable || self.lock.is_some()
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
        assert!(read.may_move() && read.conversation().is_none());
    }

    /// Replicas of other releases take a run over.
    #[test]
    fn the_texts_of_a_stored_request_stay_as_they_are() {
        const WRITTEN: &str = concat!(
            r#"{"created_at":7,"previous":"resp_0","conversation":"conv_1","store":true,"salt":"\"s\":1","#,
            r#""is_portable":false,"lock":{"token":9,"items":[["msg_1",{"n":1}]]},"#,
            r#""trace":"00-000000000000000000000000000000ab-00000000000000cd-01","#,
            r#""client":{"model":"m"},"input":[1]}"#,
        );
        let read = StoredRequest::read(WRITTEN.as_bytes()).unwrap();
        assert_eq!(read.write(), WRITTEN);
        assert!(read.create_span().is_some() && read.conversation().is_some());
        // Release 0.2 wrote neither lock nor trace; a newer release may add members.
        let other = r#"{"created_at":7,"previous":null,"conversation":null,"store":true,"salt":null,
            "is_portable":true,"added":[1],"client":{"model":"m"},"input":[1]}"#;
        let read = StoredRequest::read(other.as_bytes()).unwrap();
        assert!(read.may_move() && read.create_span().is_none());
        assert_eq!(
            (read.client(), read.input()),
            (&br#"{"model":"m"}"#[..], &b"[1]"[..])
        );
    }

    #[test]
    fn the_lock_of_a_conversation_goes_with_the_response() {
        let body = br#"{"model":"m","input":"hi","background":true}"#;
        let create = CreateRequest::read(body).unwrap();
        let meta = ResponseMeta {
            id: "resp_1",
            created_at: 7,
            previous: None,
            conversation: Some("conv_1"),
            store: true,
        };
        let mut stored = StoredRequest::new(&create, &meta, None, false, b"[1]".to_vec()).unwrap();
        assert!(!stored.may_move());
        let items = [Item {
            id: "msg_1".into(),
            json: Bytes::from_static(br#"{"id":"msg_1"}"#),
        }];
        stored.in_conversation(IdempotencyToken(9), &items);
        let read = StoredRequest::read(&stored.write()).unwrap();
        assert!(read.may_move() && !read.is_portable);
        let expected = ("conv_1", IdempotencyToken(9), items.to_vec());
        assert_eq!(read.conversation(), Some(expected));
    }
}
