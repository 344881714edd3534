//! Tokens that were verified, by their digest: bounded, and split so that I/O threads seldom wait for each other.

use std::fmt;
use std::time::Instant;

use hashlink::LruCache;
use parking_lot::Mutex;

/// SHA-256 of a token. The token itself is not kept.
pub type TokenDigest = [u8; 32];

const SHARDS: usize = 16;

/// What verified tokens stand for.
pub struct Cache<V> {
    shards: [Mutex<LruCache<TokenDigest, Entry<V>>>; SHARDS],
}

struct Entry<V> {
    value: V,
    expires: Instant,
    issuer: usize,
    /// The generation of the keys that the token was verified with.
    generation: u64,
}

impl<V> fmt::Debug for Cache<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").finish_non_exhaustive()
    }
}

impl<V: Clone> Cache<V> {
    pub fn new(max: u32) -> Self {
        let shard = (max as usize).div_ceil(SHARDS).max(1);
        Self {
            shards: std::array::from_fn(|_| Mutex::new(LruCache::new(shard))),
        }
    }

    /// The value of a token that has not expired and whose issuer still has the keys of then. `generation` gives those
    /// of an issuer.
    pub fn get(
        &self,
        token: &TokenDigest,
        now: Instant,
        generation: impl FnOnce(usize) -> u64,
    ) -> Option<V> {
        let mut shard = self.shard(token).lock();
        let entry = shard.get(token)?;
        if now < entry.expires && entry.generation == generation(entry.issuer) {
            return Some(entry.value.clone());
        }
        let outdated = shard.remove(token);
        drop(shard);
        drop(outdated);
        None
    }

    /// Remembers a token that `issuer`'s keys of a generation verified, until `expires`.
    pub fn put(
        &self,
        token: TokenDigest,
        value: V,
        expires: Instant,
        (issuer, generation): (usize, u64),
    ) {
        let entry = Entry {
            value,
            expires,
            issuer,
            generation,
        };
        self.shard(&token).lock().insert(token, entry);
    }

    fn shard(&self, token: &TokenDigest) -> &Mutex<LruCache<TokenDigest, Entry<V>>> {
        &self.shards[usize::from(token[0]) % SHARDS]
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::observe;

    fn digest(number: u32) -> TokenDigest {
        let mut digest = [0; 32];
        digest[..4].copy_from_slice(&number.to_be_bytes());
        digest[0] = number as u8;
        digest
    }

    #[test]
    fn a_token_is_known_until_it_expires_or_the_keys_change() {
        let (cache, now) = (Cache::new(100), observe::now());
        let later = now + Duration::from_secs(10);
        let token = digest(1);
        cache.put(token, "a", later, (2, 7));
        let get = |now, generation: u64| {
            cache.get(&token, now, |issuer| {
                assert_eq!(issuer, 2);
                generation
            })
        };
        assert_eq!(get(now, 7), Some("a"));
        assert_eq!(get(now, 8), None);
        // It is gone, so that it cannot come back.
        assert_eq!(get(now, 7), None);
        cache.put(token, "a", later, (2, 7));
        assert_eq!(get(later, 7), None);
    }

    #[test]
    fn a_flood_of_tokens_takes_bounded_memory() {
        let (cache, now) = (Cache::new(64), observe::now());
        for number in 0..10_000 {
            cache.put(digest(number), number, now + Duration::from_secs(9), (0, 1));
        }
        let kept: usize = cache.shards.iter().map(|shard| shard.lock().len()).sum();
        assert_eq!(kept, 64);
        assert_eq!(cache.get(&digest(9_999), now, |_| 1), Some(9_999));
    }
}
