//! The extra keys of a block: which of them is the salt, and a hash over those that are part of its
//! content.

use xxhash_rust::xxh3::Xxh3;

use crate::kv::event::ExtraKey;

/// Apart from that of tokens.
const SEED: u64 = 1338;

/// The salt among the keys of a prompt's first block: a text beside the adapter's name.
pub(super) fn salt<'a>(keys: &'a [ExtraKey], lora_name: Option<&str>) -> Option<&'a str> {
    rest(keys, lora_name).find_map(|key| match key {
        ExtraKey::Text(text) => Some(&**text),
        ExtraKey::Blob(_) | ExtraKey::Number(_) | ExtraKey::Multimodal { .. } => None,
    })
}

/// Over all that is neither the adapter's name nor the salt; none where there is nothing else.
pub(super) fn hash(keys: &[ExtraKey], lora_name: Option<&str>, salt: Option<&str>) -> Option<u64> {
    if keys.is_empty() {
        return None;
    }
    let mut salt = salt;
    let mut hasher = Xxh3::with_seed(SEED);
    let mut is_empty = true;
    for key in rest(keys, lora_name) {
        match key {
            ExtraKey::Text(text) if salt == Some(&**text) => {
                salt = None;
                continue;
            }
            ExtraKey::Text(text) => put(&mut hasher, b't', text.as_bytes()),
            ExtraKey::Blob(blob) => put(&mut hasher, b'b', blob),
            ExtraKey::Number(number) => put(&mut hasher, b'n', &number.to_le_bytes()),
            ExtraKey::Multimodal { identifier, offset } => {
                put(&mut hasher, b'm', identifier.as_bytes());
                hasher.update(&offset.to_le_bytes());
            }
        }
        is_empty = false;
    }
    (!is_empty).then(|| hasher.digest())
}

/// All but the adapter's name, which engines put once into each block's keys. A salt may be the same
/// text.
fn rest<'a>(
    keys: &'a [ExtraKey],
    lora_name: Option<&str>,
) -> impl Iterator<Item = &'a ExtraKey> + use<'a> {
    let is_name = |key: &ExtraKey| matches!((key, lora_name), (ExtraKey::Text(text), Some(name)) if &**text == name);
    let place = keys.iter().position(is_name);
    keys.iter()
        .enumerate()
        .filter(move |(at, _)| Some(*at) != place)
        .map(|(_, key)| key)
}

/// With kind and length, so that no two lists of keys are the same bytes.
fn put(hasher: &mut Xxh3, kind: u8, bytes: &[u8]) {
    hasher.update(&[kind]);
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}
