//! The id and the body of an event. Pure.

use sha2::{Digest, Sha256};

use crate::ids;
use crate::store::outbox::EndEvent;

/// The id by which receivers recognise an event that they have received before. It is made of the end that it reports,
/// so that it is the same in every attempt of every replica.
pub(super) fn id(event: &EndEvent) -> String {
    let digest = Sha256::new()
        .chain_update("warmroute webhook event v1\0")
        .chain_update(event.key.tenant().as_str())
        .chain_update(event.key.to_string())
        .chain_update(event.event_type.status())
        .finalize();
    let digits = ids::hex::<48>(&digest).map(char::from);
    format!("evt_{}", String::from_iter(digits))
}

pub(super) fn body(event: &EndEvent, id: &str) -> String {
    let (kind, created_at, ended) = (event.event_type.as_str(), event.created_at, event.key);
    format!(
        r#"{{"id":"{id}","object":"event","created_at":{created_at},"type":"{kind}","data":{{"id":"{ended}"}}}}"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ResponseId, Root, Tenant};
    use crate::store::ResponseKey;
    use crate::store::outbox::{BatchKey, EventKey};

    fn event(status: &str, own: u128) -> EndEvent {
        let key = EventKey::Response(ResponseKey {
            tenant: Tenant::tagged(1),
            id: ResponseId::new(Root(2), own),
        });
        EndEvent::of(key, status, 1_784_740_000).unwrap()
    }

    fn of_batch(status: &str, number: u128) -> EndEvent {
        let tenant = Tenant::tagged(1);
        let key = EventKey::Batch(BatchKey { tenant, number });
        EndEvent::of(key, status, 1_784_740_000).unwrap()
    }

    #[test]
    fn a_body_has_the_shape_of_openais() {
        for (event, kind) in [
            (event("completed", 3), "response.completed"),
            (of_batch("expired", 3), "batch.expired"),
        ] {
            let id = id(&event);
            let body: serde_json::Value = serde_json::from_str(&body(&event, &id)).unwrap();
            let expected = serde_json::json!({
                "id": id,
                "object": "event",
                "created_at": 1_784_740_000,
                "type": kind,
                "data": {"id": event.key.to_string()},
            });
            assert_eq!(body, expected);
        }
    }

    #[test]
    fn every_end_has_an_id_of_its_own() {
        let completed = id(&event("completed", 3));
        assert!(completed.starts_with("evt_") && completed.len() == 52);
        assert_eq!(completed, id(&event("completed", 3)));
        for other in [
            event("failed", 3),
            event("completed", 4),
            of_batch("completed", 3),
        ] {
            assert_ne!(completed, id(&other));
        }
    }
}
