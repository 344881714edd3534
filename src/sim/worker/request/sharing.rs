//! Which requests share cached blocks, and how KV events label these blocks. Pure.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::sim::engine::cache::Label;

/// The hash salt. Adapters (all models but the first) share no blocks with other models, nor do different cache salts.
pub(super) fn salt(model: &str, known: &[String], cache_salt: Option<&str>) -> u64 {
    let mut salt = 0;
    if known.first().is_some_and(|first| first != model) {
        salt ^= xxh3_64(model.as_bytes());
    }
    if let Some(text) = cache_salt {
        salt ^= xxh3_64(text.as_bytes()).rotate_left(1);
    }
    salt
}

/// The label of a request's blocks in KV events; most requests have none.
pub(super) fn label(
    model: &str,
    known: &[String],
    cache_salt: Option<&str>,
    session_id: Option<&str>,
) -> Option<Arc<Label>> {
    // The first model is the base model, so adapters are numbered from 1.
    let index = known.iter().position(|name| name == model);
    let adapter = index.filter(|index| *index > 0);
    let label = Label {
        lora: adapter.map(|index| (index as i64, model.into())),
        cache_salt: cache_salt.map(Into::into),
        session_id: session_id.map(Into::into),
    };
    (label != Label::default()).then(|| Arc::new(label))
}
