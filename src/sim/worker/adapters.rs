//! The models that a worker serves, and adapters that are loaded and unloaded while it runs, as vLLM does with
//! `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING`.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use hyper::StatusCode;
use serde::Deserialize;

use super::error::ApiError;
use super::request;

/// The first model is the base model, the others are its adapters.
#[derive(Debug)]
pub(crate) struct Models(ArcSwap<Vec<String>>);

#[derive(Deserialize)]
struct Adapter {
    lora_name: Option<String>,
    lora_path: Option<String>,
}

impl Models {
    pub(crate) fn new(names: &[String]) -> Self {
        Self(ArcSwap::from_pointee(names.to_vec()))
    }

    pub(crate) fn list(&self) -> Guard<Arc<Vec<String>>> {
        self.0.load()
    }

    pub(crate) fn load(&self, body: &[u8]) -> Result<String, ApiError> {
        let Adapter {
            lora_name: Some(name),
            lora_path: Some(_),
        } = request::from_json(body)?
        else {
            let message = "Both 'lora_name' and 'lora_path' must be provided.";
            return Err(ApiError::bad_request(message));
        };
        if self.list().contains(&name) {
            let message = format!("The lora adapter '{name}' has already been loaded.");
            return Err(ApiError::bad_request(message));
        }
        self.change(|models| models.push(name.clone()));
        Ok(format!(
            "Success: LoRA adapter '{name}' added successfully."
        ))
    }

    pub(crate) fn unload(&self, body: &[u8]) -> Result<String, ApiError> {
        let Adapter {
            lora_name: Some(name),
            ..
        } = request::from_json(body)?
        else {
            let message = "Either 'lora_name' or 'lora_int_id' needs to be provided.";
            return Err(ApiError::bad_request(message));
        };
        if !self.list().iter().skip(1).any(|adapter| *adapter == name) {
            let mut error =
                ApiError::bad_request(format!("The lora adapter '{name}' cannot be found."));
            error.status = StatusCode::NOT_FOUND.as_u16();
            return Err(error);
        }
        self.change(|models| models.retain(|model| *model != name));
        Ok(format!(
            "Success: LoRA adapter '{name}' removed successfully."
        ))
    }

    fn change(&self, change: impl Fn(&mut Vec<String>)) {
        self.0.rcu(|models| {
            let mut models = Vec::clone(models);
            change(&mut models);
            models
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_loaded_once_and_unloaded() {
        let models = Models::new(&["base".to_owned()]);
        let load = br#"{"lora_name":"sql","lora_path":"/adapters/sql"}"#;
        assert!(models.load(load).is_ok());
        assert_eq!(models.load(load).unwrap_err().status, 400);
        assert_eq!(**models.list(), ["base", "sql"]);
        let unload = br#"{"lora_name":"sql"}"#;
        assert!(models.unload(unload).is_ok());
        assert_eq!(models.unload(unload).unwrap_err().status, 404);
        assert_eq!(
            models
                .unload(br#"{"lora_name":"base"}"#)
                .unwrap_err()
                .status,
            404
        );
        assert_eq!(
            models.load(br#"{"lora_name":"sql"}"#).unwrap_err().status,
            400
        );
    }
}
