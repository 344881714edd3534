//! Rendezvous hashing: a key -> workers in the order in which the key prefers them, the same on every replica and
//! whatever the order in which the workers are listed. Pure.

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// So many workers are ordered; a key that finds none of them free goes without a preference.
const ORDERED_WORKERS: usize = 16;

/// The worker whose hash with the key is highest. A worker that leaves moves only its own keys. `workers` gives
/// (index, identity).
pub fn choose<I: Ord>(key: u64, workers: impl Iterator<Item = (I, u64)>) -> Option<I> {
    workers
        .map(|(index, identity)| (weight(key, identity), index))
        .max()
        .map(|(_, index)| index)
}

/// The workers that a key prefers, the most preferred first, at most 16.
pub fn order<I: Ord>(key: u64, workers: impl Iterator<Item = (I, u64)>) -> SmallVec<[I; 16]> {
    let mut ordered: SmallVec<[(u64, I); ORDERED_WORKERS + 1]> = SmallVec::new();
    for (index, identity) in workers {
        let entry = (weight(key, identity), index);
        if ordered.len() == ORDERED_WORKERS && ordered.last().is_some_and(|last| entry < *last) {
            continue;
        }
        let position = ordered.partition_point(|before| *before > entry);
        ordered.insert(position, entry);
        ordered.truncate(ORDERED_WORKERS);
    }
    ordered.into_iter().map(|(_, index)| index).collect()
}

/// The hash of a key's text.
pub fn key(text: &[u8]) -> u64 {
    xxh3_64_with_seed(text, 0)
}

fn weight(key: u64, identity: u64) -> u64 {
    // The finaliser of MurmurHash3: every input bit reaches every output bit.
    let mut mixed = key ^ identity.rotate_left(32);
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    mixed ^ (mixed >> 33)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fleet(names: &[u32]) -> Vec<(usize, u64)> {
        names
            .iter()
            .enumerate()
            .map(|(index, name)| (index, key(&name.to_le_bytes())))
            .collect()
    }

    #[test]
    fn keys_spread_evenly() {
        let fleet = fleet(&[0, 1, 2, 3, 4, 5, 6, 7]);
        let mut counts = [0u32; 8];
        for number in 0u32..8_000 {
            counts[choose(key(&number.to_le_bytes()), fleet.iter().copied()).unwrap()] += 1;
        }
        assert!(
            counts.iter().all(|count| (850..1150).contains(count)),
            "{counts:?}"
        );
    }

    proptest! {
        #[test]
        fn the_order_is_that_of_choosing_and_leaving_one_after_the_other(number in any::<u32>(), count in 0u32..40) {
            let names: Vec<u32> = (0..count).collect();
            let mut rest = fleet(&names);
            let key = u64::from(number);
            let ordered = order(key, rest.iter().copied());
            prop_assert_eq!(ordered.len(), names.len().min(16));
            for index in ordered {
                prop_assert_eq!(choose(key, rest.iter().copied()), Some(index));
                rest.retain(|(other, _)| *other != index);
            }
        }

        #[test]
        fn a_worker_that_leaves_moves_only_its_own_keys(number in any::<u32>(), gone in 0usize..6) {
            let all = fleet(&[10, 11, 12, 13, 14, 15]);
            let chosen = choose(u64::from(number), all.iter().copied()).unwrap();
            let rest = choose(u64::from(number), all.iter().copied().filter(|(index, _)| *index != gone)).unwrap();
            prop_assert!(rest != gone);
            if chosen != gone {
                prop_assert_eq!(chosen, rest);
            }
        }
    }
}
