//! A block's extra keys: which of them is the cache salt, and a hash of those that are part of the content.

use xxhash_rust::xxh3::Xxh3;

use crate::kv::event::ExtraKey;

/// Different from the seed of token hashes.
const SEED: u64 = 1338;

/// The cache salt among the keys of a prompt's first block: a text other than the adapter's name.
pub(super) fn salt<'a>(keys: &'a [ExtraKey], lora_name: Option<&str>) -> Option<&'a str> {
    rest(keys, lora_name).find_map(|key| match key {
        ExtraKey::Text(text) => Some(&**text),
        ExtraKey::Blob(_)
        | ExtraKey::Number(_)
        | ExtraKey::Multimodal { .. }
        | ExtraKey::Lookahead(_) => None,
    })
}

/// Hash of all keys but the adapter's name, the salt and the lookahead; `None` if there are no others.
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
            ExtraKey::Lookahead(_) => continue,
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

/// All keys but the adapter's name, which engines put once into each block's keys. A salt with the same
/// text is kept.
fn rest<'a>(
    keys: &'a [ExtraKey],
    lora_name: Option<&str>,
) -> impl Iterator<Item = &'a ExtraKey> + use<'a> {
    let is_name = |key: &ExtraKey| matches!((key, lora_name), (ExtraKey::Text(text), Some(name)) if &**text == name);
    let location = keys.iter().position(is_name);
    keys.iter()
        .enumerate()
        .filter(move |(at, _)| Some(*at) != location)
        .map(|(_, key)| key)
}

/// Writes kind and length too, so that different lists of keys never hash the same bytes.
fn put(hasher: &mut Xxh3, kind: u8, bytes: &[u8]) {
    hasher.update(&[kind]);
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}
