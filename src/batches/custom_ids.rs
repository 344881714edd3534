//! Which `custom_id`s a file has already. Pure.

use std::collections::HashSet;

use xxhash_rust::xxh3::xxh3_128;

/// The ids that were seen, each as 128 bits: 200,000 need 5 MiB, whatever their length. Two ids of one file get the
/// same hash once in 10^28 files, unless their client chose them for it, which harms no one else.
///
/// The set hashes these again with a random key, so that no client can choose ids that are slow to look up.
#[derive(Debug, Default)]
pub struct CustomIds {
    seen: HashSet<u128>,
}

impl CustomIds {
    /// False if the id was there.
    pub fn insert(&mut self, custom_id: &str) -> bool {
        self.seen.insert(xxh3_128(custom_id.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_new_once() {
        let mut ids = CustomIds::default();
        assert!(ids.insert("a"));
        assert!(ids.insert("A"));
        assert!(!ids.insert("a"));
    }
}
