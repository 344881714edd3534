//! Rendezvous hashing: session affinity key -> worker, the same on every replica. Pure.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The worker whose hash with the key is highest. A worker that leaves moves only its own keys. `workers` gives
/// (worker_index, identity).
pub fn choose(key: u64, workers: impl Iterator<Item = (usize, u64)>) -> Option<usize> {
    workers
        .map(|(index, identity)| (weight(key, identity), index))
        .max()
        .map(|(_, index)| index)
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
