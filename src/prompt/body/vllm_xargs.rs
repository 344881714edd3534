//! Refuses members of `vllm_xargs` that a client must not set. vLLM copies the members of `vllm_xargs` into its own
//! extra arguments, so what is refused at the top level of a body is refused here as well.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde_json::Value;

use crate::json_scan::Scan;
use crate::prompt::types::Error;

/// Checks the raw JSON of a client's `vllm_xargs`. JSON that cannot be parsed here is refused too, because an engine
/// might parse it.
pub fn check_xargs(xargs: &str) -> Result<(), Error> {
    let mut forbidden = None;
    // Every occurrence of a repeated name is checked.
    let read = Scan::<true>::new(xargs).whole_object(|name, value| {
        forbidden = forbidden.or(forbidden_path(&name, value == "null"));
    });
    match (read, forbidden) {
        (Some(()), Some(path)) => Err(Error::Forbidden(path)),
        (Some(()), None) => Ok(()),
        (None, _) => parsed(xargs).map_err(|error| Error::Json(error.to_string())),
    }
}

/// Parses what is not an object of JSON. The engine refuses values that are not objects.
fn parsed(xargs: &str) -> serde_json::Result<()> {
    match xargs.as_bytes().first() {
        Some(b'{') => serde_json::from_str::<BTreeMap<String, IgnoredAny>>(xargs).map(drop),
        Some(b'[') => serde_json::from_str::<IgnoredAny>(xargs).map(drop),
        _ => serde_json::from_str::<Value>(xargs).map(drop),
    }
}

/// The path in the body of a member that a client must not set. A null report mode has no effect in the engine. For the
/// transfer parameters, the engine only checks whether the name exists.
fn forbidden_path(name: &str, is_null: bool) -> Option<&'static str> {
    match name {
        "kv_cache_report_mode" if !is_null => Some("vllm_xargs.kv_cache_report_mode"),
        "kv_transfer_params" => Some("vllm_xargs.kv_transfer_params"),
        "ec_transfer_params" => Some("vllm_xargs.ec_transfer_params"),
        _ => None,
    }
}

/// The name of a member that a client must not set where a request has it among its sampling parameters.
pub(super) fn as_extra_args(name: &'static str) -> &'static str {
    match name {
        "vllm_xargs.kv_transfer_params" => "sampling_params.extra_args.kv_transfer_params",
        "vllm_xargs.ec_transfer_params" => "sampling_params.extra_args.ec_transfer_params",
        "vllm_xargs.kv_cache_report_mode" => "sampling_params.extra_args.kv_cache_report_mode",
        name => name,
    }
}
