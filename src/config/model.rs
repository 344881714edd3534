//! What one model has of its own: names, tokenizer, and settings that differ from those in `routing`.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use super::tokenizer::{self, Tokenizer};
use crate::relay::StreamContinuation;
use crate::relay::request::target::{Sticky, Target};
use crate::routing::Policy;

/// What one model has of its own; the rest is as in `routing`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelOverride {
    /// The name by which clients and engines call the model.
    pub name: String,
    /// Other names by which clients may ask for it. Engines are asked for the model itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// The models that requests for this name are split over, by weight. Left out: the model of this name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<Target>,
    /// With `targets`: which requests go to the same one.
    #[serde(default)]
    pub sticky: Sticky,
    /// The models, one or a list, that get a request if no worker of its model can take or answer it. In this order;
    /// their own fallbacks are not followed.
    #[serde(
        default,
        deserialize_with = "one_or_list",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schemars(with = "OneOrList")]
    pub fallback: Vec<String>,
    /// The model's tokenizer: the path of its folder, or a map. With it the router knows prompts as the token ids
    /// that engines compute and compares them with KV events; without it prompts are routed by prediction. A LoRA
    /// adapter uses that of its base model.
    #[serde(
        default,
        deserialize_with = "tokenizer::path_or_map",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Option<tokenizer::PathOrMap>")]
    pub tokenizer: Option<Tokenizer>,
    /// Sends chat and Responses requests with the token ids that they were routed by (vLLM 0.32 and later), so
    /// that the engine does not tokenise again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub send_token_ids: Option<bool>,
    /// A stream whose worker is lost goes on on another worker. Left out: it ends with an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_continuation: Option<StreamContinuation>,
    /// As in `predicted`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.01))]
    pub bytes_per_token: Option<f64>,
    /// As in `routing`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// As in `routing`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash_on: Option<Vec<String>>,
}

/// The forms in which a list of names is written: one name, or a list.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
enum OneOrList {
    One(String),
    List(Vec<String>),
}

/// Reads names from any of their forms.
fn one_or_list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(match OneOrList::deserialize(deserializer)? {
        OneOrList::One(name) => vec![name],
        OneOrList::List(names) => names,
    })
}
