use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const FIRST: VocabularyId = VocabularyId(1);

fn cache(max_cache_memory: u64) -> Cache {
    let metrics = Metrics::new(&Registry::default());
    Cache::new(&Settings { max_cache_memory }, 7, metrics)
}

fn found(cache: &Cache, vocabulary: VocabularyId, text: &str) -> Option<Vec<u32>> {
    let mut ids = vec![0];
    cache
        .get(vocabulary, text, &mut ids)
        .then(|| ids[1..].to_vec())
}

#[test]
fn entries_are_found_only_with_their_vocabulary() {
    let cache = cache(1 << 20);
    cache.put(FIRST, "a text", &[1, 2]);
    assert_eq!(found(&cache, FIRST, "a text"), Some(vec![1, 2]));
    assert_eq!(found(&cache, VocabularyId(2), "a text"), None);
    assert_eq!(found(&cache, FIRST, "another"), None);
}

#[test]
fn the_least_recently_used_entries_are_evicted_at_the_limit() {
    let bytes_max = 64 << 10;
    let cache = cache(bytes_max);
    cache.put(FIRST, "kept", &[9]);
    for i in 0..10_000 {
        cache.put(FIRST, &format!("text {i}"), &[i]);
        assert_eq!(found(&cache, FIRST, "kept"), Some(vec![9]));
    }
    assert!(cache.memory_bytes() <= bytes_max as usize);
    assert_eq!(cache.metrics.bytes.get(), cache.memory_bytes() as i64);
    assert!(cache.metrics.evicted_bytes.get() > 0);
    assert_eq!(found(&cache, FIRST, "text 0"), None);
}

#[test]
fn a_text_larger_than_a_shard_is_not_cached() {
    let cache = cache(64 << 10);
    cache.put(FIRST, &"x".repeat(10_000), &[1]);
    assert_eq!(cache.memory_bytes(), 0);
}

#[test]
fn a_limit_of_zero_turns_the_cache_off() {
    let cache = cache(0);
    cache.put(FIRST, "x", &[1]);
    assert_eq!(found(&cache, FIRST, "x"), None);
}

proptest! {
    #[test]
    fn it_returns_only_ids_that_were_put(
        operations in proptest::collection::vec((0u32..2, 0u8..40, any::<bool>()), 1..400)
    ) {
        let cache = cache(16 << 10);
        let mut model: HashMap<(u32, u8), Vec<u32>> = HashMap::new();
        for (step, (vocabulary, text, puts)) in operations.into_iter().enumerate() {
            let key = format!("text {text}");
            if puts {
                let ids = vec![step as u32; usize::from(text)];
                cache.put(VocabularyId(vocabulary), &key, &ids);
                model.insert((vocabulary, text), ids);
            } else if let Some(ids) = found(&cache, VocabularyId(vocabulary), &key) {
                prop_assert_eq!(Some(&ids), model.get(&(vocabulary, text)));
            }
            prop_assert!(cache.memory_bytes() <= 16 << 10);
        }
    }
}
