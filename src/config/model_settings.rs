//! The settings of all models, for the relay.

use super::model::ModelOverride;
use super::model_names;
use super::settings::Config;
use crate::relay::{ModelSettings, PerModel};
use crate::routing;

impl Config {
    pub fn model_settings(&self) -> ModelSettings {
        let common = PerModel {
            routing: self.routing.clone(),
            bytes_per_token: self.predicted.bytes_per_token,
            // An engine that does not know the field would refuse it, or tokenise all the same.
            send_tokens: false,
            stream_continuation: None,
        };
        let own = |model: &ModelOverride| {
            let default = &common.routing;
            let hash_on = model.hash_on.as_ref().unwrap_or(&default.hash_on);
            let routing = routing::Settings {
                policy: model.policy.unwrap_or(default.policy),
                hash_on: hash_on.clone(),
                advanced: default.advanced.clone(),
            };
            let settings = PerModel {
                routing,
                bytes_per_token: model.bytes_per_token.unwrap_or(common.bytes_per_token),
                send_tokens: model.send_token_ids.unwrap_or(common.send_tokens),
                stream_continuation: model.stream_continuation,
            };
            (model.name.clone(), settings)
        };
        ModelSettings {
            named: self.models.iter().map(own).collect(),
            names: model_names::of(&self.models, &common.routing.hash_on),
            common,
        }
    }
}
