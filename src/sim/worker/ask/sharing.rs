//! Whose cached blocks a request may share, and what they are told with. Pure.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::sim::engine::cache::Label;

/// Other names stand for adapters of the first model, and adapters share no blocks.
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

/// What the blocks of such a request are told with; most have nothing.
pub(super) fn label(
    model: &str,
    known: &[String],
    cache_salt: Option<&str>,
    session_id: Option<&str>,
) -> Option<Arc<Label>> {
    // The base model is the first, so adapters are numbered from one.
    let place = known.iter().position(|name| name == model);
    let adapter = place.filter(|place| *place > 0);
    let label = Label {
        lora: adapter.map(|place| (place as i64, model.into())),
        cache_salt: cache_salt.map(Into::into),
        session_id: session_id.map(Into::into),
    };
    (label != Label::default()).then(|| Arc::new(label))
}
