//! Finds out whether an engine serves the Responses API.

use std::time::Duration;

use hyper::StatusCode;
use serde::Deserialize;
use tracing::{debug, info};

use crate::fleet::{Facts, ResponsesApi, Worker};

const PATH: &str = "/v1/responses";
/// More than any error.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Whether the worker needs chat completions: an engine without the path, or SGLang, whose answers to chat completions
/// are better than those of its own Responses API. Asked with a body that every engine refuses, so that nothing is
/// generated, and only where the configuration does not say.
pub(super) async fn is_lacking(worker: &Worker, facts: &Facts, limit: Duration) -> bool {
    if worker.responses != ResponsesApi::Auto {
        return false;
    }
    if is_sglang(facts) {
        return true;
    }
    let authorization = worker.authorization.as_ref();
    let post = worker
        .pool
        .post(PATH, authorization, "{}", MAX_RESPONSE_BYTES);
    match tokio::time::timeout(limit, post).await {
        Ok(Ok((status, _))) => {
            let is_lacking = matches!(
                status,
                StatusCode::NOT_FOUND
                    | StatusCode::METHOD_NOT_ALLOWED
                    | StatusCode::NOT_IMPLEMENTED
            );
            if is_lacking {
                info!(worker = %worker.name, %status, "worker does not serve the Responses API; it is sent chat completions");
            }
            is_lacking
        }
        Ok(Err(error)) => {
            debug!(worker = %worker.name, error, "cannot ask for the Responses API");
            facts.lacks_responses
        }
        Err(_) => facts.lacks_responses,
    }
}

fn is_sglang(facts: &Facts) -> bool {
    #[derive(Deserialize)]
    struct Card {
        #[serde(default)]
        owned_by: String,
    }
    facts.models.values().any(|card| {
        let card = serde_json::from_str::<Card>(card.get());
        card.is_ok_and(|card| card.owned_by == "sglang")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;

    #[test]
    fn sglang_is_known_by_its_list_of_models() {
        let facts = |card: &str| {
            let card = RawValue::from_string(card.to_owned()).unwrap();
            Facts {
                models: [("m".into(), card)].into(),
                ..Facts::default()
            }
        };
        assert!(is_sglang(&facts(r#"{"id":"m","owned_by":"sglang"}"#)));
        for card in [r#"{"id":"m","owned_by":"vllm"}"#, r#"{"id":"m"}"#, "7"] {
            assert!(!is_sglang(&facts(card)), "{card}");
        }
    }
}
