//! Further endpoints of engines that the configuration allows: which paths may be listed. What changes an engine is never
//! passed on, whatever the list has. Pure.

/// Parts of the paths with which engines are put to sleep, reset, loaded, scaled, stopped or looked into.
const CHANGES: [&str; 28] = [
    "abort",
    "clear",
    "collective",
    "configure",
    "continue_generation",
    "debug",
    "destroy",
    "drain",
    "dump",
    "fault",
    "flush",
    "freeze",
    "hicache",
    "init_",
    "kill",
    "lora",
    "memory_occupation",
    "pause",
    "profile",
    "reset",
    "resume",
    "scale",
    "scaling",
    "shutdown",
    "sleep",
    "update",
    "wake",
    "weight",
];

/// Paths that the router serves itself, with everything below them.
pub(super) const OWN: [&str; 16] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/conversations",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/models",
    "/v1/files",
    "/v1/batches",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/tokenize",
    "/detokenize",
    "/inference/v1/generate",
    "/health",
];

/// The part of a path that names a change of the engine.
pub(super) fn change_in(path: &str) -> Option<&'static str> {
    let path = path.to_ascii_lowercase();
    CHANGES.into_iter().find(|change| path.contains(change))
}

/// What is wrong with a path of the list.
pub(super) fn check(path: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/_.-".contains(&byte);
    let mut parts = path.split('/').skip(1);
    let has_bad_part =
        parts.any(|part| part.is_empty() || part.chars().all(|character| character == '.'));
    if !path.starts_with('/') || !path.bytes().all(is_plain) || has_bad_part {
        return Err(format!(
            "`{path}` must be a whole path of letters, digits and `/_.-`, such as `/v1/score`"
        ));
    }
    if let Some(change) = change_in(path) {
        return Err(format!(
            "`{path}` is never passed on, because `{change}` changes an engine; call the engine itself"
        ));
    }
    let is_own = |own: &&str| {
        let rest = path.strip_prefix(*own);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    match OWN.into_iter().find(is_own) {
        Some(own) => Err(format!("the router serves `{own}` itself; remove `{path}`")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_an_engine_can_never_be_listed() {
        for path in [
            "/sleep",
            "/wake_up",
            "/reset_prefix_cache",
            "/reset_mm_cache",
            "/reset_encoder_cache",
            "/flush_cache",
            "/abort_request",
            "/v1/abort_requests",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
            "/scale_elastic_ep",
            "/is_scaling_elastic_ep",
            "/start_profile",
            "/stop_profile",
            "/update_weights",
            "/update_weights_from_disk",
            "/init_weights_update_group",
            "/release_memory_occupation",
            "/pause_generation",
            "/resume",
            "/collective_rpc",
            "/fault_tolerance/apply",
            "/configure_logging",
            "/SLEEP",
        ] {
            let error = check(path).unwrap_err();
            assert!(error.contains("never passed on"), "{path}: {error}");
        }
    }

    #[test]
    fn a_listed_path_is_plain_and_not_the_routers_own() {
        for path in [
            "/score",
            "/v1/score",
            "/classify",
            "/pooling",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/v1/audio/speech",
            "/v1/images/generations",
        ] {
            assert_eq!(check(path), Ok(()));
        }
        for path in [
            "",
            "score",
            "/",
            "/a//b",
            "/a/../b",
            "/a/.",
            "/v1/*",
            "/a?b",
            "/%73leep",
            "/a b",
            "/v1/responses",
            "/v1/messages/batches",
            "/health",
        ] {
            assert!(check(path).is_err(), "{path}");
        }
    }
}
