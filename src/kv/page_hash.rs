//! SGLang's names of pages: a hash of the tokens from the start of the prompt, without a random seed. So a store that
//! begins at a prompt's start proves that its pages depend on these tokens and nothing else that is not reported. Pure.

use sha2::{Digest, Sha256};

use super::event::{EngineHash, Stored};

const SALT_PREFIX: &[u8] = b"sglang-cache-salt-v1\0";

/// The names of a prompt's whole pages.
pub fn page_hashes(
    tokens: &[u32],
    page_size: usize,
    cache_salt: Option<&str>,
) -> impl Iterator<Item = EngineHash> {
    let mut before = cache_salt.map(|salt| {
        let mut hasher = Sha256::new();
        hasher.update(SALT_PREFIX);
        hasher.update(salt.as_bytes());
        hasher.finalize()
    });
    tokens.chunks_exact(page_size.max(1)).map(move |page| {
        let mut hasher = Sha256::new();
        if let Some(before) = &before {
            hasher.update(before);
        }
        for token in page {
            hasher.update(token.to_le_bytes());
        }
        let digest = hasher.finalize();
        let first = digest.iter().take(8);
        let name = first.fold(0, |name, byte| name << 8 | u64::from(*byte));
        before = Some(digest);
        EngineHash(name)
    })
}

/// Whether the names of a store's pages are those of its tokens. `None` if that cannot be seen: it does not begin at a
/// prompt's start, or is an adapter's, whose names have a name space mixed in.
pub fn names_its_tokens(stored: &Stored) -> Option<bool> {
    if stored.parent.is_some() || stored.lora_name.is_some() {
        return None;
    }
    let size = stored.block_size as usize;
    let names = page_hashes(&stored.token_ids, size, stored.cache_salt.as_deref());
    Some(names.eq(stored.hashes.iter().copied()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_page_of_recorded_and_documented_prompts() {
        let first = |tokens: &[u32], size, salt| page_hashes(tokens, size, salt).next().unwrap();
        let tokens: Vec<u32> = (100..116).collect();
        assert_eq!(first(&tokens, 16, None), EngineHash(0x3481_9f75_ed7b_029c));
        let documented = -2_360_060_374_177_730_597_i64;
        assert_eq!(first(&[0], 1, None), EngineHash(documented as u64));
        assert_ne!(first(&tokens, 16, Some("a")), first(&tokens, 16, None));
        assert_eq!(page_hashes(&tokens, 32, None).count(), 0);
    }
}
