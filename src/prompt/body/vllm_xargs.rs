//! Refuses members of `vllm_xargs` that a client must not set. vLLM copies the members of `vllm_xargs` into its own
//! extra arguments, so what is refused at the top level of a body is refused here as well.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{self, IgnoredAny, MapAccess, Visitor};

use crate::prompt::types::Error;

/// Checks the raw JSON of a client's `vllm_xargs`. JSON that cannot be parsed here is refused too, because an engine
/// might parse it.
pub fn check_xargs(xargs: &str) -> Result<(), Error> {
    match serde_json::from_str(xargs) {
        Ok(Xargs { forbidden: None }) => Ok(()),
        Ok(Xargs {
            forbidden: Some(name),
        }) => Err(Error::Forbidden(name)),
        Err(error) => Err(Error::Json(error.to_string())),
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

struct Xargs {
    /// The first member that a client must not set, as a path in the body.
    forbidden: Option<&'static str>,
}

impl Xargs {
    /// A null report mode has no effect in the engine. For the transfer parameters, the engine only checks whether
    /// the key exists.
    fn forbidden(name: &str, is_null: bool) -> Option<&'static str> {
        match name {
            "kv_cache_report_mode" if !is_null => Some("vllm_xargs.kv_cache_report_mode"),
            "kv_transfer_params" => Some("vllm_xargs.kv_transfer_params"),
            "ec_transfer_params" => Some("vllm_xargs.ec_transfer_params"),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for Xargs {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// The engine refuses values that are not objects.
        const NONE: Xargs = Xargs { forbidden: None };
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Xargs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any value")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Xargs, A::Error> {
                let mut forbidden = None;
                // Keys are compared unescaped, and every occurrence of a repeated key is checked.
                while let Some(name) = map.next_key::<Cow<'de, str>>()? {
                    let is_null = map.next_value::<Option<IgnoredAny>>()?.is_none();
                    forbidden = forbidden.or(Xargs::forbidden(&name, is_null));
                }
                Ok(Xargs { forbidden })
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Xargs, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(NONE)
            }
            fn visit_str<E>(self, _: &str) -> Result<Xargs, E> {
                Ok(NONE)
            }
            fn visit_unit<E>(self) -> Result<Xargs, E> {
                Ok(NONE)
            }
            fn visit_bool<E>(self, _: bool) -> Result<Xargs, E> {
                Ok(NONE)
            }
            fn visit_i64<E>(self, _: i64) -> Result<Xargs, E> {
                Ok(NONE)
            }
            fn visit_u64<E>(self, _: u64) -> Result<Xargs, E> {
                Ok(NONE)
            }
            fn visit_f64<E>(self, _: f64) -> Result<Xargs, E> {
                Ok(NONE)
            }
        }
        deserializer.deserialize_any(V)
    }
}
