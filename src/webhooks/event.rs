//! The id and the body of an event. Pure.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

use super::settings::EventType;
use crate::store::outbox::EndEvent;

/// The id by which receivers recognise an event that they have received before. It is made of the end that it reports,
/// so that it is the same in every attempt of every replica.
pub(super) fn id(event: &EndEvent) -> String {
    let digest = Sha256::new()
        .chain_update("warmroute webhook event v1\0")
        .chain_update(event.key.tenant.as_str())
        .chain_update(event.key.id.to_string())
        .chain_update(event.status.as_str())
        .finalize();
    digest
        .iter()
        .take(24)
        .fold("evt_".to_owned(), |mut id, byte| {
            // Writing to a String cannot fail.
            let _ = write!(id, "{byte:02x}");
            id
        })
}

/// `None` for a status that is no end.
pub(super) fn body(event: &EndEvent, id: &str) -> Option<String> {
    let kind = EventType::of(event.status)?.as_str();
    let (created_at, response) = (event.created_at, event.key.id);
    Some(format!(
        r#"{{"id":"{id}","object":"event","created_at":{created_at},"type":"{kind}","data":{{"id":"{response}"}}}}"#
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ResponseId, Root, Tenant};
    use crate::store::{ResponseKey, Status};

    fn event(status: Status, own: u128) -> EndEvent {
        EndEvent {
            key: ResponseKey {
                tenant: Tenant::tagged(1),
                id: ResponseId::new(Root(2), own),
            },
            status,
            created_at: 1_784_740_000,
        }
    }

    #[test]
    fn a_body_has_the_shape_of_openais() {
        let completed = event(Status::Completed, 3);
        let id = id(&completed);
        let body: serde_json::Value =
            serde_json::from_str(&body(&completed, &id).unwrap()).unwrap();
        let expected = serde_json::json!({
            "id": id,
            "object": "event",
            "created_at": 1_784_740_000,
            "type": "response.completed",
            "data": {"id": completed.key.id.to_string()},
        });
        assert_eq!(body, expected);
    }

    #[test]
    fn every_end_has_an_id_of_its_own() {
        let completed = id(&event(Status::Completed, 3));
        assert!(completed.starts_with("evt_") && completed.len() == 52);
        assert_eq!(completed, id(&event(Status::Completed, 3)));
        assert_ne!(completed, id(&event(Status::Failed, 3)));
        assert_ne!(completed, id(&event(Status::Completed, 4)));
        assert_eq!(body(&event(Status::Queued, 3), "evt_"), None);
    }
}
