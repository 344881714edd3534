//! Finds out whether an engine serves the Responses API.

use std::time::Duration;

use serde::Deserialize;

use super::served_api::{self, OptionalApi};
use crate::fleet::{Facts, ResponsesApi, Worker};

const API: OptionalApi = OptionalApi {
    path: "/v1/responses",
    otherwise: "it is sent chat completions",
};

/// Whether the worker needs chat completions: an engine without the path, or SGLang, whose answers to chat completions
/// are better than those of its own Responses API. Asked only where the configuration does not say.
pub(super) async fn is_lacking(worker: &Worker, facts: &Facts, limit: Duration) -> bool {
    if worker.responses != ResponsesApi::Auto {
        return false;
    }
    if is_sglang(facts) {
        return true;
    }
    served_api::is_lacking(worker, &API, facts.lacks_responses, limit).await
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
